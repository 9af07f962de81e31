"""The model of the gradients' kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "research"))
from sass_model import backward  # noqa: E402
from sass_model.devices import DEVICES  # noqa: E402
from sass_model.kernels import _run_cpp  # noqa: E402
from sass_model.sass import parse  # noqa: E402
from sass_model.simulate import Event, simulate  # noqa: E402


def listing(*lines: str) -> str:
    """As cuobjdump prints it, from lines of an address and an instruction."""
    return "\n".join(
        f"        {line} /* 0x0000000000000000 */\n    /* 0x000fe20000000000 */" for line in lines
    )


def test_the_tiles_are_those_of_the_kernels() -> None:
    program = """
        #include "cuda/backward/wmma/traits.h"
        #include <cstdio>
        int main() {
          for (int d : {64, 128, 256}) {
            const auto t = dlattn::backward_wmma::key_tile(d);
            std::printf("%d %d %d %d %d %d %d\\n", d, t.block_n, t.block_m, t.num_warps,
                        t.blocks_per_sm, t.ds_steps, t.sharers);
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
    code = listing(
        "/*0000*/ HMMA.16816.F32 R0, R4, R8, R0 ;",
        "/*0010*/ @P0 BRA 0x0 ;",
        "/*0020*/ EXIT ;",
    )
    with pytest.raises(ValueError, match="4096 operations, the tile at 64 takes"):
        backward.steps_of(code, 64, backward.FLASH_ATTENTION_2[64])


def test_a_barrier_of_steps_that_make_dq_is_not_that_of_others() -> None:
    """Nor do others wait for dS."""
    product = "HMMA.16816.F32 R0, R4, R8, R0"
    lines = [product, "ARRIVES.LDGSTSBAR.64 [R1+0x100]", "@!P1 BAR.SYNC 0x0", "LDS R2, [0x124]"]
    code = [f"/*{16 * i:04x}*/ {x} ;" for i, x in enumerate(lines)]
    code += ["/*0040*/ @P0 BRA 0x0 ;", "/*0050*/ EXIT ;"]
    tile = backward.Tile(keys=64, queries=1, warps=10, blocks=1, dq_steps=2)
    steps, events = backward.steps_of(listing(*code), 64, tile)
    assert [i.name for i in steps].count("BAR") == 1
    assert [events[place].name for place in sorted(events)] == ["full 1", "dS written", "full 0"]


def test_warps_wait_until_all_have_arrived() -> None:
    """Those of a pass before, or none goes on."""
    product = "HMMA.16816.F32 R0, R4, R8, R0"
    code = parse(listing(*[f"/*{16 * i:04x}*/ {product} ;" for i in range(4)]))
    wait = Event("mbarrier", waits=True, passes_before=1)
    gpu = DEVICES["L4"]
    free = simulate(code, gpu, 1, 8).clocks_per_pass
    assert simulate(code, gpu, 1, 8, events={0: wait, 3: Event("mbarrier")}).clocks_per_pass >= free
    with pytest.raises(ValueError, match="none can go on"):
        simulate(code, gpu, 1, 8, events={0: wait})


def test_the_page_has_the_committed_figures_of_gradients() -> None:
    document = json.loads((ROOT / "research/model/ada-backward.json").read_text())
    assert backward.loops_table(document) in (ROOT / "research/ADA.md").read_text()
