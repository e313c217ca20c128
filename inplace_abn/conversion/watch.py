"""Watches a model's forward pass in the steps in which the guard measures.

A dispatch mode sees who reads and writes the results of converted layers. Code that would notice a difference from
torch gets what it would get with torch (`conversion.observed`). From the next generation of the guard on the layer is
torch's. At the end of the forward pass the watch finds out what the layers have saved.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from inplace_abn import _torch, tags
from inplace_abn.activations import activation_of_op, find
from inplace_abn.conversion.observed import Result, copy_saved, give_up, is_writable, untagged
from inplace_abn.trial import tensors_in

_local = threading.local()

active: set[int] = set()
"""The threads that watch. Next to no call finds one, so this is asked before anything else."""
_KINDS = (Tensor, nn.Parameter)
_OWN = ("prim", "inplace_abn")
"""The namespaces of ops that are not looked at."""
_CALCULATING = ("aten", "prims", "torchvision")
"""The namespaces of ops that are known to tell zeros from tiny numbers only where `inplace_abn.tags` says so."""


def _is_ordinary(t: Tensor) -> bool:
    """Whether the tensor has a storage of its own. Sparse tensors, and those that vmap makes, have none."""
    return type(t) in _KINDS and t.layout is torch.strided and not (t.is_nested or _torch.is_batched(t))


def _key_of(t: Tensor) -> int:
    """The tensor's storage; -1 if it has none of its own."""
    return tags.storage_of(t) if _is_ordinary(t) else -1


def current() -> Watch | None:
    """The calling thread's watch."""
    watch: Watch | None = getattr(_local, "watch", None)
    return watch


