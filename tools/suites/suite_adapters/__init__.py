"""Other projects' tests of caches of keys and of gradients, and what stands for their packages.

An adapter is a module of the peer's name that computes with dlattn. The tests themselves are files
of those projects, which whoever runs them with `kvcache_suite.py` brings.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Suite:
    """Tests of one project."""

    project: str
    files: tuple[str, ...]
    """In its repository, which a folder stands for."""
    install: str
    """The function of an adapter that puts the project's modules into sys.modules."""
    functions: str
    """Those that are run by default: a regular expression of their names."""
    values: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    """By function and argument, what it is to be instead of what the file says."""
    not_promised: Mapping[str, str] = field(default_factory=dict)
    """Functions that are left out, by a regular expression of their names, and why."""
    cases_not_promised: Mapping[str, str] = field(default_factory=dict)
    """Cases that are not run, by a regular expression that is searched for in their names, and
    why."""
    begin: str = ""
    """The adapter's function that is told the name of each test function before it runs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the files read."""

    def paths(self, path: Path) -> list[Path]:
        """The files of the suite that a path stands for."""
        found = [path] if path.is_file() else [path / name for name in self.files]
        missing = [str(file) for file in found if not file.is_file()]
        if missing:
            raise FileNotFoundError(f"no {', '.join(missing)}: bring {self.project}'s tests")
        return found

    def reason_against(self, function: str) -> str | None:
        """Why a function is left out; None if it is not."""
        for pattern, reason in self.not_promised.items():
            if re.fullmatch(pattern, function):
                return reason
        return None

    def reason_against_case(self, title: str) -> str | None:
        """Why a case is not run; None if it is."""
        for pattern, reason in self.cases_not_promised.items():
            if re.search(pattern, title):
                return reason
        return None

    def prepare(self, path: Path) -> Callable[[str], None]:
        """Make a file's imports find the adapters; return what is called before each test."""
        # A file finds those beside it, and what its folder named "tests" has by that name.
        sys.path.insert(0, str(path.parent))
        sys.path[0:0] = [str(folder.parent) for folder in path.parents if folder.name == "tests"]
        os.environ.update(self.environment)
        _named(self.install)()
        return _named(self.begin) if self.begin else lambda function: None


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), function)


_ONE_KEY = {
    r"seqlen_k=1[,\]]|(local=True|local_enum=[123]),.*seqlen_k=3[,\]]": "the gradients of q and k "
    "are 0 where rows see one key alone, and the file may allow no error then: dlattn's are what "
    "the rounding of two sums in float32 leaves"
}

_ONE_KEY_2 = {
    r"seqlen_q=1,swap_sq_sk=True|seqlen_k=1[,\]]": "where rows see one key alone the gradient of v "
    "is a sum of dout, and the file may allow no error then: in 6 of 100 such cases two orders of "
    "float32 round to other numbers of 16 bits"
}

_FLASHINFER = (
    "alibi",
    "attention_sink",
    "batch_attention",
    "batch_decode_kernels",
    "batch_invariant_fa2",
    "decode_prefill_lse",
    "logits_cap",
    "non_contiguous_decode",
    "page",
    "shared_prefix_kernels",
    "sliding_window",
    "tensor_cores_decode",
    "xqa_batch_decode",
)

SUITES = {
    "flash-attention-2": Suite(
        project="Dao-AILab/flash-attention",
        files=("tests/test_flash_attn.py",),
        install="flash_attention.install_2",
        functions="test_flash_attn_kvcache.*|test_flash_attn_varlen_(causal|paged.*)",
        values={
            # The file has this in a comment.
            "test_flash_attn_kvcache": {"has_batch_idx": (False, True)},
            # Without pages it asks for gradients.
            "test_flash_attn_varlen_causal": {"paged_kv_block_size": (256, 512)},
        },
        not_promised={
            "test_flash_attn_kvcache_paged_block_table_bounds": "asks for an error in flash-attn's "
            "words: the CPU refuses such lengths in others, and on a GPU they are clamped",
            "test_flash_attn_varlen_paged_kv_num_splits": "calls a private function, and asks for "
            "an error for two splits, which are no restriction here",
        },
    ),
    "flash-attention-3": Suite(
        project="Dao-AILab/flash-attention",
        files=("hopper/test_flash_attn.py",),
        install="flash_attention.install_3",
        functions="test_flash_attn_(kvcache|combine|varlen_combine_linearize)",
    ),
    "flash-attention-2-gradients": Suite(
        project="Dao-AILab/flash-attention",
        files=("tests/test_flash_attn.py",),
        install="flash_attention.install_2",
        functions="test_flash_attn_((varlen_)?(qkvpacked|output|causal|deterministic)|splitkv|"
        "race_condition|bwd_.*)",
        cases_not_promised=_ONE_KEY_2,
        values={
            **{
                f"test_flash_attn_{name}": {"dropout_p": (0.0,)}
                for name in (
                    "qkvpacked",
                    "varlen_qkvpacked",
                    "output",
                    "varlen_output",
                    "race_condition",
                )
            },
            "test_flash_attn_varlen_causal": {"paged_kv_block_size": (None,)},
        },
    ),
    "flash-attention-3-gradients": Suite(
        project="Dao-AILab/flash-attention",
        files=("hopper/test_flash_attn.py",),
        install="flash_attention.install_3",
        functions="test_flash_attn_(output|varlen_output|race_condition)",
        values={
            "test_flash_attn_output": {"has_qv": (False,), "V_colmajor": (False,)},
            "test_flash_attn_varlen_output": {"has_qv": (False,)},
        },
        environment={"FLASH_ATTENTION_DISABLE_FP8": "TRUE"},
        cases_not_promised=_ONE_KEY,
        not_promised={
            "test_flash_attn_race_condition": "a thousand calls beside 70 GiB: the tests of "
            "flash-attention-2 have the same in fewer",
        },
    ),
    "flash-attention-4-gradients": Suite(
        project="Dao-AILab/flash-attention",
        files=("tests/cute/test_flash_attn.py",),
        install="flash_attention_4.install",
        functions="test_flash_attn_((varlen_)?output|.*learnable_sink.*|lse_grad.*|"
        "varlen_cumsum_metadata_paths|small_head_dim|seqlen_k_zero|empty_q_.*)",
        cases_not_promised={
            **_ONE_KEY,
            "cumsum_mode=metadata": "reads what FlashAttention-4's scheduler has prepared",
        },
    ),
    "flashinfer": Suite(
        project="flashinfer-ai/flashinfer",
        files=tuple(f"tests/attention/test_{name}.py" for name in _FLASHINFER),
        install="flashinfer.install",
        functions=".*",
        begin="flashinfer_wrappers.begin",
        not_promised={
            ".*nvfp4.*": "caches of 4-bit numbers",
            "test_tensor_core_decode_rejects_mismatched_q_len": "errors of FlashInfer's plan",
            "test_single_decode_torch_compile_cuda_graph": "FlashInfer in a process of its own",
        },
    ),
}
