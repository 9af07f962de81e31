"""The metadata of a distribution: what PyPI and pip show of it."""

from __future__ import annotations

import email
import re
from pathlib import Path
from types import ModuleType

import pytest

import dlattn

ROOT = Path(__file__).resolve().parents[3]
REPOSITORY = "https://example.org/owner/dlattn"
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    monkeypatch.delenv("DLATTN_LOCAL_VERSION", raising=False)
    monkeypatch.delenv("DLATTN_REPOSITORY", raising=False)
    import dlattn_metadata

    return dlattn_metadata


def test_metadata_of_a_checkout(metadata: ModuleType) -> None:
    """It names no page, as nothing in the source says where that is."""
    fields = metadata.dynamic_metadata({}, {})
    assert fields["version"] == dlattn.__version__ and fields["urls"] == {}
    assert fields["readme"] == {"text": README, "content-type": "text/markdown"}


def test_links_of_a_release_lead_to_its_files(
    metadata: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLATTN_REPOSITORY", REPOSITORY)
    fields = metadata.dynamic_metadata({}, {})
    tag = f"v{dlattn.__version__}"
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", fields["readme"]["text"])
    before = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", README)
    assert len(links) == len(before) > 10 and [image for image, _ in before].count("!") == 1
    for (image, target), (_, old) in zip(links, before, strict=True):
        folder = f"{REPOSITORY}/{'raw' if image else 'blob'}/{tag}/"
        assert target == folder + old
        assert (ROOT / old.partition("#")[0]).exists()
    assert fields["urls"]["Source"] == REPOSITORY
    assert fields["urls"]["Changelog"] == f"{REPOSITORY}/blob/{tag}/CHANGELOG.md"


def test_other_links_stay(metadata: ModuleType) -> None:
    kept = "[a](https://example.org/x) [b](#below) `c(d)` [e]"
    assert metadata.absolute(kept, REPOSITORY, "v1") == kept


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DLATTN_LOCAL_VERSION", "CUDA 12"),
        ("DLATTN_LOCAL_VERSION", "+cu129"),
        ("DLATTN_REPOSITORY", "owner/dlattn"),
        ("DLATTN_REPOSITORY", REPOSITORY + "/"),
    ],
)
def test_wrong_variable_is_refused(
    metadata: ModuleType, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match=re.escape(f"{variable} is {value!r}; accepted: ")):
        metadata.dynamic_metadata({}, {})


def test_wheel_of_another_cuda_has_a_local_version(
    metadata: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the build backend writes it."""
    build = pytest.importorskip("scikit_build_core.build")
    monkeypatch.setenv("DLATTN_LOCAL_VERSION", "cu129")
    monkeypatch.setenv("DLATTN_REPOSITORY", REPOSITORY)
    monkeypatch.chdir(ROOT)
    folder = build.prepare_metadata_for_build_wheel(str(tmp_path))
    assert folder == f"dlattn-{dlattn.__version__}+cu129.dist-info"
    fields = email.message_from_bytes((tmp_path / folder / "METADATA").read_bytes())
    assert fields["Version"] == f"{dlattn.__version__}+cu129"
    assert f"Source, {REPOSITORY}" in fields.get_all("Project-URL")
    authors = re.findall(r"^  - name: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert fields["Author"] == ", ".join(authors)
    assert fields["Description-Content-Type"] == "text/markdown"
    assert f"{REPOSITORY}/raw/" in fields.get_payload(decode=True).decode()


def test_manifest_of_the_comfyui_node() -> None:
    """By the rules of docs.comfy.org/registry/specifications, but for what its publisher adds."""
    tomllib = pytest.importorskip("tomllib")
    manifest = tomllib.loads((ROOT / "examples" / "comfyui" / "pyproject.toml").read_text())
    project, comfy = manifest["project"], manifest["tool"]["comfy"]
    # A name of letters, digits, single separators, that begins with a letter and is not ComfyUI's.
    assert re.fullmatch(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)*", project["name"])
    assert "comfyui" not in project["name"].lower()
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["version"] == dlattn.__version__
    assert project["dependencies"] == [f"dlattn>={dlattn.__version__}"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == {"text": ours["license"]}
    assert project["requires-python"] == ours["requires-python"]
    assert set(project["classifiers"]) <= set(ours["classifiers"])  # the registry reads these two
    assert comfy == {"DisplayName": "Attention by dlattn"} and "urls" not in project
    node = (ROOT / "examples" / "comfyui" / "__init__.py").read_text()
    assert f'"{comfy["DisplayName"]}"' in node
