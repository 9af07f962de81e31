from collections.abc import Callable
from typing import Any

__version__: str
kernel_names: tuple[str, ...]  # values of the argument kernel: "auto", "cpu", the families
# The tensors of each operation, from its table in src/core/operations: name, dimensions, and what
# takes it as an optional argument (functions, and "torch" for torch.ops.dlattn).
operands: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]]
feature_names: tuple[str, ...]  # values of refusal's argument feature

class HostBuffer:
    def __init__(self, shape: tuple[int, ...], dtype: str) -> None: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: Any = None,
        copy: Any = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# The arguments of dlattn.attention, dlattn.attention_varlen and dlattn.attention_with_kvcache, by
# position, in the order of python/api/arguments.py.
def attention(*args: Any) -> Any: ...
def attention_varlen(*args: Any) -> Any: ...
def attention_with_kvcache(*args: Any) -> Any: ...
def supported(*args: Any) -> tuple[bool, tuple[str, ...]]: ...
def supported_varlen(*args: Any) -> tuple[bool, tuple[str, ...]]: ...
def supported_with_kvcache(*args: Any) -> tuple[bool, tuple[str, ...]]: ...
def plan(*args: Any) -> dict[str, Any]: ...
def plan_varlen(*args: Any) -> dict[str, Any]: ...
def plan_with_kvcache(*args: Any) -> dict[str, Any]: ...

# attention_with_kvcache for arguments by their names, after new keys are appended.
def append_and_attend(
    k: Any,
    v: Any,
    seqused_k: Any,  # before the call; that of options counts the new keys
    rotary_cos: Any,
    rotary_sin: Any,
    rotary_interleaved: Any,
    leftpad_k: Any,  # from which rotary positions count
    options: dict[str, Any],
) -> Any: ...

# The six gradients of a call of attention or attention_varlen, whose arguments `options` has by
# their names; None for those that `needs` leaves out.
def attention_backward(
    dout: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    gradients: dict[str, Any],  # tensors to write to, or None
    needs: Any,
    deterministic: Any,
    workspace: Any,
    options: dict[str, Any],
) -> tuple[Any, ...]: ...
def supported_backward(
    dout: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    gradients: dict[str, Any],
    needs: Any,
    deterministic: Any,
    workspace: Any,
    options: dict[str, Any],
) -> tuple[bool, tuple[str, ...]]: ...
def plan_backward(
    dout: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    gradients: dict[str, Any],
    needs: Any,
    deterministic: Any,
    workspace: Any,
    options: dict[str, Any],
) -> dict[str, Any]: ...

# attention's and attention_varlen's arguments, with pairs (dtype, shape) as tensors: what XLA's
# handlers are called with. Returns their attributes, dtype and shape of out, the shape of lse and
# the bytes of workspace.
def xla_call(
    *args: Any,
) -> tuple[dict[str, int | float | str], tuple[str, tuple[int, ...]], tuple[int, ...], int]: ...
def xla_call_varlen(
    *args: Any,
) -> tuple[dict[str, int | float | str], tuple[str, tuple[int, ...]], tuple[int, ...], int]: ...
def xla_handlers() -> dict[str, Any]: ...  # by platform, capsules

# The same of the gradients, in the order of `needs`, of a call whose arguments `options` has by
# their names. Returns attributes, dtypes and shapes of them, and the bytes of workspace.
def xla_call_backward(
    options: dict[str, Any],
    results: dict[str, Any],  # out, lse, and dout, dlse or both
    needs: str,  # names, with spaces between them
    deterministic: bool,
) -> tuple[dict[str, int | float | str], tuple[tuple[str, tuple[int, ...]], ...], int]: ...
def xla_backward_handlers() -> dict[str, Any]: ...
def merge_states(outs: Any, lses: Any, layout: Any, stream: Any) -> tuple[Any, Any]: ...
def quantize_kv(
    k: Any,
    v: Any,
    precision: Any,
    layout: Any,
    stream: Any,
    cu_seqlens_k: Any,
    max_seqlen_k: Any,
    seqused_k: Any,
) -> tuple[Any, int, int, int | None, int, int, int, bytes | None]: ...
def append_kv(*args: Any) -> Any: ...  # in the order of dlattn.append_kv
def relay(capsule: Any) -> Any: ...

# The function that puts native kernels of torch.ops.dlattn into torch's dispatcher and returns why
# it cannot, or "", the one that takes them out, and the failure of this thread's last call of one.
def register_torch_ops(folder: str, backend: str, schemas: dict[str, tuple[str, ...]]) -> str: ...
def unregister_torch_ops() -> None: ...
def torch_ops_failure() -> tuple[str, str] | None: ...
def register_torch_sdpa(
    folder: str,
    key: str,
    schemas: dict[str, tuple[str, ...]],
    count_refused: Callable[[str, str], None],
) -> str: ...
def register_torch_raise(folder: str, exception: object) -> str: ...
def unregister_torch_sdpa() -> None: ...
def register_torch_overrideable(
    folder: str, key: str, schemas: dict[str, tuple[str, ...]]
) -> str: ...
def serve_torch_sdpa(serving: bool, gradients: str) -> None: ...
def torch_sdpa_served(reset: bool) -> dict[str, int]: ...
def torch_gradients_are_as_fast(
    torchs: str,
    kernel: str,
    has_bias: bool,
    wants_dbias: bool,
    deterministic: bool,
    seqlen_q: int,
    head_dim: int,
) -> bool: ...
def info() -> dict[str, Any]: ...
def inspect(tensor: Any) -> dict[str, Any]: ...
def use_exchange_api(on: bool) -> None: ...
def refusal(
    kernel: str, dtype: str, head_dim: int, feature: str, compute_capability: int
) -> str: ...
