"""Every private name of torch that Python code uses, each with its reason.

``tests/autograd/test_private_names.py`` has a test of each name, which fails when torch drops or changes it. The tests
of names for compilers are in ``tests/compiling/test_private_names_of_compilers.py``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from sys import getrefcount
from typing import Any

import torch
import torch._functorch.config
import torch._functorch.pyfunctorch
import torch.fx
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

# A context in which ops run below autograd. It takes a microsecond less than no_grad, and modes still see the ops.
BelowAutograd = torch._C._AutoDispatchBelowADInplaceOrView

# A context in which no dispatch mode sees the ops.
NoDispatch = torch._C._DisableTorchDispatch

# The dispatch keys below autograd. A call that will bump versions itself goes on with these.
BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset

# The class of an op with one signature, in torch's registry of ops.
OpOverload = torch._ops.OpOverload

# The functions behind torch.nn.functional. Models may call them directly.
nn_functions = torch._C._nn

# Whether an op has a kernel for a backend.
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

# Whether a transform of torch.func is running. Under transforms nothing is reused, and graphs have levels.
transforms_active = torch._C._are_functorch_transforms_active

# The node that autograd's engine is running.
current_node = torch._C._current_autograd_node

# Whether the running backward pass keeps the graph (retain_graph). Then the saved output may be needed again.
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

# How a view was made, which decides whether autograd allows writing to it. Autograd itself raises after the write.
creation_meta = torch._C._autograd._get_creation_meta
CREATED_BY_DEFAULT = torch._C._autograd.CreationMeta.DEFAULT

# Whether autograd knows a tensor as a view. It has its own rules for writing to views.
is_view = Tensor._is_view

# The tensor that a view is a view of; None for any other tensor.
_base: Any = Tensor._base
base_of = _base.__get__

# Whether a tensor's memory is a lazy copy of another tensor's memory.
is_lazy_copy = torch._C._is_cow_tensor  # type: ignore[attr-defined]

# Whether a storage on a GPU, given by its address, has memory of torch's allocator as it came from there. Memory that
# other processes share, by handles of CUDA's, does not. Builds of torch for CPUs lack the function.
_is_as_allocated: Callable[[int], bool] | None = getattr(torch._C, "_has_Standard_Deleter", None)


def is_shared(t: Tensor) -> bool:
    """Whether other processes may see a tensor's memory.

    torch says of all memory on GPUs that it is shared. In the process that has sent it, only the function that will
    free it tells.
    """
    storage = t.untyped_storage()
    if t.is_cpu:
        return storage.is_shared()
    return _is_as_allocated is None or not _is_as_allocated(storage._cdata)


# The saved-tensor hooks that are set. They may keep a saved tensor, or replace it.
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def checkpoint_of(hooks: tuple[Any, Any]) -> Any:
    """The checkpoint, not a reentrant one, whose saved-tensor hooks these are; None if they are others.

    In the forward pass and in the recomputation it is the same object, and the hook that packs closes over it.
    """
    for cell in getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ():
        found = cell.cell_contents
        found = found() if isinstance(found, weakref.ref) else found
        if isinstance(found, torch.utils.checkpoint._CheckpointFrame):
            return found
    return None


def recompute_in(checkpoint: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Makes the recomputation of a checkpoint that `checkpoint_of` returned run in a context."""
    recompute = checkpoint.recompute_fn

    def recompute_in_context(*args: Any) -> None:
        with context():
            recompute(*args)

    checkpoint.recompute_fn = recompute_in_context


# The active dispatch modes, the innermost last.
dispatch_modes: Callable[[], list[Any]] = torch.utils._python_dispatch._get_current_dispatch_mode_stack

# The number of active dispatch modes. It is zero in almost every call, and then no mode needs to be looked at.
count_dispatch_modes = torch._C._len_torch_dispatch_stack

# What torch.jit.trace records; None in almost every call.
tracing_state = torch._C._get_tracing_state

_BATCHED: list[Any] = [torch._C._parse_dispatch_key(key) for key in ("FuncTorchBatched", "Batched")]

_SelectiveCheckpointModes = (
    torch.utils.checkpoint._CachingTorchDispatchMode,
    torch.utils.checkpoint._CachedTorchDispatchMode,
)


# Where a tensor has its hooks. Autograd removes them from a tensor that a custom function has modified.
_backward_hooks: Any = Tensor._backward_hooks
HOOKS = (_backward_hooks.__get__, _backward_hooks.__set__)

