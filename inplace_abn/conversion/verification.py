"""Compares a converted model with its original, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from inplace_abn import guard
from inplace_abn.activations import find
from inplace_abn.conversion import classes
from inplace_abn.conversion.converted import Converted
from inplace_abn.conversion.layer_norms import ConvertedLayerNorm
from inplace_abn.modules.abn import ActivatedNorm
from inplace_abn.trial import copied, randomness_restored, tensors_in

_TOLERANCE = 1e-9
# Next to the minimum of an activation, a rounding of z moves y by the square root of that rounding.
_TOLERANCE_AT_MINIMA = 1e-6
# A layer in place rounds differently, in forward and in backward, and more than once in each.
_ROUNDINGS = 16
_PERTURBATIONS = 3
# A larger error is never accepted, however ill-conditioned the model is.
_LARGEST_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. It is true if the models agree.

    Attributes:
        loss_error: the relative error of the training loss.
        gradient_errors: the errors of the gradients of parameters and inputs, in the 2-norm. Each is relative to the
            tensor's own gradient, or to a millionth of the whole gradient, whichever is larger. It is infinite where
            only one model has a gradient.
        buffer_errors: the relative errors of floating-point buffers, such as running statistics, after the step. The
            error of a running mean of nearly zero is relative to a millionth of the deviation.
        evaluation_error: the relative error of the outputs in evaluation.
        tolerance: what is accepted for each error, whatever the model's own sensitivity is.
        output_error: the relative error of outputs in training that take no part in the loss, as masks and indices do.
        sensitivity: the differences of the original from itself when its inputs, parameters and buffers, and its norms'
            inputs and outputs, are moved by one rounding of float64. They have the names of `errors`. Empty if all
            errors are within ``tolerance``, or if `verify` was called with a tolerance.
        shape_differences: where the models return other numbers or shapes of outputs, in words.
        not_compared: the names of converted norms that did in float64 what they did before conversion, so that nothing
            of them was compared: mostly those that compute in float32 whatever they are given.
    """

    loss_error: float
    gradient_errors: dict[str, float]
    buffer_errors: dict[str, float]
    evaluation_error: float
    tolerance: float
    output_error: float = 0.0
    sensitivity: dict[str, float] = field(default_factory=dict)
    shape_differences: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()

    @property
    def errors(self) -> dict[str, float]:
        """All errors by name, such as "loss", "gradient of fc.weight" and "buffer bn.running_mean"."""
        return {
            "loss": self.loss_error,
            "evaluation": self.evaluation_error,
            "outputs without gradient": self.output_error,
            **{f"gradient of {name}": error for name, error in self.gradient_errors.items()},
            **{f"buffer {name}": error for name, error in self.buffer_errors.items()},
        }

    def accepted(self, name: str) -> float:
        """The accepted value of the error that has this name in `errors`.

        It is ``tolerance``, or sixteen times the original's own sensitivity up to 1e-6, whichever is larger.
        """
        return max(self.tolerance, min(_ROUNDINGS * self.sensitivity.get(name, 0.0), _LARGEST_TOLERANCE))

    @property
    def worst(self) -> tuple[str, float]:
        """The name and the value of the error that is largest in relation to its accepted value."""
        errors = self.errors
        name = max(errors, key=lambda n: _order(errors[n]) / self.accepted(n))
        return name, errors[name]

    @property
    def ok(self) -> bool:
        """Whether every error is accepted, and both models return outputs of the same shapes."""
        return not self.shape_differences and all(error <= self.accepted(name) for name, error in self.errors.items())

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.shape_differences:
            return "\n".join(("THE MODELS DIFFER: they return other outputs", *self.shape_differences))
        name, error = self.worst
        verdict = "The models agree" if self.ok else "THE MODELS DIFFER"
        accepted = self.accepted(name)
        lines = [f"{verdict}: the worst error is {error:.1e} ({name}), {accepted:.1g} is accepted, in float64"]
        if self.sensitivity:
            own = max(self.sensitivity.values())
            lines.append(
                f"the original differs from itself by {self.sensitivity[name]:.1e} there, and by {own:.1e} at most, "
                "when inputs, parameters, buffers and what norms are given and return are moved by one rounding"
            )
        if self.not_compared:
            names = ", ".join(self.not_compared[:3]) + ", …" * (len(self.not_compared) > 3)
            lines.append(
                f"not compared: {len(self.not_compared)} norms that do in float64 what they did before ({names})"
            )
        lines.append(f"loss {self.loss_error:.1e}, outputs in evaluation {self.evaluation_error:.1e}")
        worst = sorted(self.errors.items(), key=lambda item: _order(item[1]), reverse=True)
        lines += [f"{error:.1e}  {name}" for name, error in worst[: 5 if self.ok else 20]]
        return "\n".join(lines)


