"""transformers' tests that all its models share, for some small models, as a file of tests.

    TRANSFORMERS_SOURCE=FOLDER python tools/suites/torch_suite.py \\
        tools/suites/transformers_cases.py -k 'eager_matches|attention' --json results.json

FOLDER is the unpacked source distribution of the installed transformers, whose `tests` are not part
of this project. Models and their sizes are chosen here. The distribution lacks the tests of
generation and of export; empty classes stand for them.
"""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

SOURCE = Path(os.environ["TRANSFORMERS_SOURCE"]).resolve(strict=True)
VOCABULARY = 99
ROWS, LENGTH = 7, 9  # of the inputs
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
ENCODER = {k: v for k, v in SIZES.items() if k not in ("bos_token_id", "eos_token_id")}

# The prefix of a family's names, its arguments, and the classes that are tested.
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": GROUPED,
    "Gemma": GROUPED,
    "Gemma2": {**GROUPED, "query_pre_attn_scalar": 8},
    "Phi3": {**SIZES, "num_key_value_heads": 2},
    "Olmo2": {**SIZES, "num_key_value_heads": 2},
    "GPTNeoX": SIZES,
    "GPT2": SIZES,
}
ENCODERS: dict[str, dict[str, Any]] = {"Bert": ENCODER, "Roberta": ENCODER}
IMAGES = {"image_size": 30, "patch_size": 10, "num_labels": 3}


def _common() -> ModuleType:
    """`test_modeling_common` of the distribution, as a module of its package `tests`."""
    for name, stands_for in (
        ("tests.exporters.test_export", "ExportTesterMixin"),
        ("tests.generation.test_utils", "GenerationTesterMixin"),
    ):
        if not (SOURCE / (name.replace(".", "/") + ".py")).exists():
            package = ModuleType(name.rpartition(".")[0])
            package.__path__ = []
            module = ModuleType(name)
            setattr(module, stands_for, type(stands_for, (), {}))
            sys.modules.update({package.__name__: package, name: module})
    sys.path.insert(0, str(SOURCE))
    import tests.test_modeling_common

    return tests.test_modeling_common


common = _common()


class Tester:
    """Configuration and inputs of a model, as the shared tests ask for them."""

    is_training = True
    batch_size, seq_length = ROWS, LENGTH

    def __init__(self, config: type, arguments: dict[str, Any]) -> None:
        self._config, self._arguments = config, arguments
        self.__dict__.update({k: v for k, v in arguments.items() if k != "head_dim"})

    def get_config(self) -> Any:
        return self._config(**self._arguments)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = common.ids_tensor([ROWS, LENGTH], VOCABULARY)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class ImageTester(Tester):
    """The same of a model of images."""

    seq_length = (IMAGES["image_size"] // IMAGES["patch_size"]) ** 2 + 1
    mask_length = seq_length - 1
    image_size, patch_size, num_masks = IMAGES["image_size"], IMAGES["patch_size"], 1

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        side = self.image_size
        return self.get_config(), {"pixel_values": common.floats_tensor([ROWS, 3, side, side])}


def _tests(name: str, tester: Tester, suffixes: tuple[str, ...], **settings: Any) -> type:
    """A class of all shared tests, for the models of a family that there are."""
    models = tuple(getattr(transformers, f"{name}{suffix}") for suffix in suffixes)

    def set_up(self: Any) -> None:
        self.model_tester = tester

    return type(
        f"{name}Test",
        (common.ModelTesterMixin, unittest.TestCase),
        {"all_model_classes": models, "setUp": set_up, "__module__": __name__, **settings},
    )


for _name, _arguments in DECODERS.items():
    _causal = "LMHeadModel" if _name == "GPT2" else "ForCausalLM"
    _config = getattr(transformers, f"{_name}Config")
    globals()[f"{_name}Test"] = _tests(_name, Tester(_config, _arguments), ("Model", _causal))
for _name, _arguments in ENCODERS.items():
    _config = getattr(transformers, f"{_name}Config")
    globals()[f"{_name}Test"] = _tests(_name, Tester(_config, _arguments), ("Model", "ForMaskedLM"))
_sizes = {key: SIZES[key] for key in list(SIZES)[1:5]} | IMAGES
ViTTest = _tests(
    "ViT",
    ImageTester(transformers.ViTConfig, _sizes),
    ("Model", "ForImageClassification"),
    test_resize_embeddings=False,
)
