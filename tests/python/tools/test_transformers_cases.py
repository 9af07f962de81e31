"""The models for which transformers' shared tests are run, with a shared test made up for them."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch_suite_worker as worker

COMMON = """
import torch


def ids_tensor(shape, vocabulary):
    return torch.randint(3, vocabulary, shape)


def floats_tensor(shape):
    return torch.rand(shape)


class ModelTesterMixin:
    def test_computes(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model in self.all_model_classes:
            found = model(config).eval()(**inputs)
            self.assertTrue(torch.isfinite(found[0]).all())
            self.assertEqual(len(found[0]), self.model_tester.batch_size)
"""
CASES = Path(__file__).resolve().parents[3] / "tools" / "suites" / "transformers_cases.py"


def test_models_take_their_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_modeling_common.py").write_text(COMMON)
    monkeypatch.setenv("TRANSFORMERS_SOURCE", str(tmp_path))
    monkeypatch.setattr(sys, "path", sys.path[:])
    try:
        found: dict[str, Any] = worker.tests_of(worker.load(CASES))
    finally:  # the package of this name is the made-up one
        for name in [n for n in sys.modules if n.split(".")[0] == "tests"]:
            del sys.modules[name]
    assert len(found) == 13 and "ViTTest.test_computes" in found
    result = unittest.TestResult()
    unittest.TestSuite(made("test_computes") for made in found.values()).run(result)
    assert result.testsRun == 13 and not result.failures + result.errors
