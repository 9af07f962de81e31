"""Fill the generated parts of README.md: the support table and the figures.

python benchmarks/update_readme.py           # write them
python benchmarks/update_readme.py --check   # exit 1 if they are not what would be written
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from dlattn.bench.figures import figures_markdown
from dlattn.cli.support import support_markdown

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def fill(text: str) -> str:
    """The README's text with its generated parts as they should be."""
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    parts = {"support": support_markdown(), "figures": figures_markdown(results, ROOT)}
    for name, content in parts.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            pattern, lambda m, new=content: f"{m[1]}{new}\n{m[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"README.md has {count} places for the generated part {name!r}")
    return text


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    args = parser.parse_args()
    old = README.read_text()
    new = fill(old)
    if args.check:
        return 0 if new == old else 1
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
