"""The benchmark, run in an instant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlattn.bench import timing
from dlattn.cli import main

INSTANT = timing.Windows(rounds=2, warmup_seconds=0.0, measured_seconds=0.0, host_calls=3)


def run_bench(*arguments: str | Path) -> int:
    return main(["bench", "--quick", "--device", "cpu", *map(str, arguments)])


def run_to_json(tmp_path: Path, *arguments: str) -> Any:
    path = tmp_path / "bench.json"
    assert run_bench("--json", path, *arguments) == 0
    return json.loads(path.read_text(), parse_constant=pytest.fail)
