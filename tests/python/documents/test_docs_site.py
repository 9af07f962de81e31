"""The documentation's site builds without a warning, and its pages say what the code does."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dlattn

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton", "sphinx_design"):
        pytest.importorskip(name)
    if not (ROOT / "research").exists():
        pytest.skip("no research/, which some pages lead to; it is not in the sdist")
    folder = tmp_path_factory.mktemp("site")
    package = Path(str(dlattn.__file__)).parents[1]
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", str(DOCS)]
    command += ["-d", str(folder / "doctrees"), str(ROOT), str(folder / "html")]
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]*>", "", page.read_text())


@pytest.mark.slow
def test_site_has_every_page(site: Path) -> None:
    assert "url=docs/index.html" in (site / "index.html").read_text()
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")]:
        assert (site / path.relative_to(ROOT)).with_suffix(".html").is_file(), path
    menu = (site / "docs" / "index.html").read_text()
    pages = ["install", "usage", "errors", "semantics", "torch", "jax", "c"]
    for page in (*pages, "api/dlattn", "api/c", "api/cpp"):
        assert f'href="{page}.html"' in menu, page
    assert menu.count('class="sd-tab-label"') == 6 and "copybutton.js" in menu
    assert "_static/site.css" in menu and (site / "_static" / "site.css").is_file()


@pytest.mark.slow
def test_site_has_the_docstrings(site: Path) -> None:
    page = site / "docs" / "api" / "dlattn.html"
    html, text = page.read_text(), text_of(page)
    for name in dlattn.__all__:
        if name not in ("__version__", "flash_attn", "sageattention"):
            assert f'id="dlattn.{name}"' in html, name
    # An argument of several lines, marks that Sphinx would take for its own, code.
    assert "kernel The one kernel to use, of those in info().kernels, or" in " ".join(text.split())
    assert "|q·k| and |softmax_scale * q·k| &lt;= 2^126" in " ".join(text.split())
    assert '<span class="pre">Plan.variant</span>' in html


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needed", "marks"),
    [
        ("flash_attn", [], ["flash_attn_varlen_func", "alibi_slopes"]),
        ("flash_attn_interface", ["torch"], ["_flash_attn_varlen_backward", "softmax_d"]),
        ("sageattention", [], ["sageattn_varlen", "tensor_layout"]),
        ("torch", ["torch"], ["activate", "deactivate", "stats"]),
        ("transformers", ["torch", "transformers"], ["attention_forward"]),
        ("diffusers", ["torch", "diffusers"], ["dlattn_int8_fp8"]),
        ("jax", ["jax"], ["dot_product_attention", "local_window_size"]),
    ],
)
def test_site_has_the_faces_that_can_be_imported(
    site: Path, name: str, needed: list[str], marks: list[str]
) -> None:
    page = site / "docs" / "api" / f"{name}.html"
    assert page.is_file() == all(map(importlib.util.find_spec, needed))
    if page.is_file():
        text = text_of(page)
        assert not [mark for mark in marks if mark not in text]


@pytest.mark.slow
def test_site_has_the_headers(site: Path) -> None:
    for name, marks in {
        "c": ["dlattn_attention", "DLATTN_OK", "DlattnTensor", "dlattn_quantize_kv"],
        "cpp": ["AttentionParams", "forward", "backward-plan", "Options", "kMaxSoftcap", "size_of"],
    }.items():
        html = (site / "docs" / "api" / f"{name}.html").read_text()
        assert not [mark for mark in marks if f'id="{mark}"' not in html]
        assert "DLATTN_API" not in html


HEADERS = sorted((ROOT / "src" / "include" / "dlattn").glob("*.h"))


def test_reference_has_every_header() -> None:
    """But for export.h, whose macro no user needs, and attention.h, which includes the rest."""
    text = "".join((DOCS / "api" / f"{name}.md").read_text() for name in ("c", "cpp"))
    shown = " ".join(re.findall(r"```\{header\} (.*)", text)).split()
    assert sorted([*shown, "attention.h", "export.h"]) == [path.name for path in HEADERS]


@pytest.mark.parametrize("path", [p for p in HEADERS if p.stem != "export"], ids=lambda p: p.stem)
def test_reference_leaves_nothing_of_a_header_out(path: Path) -> None:
    pytest.importorskip("sphinx")
    text = path.read_text()
    items = load(DOCS / "header_reference.py").parse(text)
    declared = r"^(?:DLATTN_API|inline) .*?(\w+)\(|^(?:struct|enum class) (\w+)\b(?!;)|^\} (\w+);"
    wanted = {name for names in re.findall(declared, text, re.MULTILINE) for name in names if name}
    assert wanted <= {name for item in items for name in item.names}
    # Its own lines, in their order, but for includes, names of other headers' structs, and what
    # opens and closes a namespace.
    kept = [x for item in items for x in (*(f"// {c}".rstrip() for c in item.comment), *item.code)]
    frame = r"#pragma.*|#include.*|namespace.*|\}  // .*|#if.*|#endif|extern.*|struct \w+;.*"
    lines = [line for line in text.splitlines() if line and not re.fullmatch(frame, line)]
    assert [line for line in kept if line] == lines


def test_reference_refuses_a_line_that_it_does_not_know() -> None:
    pytest.importorskip("sphinx")
    parse = load(DOCS / "header_reference.py").parse
    assert parse("// A.\nstruct A {\n  int x;  // {\n\n};\n\nint f();\n")[0].names == ["A"]
    with pytest.raises(ValueError, match=r"line 2 is neither a comment nor a declaration: '#if 1'"):
        parse("// A.\n#if 1\n")


def test_docstrings_become_rst() -> None:
    pytest.importorskip("sphinx")
    to_rst = load(DOCS / "conf.py").to_rst
    given = ["Sum |x| of `x`.", "", "    code(x)", "", "Args:", "    x: One", "        of *two*."]
    expected = [
        r"Sum \|x\| of \ ``x``\ .",
        "",
        *["", ".. code-block:: python", "", "   code(x)", ""],
        *["", "**Args**", "", "", "- **x** One", r"  of \*two\*.", ""],
    ]
    assert to_rst(given) == expected


def strings_of_the_code() -> str:
    """The text of all string literals that messages are made of, those side by side joined."""
    found = []
    for folder in ("python/dlattn", "_build"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [x.value if isinstance(x, ast.Constant) else "{}" for x in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    for folder in ("src", "python/bindings", "cmake"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".cpp", ".h", ".cmake"):
                text = re.sub(r'"\s*\n\s*"', "", path.read_text())
                found += re.findall(r'"((?:\\.|[^"\\\n])*)"', text)
    return "\n".join(found).replace('\\"', '"')


# Words of torch, not of dlattn.
_OF_TORCH = {"Dynamo does not know how to trace method", "nb_func"}


def test_errors_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (.*?) \| .* \|$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    messages = [part for row in rows for part in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 25
    known = strings_of_the_code()
    assert not [m for m in messages if m not in known and m not in _OF_TORCH]


def test_versions_are_current() -> None:
    generator = load(DOCS / "update_versions.py")
    text = (DOCS / "install.md").read_text()
    assert generator.fill(text) == text, "run: python docs/update_versions.py"
    stale = text.replace("| Python |", "| Python, once |")
    assert stale != text and generator.fill(stale) == text
    with pytest.raises(SystemExit, match="0 places for the generated part 'versions'"):
        generator.fill(text.replace("<!-- generated: versions -->", ""))
