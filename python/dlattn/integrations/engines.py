"""Shared by the backends of serving engines."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)
_told: set[str] = set()


def log_errors(package: str, accepted: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Let a plug-in log what it raises: an engine that nobody asked for dlattn goes on.

    Args:
        package: The engine's, of which the log tells the version.
        accepted: Versions that the backend is written for.
    """

    def decorate(register: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(register)
        def registered() -> None:
            try:
                register()
            except Exception as error:
                _tell(package, accepted, error)

        return registered

    return decorate


def _tell(package: str, accepted: str, error: Exception) -> None:
    if package in _told:
        return
    _told.add(package)
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    _log.warning(
        "dlattn's attention backend is not registered with %s %s (%s: %s); accepted: %s",
        package,
        version,
        type(error).__name__,
        str(error).partition("\n")[0],
        accepted,
    )
