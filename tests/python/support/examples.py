"""The examples of README.md and docs, and the library that those in C and C++ are linked to."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import dlattn

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def example(name: str) -> tuple[str, list[str]]:
    """An example's source, and the words behind its name."""
    pattern = rf"<!-- example: {name}( \w+)* -->\n```\w+\n(.*?)\n```"
    found = [
        match for path in DOCUMENTS for match in re.findall(pattern, path.read_text(), re.DOTALL)
    ]
    assert len(found) == 1, f"README.md and docs have {len(found)} examples named {name}"
    return found[0][1], found[0][0].split()


def loaded_library() -> Path:
    code = (
        "import ctypes, dlattn._core as core; ctypes.CDLL(core.__file__)\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(next(path for path in maps if '/libdlattn.so' in path))"
    )
    command = [sys.executable, "-c", code]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout[:-1])


def package_as_installed(folder: Path) -> Path:
    """The package's folder, or one like it where it is imported from a build folder."""
    package = Path(dlattn._core.__file__).parent
    if (package / "include" / "dlattn" / "c.h").is_file():
        return package
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(ROOT / "src" / "include")
    library = loaded_library()
    soname = re.sub(r"(\.so\.\d+).*", r"\1", library.name)
    for name in {"libdlattn.so", soname}:
        (folder / "lib" / name).symlink_to(library)
    return folder
