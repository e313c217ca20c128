"""What reads an activated result, and what writes to it, between two watched steps.

A result may have tags instead of zeros, and backward needs it. In watched steps `conversion.watch` sees every op. In
the others results are offered: a function that tells tags from zeros, or copies values out of the graph, gets a copy
without tags, and one that writes to the result, where torch allows it, writes to memory of its own. A result is offered
until it is written to. One that compiled code is known to read is not: compilers look at the class of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch, tags
from inplace_abn.conversion import observed
from inplace_abn.conversion.consumers import KEEPING
from inplace_abn.conversion.offered import Recipe, made_plain, offer, stand
from inplace_abn.trial import tensors_in

_LEAVING = frozenset({"numpy", "array", "tolist", "item", "int", "contains"})
"""Methods by which values leave torch, without underscores."""
_COPYING = frozenset({"clone", "to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16", "new_tensor"})
"""Functions whose results somebody may read later, where no graph is recorded."""
_WRITING = frozenset(
    [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")]
)
_WRITES_NOTHING = frozenset({"requires_grad_", "detach_", "share_memory_"})


_memory = torch.empty(0, device="cpu")
_saved = _memory.detach()
_USERS = _torch.storage_use_count(_memory)
"""The references to the memory of a tensor that one other tensor shares, as a node's saved output does."""


class OfResult(Recipe):
    """The recipe of a result, and of what shares its memory. It makes no node."""

    bypasses = False
    is_result = True
    _is_written = False

    def __init__(self, layer: Any, t: Tensor, activation: tuple[str, float], is_writable: bool) -> None:
        self.layer, self._activation, self._is_writable = layer, activation, is_writable
        self._version = t._version

    def given(self, t: Tensor, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        if _writes(func, kwargs) and args and (args[0] is t or any(each is t for each in _listed(args[0]))):
            self._is_written = self._is_writable and self._moved(t)
        elif _is_pickled(func):
            return self._clean(made_plain(t))
        elif _tells(func, args, kwargs, t, tags.sign_of(*self._activation)):
            return _placed(self._clean(t), t)
        return t

    def _clean(self, t: Tensor) -> Tensor:
        """t without tags, unless somebody wrote to it."""
        with torch.no_grad():
            return observed.untagged(t, *self._activation) if t._version == self._version else t

    def was_read(self, t: Tensor, func: Any, result: Any) -> None:
        if self._is_written:
            made_plain(t)
            return
        # What transforms make has no storage.
        for each in () if _torch.transforms_active() else tensors_in(result):
            if each is not t and type(each) is Tensor and tags.is_alias(each, t):
                offer(each, OfResult(self.layer, each, self._activation, False))

    @staticmethod
    def _moved(t: Tensor) -> bool:
        """Makes t a tensor with memory of its own, after what t was in the graph. False if others hold its memory."""
        if torch.is_inference_mode_enabled() or _torch.storage_use_count(t) != _USERS:
            return False
        other = _placed(t.detach().clone(), t)
        with suppress(RuntimeError):
            torch.utils.swap_tensors(t, other)
            t.__dict__.update(other.__dict__)
            return True
        return False


def offer_result(layer: Any, z: Tensor, activation: tuple[str, float], is_writable: bool) -> None:
    """Offers a result that nobody watches."""
    # Hooks may hold the memory as well, and so does what z is a view of.
    is_writable = is_writable and _torch.top_saved_tensors_hooks(True) is None and not _torch.is_view(z)
    if not layer._record.is_read_compiled and (is_writable or tags.sign_of(*activation)):
        offer(z, OfResult(layer, z, activation, is_writable))


def _placed(copy: Tensor, t: Tensor) -> Tensor:
    """A copy of t, after t in the graph."""
    if copy is t or not t.requires_grad:
        return copy
    with torch.enable_grad():
        return stand(t, (copy,))  # type: ignore[no-any-return]


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _is_pickled(func: Any) -> bool:
    """Whether a function copies all that belongs to a tensor, and must not find a recipe."""
    return func is Tensor.__reduce_ex__ or func is Tensor.__deepcopy__


def _writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes to its first argument."""
    name = getattr(func, "__name__", "").split(".")[0]
    is_method = name.endswith("_") and not name.endswith("__") and name not in _WRITES_NOTHING
    return is_method or name in _WRITING or name == "__setitem__" or bool(kwargs.get("inplace"))


def _tells(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], t: Tensor, sign: str) -> bool:
    """Whether a function tells t's tags from zeros, or hands t's values to what is not torch."""
    name = tags.name_of(func)
    if not sign or func in KEEPING:
        return False
    if name in _COPYING and not (torch.is_grad_enabled() and t.requires_grad):
        # Saved-tensor hooks get the result back in backward, and must find all of its bits.
        return not _torch.in_backward()
    is_first = bool(args) and args[0] is t
    return name in _LEAVING or tags.is_told(name, sign, is_first, (*args[is_first:], *kwargs.values()))