def verify(
    model: nn.Module, converted: nn.Module, /, *args: Any, tolerance: float | None = None, **kwargs: Any
) -> Verification:
    """Runs a training step and an evaluation of both models in float64, from the same random state.

    If an error exceeds the default tolerance, the original runs three more times. Each time its inputs, parameters and
    buffers, and its norms' inputs and outputs, are moved by one rounding. For each tensor the accepted error is sixteen
    times the largest difference that this makes, up to 1e-6. So an ill-conditioned model, which amplifies roundings, is
    not taken for a wrong one.

    The loss is a fixed random combination of all outputs, so that every output counts. The models are copied, and stay
    as they were.

    Args:
        model: the original.
        converted: made from a copy of it, with the same parameters.
        args, kwargs: arguments of the forward pass. Floating-point tensors become float64.
        tolerance: the relative error that is accepted for every tensor. None: 1e-9, or 1e-6 if an activation has a
            minimum, and more if the original's own sensitivity explains it.

    Returns:
        The errors and the verdict, which is also the result's truth value.

    Raises:
        ValueError: both models are one object, or the original is converted itself, so that nothing would be compared;
            or their parameters have different names.
        RuntimeError: a model cannot be copied.
    """
    if model is converted:
        raise ValueError(
            "inplace_abn.verify: expected two models, got one object twice: convert changes the model that it is "
            "given. Copy it before: verify(model, convert(copy.deepcopy(model)), ...)"
        )
    if any(isinstance(layer, Converted) for _, layer in guard.layers_of(model)):
        raise ValueError(
            "inplace_abn.verify: expected the original first, got a converted model. Copy the original before it is "
            "converted, or pass inplace_abn.revert(copy.deepcopy(model))"
        )
    names = [{name for name, _ in m.named_parameters()} for m in (model, converted)]
    if names[0] != names[1]:
        others = sorted(names[0] ^ names[1])
        raise ValueError(f"inplace_abn.verify: expected models with the same parameters, got {others} in one only")
    calibrated = tolerance is None
    actual = _run(converted, args, kwargs)
    if tolerance is None:
        tolerance = _TOLERANCE_AT_MINIMA if any(find(a).special for a in actual.activations) else _TOLERANCE
    expected = _run(model, args, kwargs)
    result = _compared(actual, expected, tolerance)
    if result.ok or not calibrated or result.shape_differences:
        return result
    moved = [_compared(_run(model, args, kwargs, seed), expected, tolerance) for seed in range(1, _PERTURBATIONS + 1)]
    return replace(result, sensitivity={name: _largest(m.errors[name] for m in moved) for name in result.errors})


def _largest(errors: Iterable[float]) -> float:
    """The largest error. NaN is larger than any number."""
    return max(errors, key=_order, default=0.0)


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _compared(actual: _Run, expected: _Run, tolerance: float) -> Verification:
    scale = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values() if g is not None))
    return Verification(
        _error(actual.loss, expected.loss),
        {name: _error(actual.gradients.get(name), g, scale) for name, g in expected.gradients.items()},
        {
            name: _error(actual.buffers.get(name), b, _deviation(expected.buffers, name))
            for name, b in expected.buffers.items()
        },
        _error_of_all(actual.evaluated, expected.evaluated),
        tolerance,
        _error_of_all(actual.others, expected.others),
        shape_differences=tuple(
            f"{what}: {shapes} in the original, {actual.shapes[what]} in the other model"
            for what, shapes in expected.shapes.items()
            if shapes != actual.shapes[what]
        ),
        not_compared=actual.not_compared,
    )


