"""Compares a converted model with its original, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inplace_abn.abn import ABN
from inplace_abn.example import Example, tensors_in
from inplace_abn.preservation import preserved

_EXACT = ("identity", "none", "relu", "leaky_relu", "elu")
_TOLERANCE = 1e-9
# Next to the minimum of silu and hardswish a rounding of z moves y by its square root.
_TOLERANCE_AT_MINIMA = 1e-6


@dataclass(frozen=True)
class Verification:
    """What `verify` found. True if the models agree."""

    loss_error: float
    """Of the training loss, relative."""
    gradient_errors: dict[str, float]
    """Per parameter and input, in the 2-norm, relative to the whole gradient's or the parameter's own, whichever is
    larger; infinite where only one model has a gradient."""
    buffer_errors: dict[str, float]
    """Running statistics after the step, relative."""
    evaluation_error: float
    """Of the outputs in evaluation, relative."""
    tolerance: float

    @property
    def worst(self) -> tuple[str, float]:
        """The largest error, and whose it is."""
        errors = {
            "loss": self.loss_error,
            "evaluation": self.evaluation_error,
            **{f"gradient of {name}": error for name, error in self.gradient_errors.items()},
            **{f"buffer {name}": error for name, error in self.buffer_errors.items()},
        }
        name = max(errors, key=lambda n: math.inf if math.isnan(errors[n]) else errors[n])
        return name, errors[name]

    @property
    def ok(self) -> bool:
        return self.worst[1] <= self.tolerance

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        name, error = self.worst
        verdict = "The models agree" if self.ok else "THE MODELS DIFFER"
        lines = [f"{verdict}: the worst error is {error:.1e} ({name}), {self.tolerance:.0e} is accepted, in float64"]
        lines.append(f"loss {self.loss_error:.1e}, outputs in evaluation {self.evaluation_error:.1e}")
        worst = sorted(self.gradient_errors.items(), key=lambda item: -item[1])
        lines += [f"{error:.1e}  gradient of {name}" for name, error in (worst if not self.ok else worst[:5])]
        return "\n".join(lines)


def verify(model: nn.Module, converted: nn.Module, *example: Any, tolerance: float | None = None) -> Verification:
    """Runs a training step and an evaluation of both models in float64, from the same random state.

    The loss is a fixed random combination of all outputs, so that every one of them counts. The models, which are
    copied, are left as they were.

    Args:
        model: the original.
        converted: made from a copy of it, with the same parameters.
        example: arguments of the forward pass, or one `Example`. Floating-point tensors become float64.
        tolerance: relative error that is accepted. None: 1e-9, or 1e-6 if there is a silu or hardswish.

    Returns:
        The errors and the verdict, which is also the result's truth value.

    Raises:
        ValueError: the models' parameters have different names.
    """
    first = example[0] if len(example) == 1 and isinstance(example[0], Example) else Example(*example)
    names = [{name for name, _ in m.named_parameters()} for m in (model, converted)]
    if names[0] != names[1]:
        raise ValueError(f"inplace_abn.verify: only one model has the parameters {sorted(names[0] ^ names[1])}")
    if tolerance is None:
        activations = {m.activation for m in converted.modules() if isinstance(m, ABN)}
        tolerance = _TOLERANCE if activations <= set(_EXACT) else _TOLERANCE_AT_MINIMA
    expected, actual = (_run(m, first) for m in (model, converted))
    scale = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values() if g is not None))
    gradients = {name: _error(actual.gradients.get(name), g, scale) for name, g in expected.gradients.items()}
    buffers = {name: _error(actual.buffers.get(name), b, 0.0) for name, b in expected.buffers.items()}
    evaluation = max(map(_error, actual.outputs, expected.outputs), default=0.0)
    if len(actual.outputs) != len(expected.outputs):
        evaluation = math.inf
    return Verification(_error(actual.loss, expected.loss, 0.0), gradients, buffers, evaluation, tolerance)


@dataclass
class _Run:
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    outputs: list[Tensor]


def _run(model: nn.Module, example: Example) -> _Run:
    model = copy.deepcopy(model).double()
    with preserved(model):
        inputs: list[Tensor] = []

        def fresh(t: Tensor) -> Tensor:
            t = t.detach().double().requires_grad_() if t.is_floating_point() else t.detach()
            inputs.append(t)
            # A model may write over its input, but not over a leaf.
            return t.clone() if t.requires_grad else t

        torch.manual_seed(0)
        model.zero_grad()
        model.train()
        arguments = example.map_tensors(fresh)
        outputs = list(_differentiable(model(*arguments.args, **arguments.kwargs)))
        generator = torch.Generator().manual_seed(1)
        loss = torch.stack(
            [(t * torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)).sum() for t in outputs]
        ).sum()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        gradients |= {f"input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}
        buffers = {name: b.detach().clone() for name, b in model.named_buffers() if b.is_floating_point()}
        model.eval()
        with torch.no_grad():
            arguments = example.map_tensors(lambda t: t.detach().double() if t.is_floating_point() else t.detach())
            evaluated = [t for t in tensors_in(model(*arguments.args, **arguments.kwargs)) if t.is_floating_point()]
    return _Run(loss.detach(), gradients, buffers, evaluated)


def _differentiable(result: Any) -> Iterator[Tensor]:
    return (t for t in tensors_in(result) if t.is_floating_point() and t.requires_grad)


def _error(actual: Tensor | None, expected: Tensor | None, scale: float = 0.0) -> float:
    """In the 2-norm, relative to ``expected``'s; a gradient that is nearly zero is measured by ``scale``."""
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    if actual.shape != expected.shape:
        return math.inf
    difference = float((actual.double() - expected.double()).norm())
    size = max(float(expected.double().norm()), 1e-6 * scale)
    return difference / size if size > 0 else (0.0 if difference == 0 else math.inf)
