"""`python -m dlattn info`: what this build and this machine have."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util

import dlattn
from dlattn.cli.support import support_table

# Packages that can bring tensors, be timed against or read files; found without importing them.
_PACKAGES = ("numpy", "torch", "cupy", "jax", "ml_dtypes", "safetensors", "matplotlib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--support", action="store_true", help="print which kernel supports what instead"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.support:
        print(support_table())
        return 0
    print(dlattn.info())
    found = [f"{name} {_version(name)}".strip() for name in _PACKAGES if _is_installed(name)]
    missing = [name for name in _PACKAGES if not _is_installed(name)]
    print(f"installed: {', '.join(found)}")
    if missing:
        print(f"not installed: {', '.join(missing)}")
    return 0


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _version(name: str) -> str:
    """The version of an importable package, whatever name it is distributed under."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        providers = importlib.metadata.packages_distributions().get(name, [])
        return importlib.metadata.version(providers[0]) if providers else ""
