"""The model of the gradients' kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "research"))
from sass_model import backward  # noqa: E402
from sass_model.kernels import _run_cpp  # noqa: E402


def test_the_tiles_are_those_of_the_kernels() -> None:
    program = """
        #include "cuda/backward/wmma/traits.h"
        #include <cstdio>
        int main() {
          for (int d : {64, 128, 256}) {
            const auto t = dlattn::backward_wmma::key_tile(d);
            std::printf("%d %d %d %d %d %d\\n", d, t.block_n, t.block_m, t.num_warps,
                        t.blocks_per_sm, t.ds_steps);
          }
        }"""
    told = {}
    for line in _run_cpp(program).splitlines():
        head_dim, *tile = map(int, line.split())
        told[head_dim] = backward.Tile(*tile)
    assert told == backward.OURS


def test_what_l2_is_asked_for() -> None:
    """64 queries at head_dim 64, half of 128 keys: Q and dO in 16 bits, dQ in 32."""
    assert backward.l2_bytes(64, backward.OURS[64]) == 64 * 64 * 8 / 2
    for head_dim in (128, 256):
        ours = backward.l2_bytes(head_dim, backward.OURS[head_dim])
        assert 2 * ours == backward.l2_bytes(head_dim, backward.FLASH_ATTENTION_2[head_dim])


def test_a_loop_with_other_products_is_refused() -> None:
    """So that no figure is of half a step."""
    lines = [
        "/*0000*/ HMMA.16816.F32 R0, R4, R8, R0 ;",
        "/*0010*/ @P0 BRA 0x0 ;",
        "/*0020*/ EXIT ;",
    ]
    listing = "\n".join(
        f"        {line} /* 0x0000000000000000 */\n    /* 0x000fe20000000000 */" for line in lines
    )
    with pytest.raises(ValueError, match="4096 operations, the tile at 64 takes"):
        backward.steps_of(listing, 64, backward.FLASH_ATTENTION_2[64])


def test_the_page_has_the_committed_figures_of_gradients() -> None:
    document = json.loads((ROOT / "research/model/ada-backward.json").read_text())
    assert backward.loops_table(document) in (ROOT / "research/ADA.md").read_text()
