"""cuDNN's attention on float8 tensors, by the graph API of nvidia-cudnn-frontend.

It takes one scale for each tensor. On Hopper it writes e4m3 alone (cuDNN 9.19), by a scale that its
caller has to know beforehand: here the power of two that a first run's largest result leaves room
for. It multiplies v by probabilities that are relative to a row's maximum and rounded to e4m3 after
a scale of 256, which the caller has to give too; a wrong one gives wrong results and no error.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

from dlattn.bench import cudnn_library, tensors
from dlattn.bench.cases import FLOAT8
from dlattn.bench.peers import Bound, Contestant, Problem, UnavailableError
from dlattn.console.errors import first_line

NAME = "cudnn-fp8"

_WEIGHTS_SCALE = 256.0
_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
_AVERAGED = 8  # scales of the result within a factor of 2


class Attention:
    """One problem's graph with its tensors, ready to run."""

    def __init__(self, problem: Problem) -> None:
        """Build the graph; raises UnavailableError for what this peer cannot do."""
        self._cudnn = _module()
        self._torch = tensors.torch_module()
        if tensors.dtype_of(problem.q) != FLOAT8:
            raise UnavailableError("takes float8 tensors only")
        wrong = sorted(set(problem.options) - set(tensors.DESCALES))
        if wrong:
            raise UnavailableError(f"is timed without {', '.join(wrong)}")
        self._problem = problem
        device = problem.q.device
        descales = [_one_value(problem.options.get(name), device) for name in tensors.DESCALES]
        others = (1.0 / _WEIGHTS_SCALE, _WEIGHTS_SCALE, 1.0)
        self._scales = [*descales, *(self._torch.full((1,), x, device=device) for x in others)]
        self._amax = [self._torch.zeros(1, device=device) for _ in range(2)]
        self._out = self._torch.empty_like(problem.q)
        self._stream = self._torch.cuda.current_stream
        self._handle = _handle()
        self._graph, self._memory = self._build()
        size = max(1, self._graph.get_workspace_size())
        self._workspace = self._torch.empty(size, dtype=self._torch.uint8, device=device)
        self._leave_room()

    def __call__(self) -> Any:
        """Enqueue it on torch's current stream; the result is in e4m3, times `scale_o`."""
        self._cudnn.set_stream(handle=self._handle, stream=self._stream().cuda_stream)
        self._graph.execute(self._memory, self._workspace, handle=self._handle)
        return self._out

    def result(self) -> Any:
        """The result in float32, written over NaN."""
        tensors.fill_with_nan(self._out)
        return self().float() / self._scales[-1]

    def averaged(self) -> Any:
        """The mean of results that differ in their scale alone.

        Where all results are much the same, e4m3 rounds all of them to the same side: no mean of
        one run tells what was rounded.
        """
        scale = self._scales[-1].clone()
        total = self._torch.zeros_like(self._out, dtype=self._torch.float32)
        for i in range(_AVERAGED):
            self._scales[-1].copy_(scale * 2.0 ** (-i / _AVERAGED))
            total += self.result()
        self._scales[-1].copy_(scale)
        return total / _AVERAGED

    def _leave_room(self) -> None:
        """Let the largest result be between 224 and 448 in e4m3."""
        self()
        largest = float(self._amax[1])
        if 0.0 < largest < math.inf:
            power = math.floor(math.log2(tensors.LARGEST_FLOAT8 / largest))
            self._scales[-1].fill_(2.0**power)

    def _build(self) -> tuple[Any, dict[int, Any]]:
        """The graph, and the memory of each of its tensors."""
        cudnn, problem = self._cudnn, self._problem
        types = cudnn.data_type
        graph = cudnn.pygraph(
            io_data_type=types.FP8_E4M3,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self._handle,
        )
        bound: dict[Any, Any] = {}
        inputs = []
        for name in ("q", "k", "v"):
            x = getattr(problem, name)
            sizes, strides = _view(x, problem)
            inputs.append(
                graph.tensor(name=name, dim=sizes, stride=strides, data_type=types.FP8_E4M3)
            )
            bound[inputs[-1]] = x
        scales = {}
        for name, memory in zip(_SCALES, self._scales, strict=True):
            scales[name] = graph.tensor(
                name=name, dim=[1] * 4, stride=[1] * 4, data_type=types.FLOAT
            )
            bound[scales[name]] = memory
        options: dict[str, Any] = {}
        if problem.case.causal:
            options = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": 0}
        ends: list[Any] = []
        if problem.varlen is not None:
            ends, lengths = self._ragged(graph, bound)
            for tensor, end in zip(inputs, (ends[0], ends[1], ends[1]), strict=True):
                tensor.set_ragged_offset(end)
            options |= {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}
        out, _, *amax = graph.sdpa_fp8(
            q=inputs[0],
            k=inputs[1],
            v=inputs[2],
            **scales,
            attn_scale=1.0 / math.sqrt(problem.case.sizes[3]),
            generate_stats=False,
            **options,
        )
        sizes, strides = _view(self._out, problem)
        out.set_output(True).set_dim(sizes).set_stride(strides).set_data_type(types.FP8_E4M3)
        if ends:
            out.set_ragged_offset(ends[0])
        bound[out] = self._out
        for tensor, memory in zip(amax, self._amax, strict=True):
            tensor.set_output(True).set_dim([1] * 4).set_stride([1] * 4)
            tensor.set_data_type(types.FLOAT)
            bound[tensor] = memory
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, {tensor.get_uid(): memory for tensor, memory in bound.items()}

    def _ragged(self, graph: Any, bound: dict[Any, Any]) -> tuple[list[Any], Any]:
        """Where each sequence begins in q and in k, in elements, and how long they are."""
        problem, types, torch = self._problem, self._cudnn.data_type, self._torch
        assert problem.varlen is not None
        count = len(problem.varlen.lengths)
        starts = problem.varlen.cu_seqlens.long()
        ends = []
        for name in ("q", "k"):
            sizes, strides = [count + 1, 1, 1, 1], [1] * 4
            row = getattr(problem, name).stride(0)
            end = graph.tensor(
                name=f"{name}_offsets", dim=sizes, stride=strides, data_type=types.INT64
            )
            bound[end] = starts * row
            ends.append(end)
        lengths = graph.tensor(
            name="lengths", dim=[count, 1, 1, 1], stride=[1] * 4, data_type=types.INT32
        )
        bound[lengths] = torch.diff(starts).int()
        return ends, lengths


