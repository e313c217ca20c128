"""The hooks around a converted model's forward pass: when it is watched, and what it returns."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx, nn

from inplace_abn import _torch, checkpoints, guard
from inplace_abn.conversion import called, watch
from inplace_abn.conversion.offered import Offered, plain
from inplace_abn.guard import generations
from inplace_abn.trial import tensors_in


class _Root:
    """When a model was watched."""

    def __init__(self) -> None:
        self.watched_at = -1
        self.due_at: float = 0
        """The generation in which the model is to be watched again."""
        self.calls: Counter[tuple[bool, bool]] = Counter()
        """The watched calls of the generation, by training and evaluation, with and without gradients."""

    def is_due(self, model: nn.Module) -> bool:
        at = generations.current
        if self.watched_at == at:
            return self.calls[_kind(model)] < guard.CALLS
        if at >= self.due_at or self.watched_at <= generations.changed_at:
            return True
        return generations.are_changed(layer for _, layer in guard.layers_of(model))


def _kind(model: nn.Module) -> tuple[bool, bool]:
    return model.training, torch.is_grad_enabled()


_roots: weakref.WeakKeyDictionary[nn.Module, _Root] = weakref.WeakKeyDictionary()


def begin(model: nn.Module, args: Any) -> None:
    """The hook before a converted model's forward pass. It begins to watch if the model is due.

    A pass without gradients is watched in training only: a checkpoint may repeat it with gradients.
    """
    if torch.compiler.is_compiling():
        return
    if watch.active:
        watch.end_what_was_interrupted()
        if watch.current() is not None:
            return
    root = _roots.get(model)
    if root is not None and not root.is_due(model):
        return
    kind = _kind(model)
    if not any(kind) or torch.is_inference_mode_enabled():
        return
    if any(isinstance(value, fx.Proxy) for value in args):
        return
    if guard.is_paused() or _torch.in_backward() or checkpoints.are_seen():
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    if root is None:
        root = _roots[model] = _Root()
    at = generations.current
    if root.watched_at != at:
        root.calls.clear()
    intervals = [layer.guard_interval for _, layer in guard.layers_of(model) if layer.guard_interval]
    interval = min(intervals, default=0)
    root.watched_at, root.due_at = at, (at // interval + 1) * interval if interval else math.inf
    root.calls[kind] += 1
    for part in model.modules():
        if part is not model:
            called.remove_hooks(part, begin_part, end_part)
    if intervals:
        watch.start(model)
        called.listen(model)


def begin_part(part: nn.Module, args: Any) -> None:
    begin(part, args)


def end_part(part: nn.Module, _: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        _end(part, output)


def finish(model: nn.Module, args: Any, result: Any) -> Any:
    """The hook after a converted model's forward pass. It leaves plain tensors in the result, and ends the watch.

    It is called after an exception, too, with None for the result.
    """
    if type(result) is Offered:
        result = plain(result)
    elif type(result) is not Tensor:
        result = torch.utils._pytree.tree_map_only(Offered, plain, result)
    if watch.active:
        _end(model, result)
    return result


def _end(model: nn.Module, output: Any) -> None:
    is_watched = watch.end(model, output)
    if is_watched:
        called.listen_less(model)
    # A part's output may go where only plain tensors work, as in compiled code.
    if checkpoints.of_forward_pass(f"ended {id(model)}", is_watched):
        for t in tensors_in(output):
            plain(t)


def hook(model: nn.Module) -> None:
    """Adds the hooks around a converted model's forward pass, unless it has them.

    The parts of the model that contain layers get hooks too, in case that the model itself is never called. The
    outermost part that is called is watched, and needs no hooks within it.
    """
    layers = dict(guard.layers_of(model))
    parts = {name[:i] for name in layers for i, character in enumerate(name) if character == "."}
    _add(model, begin, finish)
    for name in sorted(parts):
        _add(model.get_submodule(name), begin_part, end_part)


def _add(module: nn.Module, before: Any, after: Any) -> None:
    if after not in module._forward_hooks.values():
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)


def unhook(model: nn.Module) -> None:
    """Removes what `hook` added, from all modules."""
    for module in model.modules():
        called.remove_hooks(module, begin, finish, begin_part, end_part)
