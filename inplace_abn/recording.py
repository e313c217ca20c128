"""One forward pass of a model, observed: which storages each op reads and writes, and which autograd keeps.

Everything is told by storages, because views, reshapes and splits hide who really owns memory. A storage's number is
never given twice: the recorder holds a weak reference, which keeps the address taken but not the memory.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Example:
    """Arguments of one call of a model: ``Example(x, mask=m)`` stands for ``model(x, mask=m)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Example:
        """The example with ``function`` of each tensor."""
        args, kwargs = tree_map_only(Tensor, function, (self.args, self.kwargs))
        return Example(*args, **kwargs)


@dataclass(frozen=True)
class Seen:
    """A tensor, without holding it."""

    storage: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    whole: bool
    """Whether it covers its storage, once."""


@dataclass(frozen=True)
class Op:
    """An op below autograd that does more than to make a view."""

    name: str
    """Without namespace and overload."""
    module: str
    """The innermost module that was being called."""
    tensors: tuple[Seen, ...]
    values: dict[str, Any]
    """Arguments that are no tensors, by name, defaults included."""
    reads: frozenset[int]
    writes: frozenset[int]
    results: tuple[Seen, ...]

    def touches(self, storage: int) -> bool:
        return storage in self.reads or storage in self.writes

    def __str__(self) -> str:
        return f"{self.name} in {self.module}" if self.module else self.name


@dataclass
class Call:
    """A call of a module: its ops are ``ops[start:stop]`` of the recording."""

    module: str
    start: int
    stop: int = -1
    input: Seen | None = None
    source: str = ""
    """The module that returned the very tensor object that this one was called with."""
    custom_function: str = ""
    """The custom autograd Function that made the input."""
    protected: bool = False
    """Whether autograd forbids to write the input: a leaf that requires grad, or one of several views."""
    by_keyword: bool = False


@dataclass(frozen=True)
class Save:
    """A tensor that autograd keeps for backward."""

    storage: int
    before: int
    """Number of ops that had run."""
    modules: tuple[str, ...]
    """Modules that were being called, the innermost last."""
    held: bool = True
    """Whether the graph of the result holds it; not so in branches that lead nowhere."""


