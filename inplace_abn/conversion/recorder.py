"""Runs a model once and records what happens to its tensors.

The recorder holds weak references to storages, which keep the address but not the memory. So the number of a storage is
never used twice.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from inplace_abn import _torch
from inplace_abn.conversion.preservation import local_statistics, preserved
from inplace_abn.example import Example, tensors_in
from inplace_abn.recording import Call, Op, Recording, Save, Seen, Watch

_MEMORY = ("numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__", "__reduce_ex__")
"""Methods of a tensor that hand out its values or its memory without an op."""


class _Ticket:
    """An object that autograd keeps instead of a tensor. It lives as long as the tensor would."""


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
        key = _torch.storage_key(storage)
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
        if func.namespace != "prim":
            with _torch.NoTorchFunctionModes():
                self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        schema = _torch.schema_of(func)
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
            self.recording.ops.append(
                Op(
                    name,
                    self._modules[-1],
                    tuple(tensors),
                    values,
                    reads,
                    frozenset(written),
                    results,
                    torch.is_grad_enabled(),
                )
            )

    def pack(self, t: Tensor) -> _Ticket:
        """The saved-tensor hook.

        Autograd keeps a ticket instead of the tensor. So something else holds the tensors that are alive after the
        pass.
        """
        ticket = _Ticket()
        with _torch.NoTorchFunctionModes():
            self.recording.saves.append(Save(self.storage(t), len(self.recording.ops), tuple(self._modules)))
        self._tickets.append(weakref.ref(ticket))
        return ticket

    def unpack(self, ticket: _Ticket) -> Tensor:
        raise RuntimeError("inplace_abn: analyze runs the forward pass only, but the model unpacks a saved tensor")

    def watch(self, t: Tensor, kind: str, what: str) -> None:
        self.recording.watches.append(Watch(self.storage(t), len(self.recording.ops), kind, what))

    @property
    def module(self) -> str:
        """The innermost module that is being called, in words."""
        return self._modules[-1] or "the model"

    def enter(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._watch_backward_hooks(module, name, (args, kwargs))
        call = Call(name, len(self.recording.ops))
        x = next(tensors_in((args, kwargs)), None)
        if x is not None:
            call.input = self.see(x)
            call.by_keyword = not args
            reference, source = self._returned.get(id(x), (None, ""))
            call.source = source if reference is not None and reference() is x else ""
            call.custom_function = _custom_function(x)
            multiple = _torch.is_view(x) and _torch.creation_meta(x) != _torch.CREATED_BY_DEFAULT
            call.protected = (x.is_leaf and x.requires_grad) or multiple
        self.recording.calls.setdefault(name, []).append(call)
        self._open.append(call)
        self._modules.append(name)

    def leave(self, module: nn.Module, name: str, result: Any) -> None:
        self._watch_backward_hooks(module, name, result)
        self._modules.pop()
        self._open.pop().stop = len(self.recording.ops)
        if isinstance(result, Tensor):
            self._returned[id(result)] = (weakref.ref(result), name)

    def _watch_backward_hooks(self, module: nn.Module, name: str, tensors: Any) -> None:
        if module._backward_hooks or module._backward_pre_hooks:
            for t in tensors_in(tensors):
                self.watch(t, "gradient", f"a backward hook of {name or 'the model'}")

    def finish(self, result: Any) -> None:
        self.recording.outputs = {self.storage(t) for t in tensors_in(result)}
        known = self.recording.outputs | self.recording.inputs | self.recording.state
        if self._alive() - known:
            # Reference cycles would keep tensors alive that nobody can reach.
            gc.collect()
        self.recording.alive = self._alive()
        saves = zip(self.recording.saves, self._tickets, strict=True)
        self.recording.saves = [replace(save, held=ticket() is not None) for save, ticket in saves]

    def _alive(self) -> set[int]:
        return {i for i, reference in enumerate(self._references) if not reference.expired()}


class _Watcher(TorchFunctionMode):
    """Tells the recorder what happens to tensors above autograd, without an op."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder, name = self._recorder, getattr(func, "__name__", "")
        if name == "__get__":
            result = func(*args, **kwargs)
            # Conversion does not change the node of a custom function.
            if getattr(func.__self__, "__name__", "") == "grad_fn" and not isinstance(result, BackwardCFunction):
                recorder.watch(args[0], "node", f"grad_fn in {recorder.module}")
            return result
        if name in ("register_hook", "retain_grad"):
            recorder.watch(args[0], "gradient", f"{name} in {recorder.module}")
        elif name in _MEMORY:
            recorder.watch(args[0], "memory", f"{name} in {recorder.module}")
        elif name == "__bool__":
            recorder.watch(args[0], "truth", f"bool in {recorder.module}")
        for t in tensors_in((args, kwargs)):
            function = _custom_function(t)
            if function:
                recorder.watch(t, "function", f"the custom autograd Function {function}")
        return func(*args, **kwargs)