# The common base of torch's batch norms and instance norms: parameters, running statistics and state dicts.
NormBase = torch.nn.modules.batchnorm._NormBase

# Whether there are hooks of all modules. They may replace the output of any module.
has_global_hooks = torch.nn.modules.module._has_any_global_hook

# A context in which calls bypass the ``__torch_function__`` of tensor subclasses.
NoTorchFunction = torch._C.DisableTorchFunctionSubclass


def schema_of(op: Any) -> Any:
    """The schema of an op: its name, its arguments, and which of them it writes to."""
    return op._schema


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that is the same for all handles of one storage, as long as there is a handle."""
    key: int = storage._cdata
    return key


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active, so that tensors may have tangents."""
    return forward_ad._current_level >= 0


def kinds_of_wrappers(t: Tensor) -> set[str]:
    """The kinds of the wrappers that torch.func's transforms have put around the tensor: "vmap", "grad", "jvp" and
    others.

    A tangent outside of transforms is a "jvp", too.
    """
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
    """Whether the tensor stands for a batch of tensors, by vmap or ``torch.autograd.grad(is_grads_batched=True)``."""
    if torch.compiler.is_compiling():
        # The compiler does not trace the functions below.
        keys = _keys_of(t)
        return any(keys.has(key) for key in _BATCHED)
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(t) or functorch.is_legacy_batchedtensor(t)  # type: ignore[attr-defined]


# The dispatch keys of a tensor. They tell subclasses, wrappers, layouts, and whether memory is what it seems to be.
_keys_of = torch._C._dispatch_keys
_KEYS_ON_CPU = _keys_of(torch.inference_mode(False)(torch.empty)(0, device="cpu"))


@functools.cache
def _plain_keys(device: torch.device) -> Any:
    with torch.inference_mode(False), NoDispatch():
        return _keys_of(torch.empty(0, device=device))


def is_plain(t: Tensor) -> bool:
    """Whether the tensor is a usual one: strided, without a negative or conjugate bit, wrapped by no transform, of no
    class with ops of its own, and not made in inference mode."""
    return _keys_of(t) == (_KEYS_ON_CPU if t.is_cpu else _plain_keys(t.device))  # type: ignore[no-any-return]


def use_count(t: Tensor) -> int:
    """The number of references to the tensor from C++. Whether its Python object counts depends on torch's release."""
    count: int = t._use_count()  # type: ignore[attr-defined]
    return count


def storage_use_count(t: Tensor) -> int:
    """The number of references to the tensor's memory, by tensors and by Python handles.

    The handle that is made here counts. Whether handles are one object or several depends on torch's release.
    """
    storage = t.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return count + getrefcount(storage)


def in_compiled_function() -> bool:
    """Whether a function on the stack was compiled, and runs as it is written now. Its wrapper knows the context.

    A function within it may be one that is never compiled. Those that torch itself excludes, as a checkpoint, are
    compiled in ways of their own.
    """
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    frame = None if module is None else sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == module.__file__:
            context, caller = frame.f_locals.get("self"), frame.f_back
            is_torchs = caller is not None and caller.f_code.co_filename == torch._compile.__file__
            if isinstance(context, module.OptimizeContext) or (
                isinstance(context, module.DisableContext) and not is_torchs
            ):
                return isinstance(context, module.OptimizeContext)
        frame = frame.f_back
    return False


def is_capturing(t: Tensor) -> bool:
    """Whether the current stream of the tensor's device is captured into a graph. torch asks the current device."""
    if not t.is_cuda:
        return False
    with torch.cuda.device(t.device):
        return torch.cuda.is_current_stream_capturing()


def is_exporting() -> bool:
    """Whether torch.export is tracing.

    In torch 2.11 torch.compiler.is_exporting() is also true while the compiler traces.
    """
    return torch.compiler._is_exporting_flag


def saves_its_result(t: Tensor) -> bool:
    """Whether the op that made the tensor keeps it for its own backward."""
    kind: Any = type(t.grad_fn)
    return _saves_its_result(kind)


@functools.lru_cache(maxsize=256)
def _saves_its_result(kind: Any) -> bool:
    return hasattr(kind, "_saved_result")


def in_backward() -> bool:
    """Whether autograd is running a backward pass, in which checkpoints compute their forward pass again."""
    return torch._C._current_graph_task_id() != -1