@dataclass
class Recording:
    """What was observed in one forward pass."""

    training: bool = True
    ops: list[Op] = field(default_factory=list)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of each storage."""
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    state: set[int] = field(default_factory=set)
    """Storages of parameters and buffers."""
    alive: set[int] = field(default_factory=set)
    """Storages that somebody else than autograd still holds after the pass."""

    def touching(self, storage: int, after: int) -> list[int]:
        """Numbers of the ops beyond ``after`` that read or write the storage."""
        return [i for i in range(after + 1, len(self.ops)) if self.ops[i].touches(storage)]

    def is_held(self, storage: int) -> bool:
        """Whether autograd keeps it after the pass."""
        return any(save.storage == storage and save.held for save in self.saves)

    def saved_by(self, save: Save) -> str:
        """An op saves its inputs before it runs, its results after."""
        following = self.ops[save.before] if save.before < len(self.ops) else None
        if following is not None and following.touches(save.storage) and following.module == save.modules[-1]:
            return str(following)
        previous = self.ops[save.before - 1] if save.before else None
        if previous is not None and any(r.storage == save.storage for r in previous.results):
            return str(previous)
        return f"a function in {save.modules[-1] or 'the model'}"

    def producer(self, storage: int) -> Op | None:
        """The op that first had the storage as its result."""
        for op in self.ops:
            if any(result.storage == storage for result in op.results):
                return op
        return None


class _Ticket:
    """What autograd keeps in place of a tensor; it lives as long as the tensor would."""


class _Recorder(TorchDispatchMode):
    """Fills in a `Recording`."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._numbers: dict[int, int] = {}
        self._references: list[StorageWeakRef] = []
        self._tickets: list[weakref.ref[_Ticket]] = []
        self._modules: list[str] = [""]
        self._open: list[Call] = []
        self._returned: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def storage(self, t: Tensor) -> int:
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._references)
            self._references.append(StorageWeakRef(storage))
            self.recording.sizes.append(storage.nbytes())
        return self._numbers[key]

    def see(self, t: Tensor) -> Seen:
        size = t.untyped_storage().nbytes()
        dense = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 == t.numel()
        whole = dense and t.numel() * t.element_size() == size
        return Seen(self.storage(t), t.shape, t.dtype, t.device, whole)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        schema = func._schema
        tensors: list[Seen] = []
        values: dict[str, Any] = {}
        written: set[int] = set()
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            found = [self.see(t) for t in tensors_in(value)]
            tensors += found
            if not found:
                values[argument.name] = value
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.update(seen.storage for seen in found)
        results = tuple(self.see(t) for t in tensors_in(result))
        shared = {seen.storage for seen in results} - written
        reads = frozenset(seen.storage for seen in tensors) - shared
        if reads or written or not tensors:
            name = schema.name.split("::")[-1]
            op = Op(name, self._modules[-1], tuple(tensors), values, reads, frozenset(written), results)
            self.recording.ops.append(op)
        return result

    def pack(self, t: Tensor) -> _Ticket:
        """Autograd gets a ticket instead of the tensor, so what is alive afterwards is held by somebody else."""
        ticket = _Ticket()
        self.recording.saves.append(Save(self.storage(t), len(self.recording.ops), tuple(self._modules)))
        self._tickets.append(weakref.ref(ticket))
        return ticket

    def unpack(self, ticket: _Ticket) -> Tensor:
        raise RuntimeError("inplace_abn: analyze runs the forward pass only, but the model unpacks a saved tensor")

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = Call(name, len(self.recording.ops))
        x = next(tensors_in((args, kwargs)), None)
        if x is not None:
            call.input = self.see(x)
            call.by_keyword = not args
            reference, source = self._returned.get(id(x), (None, ""))
            call.source = source if reference is not None and reference() is x else ""
            for node in (x.grad_fn, x._base.grad_fn if x._base is not None else None):
                if isinstance(node, BackwardCFunction):
                    call.custom_function = node.name().removesuffix("Backward")
            default = torch._C._autograd.CreationMeta.DEFAULT
            multiple = x._is_view() and torch._C._autograd._get_creation_meta(x) != default
            call.protected = (x.is_leaf and x.requires_grad) or multiple
        self.recording.calls.setdefault(name, []).append(call)
        self._open.append(call)
        self._modules.append(name)

    def leave(self, name: str, result: Any) -> None:
        self._modules.pop()
        self._open.pop().stop = len(self.recording.ops)
        if isinstance(result, Tensor):
            self._returned[id(result)] = (weakref.ref(result), name)

    def finish(self, result: Any) -> None:
        self.recording.outputs = {self.storage(t) for t in tensors_in(result)}
        known = self.recording.outputs | self.recording.inputs | self.recording.state
        if self._alive() - known:
            # Cycles hold what nobody can reach.
            gc.collect()
        self.recording.alive = self._alive()
        saves = zip(self.recording.saves, self._tickets, strict=True)
        self.recording.saves = [replace(save, held=ticket() is not None) for save, ticket in saves]

    def _alive(self) -> set[int]:
        return {i for i, reference in enumerate(self._references) if not reference.expired()}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """In lists, mappings and objects such as dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(vars(value))


class _LocalStatistics(nn.modules.batchnorm._BatchNorm):
    """What a SyncBatchNorm is during the recording: on one rank alone a collective would wait for ever."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Gives back buffers, attributes, hooks, training flags and the state of random generators as they were."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    # Buffers, hooks and submodules are entries of dicts; what models collect is mostly in lists.
    containers = [
        (value, copy.copy(value))
        for _, values in attributes
        for value in values.values()
        if isinstance(value, (dict, list, set))
    ]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [*{t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}]
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        for module, was in attributes:
            now = vars(module)
            for name in now.keys() - was.keys():
                del now[name]
            now.update(was)
        for container, content in containers:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
        with torch.no_grad():
            for buffer, value in values:
                if buffer.device.type != "meta" and not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def _local_statistics(model: nn.Module) -> Iterator[None]:
    synchronised = [module for module in model.modules() if type(module) is nn.SyncBatchNorm]
    for module in synchronised:
        module.__class__ = _LocalStatistics  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in synchronised:
            module.__class__ = nn.SyncBatchNorm


def _run(model: nn.Module, example: Example, fake: bool) -> Recording:
    recorder = _Recorder()
    recorder.recording.training = model.training
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with ExitStack() as stack:
        if fake:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            state = {name: mode.from_tensor(t, static_shapes=True) for name, t in state.items()}
            example = example.map_tensors(lambda t: mode.from_tensor(t, static_shapes=True))
            stack.enter_context(mode)
        recorder.recording.state = {recorder.storage(t) for t in state.values()}
        recorder.recording.inputs = {recorder.storage(t) for t in tensors_in((example.args, example.kwargs))}
        for name, module in model.named_modules():
            for handle in _hook(module, name, recorder):
                stack.callback(handle.remove)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack))
        with recorder:
            if fake:
                result = torch.func.functional_call(model, state, example.args, example.kwargs)
            else:
                result = model(*example.args, **example.kwargs)
        recorder.finish(result)
    return recorder.recording


def _hook(module: nn.Module, name: str, recorder: _Recorder) -> list[Any]:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.enter(name, args, kwargs)

    def leave(_: nn.Module, __: Any, result: Any) -> None:
        recorder.leave(name, result)

    return [
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(leave),
    ]


def record(model: nn.Module, example: Example) -> list[Recording]:
    """The recording of ``model(*example.args, **example.kwargs)`` in training mode, and one in evaluation.

    Nothing is computed, unless the model needs to know values (``.item()``, ``float(tensor)``): then it runs with the
    tensors that it has. Either way the model is left as it was. An evaluation that fails is left out.
    """
    recordings: list[Recording] = []
    for training, fake in ((True, True), (True, False), (False, True), (False, False)):
        if any(recording.training is training for recording in recordings):
            continue
        with preserved(model), _local_statistics(model):
            model.train(training)
            try:
                recordings.append(_run(model, example, fake))
            except Exception:
                if training and not fake:
                    raise
    return recordings