class Watch(_torch.OwnMode):
    """Follows the outputs of converted norms through a model's forward pass."""

    sees_measurements = False

    def __init__(self) -> None:
        super().__init__()
        self._follower = tags.Follower()
        self._results: dict[int, Result] = {}
        """What norms keep, by the storage of z, until it is written to."""
        self._added: dict[int, list[Result]] = {}
        """What norms keep, by the storage of the residual, until it is written to."""
        self._measured: list[Result] = []
        self._views: Counter[int] = Counter()
        """How many views of a tensor the model returned. They hold it, and keep nothing for backward."""
        self._natively: dict[int, Any] = {}
        """The storages of outputs of norms that did as torch does, in a forward pass that backward will repeat."""
        self._checkpoints: weakref.WeakSet[Any] = weakref.WeakSet()
        # A reference to a storage keeps its address from being used again.
        self._references: dict[int, StorageWeakRef] = {}

    def follow(self, result: Result, z: Tensor) -> None:
        """Follows a norm's result from here on."""
        key = self._hold(z)
        self._results[key] = result
        if result.nbytes:
            self._measured.append(result)
        if result.residual is not None:
            self._added.setdefault(self._hold(result.residual), []).append(result)
        if result.sign:
            self._follower.add(key, result.layer, result.sign)

    def follow_native(self, layer: Any, y: Tensor) -> None:
        """Follows the output of a norm that does as torch does now, and will be in place when backward repeats it."""
        if _is_ordinary(y):
            self._natively[self._hold(y)] = layer

    def follow_native_activation(self, layer: Any, activation: tuple[str, float], x: Tensor, z: Tensor) -> None:
        """The same for an activation, unless it will be part of a norm."""
        if _is_ordinary(x) and _is_ordinary(z) and tags.storage_of(x) not in self._natively:
            self.follow(Result(layer, *activation, True, is_alone=True), z)

    def _hold(self, t: Tensor) -> int:
        storage = t.untyped_storage()
        key = _torch.storage_key(storage)
        if key not in self._references:
            self._references[key] = StorageWeakRef(storage)
        return key

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.equal.default and isinstance(args[0], int):
            # TorchScript compares numbers by this op when it optimises a traced module under a mode.
            return args[0] == args[1]
        hooks = _torch.top_saved_tensors_hooks(True)
        if hooks is not None:
            self._repeat_in_checkpoint(_torch.checkpoint_of(hooks))
        # Offered tensors must not take the ops below autograd for what a model calls.
        with _torch.NoTorchFunction():
            return self.run(func, args, kwargs or {})

    def _repeat_in_checkpoint(self, checkpoint: Any) -> None:
        """Makes a checkpoint's recomputation do what its forward pass does: compiled code runs as it is written."""
        if checkpoint is not None and checkpoint not in self._checkpoints:
            self._checkpoints.add(checkpoint)
            _torch.recompute_in(checkpoint, _compilers_paused)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op, and sees what it reads and writes."""
        if not self._references or func.namespace in _OWN:
            return func(*args, **kwargs)
        tensors = [t for t in tensors_in((args, kwargs)) if _is_ordinary(t)]
        if not any(tags.storage_of(t) in self._references for t in tensors):
            return func(*args, **kwargs)
        op = tags.op_of(func, args, kwargs)
        read = {r.layer for t in op.tensors if (r := self._results.get(t.storage)) is not None}
        if any(not layer._record.is_read_compiled for layer in read) and _torch.in_compiled_function():
            for layer in read:
                layer._record.is_read_compiled = True
        is_view = func is not _BITS and any(
            r.alias_info is not None and not r.alias_info.is_write for r in _torch.schema_of(func).returns
        )
        readings = {} if is_view else self._readings(func.namespace, op)
        if readings and op.name == "_local_scalar_dense" and func(self._clean(args[0], op.writes)) != 0:
            # A number that is not zero may be written to a log.
            readings = {}
        for layer, reading in readings.items():
            give_up(layer, f"its zeros are tiny numbers in training, and {reading}")
        if readings or op.name in _READ_AGAIN:
            for key in {t.storage for t in op.tensors} - op.writes:
                self._release(key)
        elif not is_view and self._follower.kept(op):
            # What is made of z then has no tags, without a copy of z that lives until backward.
            args, kwargs = tree_map_only(Tensor, lambda t: self._clean(t, op.writes), (args, kwargs))
        for key in op.writes & self._results.keys():
            self._before_write(self._results.pop(key), op.name)
        for key in op.writes & self._added.keys():
            self._before_write_to_residuals(self._added.pop(key), op.name)
        result = func(*args, **kwargs)
        if "_foreach_" in str(func):
            # Under a dispatch mode torch does not count the writes of ops on lists.
            torch.autograd.graph.increment_version([t for t in tensors if tags.storage_of(t) in op.writes])
        if not is_view:
            made = [t for t in tensors_in(result) if _is_ordinary(t)]
            self._follower.follow(op, [tags.info_of(t) for t in made])
            self._follow_to_activation(op, made)
            for t in made:
                if tags.storage_of(t) in self._follower.tagged or tags.storage_of(t) in self._follower.chosen:
                    self._hold(t)
        return result

    def _readings(self, namespace: str, op: tags.Op) -> dict[Any, str]:
        """The layers whose tags the op notices, and how, in words."""
        if namespace in _CALCULATING:
            return self._follower.readings(op)
        sources = [source for t in op.tensors for source in self._follower.tagged.get(t.storage, ())]
        return dict.fromkeys(sources, f"{namespace}::{op.name} may tell them from zeros")

    def _clean(self, t: Tensor, writes: frozenset[int]) -> Tensor:
        """The tensor without tags, if it is a norm's result that the op does not write to."""
        key = _key_of(t)
        result = self._results.get(key)
        if result is None or result.z is None or key in writes or not t.is_floating_point():
            return t
        return untagged(t, result.activation, result.param)

    def _release(self, key: int) -> None:
        """Takes the tags from a norm's result, whatever refers to it, after backward got a copy."""
        result = self._results.get(key)
        if result is not None and result.saved is not None and result.sign:
            copy_saved(result)
            del self._results[key]

    @staticmethod
    def _before_write(result: Result, op: str) -> None:
        """Gives backward what it needs, and takes the tags from z, because they mean nothing in what will be there.

        Where torch does not allow the write either, backward raises its error, unless the write itself fails.
        """
        # A norm of rows keeps what its reader keeps, but that reader's result may lead nowhere.
        if result.is_writable or (result.is_alone and result.saved is not None):
            give_up(result.layer, f"{op} writes to its output, which backward needs")
            if result.z is not None:
                copy_saved(result)

    @staticmethod
    def _before_write_to_residuals(results: list[Result], op: str) -> None:
        for result in results:
            give_up(result.layer, f"{op} writes to what was added to its output, which backward needs")
            if result.of_residual is not None:
                result.of_residual.data = result.of_residual.data.clone()

    def _follow_to_activation(self, op: tags.Op, made: Iterable[Tensor]) -> None:
        """Follows a norm's output, done as torch does it, to its activation, and from there as a norm's result."""
        layer = next((self._natively[t.storage] for t in op.tensors if t.storage in self._natively), None)
        if layer is None:
            return
        name = activation_of_op(op.name, op.values.get("approximate", ""))
        for t in made:
            if name is not None:
                param = float(op.values.get(find(name).param, 0.0))
                self.follow(Result(layer, name, param, is_writable(name, self._hold(t) in op.writes)), t)
            elif op.name == "add":
                self.follow_native(layer, t)

    def finish(self, output: Any) -> None:
        """Gives up layers whose tags decided about an output, and tells all what they saved."""
        for t in tensors_in(output):
            key = _key_of(t)
            self._views[id(_torch.base_of(t))] += 1
            if key in self._follower.chosen:
                op, layers = self._follower.chosen[key]
                for layer in layers:
                    give_up(layer, f"its zeros are tiny numbers in training, and {op.name} chooses by them")
        sizes = self._sizes()
        for layer, size in sizes.items():
            layer._record.bytes_saved = size
            if size < 0:
                give_up(layer, "it saves nothing: only the norm keeps what it keeps", noticed=False)
        for layer in {r.layer for r in self._measured if r.is_alone and r.is_writable}:
            if sizes[layer] <= 0:
                self._make_torchs(layer)

    def _make_torchs(self, layer: Any) -> None:
        """Gives up a layer that saves nothing. What follows the forward pass may write to its results."""
        is_input = any(not r.input.expired() for r in self._measured if r.layer is layer)
        why = "it saves nothing: what follows does not keep its output"
        if is_input:
            why = "it saves nothing: something else keeps its input"
        give_up(layer, why, noticed=False)
        for key, result in [*self._results.items()]:
            if result.layer is layer:
                del self._results[key]
                # Autograd must not notice a new version of z.
                with _torch.BelowAutograd():
                    copy_saved(result)

    def _sizes(self) -> dict[Any, int]:
        """The bytes that each layer saved: what torch would have kept, less what it keeps."""
        sizes: dict[Any, int] = {}
        inputs = {r.input.cdata for r in self._measured}
        counted: set[int] = set()
        for r in self._measured:
            key = r.input.cdata
            # Inputs, results and residuals have the same size. torch's activation would keep its input instead of z.
            keeps_input = r.is_writable and r.activation != "identity"
            # What somebody else keeps, torch's activation keeps without more memory.
            tensors = int(keeps_input and not r.is_alone and (r.activated is None or r.activated.expired()))
            if r.input.expired() and key not in counted:
                tensors += 1
                counted.add(key)
            is_own = r.is_alone and r.is_writable
            for t in (r.z if keeps_input or r.is_residual or is_own else None, r.residual):
                # A tensor that only norms keep costs memory, unless torch would keep it as a norm's input. Leaves are
                # the user's.
                if t is None or t.is_leaf or id(t) in counted or tags.storage_of(t) in inputs:
                    continue
                if _torch.use_count(t) - self._views[id(t)] == _UNUSED:
                    tensors -= 1
                    counted.add(id(t))
            sizes[r.layer] = sizes.get(r.layer, 0) + tensors * r.nbytes
        return sizes


