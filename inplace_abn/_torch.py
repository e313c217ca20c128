"""Every private name of torch that Python code uses, one line of reason each.

``tests/autograd/test_private_names.py`` has a test for each, which fails with that name when it is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from sys import getrefcount
from typing import Any

import torch
import torch._functorch.config
import torch._functorch.pyfunctorch
import torch._subclasses.fake_tensor
import torch.fx
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# Ops below autograd cost a microsecond less than under no_grad, and are seen by modes all the same.
BelowAutograd = torch._C._AutoDispatchBelowADInplaceOrView

# What comes below autograd when an op is dispatched: from there calls go on that have bumped versions.
BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset

# What torch's registry of ops has an entry of for each signature.
OpOverload = torch._ops.OpOverload

# The functions behind torch.nn.functional, which may be called as they are.
nn_functions = torch._C._nn

# Tensors that have a shape, a dtype and a device, and take no memory.
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode

# Whether the kernels have a backend.
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

# Whether one of torch.func's transforms is running: under it nothing is reused, and graphs have levels.
transforms_active = torch._C._are_functorch_transforms_active

# Where no transform of torch.func is running.
outside_of_transforms = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack

# The node that autograd's engine is running.
current_node = torch._C._current_autograd_node

# Whether the running backward pass will keep the graph (retain_graph), and with it need the saved output again.
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

# Whether autograd allows to write to a view; without it the error comes after the writing.
creation_meta = torch._C._autograd._get_creation_meta
CREATED_BY_DEFAULT = torch._C._autograd.CreationMeta.DEFAULT

# Whether autograd knows a tensor as a view, which it lets be written to by rules of their own.
is_view = Tensor._is_view

# Whether a tensor's memory is a lazy copy of another one's.
is_lazy_copy = torch._C._is_cow_tensor  # type: ignore[attr-defined]

# Whether a tensor has no memory, because all of it is zero.
is_zero_tensor = Tensor._is_zerotensor

# The hooks that saved tensors go through by default: saving under them is no simple reference.
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# How many dispatch modes are active; zero in almost every call, which spares it the look at each.
count_dispatch_modes = torch._C._len_torch_dispatch_stack

_BATCHED: list[Any] = [torch._C._parse_dispatch_key(key) for key in ("FuncTorchBatched", "Batched")]

_SelectiveCheckpointModes = (
    torch.utils.checkpoint._CachingTorchDispatchMode,
    torch.utils.checkpoint._CachedTorchDispatchMode,
)


# Calls a tensor's own functions where a subclass would see them again.
NoTorchFunction = torch._C.DisableTorchFunctionSubclass

# The same where modes would see them, too.
NoTorchFunctionModes = torch._C.DisableTorchFunction


def schema_of(op: Any) -> Any:
    """The arguments of an op, which of them it writes to, and its name."""
    return op._schema


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for all handles of one piece of memory, while one of them is there."""
    key: int = storage._cdata
    return key


def stand_in_like(kind: type[Tensor], t: Tensor) -> Any:
    """A tensor of a subclass, without memory, of t's shape, strides, dtype and device."""
    return torch.Tensor._make_wrapper_subclass(kind, t.shape, strides=t.stride(), dtype=t.dtype, device=t.device)  # type: ignore[attr-defined]


def in_forward_mode() -> bool:
    """Whether tensors may have tangents, of forward-mode differentiation."""
    return forward_ad._current_level >= 0


def kinds_of_wrappers(t: Tensor) -> set[str]:
    """Of those that torch.func's transforms have put around the tensor: "vmap", "grad", "jvp" and others. A tangent
    outside of them is a "jvp" too."""
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or []
    by_level = {interpreter.level(): interpreter.key().name.lower() for interpreter in stack}
    kinds = set()
    while functorch.is_functorch_wrapped_tensor(t):
        kinds.add("vmap" if functorch.is_batchedtensor(t) else by_level.get(functorch.maybe_get_level(t), ""))
        t = functorch.get_unwrapped(t)
    if not stack and in_forward_mode() and forward_ad.unpack_dual(t, level=0).tangent is not None:
        kinds.add("jvp")
    return kinds


def is_batched(t: Tensor) -> bool:
    """Whether the tensor stands for a batch of them, by vmap or ``torch.autograd.grad(is_grads_batched=True)``."""
    keys = torch._C._dispatch_keys(t)
    return any(keys.has(key) for key in _BATCHED)


def use_count(t: Tensor) -> int:
    """The number of references to the tensor from C++. Torch's release decides whether Python's object is one."""
    count: int = t._use_count()  # type: ignore[attr-defined]
    return count


def storage_use_count(t: Tensor) -> int:
    """The number of references to the tensor's memory, by tensors and by Python's handles. The handle that is made here
    counts. Torch's release decides whether handles are one object or several."""
    storage = t.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return count + getrefcount(storage)


def is_exporting() -> bool:
    """Whether torch.export is tracing. torch.compiler.is_exporting() is true in the compiler of torch 2.11, too."""
    return torch.compiler._is_exporting_flag


def saves_its_result(t: Tensor) -> bool:
    """Whether the op that made the tensor keeps it for its own backward."""
    return hasattr(type(t.grad_fn), "_saved_result")


def in_backward() -> bool:
    """Whether autograd is running a backward pass, in which checkpoints compute their forward pass again."""
    return torch._C._current_graph_task_id() != -1


def uncompiled_autograd() -> AbstractContextManager[Any]:
    """Where backward is not handed to a compiler, as it may be in all threads at once."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return nullcontext() if module is None else module._disable()


def is_captured() -> bool:
    """Whether a tracer is recording the ops that run: torch.jit.trace or make_fx."""
    return torch._C._get_tracing_state() is not None or get_proxy_mode() is not None


def read_while_tracing(function: Any) -> Any:
    """Has the compiler call the function with real tensors, when it traces, and keep the result. What torch.compiler
    has for it imports the compiler, which takes a second."""
    function._dynamo_marked_constant = True
    return function


def call_on_joint_graphs(wrap: Any) -> None:
    """Has the compilers' graphs of forward and backward go through ``wrap(before)``, where ``before`` is what they went
    through, or None; unless that is of its class already."""
    config = torch._functorch.config
    if not isinstance(config.joint_custom_pass, wrap):
        config.joint_custom_pass = wrap(config.joint_custom_pass)


def is_backward(node: torch.fx.Node) -> bool:
    """Whether a node of a graph of forward and backward was made by autograd's backward pass."""
    return "backward" in node.meta.get("partitioner_tag", "")


def compute_in_backward(node: torch.fx.Node) -> None:
    """Has a compiler compute the node in the backward pass, of what the forward pass keeps."""
    node.meta["partitioner_tag"] = "must_be_in_backward"


def decompositions() -> Mapping[Any, Callable[..., Any]] | None:
    """What inductor takes ops apart by; None while it is not there."""
    inductor = sys.modules.get("torch._inductor.decomposition")
    return None if inductor is None else inductor.select_decomp_table()  # type: ignore[no-any-return]


_tracing_state = torch._C._get_tracing_state
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_PreDispatch = torch._C.DispatchKey.PreDispatch


def is_watched() -> bool:
    """Whether a dispatch mode, a tracer or a transform sees the ops that run. `is_captured` tells tracers alone, and
    takes longer."""
    return bool(
        count_dispatch_modes() or _tracing_state() is not None or _is_included(_PreDispatch) or transforms_active()
    )


def is_checkpointed_selectively() -> bool:
    """Whether checkpointing keeps the results of some ops and skips these when it computes again."""
    modes: list[Any] = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, _SelectiveCheckpointModes) for mode in modes)
