"""Tensors that wait for an activation without a norm: outputs of linear layers and convolutions.

Such a tensor is what the module returned, with its values and its place in the graph. Only its class is another one
until the first function is called with it. Whatever that is, the tensor is a plain one from then on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.conversion import watch
from inplace_abn.conversion.recognition import KNOWN, QUESTIONS, Activating, Adding
from inplace_abn.conversion.scaled import PERMUTING, PRODUCTS, Origin
from inplace_abn.trial import tensors_in


class Offered(Tensor):
    """A tensor whose first reader is seen."""

    _layer: Any
    """What an activation is told (`conversion.called.CalledActivation`)."""
    _origin: Origin | None
    """How the tensor came about, if it is the output of a linear layer."""
    _hooks: Any
    """The saved-tensor hooks at the time when the tensor was made. A checkpoint that begins later has a plain tensor in
    its recomputation."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or func in QUESTIONS:
            with _torch.NoTorchFunction():
                return func(*args, **kwargs)
        read = KNOWN.get(func)
        call = None if read is None else read(args, kwargs)
        if type(call) is Offered:
            # A dropout that drops nothing returns what it is given.
            return call
        origins = {id(t): t._origin for t in tensors_in((args, kwargs)) if type(t) is Offered}
        layers = {id(t): _taken(t) for t in tensors_in((args, kwargs)) if type(t) is Offered}
        if watch.current() is not None and _torch.in_compiled_function():
            # Compilers know plain tensors only.
            for layer in filter(None, layers.values()):
                watch.give_up(layer, "compiled code reads its input")
            return func(*args, **kwargs)
        if isinstance(call, Activating) and not call.in_place:
            layer = layers.get(id(call.input))
            if layer is not None:
                return layer.activated(call, lambda: func(*args, **kwargs))
        if func in PRODUCTS and len(args) == 2 and not kwargs:
            for t, factor in (args, args[::-1]):
                origin, layer = origins.get(id(t)), layers.get(id(t))
                z = None if origin is None or layer is None else layer.scaled(t, origin, factor, lambda: func(*args))
                if z is not None:
                    return z
        result = func(*args, **kwargs)
        if func in PERMUTING and not kwargs and layers.get(id(args[0])) is not None:
            origin = origins[id(args[0])]
            if origin is not None:
                offer(result, layers[id(args[0])], origin.permuted(args[0], args[1:]))
        if isinstance(call, Adding) and not call.in_place:
            layer = next((layer for layer in layers.values() if layer is not None), None)
            if layer is not None:
                offer(result, layer)
        return result


def offer(t: Any, layer: Any, origin: Origin | None = None) -> None:
    """Makes a plain tensor one whose first reader is seen."""
    if type(t) is Tensor:
        t.__class__ = Offered
        t._layer, t._origin, t._hooks = layer, origin, _torch.top_saved_tensors_hooks(True)  # type: ignore[attr-defined]


def _taken(t: Any) -> Any:
    """Makes the tensor a plain one. Returns its layer; None if saved-tensor hooks are others than they were."""
    layer, hooks = t._layer, t._hooks
    t.__class__ = Tensor
    del t._layer, t._origin, t._hooks
    return layer if hooks == _torch.top_saved_tensors_hooks(True) else None


def settled(t: Any) -> Any:
    """The value; an offered tensor is a plain one from now on."""
    if type(t) is Offered:
        _taken(t)
    return t
