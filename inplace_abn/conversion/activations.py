"""Activations without a norm before them: they keep their result for backward, and not their input.

What follows an activation mostly keeps the activation's result: a convolution, a linear layer. torch's activation keeps
its input as well. Here backward recovers the input from the result, as it does for a norm with an activation. The call
is that of a norm of one channel whose statistics make it the identity, and it is measured as such.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from inplace_abn import _torch, checkpoints, guard
from inplace_abn.activations import ACTIVATIONS, IDENTITY, activation_of_op, find, gains, of_rounded
from inplace_abn.autograd import nodes
from inplace_abn.autograd.backward import Saved
from inplace_abn.compiling import joint, search
from inplace_abn.conversion import observed
from inplace_abn.conversion.converted import Converted, Outcome, has_standard_strides, is_usual, unsuitable
from inplace_abn.conversion.offered import Offered, plain
from inplace_abn.conversion.recipes import OfNorm, activate_tagged, identity, outcome_of, settled
from inplace_abn.conversion.results import offer_result
from inplace_abn.guard import measuring, recovery
from inplace_abn.modules.abn import as_leaf
from inplace_abn.reference import as_channel, wide
from inplace_abn.settings import DISABLED, WEIGHT, WHOLE, Operands, Settings

_EPS = 1e-30
"""With a variance of one this eps is nothing, in every dtype."""
OF_NORM = Outcome("", False, "it is part of the norm before it")
"""What an activation did that was fused with a norm."""


class ActivationAlone(Converted):
    """What an activation without a norm does. It may be a module, or a function that is called (`conversion.called`).

    The watch gives it up if it saves nothing: what follows does not keep its result, or something else keeps its input.
    In place (``inplace=True``), without a graph, for compilers, and under tracers, transforms and dispatch modes it
    does what torch does. So it does while most of its values lie next to a minimum, or where it saturates.
    """

    num_features, eps, signed_weight = 1, _EPS, True

    def recoverable(self, x: Tensor, activation: tuple[str, float] | None, follows: str = "") -> Tensor | None:
        """The result, from which backward recovers x; None where the activation does what torch does.

        ``follows`` is what the report says of it.
        """
        z = self._in_cpp(x, activation)
        if z is not None:
            return z
        self._remember_watch()
        follows_norm = checkpoints.of_forward_pass(f"follows {id(self)}", self._record.follows_norm)
        if follows_norm or self._is_given_up():
            return None
        if activation is None or not _is_suitable(x, activation):
            self._record.outcome = unsuitable(x.device) if activation is not None else Outcome(why=_NOT_APPLIED)
            return None
        nodes.calibrate()
        mean, var = identity(1, wide(x.dtype), x.device)
        decision = self._decided(x, activation, mean, var)
        self._record.outcome = outcome_of(self, follows, decision)
        if not decision.trusted:
            return None
        given = of_rounded(activation, x.dtype)
        settings = Settings(*given, _EPS, WEIGHT, False, None, WHOLE, self.__dict__["_guard_name"])
        z = torch.empty_like(x)
        activate_tagged(as_channel(x.detach()), as_channel(z), settings)
        observer = self.observer()
        saved = observer.saved(z, given, True)
        of_backward = Saved(z if saved is None else saved, None, None, None, var)
        z = nodes.attached(x, z, Operands(None, None), of_backward, settings)
        if observer is observed.NOBODY:
            offer_result(self, z, given, True)
            self._record.cpp_call = x.dtype, activation
        else:
            observer.record(observed.Result(self, *given, True, is_alone=True, saved=saved), x, z, None)
        return z

    def _decided(self, x: Tensor, activation: tuple[str, float], mean: Tensor, var: Tensor) -> guard.Decision:
        """What the guard says of the call, as of that of a norm of one channel with these statistics."""
        # A call without a gradient is not measured.
        values = as_channel(x.detach()).requires_grad_()

        def measure() -> Tensor:
            settings = Settings(*IDENTITY, _EPS, WEIGHT, False, None)
            observation = measuring.Observation(recovery.sample(values), 1, mean, var, None, None, settings)
            return observation.figures(*of_rounded(activation, x.dtype), None)

        return settled(self, guard.plan(self, values, None, (*activation, False)), measure)

    def _in_cpp(self, x: Tensor, activation: tuple[str, float] | None) -> Tensor | None:
        """The result by the node in C++, if the call is like an earlier one; None if Python has to look at it."""
        node = self._cpp_node(x)
        if node is None or self._record.follows_norm or self._record.cpp_call != (x.dtype, activation):
            return None
        name, param = activation  # type: ignore[misc]
        mode = guard.current_mode(self, x.dtype, (name, param, False))
        if mode is None or not mode.decisions[-1].trusted:
            return None
        name, param = of_rounded((name, param), x.dtype)
        constants = *identity(1, wide(x.dtype), x.device), _EPS, WEIGHT, find(name).code, param
        z: Tensor | None = node.activation_alone(x, *constants, self.__dict__["_guard_name"])
        if z is not None:
            offer_result(self, z, (name, param), True)
        return z

    def watched(self, x: Tensor, z: Tensor, activation: tuple[str, float] | None) -> Tensor:
        """z as torch computes it."""
        watching = self._watch_without_gradients()
        if watching is not None and activation is not None:
            watching.follow_native_activation(self, activation, x, z)
        return z


class InPlaceActivation(ActivationAlone):
    """The part that all converted activation modules have in common. A converted module has the same attributes.

    If its input is the output of a converted norm, the two are fused, and this module does nothing of its own.
    """

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_leaf(self, input)
        if torch.compiler.is_compiling():
            return super().forward(self._marked(plain(input)))  # type: ignore[misc, no-any-return]
        if type(input) is Offered and type(input._recipe) is OfNorm:
            # If the norm is given up, what follows may be why, so this activation is then torch's as well.
            self._record.outcome, self._record.follows_norm = OF_NORM, True
            return super().forward(input)  # type: ignore[misc, no-any-return]
        x, z, activation = plain(input), None, applied(self)
        if torch.is_grad_enabled():
            z = self.recoverable(x, activation)
        return self.watched(x, super().forward(x), activation) if z is None else z  # type: ignore[misc]

    def _marked(self, x: Tensor) -> Tensor:
        """x for compilers, which see whether what follows keeps the result."""
        if not torch.is_grad_enabled() or not x.requires_grad or not x.is_floating_point() or DISABLED:
            return x
        # Compilers compile anew when the module is given up.
        if _torch.transforms_active() or _torch.is_exporting() or self._revision < 0 or not self._is_applied():
            return x
        return search.ALONE(x)  # type: ignore[no-any-return]

    @_torch.read_while_tracing
    def _is_applied(self) -> bool:
        joint.install()
        is_trusted = all(mode.decisions[-1].trusted for mode in guard.modes_of(self))
        return applied(self) is not None and not guard.is_noticed(self) and is_trusted


def applied(module: Any) -> tuple[str, float] | None:
    """The name and the parameter of the activation that a module is.

    None if it is none of `READERS`, if it writes to its input, or if its attributes make it something else.
    """
    read = _reader(module.__class__)
    return None if read is None or getattr(module, "inplace", False) else read(module)


@functools.cache
def _reader(kind: type) -> Callable[[Any], tuple[str, float] | None] | None:
    return next((READERS[name] for name in map(qualified, kind.__mro__) if name in READERS), None)


_NOT_APPLIED = "it writes to its input, or a parameter of it is not supported"


def _is_suitable(x: Tensor, activation: tuple[str, float]) -> bool:
    """Whether the ops take the tensor, there is a graph, and tags are small."""
    return is_usual(x) and x.requires_grad and gains(*activation, x.dtype) and has_standard_strides(x)


def _as_torch(module: Any, op: str) -> tuple[str, float] | None:
    """Reads a module whose attributes are named as the arguments of torch's op."""
    name = activation_of_op(op, getattr(module, "approximate", ""))
    param = 0.0 if name is None or not find(name).param else float(getattr(module, find(name).param))
    # A leaky_relu of slope zero is a ReLU, which keeps its result itself.
    return (name, param) if name is not None and find(name).valid(param) and gains(name, param) else None


