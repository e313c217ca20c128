"""Tells whether what a node has saved is still what it was: who wrote to it, or which hooks have changed it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.activations import bits
from inplace_abn.autograd.backward import Saved
from inplace_abn.settings import WHOLE, Settings


class Versions:
    """Tells whether a tensor was written to, without holding its memory."""

    def __init__(self, t: Tensor) -> None:
        # A detached tensor shares the version counter, even after its memory is replaced.
        self._counter = t.detach()
        self._counter.data = t.new_empty(0)
        self.first: int = t._version

    def start(self) -> None:
        self.first = self._counter._version

    def is_modified(self) -> bool:
        return self._counter._version != self.first

    def is_modified_in(self, t: Tensor | None) -> bool:
        """Whether it was written to in what saved-tensor hooks give back for it, and not after they made a copy."""
        return t is not None and self.is_modified() and t._version > self.first


class Aliased:
    """Tells whether z or the residual was written to while backward knows it by an alias.

    An alias has a version of its own. One that has become a copy has other memory.
    """

    def __init__(self, z: Tensor, residual: Tensor | None, saved: Saved) -> None:
        self._known: list[tuple[str, Versions, int]] = []
        for what, t, alias in (("output", z, saved.z), ("residual", residual, saved.residual)):
            if t is not None and alias is not None and alias is not t and alias.data_ptr() == t.data_ptr():
                self._known.append((what, Versions(t), alias.data_ptr()))

    def start(self) -> None:
        for _, versions, _ in self._known:
            versions.start()

    def check(self, saved: Saved, name: str) -> None:
        """Raises RuntimeError if z or the residual was modified in place."""
        for what, versions, memory in self._known:
            kept = saved.z if what == "output" else saved.residual
            if versions.is_modified() and kept is not None and kept.data_ptr() == memory:
                raise RuntimeError(modified(what, name))


class Hooked(Versions):
    """Tells whether saved-tensor hooks give back what they were given. Autograd does not look at that.

    Tags do not survive a cast, so all saved tensors must come back bit for bit. Hooks of checkpoints compute the call
    again instead, and what they give back belongs together, but need not be the same: dropout may draw other numbers.
    """

    def __init__(self, saved: Saved, hooks: tuple[Any, Any]) -> None:
        super().__init__(saved.z)
        self._residual = None if saved.residual is None else Versions(saved.residual)
        self._names = " and ".join(map(_name_of, hooks))
        compares = _torch.checkpoint_of(hooks) is None and _is_comparable(saved.z)
        self._checksum = _checksum(saved) if compares else None
        self._kinds = _kinds(saved)

    def check(self, saved: Saved, name: str) -> None:
        """Raises RuntimeError if z or the residual was modified in place, or if the hooks gave back other bits.

        A modification is no error if the hooks return a copy that was made before it. On CUDA the host waits for the
        comparison.
        """
        if self.is_modified_in(saved.z):
            raise RuntimeError(modified("output", name))
        if self._residual is not None and self._residual.is_modified_in(saved.residual):
            raise RuntimeError(modified("residual", name))
        if self._checksum is not None and not (
            _kinds(saved) == self._kinds and torch.equal(_checksum(saved), self._checksum)
        ):
            raise RuntimeError(
                f"inplace_abn: the saved-tensor hooks {self._names} gave back other values than {name or 'a layer'} "
                "gave them. An in-place ABN recovers its input from the last bits of its output, so hooks must give "
                "back every bit. Leave its saved tensors out of these hooks, or use ABN, or leave the layer out of the "
                "conversion (filter_fn)"
            )


def of_mode(settings: Settings) -> tuple[Tensor, ...]:
    """What a node saves before what backward needs: under hooks an empty tensor, if a norm's statistics are constants.

    Checkpoints compare the shapes that a recomputation saves with those of the forward pass, up to the last one that
    they need. So torch notices a recomputation in the other mode.
    """
    is_frozen = not settings.training and settings.shared != WHOLE
    return (torch.empty(0),) if is_frozen and _torch.top_saved_tensors_hooks(True) is not None else ()


def refuse_batched(gradient: Tensor, name: str) -> None:
    """Raises RuntimeError for a gradient that stands for a batch of gradients."""
    if _torch.is_batched(gradient):
        raise RuntimeError(
            f"inplace_abn: {name and name + ': '}gradients in batches are not supported. Use ABN, or leave the layer "
            "out of the conversion (filter_fn)"
        )


def modified(what: str, name: str) -> str:
    """The message for a tensor that somebody wrote to. The layer is told, so that its next step works."""
    torch.ops.inplace_abn.was_written_to(what, name)
    return (
        f"inplace_abn: the {what} of {name or 'an in-place ABN'} has been modified in place, but its backward needs "
        "it. Replace that operation by one out of place (z = z + y for z += y), use ABN, or leave the layer out of the "
        "conversion (filter_fn)"
    )


def _name_of(hook: Any) -> str:
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    module = getattr(hook, "__module__", None)
    return f"{module}.{name}" if module else name


def _is_comparable(z: Tensor) -> bool:
    """Whether z has values that the host may wait for."""
    return type(z) is Tensor and not z.is_meta and not _torch.is_capturing(z)


def _kinds(saved: Saved) -> list[Any]:
    return [None if t is None else (t.dtype, t.shape, t.device) for t in saved]


def _checksum(saved: Saved) -> Tensor:
    """The sums of all bits per channel, which are the same in any layout. They need no memory of z's size."""
    sums = []
    # A result whose readers are seen would be read without its tags.
    with _torch.NoTorchFunction():
        for t in saved:
            if t is not None:
                values = bits(t.detach())
                sums.append(values if t.dim() == 1 else values.sum([0, *range(2, t.dim())], dtype=values.dtype))
        return torch.cat(sums)
