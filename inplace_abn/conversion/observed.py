"""Results in watched steps: what a layer keeps of a call, and how code that reads tags or writes gets what is torch's.

Outputs of converted norms are different from torch's in two ways. Zeros are tiny numbers (`inplace_abn.tags`). And they
must not be written to, even where torch's activation saves its input instead, and therefore allows it. Before such code
runs, backward gets a copy of its own, and the output loses its tags.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from inplace_abn import _torch, guard, tags
from inplace_abn.activations import activate, find
from inplace_abn.kernels import ops

_logger = logging.getLogger("inplace_abn")


class Result(NamedTuple):
    """What a norm keeps of a call, instead of what torch would keep."""

    layer: Any
    activation: str
    param: float
    is_writable: bool
    """Whether torch would not need z, and therefore allow it to be written to."""
    is_residual: bool = False
    """Whether z is kept because another norm's node adds it."""
    is_alone: bool = False
    """Whether the layer is an activation without a norm, or a norm of rows (`activations.ActivationAlone`)."""
    z: Any = None
    """None if nobody has to look at it later."""
    nbytes: int = 0
    """Those of z; zero if what is held is not measured."""
    saved: Tensor | None = None
    """The alias by which backward knows z, if z may be written to."""
    input: Any = None
    """A weak reference to the input's storage. As long as it lives, no other storage has the same key."""
    activated: Any = None
    """The same of what the activation took, if that is not z."""
    residual: Tensor | None = None
    of_residual: Tensor | None = None
    """The alias by which backward knows the residual."""
    version: int = 0
    """That of z."""

    @property
    def sign(self) -> str:
        """The sign of the tags of z; empty if z has none."""
        return tags.sign_of(self.activation, self.param)


class Observer(NamedTuple):
    """What is special about calls in a watched step. For other calls it is `NOBODY`."""

    watch: Any
    """The `conversion.watch.Watch`; None if a backward pass repeats a watched forward pass."""
    is_blind: bool
    """Whether code may read or write results where the watch does not see it: a backward pass repeats the forward pass
    later, and must do the same."""

    def saved(self, z: Tensor, activation: tuple[str, float], is_writable: bool) -> Tensor | None:
        """The tensor by which backward is to know z; None if that is z itself.

        If the watch is blind, it is a copy, and z loses its tags. Otherwise it is an alias with a version of its own,
        which becomes a copy before somebody reads tags or writes to z.
        """
        if self is NOBODY or not (is_writable or tags.sign_of(*activation)):
            return None
        if not self.is_blind:
            return z.data
        with _torch.BelowAutograd():
            saved = z.clone()
            z.copy_(untagged(z, *activation))
        return saved

    def of_residual(self, residual: Tensor | None) -> Tensor | None:
        """The tensor by which backward is to know the residual, which torch's sum does not keep; None if that is the
        residual itself.

        If the watch is blind, it is a copy. Otherwise it is an alias that becomes a copy before somebody writes to it.
        """
        if residual is None or self is NOBODY:
            return None
        if not self.is_blind:
            return residual.data
        with _torch.BelowAutograd():
            return residual.clone()

    def record(self, result: Result, x: Tensor, z: Tensor, residual: Tensor | None) -> None:
        """Tells the watch of a norm's result, and of the tensors of its call."""
        if self.watch is None:
            return
        result = result._replace(residual=residual)
        if self.is_blind:
            result = result._replace(saved=None, of_residual=None)
        else:
            # A norm of rows does not always keep its output.
            kept = None if result.is_alone and not result.is_writable and result.saved is None else z
            of_input = StorageWeakRef(x.untyped_storage())
            result = result._replace(z=kept, nbytes=z.nbytes, version=z._version, input=of_input)
        self.watch.follow(result, z)


NOBODY = Observer(None, False)
"""Nobody watches."""


@functools.cache
def is_writable(activation: str, in_place: bool) -> bool:
    """Whether torch allows the activation's result to be written to, because the input is kept instead."""
    return activation == "identity" or (activation != "relu" and not (in_place and not find(activation).special))


def untagged(t: Tensor, activation: str, param: float) -> Tensor:
    """``t``, some values of an activation's result, with zeros instead of tags, in the same memory format."""
    if not tags.sign_of(activation, param):
        return t
    y = ops.run(ops.inverse, [], t.reshape(1, -1), find(activation).code, param)
    native = activate(y.to(t.dtype), activation, param).view(t.shape)
    # A zero of torch's may be negative.
    return torch.where(native == 0, native, t, out=torch.empty_like(t))


def copy_saved(result: Result) -> None:
    """Gives backward a copy of z, and takes the tags from z, unless somebody wrote to z unseen, which is an error."""
    if result.saved is not None and result.z._version == result.version:
        result.saved.data = result.saved.data.clone()
        if result.sign:
            # Nobody notices a new version of z.
            z = result.z.detach()
            z.copy_(untagged(z, result.activation, result.param))


def give_up(layer: Any, why: str, noticed: bool = True, at_once: bool = False) -> None:
    """Makes the layer torch's from the next generation on. Arguments are those of `guard.give_up`."""
    if guard.give_up(layer, why, noticed, at_once):
        since = "call" if at_once else "optimizer step"
        _logger.info("%s: %s; from the next %s on it does as torch does", guard.name(layer), why, since)


_library = torch.library.Library("inplace_abn", "FRAGMENT")
_library.define("was_written_to(str what, str name) -> ()")


def _was_written_to(what: str, name: str) -> None:
    """A node found that somebody wrote to what it needs. The layers of this name do without it from now on."""
    for layer in guard.layers_called(name) if name else ():
        give_up(layer, f"its {what} was written to, and backward needs it", at_once=True)


_library.impl("was_written_to", _was_written_to, "CompositeImplicitAutograd")