_BITS = torch.ops.aten.view.dtype
"""The view of a tensor's bits in another dtype."""
_READ_AGAIN = frozenset({"max", "min", "median", "nanmedian", "amax", "amin", "aminmax", "prod", "cumprod"})
"""Ops whose backward looks for the result in the argument, or divides by the argument, as autograd has saved it."""
_UNUSED = _torch.use_count(torch.empty(0))
"""The references from C++ to a tensor that nothing but Python holds."""


_lock, _stance = threading.Lock(), ExitStack()
_watches = 0


@contextmanager
def _compilers_paused() -> Iterator[None]:
    """Makes compiled code of all threads run as it is written while any thread watches, so that the watch sees it.

    Compilers do nothing under a dispatch mode, which is an error where a full graph is asked for.
    """
    global _watches
    with _lock:
        _watches += 1
        if _watches == 1 and "torch._dynamo" in sys.modules:
            # Between two compiled graphs the compiler is at work, and cannot be paused.
            with suppress(RuntimeError):
                _stance.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            _watches -= 1
            if _watches == 0:
                _stance.close()


def start(model: nn.Module) -> None:
    """Makes the calling thread watch a model's forward pass."""
    active.add(threading.get_ident())
    _local.watch, _local.root = Watch(), weakref.ref(model)
    _local.frame, _local.pause = next(_frames_of_callers()), _compilers_paused()
    _local.pause.__enter__()
    _local.watch.__enter__()


def _frames_of_callers() -> Iterator[FrameType]:
    """The frames that led here, without those of this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("inplace_abn."):
            yield frame
        frame = frame.f_back


def end_what_was_interrupted() -> None:
    """Ends a watch whose forward pass is no longer on the stack. torch calls no hooks after a KeyboardInterrupt."""
    if current() is not None and all(frame is not _local.frame for frame in _frames_of_callers()):
        _stop()


def end(model: nn.Module, output: Any) -> bool:
    """Ends the watch that `start` began for this model, and returns whether there was one."""
    watch = current()
    if watch is None or _local.root() is not model:
        return False
    _stop()
    watch.finish(output)
    return True


def _stop() -> None:
    active.discard(threading.get_ident())
    watch, _local.watch, _local.frame = _local.watch, None, None
    _local.pause.__exit__(None, None, None)
    modes = _torch.dispatch_modes()
    if modes and modes[-1] is watch:
        watch.__exit__(None, None, None)
