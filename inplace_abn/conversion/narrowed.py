"""Results in float32 that autocast casts to 16 bits for what follows.

Under autocast norms mostly compute in float32. A convolution or a linear layer that follows gets a copy in 16 bits, and
keeps it. So where nothing else reads the result, the node of the norm keeps the tensor of 16 bits. What a model gets is
the same in float32, as a tensor whose readers are seen. A convolution gets the tensor of 16 bits instead. Anything else
gets float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.conversion.consumers import is_cast_for
from inplace_abn.conversion.recognition import KNOWN, QUESTIONS
from inplace_abn.conversion.waiting import stand
from inplace_abn.trial import tensors_in


class Narrowed(Tensor):
    """A tensor in float32 that has the values of another one of 16 bits, from which it was made."""

    _narrow: Tensor
    """The other tensor. It comes after this one in the graph, as autocast's copy does, so hooks see all gradients."""
    _past: Any
    """What the norm did in its last calls (`conversion.converted.Past`)."""

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
        if type(call) is Narrowed:
            return call
        if any(type(t) is Narrowed for t in args) and is_cast_for(func, args[0]):
            dtype = torch.get_autocast_dtype(args[0].device.type)
            args = tuple(t._narrow if type(t) is Narrowed and t._narrow.dtype == dtype else t for t in args)
        for t in tensors_in((args, kwargs)):
            wide(t)
        return func(*args, **kwargs)


def narrowed(t: Any, narrow: Tensor, past: Any) -> Tensor:
    """Makes ``t``, a result in float32, one whose readers are seen. ``narrow`` has its values in 16 bits."""
    narrow = stand(t, (narrow.detach(),))
    t.__class__ = Narrowed
    t._narrow, t._past = narrow, past
    return t  # type: ignore[no-any-return]


def wide(t: Any) -> Any:
    """The value. A narrowed tensor is a plain one from now on, and its norm computes in float32 from then on."""
    if type(t) is Narrowed:
        t._past.narrow = None
        t.__class__ = Tensor  # type: ignore[assignment]
        del t._narrow, t._past
    return t
