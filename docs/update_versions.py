"""Fill docs/install.md's table of versions from the files that decide them.

python docs/update_versions.py           # write it
python docs/update_versions.py --check   # exit 1 if it is not what would be written
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "install.md"
_PART = re.compile(r"(<!-- generated: versions -->\n).*?(<!-- end -->)", re.DOTALL)


def _find(pattern: str, file: str) -> tuple[str, ...]:
    """The groups of a pattern that a file has once."""
    found = re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)
    if len(found) != 1:
        raise SystemExit(f"{file} has {len(found)} places for {pattern!r}")
    return found[0] if isinstance(found[0], tuple) else (found[0],)


def versions_markdown() -> str:
    """The table."""
    backend = "_build/dlattn_backend.py"
    faces = "python/dlattn/integrations"
    (python,) = _find(r'^requires-python = ">=([\d.]+)"', "pyproject.toml")
    (tested,) = _find(r"^        python: \[(.*)\]$", ".github/workflows/wheels.yml")
    pythons = re.findall(r"[\d.]+", tested)
    (numpy,) = _find(r'"numpy>=([\d.]+)"', "pyproject.toml")
    cuda = ".".join(_find(r"^MIN_CUDA = \((\d+), (\d+)\)", backend))
    (wheels,) = _find(r'^CUDA_WHEEL_VERSION = "([\d.]+)"', backend)
    old, old_driver, new, new_driver = _find(
        r"^MIN_DRIVER = \{(\d+): (\d+), (\d+): (\d+)\}", backend
    )
    (torch,) = _find(
        r"torch is \{torch.__version__\}; accepted: ([\d.]+)", f"{faces}/torch/activation.py"
    )
    (torch_ci,) = _find(r'^torch_version="torch==([\d.]+)"', ".ci/stages.sh")
    (jax,) = _find(r"accepted: ([\d.]+) or later, in dlattn.jax", f"{faces}/jax/__init__.py")
    (jax_tested,) = _find(r"or later; tested with ([\d. and]+)\.", "docs/jax.md")
    (transformers,) = _find(
        r"flash_attention.py` of the package, ([\d.]+)x", f"{faces}/transformers.py"
    )
    diffusers = _find(r"attention_dispatch.py`, ([\d.]+) to ([\d.]+)\.", f"{faces}/diffusers.py")
    rows = [
        ("Python", f"{python} or later", f"CI installs the wheel on {', '.join(pythons)}"),
        ("NumPy", f"{numpy} or later", ""),
        ("CUDA, to build", f"{cuda} or later", f"where there is none, {wheels} comes from PyPI"),
        ("driver, of a build with CUDA " + old, f"{old_driver} or later", ""),
        ("driver, of a build with CUDA " + new, f"{new_driver} or later", ""),
        ("torch, for `dlattn.torch.activate`", f"{torch} or later", f"CI has {torch_ci}"),
        ("JAX, for `dlattn.jax`", f"{jax} or later", f"tested with {jax_tested}"),
        ("transformers, for `dlattn.transformers`", f"{transformers}x", "CI has the latest"),
        (
            "diffusers, for `dlattn.diffusers`",
            f"{diffusers[0]} or later",
            f"read to {diffusers[1]}; CI has the latest",
        ),
    ]
    lines = ["| | accepted | tested |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def fill(text: str) -> str:
    """The page as it should be."""
    text, count = _PART.subn(lambda m: f"{m[1]}{versions_markdown()}\n{m[2]}", text)
    if count != 1:
        raise SystemExit(f"{PAGE.name} has {count} places for the generated part 'versions'")
    return text


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    wanted = fill(PAGE.read_text())
    if parser.parse_args().check:
        return 0 if PAGE.read_text() == wanted else 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
