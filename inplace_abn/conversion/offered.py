"""Tensors that wait for an activation without a norm: outputs of linear layers and convolutions.

Such a tensor is what the module returned, with its values and its place in the graph. Only its class is another one
until the first function is called with it. Whatever that is, the tensor is a plain one from then on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.conversion import watch
from inplace_abn.conversion.recognition import KNOWN, QUESTIONS, Activating, Adding
from inplace_abn.conversion.scaled import PERMUTING, PRODUCTS, Origin
from inplace_abn.trial import tensors_in


class Offer(NamedTuple):
    """What belongs to a tensor that waits."""

    layer: Any
    """What an activation is told (`conversion.called.CalledActivation`)."""
    origin: Origin | None
    """How the tensor came about, if it is the output of a linear layer."""
    hooks: Any
    """The saved-tensor hooks at the time when the tensor was made. A checkpoint that begins later has a plain tensor in
    its recomputation."""


class Offered(Tensor):
    """A tensor whose first reader is seen."""

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
        waiting = {id(t): _taken(t) for t in tensors_in((args, kwargs)) if type(t) is Offered}
        offers = {key: found for key, found in waiting.items() if found is not None}
        if watch.current() is not None and _torch.in_compiled_function():
            # Compilers know plain tensors only.
            for found in offers.values():
                watch.give_up(found.layer, "compiled code reads its input")
            return func(*args, **kwargs)
        if isinstance(call, Activating) and not call.in_place and id(call.input) in offers:
            return offers[id(call.input)].layer.activated(call, lambda: func(*args, **kwargs))
        if func in PRODUCTS and len(args) == 2 and not kwargs:
            for t, factor in (args, args[::-1]):
                waited = offers.get(id(t))
                if waited is not None and waited.origin is not None:
                    z = waited.layer.scaled(t, waited.origin, factor, lambda: func(*args))
                    if z is not None:
                        return z
        result = func(*args, **kwargs)
        if func in PERMUTING and not kwargs and id(args[0]) in offers:
            layer, origin, _ = offers[id(args[0])]
            if origin is not None:
                offer(result, layer, origin.permuted(args[1:]))
        if isinstance(call, Adding) and not call.in_place and offers:
            offer(result, next(iter(offers.values())).layer)
        return result


def offer(t: Any, layer: Any, origin: Origin | None = None) -> None:
    """Makes a plain tensor one whose first reader is seen."""
    if type(t) is Tensor:
        t._offer = Offer(layer, origin, _torch.top_saved_tensors_hooks(True))  # type: ignore[attr-defined]
        t.__class__ = Offered


def _taken(t: Any) -> Offer | None:
    """Makes the tensor a plain one. Returns what belonged to it.

    None if saved-tensor hooks are others than they were, or if another thread has taken it.
    """
    found: Offer | None = vars(t).pop("_offer", None)
    t.__class__ = Tensor
    return found if found is not None and found.hooks == _torch.top_saved_tensors_hooks(True) else None


def settled(t: Any) -> Any:
    """The value; an offered tensor is a plain one from now on."""
    if type(t) is Offered:
        _taken(t)
    return t