def _custom_function(t: Tensor) -> str:
    """The custom autograd Function that made the tensor or its base; empty if none did."""
    for node in (t.grad_fn, t._base.grad_fn if t._base is not None else None):
        if isinstance(node, BackwardCFunction):
            return node.name().removesuffix("Backward")
    return ""


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript runs the module. Its ops are seen, but it takes neither hooks nor other parameters."""
    return isinstance(module, torch.jit.ScriptModule)


def _replaceable(tensors: Iterable[tuple[str, Tensor]], scripted: Sequence[str]) -> dict[str, Tensor]:
    """The tensors that no scripted module owns. A scripted module always uses its own."""
    return {name: t for name, t in tensors if not any(name.startswith(prefix) for prefix in scripted)}


def _run(model: nn.Module, example: Example, fake: bool) -> Recording:
    recorder = _Recorder()
    recorder.recording.training = model.training
    scripted = [name + "." if name else "" for name, module in model.named_modules() if is_scripted(module)]
    own = [*model.parameters(), *model.buffers()]
    state = _replaceable([*model.named_parameters(), *model.named_buffers()], scripted)
    with ExitStack() as stack:
        if fake:
            mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
            state = {name: mode.from_tensor(t, static_shapes=True) for name, t in state.items()}
            example = example.map_tensors(lambda t: mode.from_tensor(t, static_shapes=True))
            stack.enter_context(mode)
        recorder.recording.state = {recorder.storage(t) for t in (*state.values(), *own)}
        recorder.recording.inputs = {recorder.storage(t) for t in tensors_in((example.args, example.kwargs))}
        for name, module in model.named_modules():
            if not is_scripted(module):
                for handle in _hook(module, name, recorder):
                    stack.callback(handle.remove)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack))
        with recorder, _Watcher(recorder):
            if fake:
                result = torch.func.functional_call(model, state, example.args, example.kwargs)
            else:
                result = model(*example.args, **example.kwargs)
        recorder.finish(result)
    return recorder.recording


def _hook(module: nn.Module, name: str, recorder: _Recorder) -> list[Any]:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with _torch.NoTorchFunctionModes():
            recorder.enter(module, name, args, kwargs)

    def leave(_: nn.Module, __: Any, result: Any) -> None:
        with _torch.NoTorchFunctionModes():
            recorder.leave(module, name, result)

    return [
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(leave),
    ]


def record(model: nn.Module, example: Example) -> tuple[list[Recording], str]:
    """The recording of ``model(*example.args, **example.kwargs)`` in training mode, and one in evaluation.

    The model runs on fake tensors, so nothing is computed. If it needs values (``.item()``, ``float(tensor)``), it runs
    on real tensors instead. Either way the model is left as it was.

    Returns:
        The recordings, and the error of the evaluation, or an empty text. If there was an error, the recording of the
        evaluation is missing.

    Errors in training mode are passed on.
    """
    recordings: list[Recording] = []
    failed = ""
    for training, fake in ((True, True), (True, False), (False, True), (False, False)):
        if any(recording.training is training for recording in recordings):
            continue
        with preserved(model), local_statistics(model):
            model.train(training)
            try:
                recordings.append(_run(model, example, fake))
            except Exception as error:
                if not fake:
                    if training:
                        raise
                    failed = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
    return recordings, failed