def uncompiled_autograd() -> AbstractContextManager[Any]:
    """A context in which backward is not handed to a compiler. Compiled autograd may be on for all threads at once."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return nullcontext() if module is None else module._disable()


def is_captured() -> bool:
    """Whether a tracer is recording the ops that run: torch.jit.trace or make_fx."""
    return tracing_state() is not None or get_proxy_mode() is not None


def read_while_tracing(function: Any) -> Any:
    """Makes the compiler call the function with real tensors while it traces, and keep the result.

    The public torch.compiler.assume_constant_result imports the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True
    return function


def call_uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns. The compiler, which is tracing, breaks its graph and calls it as it is written.

    torch.compiler.disable imports the compiler, which takes a second.
    """
    return torch.compiler.disable(function)(*args)


def process_group(name: str) -> Any:
    """The process group of this name. Compiled code knows groups by their names."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, attr-defined]


def call_on_joint_graphs(wrap: Any) -> bool:
    """Makes compilers pass their joint graphs of forward and backward through ``wrap(before)``, and returns whether.

    ``before`` is the pass that was installed before, or None. If that pass is already of the class ``wrap``, nothing is
    done.
    """
    config = torch._functorch.config
    if not hasattr(config, "joint_custom_pass"):
        return False
    if not isinstance(config.joint_custom_pass, wrap):
        config.joint_custom_pass = wrap(config.joint_custom_pass)
    return True


def is_backward(node: torch.fx.Node) -> bool:
    """Whether autograd's backward pass made this node of a joint graph."""
    return "backward" in node.meta.get("partitioner_tag", "")


def compute_in_backward(node: torch.fx.Node) -> None:
    """Makes a compiler compute the node in the backward pass, from what the forward pass keeps."""
    node.meta["partitioner_tag"] = "must_be_in_backward"


def decompositions() -> Mapping[Any, Callable[..., Any]] | None:
    """Inductor's table of decompositions; None if inductor is not imported."""
    inductor = sys.modules.get("torch._inductor.decomposition")
    return None if inductor is None else inductor.select_decomp_table()  # type: ignore[no-any-return]


def take_for_tensors(kind: type[Tensor]) -> None:
    """Makes torch's tracers take tensors of a class for plain ones.

    A compiled region that gets one runs its ops as they are, without ``__torch_function__``. A mode of AOTAutograd
    looks at the classes of what they are given, and refuses those that it does not know.
    """
    for name in ("torch.fx.experimental.proxy_tensor", "torch._functorch._aot_autograd.runtime_wrappers"):
        module: Any = sys.modules.get(name)
        if module is not None and hasattr(module, "HANDLED_TYPES"):
            module.HANDLED_TYPES = (*module.HANDLED_TYPES, kind)


_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_PreDispatch = torch._C.DispatchKey.PreDispatch


class OwnMode(TorchDispatchMode):
    """A dispatch mode of this package, under which everything works as without it."""

    sees_measurements = True
    """Whether the mode sees the ops of the guard's measurements."""


def is_in_foreign_mode() -> bool:
    """Whether a dispatch mode that is not of this package sees the ops that run."""
    return count_dispatch_modes() > 0 and any(not isinstance(mode, OwnMode) for mode in dispatch_modes())


def is_transformed() -> bool:
    """Whether a tracer or a transform sees the ops that run, in no dispatch mode.

    `is_captured` is about tracers only, and takes longer.
    """
    return tracing_state() is not None or _is_included(_PreDispatch) or transforms_active()


def builtin_of(op: Any) -> Callable[..., Any]:
    """The function in C++ that the overload of an op calls with the arguments that it is given."""
    return op._op  # type: ignore[no-any-return]


def unwatched() -> AbstractContextManager[Any]:
    """A context for the ops of the guard's measurements. There are so many that a mode takes longer than they do."""
    modes = dispatch_modes()
    is_blind = bool(modes) and all(isinstance(mode, OwnMode) and not mode.sees_measurements for mode in modes)
    return NoDispatch() if is_blind else nullcontext()


def is_checkpointed_selectively() -> bool:
    """Whether selective checkpointing is active.

    It keeps the results of some ops, and skips these ops in the recomputation.
    """
    return any(isinstance(mode, _SelectiveCheckpointModes) for mode in dispatch_modes())