def _deviation(buffers: dict[str, Tensor], name: str) -> float:
    """The deviation of the values whose running mean the buffer is, over all channels; 0 for other buffers.

    Where the values cancel, as after a norm without bias, the mean is what their rounding left.
    """
    norm, dot, kind = name.rpartition(".")
    var = buffers.get(f"{norm}{dot}running_var") if kind == "running_mean" else None
    return 0.0 if var is None else float(var.double().sum().sqrt())


def _error_of_all(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return math.inf if len(actual) != len(expected) else _largest(map(_error, actual, expected))


@dataclass
class _Run:
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    others: list[Tensor]
    """Outputs of the training step that take no part in the loss."""
    evaluated: list[Tensor]
    activations: set[str]
    """The activations that in-place modules have applied."""
    shapes: dict[str, str]
    """The shapes of outputs in words, by what they are."""
    not_compared: tuple[str, ...]
    """The names of converted norms whose formula is not known in float64."""


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int = 0) -> _Run:
    """Runs a training step and an evaluation. With a seed, all that they start from is moved by one rounding."""
    model = copied(model).double()
    moving = torch.Generator().manual_seed(seed)

    def double(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        t = t.double()
        if seed:
            signs = torch.randint(0, 2, t.shape, generator=moving, dtype=t.dtype).to(t.device) * 2 - 1
            t = t * (1 + signs * torch.finfo(t.dtype).eps)
        return t

    if seed:
        # The input of a norm was rounded before. Where large terms cancel in the norm, that rounding is larger than the
        # result itself.
        for module in model.modules():
            if isinstance(module, classes.KINDS):
                module.register_forward_pre_hook(lambda _, args: tree_map_only(Tensor, double, args))
                module.register_forward_hook(lambda _, __, result: tree_map_only(Tensor, double, result))
        with torch.no_grad():
            for own in (*model.parameters(), *model.buffers()):
                if own.is_floating_point():
                    own.copy_(double(own))
    with randomness_restored(model):
        inputs: list[Tensor] = []

        def fresh(t: Tensor) -> Tensor:
            t = double(t.detach())
            t.requires_grad_(t.is_floating_point())
            inputs.append(t)
            # A model may write over its input, but not over a leaf.
            return t.clone() if t.requires_grad else t

        torch.manual_seed(0)
        model.zero_grad()
        model.train()
        given, named = tree_map_only(Tensor, fresh, (args, kwargs))
        results = list(tensors_in(model(*given, **named)))
        outputs = [t for t in results if t.is_floating_point() and t.requires_grad]
        others = [t.detach().clone() for t in results if not (t.is_floating_point() and t.requires_grad)]
        generator = torch.Generator().manual_seed(1)
        loss = torch.stack(
            [(t * torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)).sum() for t in outputs]
        ).sum()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        gradients |= {f"input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}
        activations = {m.activation for m in model.modules() if isinstance(m, ActivatedNorm)}
        activations.update(
            *(layer.activations() for _, layer in guard.layers_of(model) if isinstance(layer, Converted))
        )
        buffers = {name: b.detach().clone() for name, b in model.named_buffers() if b.is_floating_point()}
        model.eval()
        with torch.no_grad():
            given, named = tree_map_only(Tensor, lambda t: double(t.detach()), (args, kwargs))
            evaluated = list(tensors_in(model(*given, **named)))
    kinds = {"outputs with a gradient": outputs, "outputs without gradient": others, "outputs in evaluation": evaluated}
    shapes = {
        what: f"{len(tensors)} of shape {', '.join(str(tuple(t.shape)) for t in tensors)}" if tensors else "none"
        for what, tensors in kinds.items()
    }
    not_compared = tuple(
        name for name, layer in model.named_modules() if isinstance(layer, ConvertedLayerNorm) and layer.is_unknown()
    )
    return _Run(loss.detach(), gradients, buffers, others, evaluated, activations, shapes, not_compared)


def _error(actual: Tensor | None, expected: Tensor | None, scale: float = 0.0) -> float:
    """The difference in the 2-norm, relative to ``expected`` or to a millionth of ``scale``, whichever is larger."""
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    if actual.shape != expected.shape:
        return math.inf
    difference = float((actual.double() - expected.double()).norm())
    size = max(float(expected.double().norm()), 1e-6 * scale)
    return difference / size if size > 0 else (0.0 if difference == 0 else math.inf)
