"""Layers that keep their result for backward, and not their input, whatever made the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch, functions, guard
from inplace_abn.autograd import nodes
from inplace_abn.autograd.backward import Values
from inplace_abn.conversion import watch
from inplace_abn.conversion.converted import Converted, Note, Past
from inplace_abn.settings import Operands, Settings


class Alone(Converted):
    """The part that these layers have in common.

    What follows mostly keeps the result, too. The watch gives a layer up that saves nothing, because what follows does
    not keep its result, or because something else keeps its input. A layer keeps its result for the first time in a
    step that is watched, because what follows may read or write to it.
    """

    def _is_known(self) -> bool:
        """Whether what follows was watched before, or is now. If not, the next generation is watched."""
        past: Past = self._past
        if past.was_watched or not self.guard_interval:
            past.is_known = True
        elif not past.is_known:
            guard.generations.note_change()
            past.note = Note(why="it is watched first")
        # A checkpoint's recomputation does what its forward pass did.
        return guard.of_forward_pass(f"known {id(self)}", past.is_known)

    def _attached(
        self,
        x: Tensor,
        result: nodes.Result,
        operands: Operands,
        values: Values,
        settings: Settings,
        follows: str = "",
    ) -> Tensor:
        """The result, with a node of its own. ``follows`` is what the report says of it."""
        observer, activation = self.observer(), (settings.activation, settings.activation_param)
        if observer is not None and result.saved is None:
            result = result._replace(saved=observer.saved(result.z, activation, True))
        z = functions.attached(x, result, operands, values, settings)
        if observer is not None:
            observer.note(watch.Result(self, *activation, True, is_alone=True, saved=result.saved), x, z, None)
        self._past.note = Note(follows, in_place=True, why="")
        return z

    def noted(self, x: Tensor, z: Tensor, activation: tuple[str, float] | None) -> Tensor:
        """z as torch computes it. A pass without gradients is watched, too: backward may repeat it with gradients."""
        layer: Any = self
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not layer.training or _torch.in_backward():
            return z
        watching = watch.current()
        self._past.was_watched = watching is not None
        if watching is not None and activation is not None:
            watching.note_native_activation(self, activation, x, z)
        return z
