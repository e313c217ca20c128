"""Activations that are called as functions, as in ``F.gelu(self.fc1(x))``.

The module that makes the input, a linear layer or a convolution, carries what is known of the activation that follows.
In watched passes the outputs of all these modules are offered to what follows (`conversion.offered`). From then on only
modules whose output was activated go on offering it, so the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from inplace_abn import _torch, checkpoints, guard
from inplace_abn.activations import IDENTITY, gains
from inplace_abn.autograd import scale
from inplace_abn.conversion import observed, watch
from inplace_abn.conversion.activations import ActivationAlone, qualified
from inplace_abn.conversion.converted import Outcome, may_have_node
from inplace_abn.conversion.offered import Offered, Recipe, offer
from inplace_abn.conversion.recognition import Activating, Adding
from inplace_abn.conversion.scaled import PERMUTING, Origin, of_output

_WITHOUT_GRADIENTS = "it was called without gradients only"
_SCALED = Outcome("mul by a vector", in_place=True, why="")


class CalledActivation(ActivationAlone):
    """What is known of the function that activates a module's output."""

    _parameters: ClassVar[dict[str, Any]] = {}
    _buffers: ClassVar[dict[str, Any]] = {}
    training = True
    """Whether the module is in training."""

    @property
    def is_called(self) -> bool:
        """Whether an activation was ever called with the module's output."""
        return self._record.outcome != Outcome()

    def activated(self, call: Activating, native: Callable[[], Tensor]) -> Tensor:
        """The result of the call. ``native`` computes it as torch does."""
        activation = call.activation, call.param
        if not gains(*activation):
            return native()
        if not self.is_called:
            self._record.outcome = Outcome(call.activation, why=_WITHOUT_GRADIENTS)
        z = self.recoverable(call.input, activation, call.activation) if torch.is_grad_enabled() else None
        return self.watched(call.input, native(), activation) if z is None else z

    def scaled(self, t: Tensor, origin: Origin, factor: Any, product: Callable[[], Tensor]) -> Tensor | None:
        """The product of ``t``, a linear layer's output, and a vector; None if it has to be torch's."""
        gamma = origin.vector(t, factor)
        if gamma is None or not may_have_node(t):
            return None
        if not self.is_called:
            self._record.outcome = Outcome(_SCALED.follows, why=_WITHOUT_GRADIENTS)
        if not torch.is_grad_enabled():
            return None
        self._remember_watch()
        if self._is_given_up():
            return None
        with torch.no_grad():
            z = product().detach()
        z = scale.scaled(t, gamma, z, origin.linear, origin.back, origin.exchange)
        self.observer().record(observed.Result(self, *IDENTITY, is_writable=False, is_alone=True), t, z, None)
        self._record.outcome = _SCALED
        return z

    def is_scaled(self) -> bool:
        """Whether the module's output was multiplied by a vector. A recomputation does what its forward pass did."""
        return checkpoints.of_forward_pass(f"scaled {id(self)}", self._record.outcome == _SCALED)


class OfOutput(Recipe):
    """The recipe of the output of a linear layer or a convolution, and of sums of it and something else."""

    bypasses = False

    def __init__(self, layer: CalledActivation, origin: Origin | None) -> None:
        self.layer, self._origin = layer, origin
        # A checkpoint that begins later has a plain tensor in its recomputation.
        self._hooks: Any = _torch.top_saved_tensors_hooks(True)

    def _is_open(self) -> bool:
        return bool(self._hooks == _torch.top_saved_tensors_hooks(True))

    def activated(self, t: Tensor, call: Activating, native: Callable[[], Tensor]) -> Tensor | None:
        return None if call.in_place or not self._is_open() else self.layer.activated(call, native)

    def scaled(self, t: Tensor, factor: Any, product: Callable[[], Tensor]) -> Tensor | None:
        is_open = self._origin is not None and self._is_open()
        return self.layer.scaled(t, self._origin, factor, product) if is_open else None  # type: ignore[arg-type]

    def adds(self, t: Tensor, other: Any, call: Adding) -> bool:
        return not call.in_place and self._is_open()

    def of_sum(self, result: Tensor, residual: Any, call: Adding) -> Recipe:
        return OfOutput(self.layer, None)

    def of_view(self, t: Tensor, func: Any, args: tuple[Any, ...]) -> Recipe | None:
        is_open = self._origin is not None and func in PERMUTING and self._is_open()
        return OfOutput(self.layer, self._origin.permuted(args)) if is_open else None  # type: ignore[union-attr]


def is_fit(module: nn.Module) -> bool:
    """Whether the module may carry an activation, and carries none: it is a linear layer or a convolution."""
    is_linear = qualified(type(module)) == "transformers.pytorch_utils.Conv1D"
    is_maker = is_linear or isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    return is_maker and guard.CARRIED not in module.__dict__


def carry(module: nn.Module, name: str) -> None:
    """Makes the module carry what is known of an activation of its output."""
    layer = CalledActivation()
    layer.adopt(name)
    module.__dict__[guard.CARRIED] = layer


def carried(model: nn.Module) -> Iterator[tuple[str, nn.Module, CalledActivation]]:
    """The modules that carry an activation, with their names."""
    for name, module in model.named_modules():
        layer = module.__dict__.get(guard.CARRIED)
        if layer is not None:
            yield name, module, layer


def _offer_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
    layer = module.__dict__.get(guard.CARRIED)
    if layer is None or type(output) is not Tensor or torch.compiler.is_compiling() or checkpoints.are_seen():
        return None
    given_up = guard.given_up(layer)
    if given_up is not None and given_up[0] < guard.now():
        return None
    if not checkpoints.happened_in_forward_pass(f"offered {id(layer)}"):
        return None
    if output.requires_grad or watch.current() is not None:
        layer.training = module.training
        exchange = scale.Exchange() if output.requires_grad and layer.is_scaled() else None
        if not layer.is_called or layer.is_scaled():
            # Results between two watched steps stay offered to whoever reads them next. A product keeps an alias.
            with _torch.NoTorchFunction():
                args = tuple(t.view_as(t) if type(t) is Offered else t for t in args)
        origin = of_output(module, args, output, exchange)
        if origin is not None and exchange is not None:
            output = scale.linear(origin.linear, output, exchange)
        offer(output, OfOutput(layer, origin))
    return output  # type: ignore[no-any-return]


def listen(model: nn.Module) -> None:
    """Makes all modules that carry an activation offer their output."""
    for _, module, _ in carried(model):
        if _offer_output not in module._forward_hooks.values():
            module.register_forward_hook(_offer_output)


def listen_less(model: nn.Module) -> None:
    """Makes only those modules go on whose output was activated in a way that saves memory.

    A module that was given up in this generation goes on, because recomputations do what their forward pass did.
    """
    for _, module, layer in carried(model):
        given_up = guard.given_up(layer)
        if not layer.is_called or (given_up is not None and given_up[0] != guard.generations.current):
            remove_hooks(module, _offer_output)


def release(model: nn.Module) -> None:
    """Removes what `carry` and `listen` have stored."""
    for _, module, _ in carried(model):
        remove_hooks(module, _offer_output)
        del module.__dict__[guard.CARRIED]


def remove_hooks(module: nn.Module, *functions: Any) -> None:
    """Removes hooks around the module's forward pass."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        # Another thread may remove the same hooks.
        for key in [key for key, value in [*hooks.items()] if value in functions]:
            hooks.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