def bind(problem: Problem) -> Bound:
    """The peer with a problem."""
    attention = Attention(problem)
    return Bound(attention, checked=attention.result, averaged=attention.averaged)


CUDNN_FP8 = Contestant(NAME, False, bind)


def _module() -> Any:
    """The frontend, which finds the cuDNN that torch has loaded: so torch comes first."""
    tensors.torch_module()
    try:
        module = importlib.import_module("cudnn")
    except ImportError as error:
        text = f"nvidia-cudnn-frontend is not installed: {first_line(error)}"
        raise UnavailableError(text) from error
    named = cudnn_library.handle()
    if named is not None:  # it looks for a package of cuDNN first, whatever is loaded
        module._pybind_module._set_dlhandle_cudnn(named)
    return module


@functools.cache
def _handle() -> Any:
    """One for all problems, as they run one after the other."""
    return _module().create_handle()


def _one_value(descale: Any, device: Any) -> Any:
    """The one descale that all heads share, in memory of its own."""
    if descale is None:
        return tensors.torch_module().ones(1, device=device)
    first = descale.flatten()[:1].clone()
    if not bool((descale == first).all()):
        raise UnavailableError("takes one scale for each tensor, not one for each head")
    return first


def _view(x: Any, problem: Problem) -> tuple[list[int], list[int]]:
    """Sizes and strides as (batch, heads, seqlen, dim), varlen tensors as the longest sequence."""
    if problem.varlen is None:
        return list(x.shape), list(x.stride())
    longest = max(problem.varlen.lengths)
    row, head, element = x.stride()
    sizes = [len(problem.varlen.lengths), x.shape[1], longest, x.shape[2]]
    return sizes, [longest * row, head, row, element]