def _calls(function: Any, activation: str) -> Callable[[Any], tuple[str, float] | None]:
    """Reads a module whose attribute ``act`` is the function that it calls."""
    return lambda module: (activation, 0.0) if getattr(module, "act", None) is function else None


def _gelu_of_partial(module: Any) -> tuple[str, float] | None:
    """Reads a module whose attribute ``act`` is a GELU with arguments."""
    act = getattr(module, "act", None)
    is_gelu = isinstance(act, functools.partial) and act.func is F.gelu and act.keywords.keys() == {"approximate"}
    name = activation_of_op("gelu", act.keywords["approximate"]) if is_gelu and not act.args else None  # type: ignore[union-attr]
    return None if name is None else (name, 0.0)


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


TORCHS: dict[type[nn.Module], str] = {
    type(entry.module(param)): entry.op
    for entry in ACTIVATIONS.values()
    for param in entry.typical
    if entry.module is not None and entry.gains(param)
}
"""torch's modules that keep their input, and the names of their ops."""

READERS: dict[str, Callable[[Any], tuple[str, float] | None]] = {
    **{qualified(kind): functools.partial(_as_torch, op=op) for kind, op in TORCHS.items()},
    "timm.layers.activations.GELU": lambda module: ("gelu", 0.0),
    "timm.layers.activations.GELUTanh": lambda module: ("gelu_tanh", 0.0),
    "transformers.activations.GELUActivation": _calls(F.gelu, "gelu"),
    "transformers.activations.GELUTanh": _gelu_of_partial,
    "transformers.activations.MishActivation": _calls(F.mish, "mish"),
    "transformers.activations.SiLUActivation": lambda module: ("silu", 0.0),
}
"""How to read the activation of a module, by the name of its class. None of these packages is imported."""
