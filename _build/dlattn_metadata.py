"""The metadata of a distribution that pyproject.toml cannot state: version, README.md, URLs.

The version stands in src/include/dlattn/version.h. Two variables of the environment, which the
release workflow sets, add what only a release knows:

    DLATTN_LOCAL_VERSION=cu129                       a wheel for another CUDA than that of PyPI's
                                                     wheel is dlattn 0.1.0+cu129, in its file's
                                                     name and in what pip lists
    DLATTN_REPOSITORY=https://host/owner/repository  the project's page; the links and figures of
                                                     README.md lead to its files of this version
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_TARGET = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def version() -> str:
    """The version of the source."""
    text = (ROOT / "src" / "include" / "dlattn" / "version.h").read_text(encoding="utf-8")
    found = re.search(r'#define DLATTN_VERSION "([^"]+)"', text)
    assert found
    return found[1]


def _asked(variable: str, pattern: str, accepted: str) -> str:
    value = os.environ.get(variable, "")
    if value and not re.fullmatch(pattern, value):
        raise SystemExit(f"dlattn: {variable} is {value!r}; accepted: {accepted}")
    return value


def absolute(text: str, repository: str, tag: str) -> str:
    """A file of the repository's root with links that lead there from anywhere."""

    def replace(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        return f"{image}[{words}]({repository}/{'raw' if image else 'blob'}/{tag}/{target})"

    return _TARGET.sub(replace, text)


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, as scikit-build-core asks for them."""
    local = _asked("DLATTN_LOCAL_VERSION", r"[a-z0-9]+(\.[a-z0-9]+)*", "letters and digits, as cu129")
    repository = _asked("DLATTN_REPOSITORY", r"https://\S+[^/\s]", "the https:// URL of its page")
    readme, urls = (ROOT / "README.md").read_text(encoding="utf-8"), {}
    if repository:
        tag = f"v{version()}"
        readme = absolute(readme, repository, tag)
        urls = {
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        }
    return {
        "version": f"{version()}+{local}" if local else version(),
        "readme": {"text": readme, "content-type": "text/markdown"},
        "urls": urls,
    }
