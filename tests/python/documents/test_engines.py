"""The examples of docs/engines.md, against attention over all keys of each request at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from test_readme import example

from dlattn.reference import attention_reference, error_bound, max_error


def run(name: str) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(compile(example(name)[0], f"example {name}", "exec"), scope)
    return scope


def check(found: Any, q: Any, keys: Any, lse: Any = None, **options: Any) -> None:
    """A request's out, and lse (1, heads, queries); q, K and V have no dimension for a batch."""
    given = [x[None] for x in (q, *keys)]
    expected = attention_reference(*given, **options)
    bound = error_bound(*given, expected=expected, **options)
    assert max_error(found[None], expected[0]) <= bound.out
    if lse is not None:
        assert max_error(lse, expected[1]) <= bound.lse
    fewer = attention_reference(given[0], given[1][:, :-1], given[2][:, :-1], **options)
    assert max_error(found[None], fewer[0]) > bound.out


def rows_of(pages: Any, table: Any, length: int) -> Any:
    used = table[: -(-length // pages.shape[1])]
    return pages[used].reshape(-1, *pages.shape[2:])[:length]


def test_context_parallel_decoding() -> None:
    s = run("engine_context_parallel")
    for b in range(2):
        keys = [
            np.concatenate(
                [rows_of(s[x][r], s["page_table"][r, b], s["seqused_k"][r, b]) for r in range(2)]
            )
            for x in ("k_pages", "v_pages")
        ]
        assert len(keys[0]) == (73, 9)[b]
        check(s["out"][b], s["q"][b], keys, s["lse"][b : b + 1])


def test_drafts() -> None:
    """Each query alone, over as many keys as the page says it sees."""
    s = run("engine_drafts")
    starts = s["cu_seqlens_q"]
    for b, length in enumerate(s["seqused_k"]):
        n = starts[b + 1] - starts[b]
        for i in range(n):
            sees = length - n + 1 + i
            keys = [rows_of(s[x], s["page_table"][b], sees) for x in ("k_pages", "v_pages")]
            row = slice(starts[b] + i, starts[b] + i + 1)
            check(s["out"][row], s["q"][row], keys)


def test_shared_prefixes() -> None:
    s = run("engine_cascade")
    for b, length in enumerate(s["seqused_k"]):
        keys = [
            np.concatenate([s[f"{x}_prefix"][0], s[f"{x}_cache"][b, :length]]) for x in ("k", "v")
        ]
        check(s["out"][b], s["q"][b], keys, s["lse"][b : b + 1])
