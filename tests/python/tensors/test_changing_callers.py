"""Callers that change their tensors while a call reads them, from its own hooks or other threads.

A call holds on to what it was given, uses what it checked, or says that a tensor changed. Where it
does not, the process is likely to crash, so each case runs in one of its own.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from programs import HERE

PRELUDE = """
import numbers, sys, threading
sys.path.insert(0, sys.argv[1])
import numpy as np
import dlattn
from arrays import assert_attention, normal, qkv
from capsules import Exporter

class Hook(Exporter):
    '''Runs a function while the call takes it in.'''
    def __init__(self, array, function):
        super().__init__(array)
        self.function = function
    def __dlpack__(self, **keywords):
        self.function()
        return super().__dlpack__(**keywords)

def refused(message, function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except dlattn.UnsupportedError as error:
        assert message in str(error), error
    else:
        raise AssertionError('not refused')
"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PRELUDE + textwrap.dedent(code), str(HERE)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# Big enough to be unmapped when freed.
MERGE = """
    outs = [normal(1, 4096, 4, 64, seed=n) for n in range(3)]
    lses = [normal(1, 4, 4096, seed=n) for n in range(3)]
    want = dlattn.merge_states(outs, lses)
"""


@pytest.mark.parametrize("kind", ["list", "Sequence"])
def test_merged_parts_are_held_when_their_list_is_cleared(kind):
    pytest.importorskip("torch")
    run(
        MERGE
        + f"""
    import torch
    class Sequence(list):
        def __iter__(self):  # of parts that nothing else holds
            return iter([x.clone() if hasattr(x, 'clone') else x for x in list.__iter__(self)])
    held = [[torch.from_numpy(x).clone() for x in parts] for parts in (outs[:2], lses[:2])]
    def clear():
        held[0].clear()
        held[1].clear()
    held[1].append(lses[2])
    held[0].append(Hook(outs[2], clear))
    if {kind == "Sequence"}:
        held = [Sequence(parts) for parts in held]
    got = dlattn.merge_states(*held)
    for x, y in zip(got, want):
        np.testing.assert_array_equal(x.numpy(), y)
    """
    )


def test_merged_parts_are_held_when_another_thread_clears_their_list():
    pytest.importorskip("torch")
    run(
        MERGE
        + """
    import torch
    for n in range(20):
        held = [[torch.from_numpy(x).clone() for x in parts] for parts in (outs, lses)]
        start = threading.Barrier(2)
        def clear():
            start.wait()
            held[0].clear()
            held[1].clear()
        thread = threading.Thread(target=clear)
        thread.start()
        start.wait()
        try:
            got = dlattn.merge_states(*held)
        except dlattn.UnsupportedError as error:
            assert 'is empty' in str(error) or 'lses holds' in str(error), error
        else:
            for x, y in zip(got, want):
                np.testing.assert_array_equal(x.numpy(), y)
        thread.join()
    """
    )


def test_lengths_are_used_as_they_were_checked():
    run(
        """
    q, k, v = normal(10, 4, 8, seed=1), normal(14, 2, 8, seed=2), normal(14, 2, 8, seed=3)
    good = dict(cu_seqlens_q=[0, 3, 10], cu_seqlens_k=[0, 5, 14], seqused_k=[4, 9])
    def call(**keywords):
        return dlattn.attention_varlen(q, k, v, max_seqlen_q=7, max_seqlen_k=9, **keywords)
    bias = normal(7, 9)
    for name in good:
        for value in (2**30, -(2**30)):
            lengths = {key: np.array(values, np.int32) for key, values in good.items()}
            want = call(bias=bias, **lengths)
            def write():
                lengths[name][1] = value
            try:
                got = call(bias=Hook(bias, write), **lengths)
            except dlattn.UnsupportedError as error:
                assert name in str(error)
            else:
                np.testing.assert_array_equal(got, want)
            refused(name, call, bias=bias, **lengths)
    """
    )


def test_lengths_may_be_written_by_another_thread():
    run(
        """
    q, k, v = (normal(4096, 2, 16, seed=n) for n in range(3))
    good = np.array([0, 1000, 4096], np.int32)
    cu_seqlens = good.copy()
    def call():
        return dlattn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 4096, 4096, causal=True)
    want, done = call(), threading.Event()
    def write():
        while not done.is_set():
            cu_seqlens[1] = 1 << 30
            cu_seqlens[1] = good[1]
    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(10):
        try:
            np.testing.assert_array_equal(call(), want)
        except dlattn.UnsupportedError as error:
            assert 'cu_seqlens' in str(error)
    done.set()
    thread.join()
    """
    )


BIG = "    q, k, v = qkv(1, 4096, 64, 4, 4, 64)\n"


@pytest.mark.parametrize("name", ["q", "bias"])
def test_a_torch_tensor_that_is_given_other_memory_is_refused(name):
    pytest.importorskip("torch")
    run(
        BIG
        + f"""
    import torch
    def resize_storage():
        x.untyped_storage().resize_(0)
    def set_data():
        x.data = torch.empty(0)
    for change in (lambda: x.set_(), lambda: x.resize_(0), set_data, resize_storage):
        x = torch.from_numpy(normal(4096, 64) if {name == "bias"} else q).clone()
        hook = Hook(v, lambda: None)
        mask = Hook(np.ones((64,), bool), lambda: None)
        arguments = {{'q': q, 'k': k, 'v': hook, 'mask': mask, {name!r}: x}}
        dlattn.attention(**arguments)
        (mask if {name == "bias"} else hook).function = change
        try:
            dlattn.attention(**arguments)
        except (dlattn.UnsupportedError, TypeError) as error:
            assert str(error).startswith({name!r}) and 'accepted' in str(error), error
        else:
            raise AssertionError('not refused')
    """
    )


def test_a_numpy_array_that_is_given_other_memory_is_refused():
    run(
        BIG
        + """
    q = q.copy()
    hook = Hook(k, lambda: q.resize((0,), refcheck=False))
    refused('q was given other memory', dlattn.attention, q, hook, v)
    """
    )


def test_numbers_are_read_before_tensors():
    """Numbers may be of any class, and run its code."""
    run(
        BIG
        + """
    class Scale(numbers.Real):
        def __float__(self):
            q.resize((0,), refcheck=False)
            return 0.5
    for name in dir(numbers.Real):
        if name in numbers.Real.__abstractmethods__ and name != '__float__':
            setattr(Scale, name, lambda *_: NotImplemented)
    Scale.__abstractmethods__ = frozenset()
    for name in ('softmax_scale', 'softcap'):
        q = qkv(1, 4096, 64, 4, 4, 64)[0].copy()
        refused('q has 1 dimensions', dlattn.attention, q, k, v, **{name: Scale()})
    """
    )
