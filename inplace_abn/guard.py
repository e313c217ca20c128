"""The guard of recovery: a layer runs in place only while z still tells what xhat was (`inplace_abn.recovery`).

The rule is deterministic, so that the same seed gives the same bits. Generations count optimizer steps, of all
optimizers of the process. A layer measures at the first generation that it sees and once in every ``guard_interval``
generations, on a sample of the batch that it is given, before that is overwritten. Its mode is constant within a
generation, so that micro-batches and the computing again of checkpoints agree, and changes at the next one, from a
figure whose copy was started when it was measured. Only the first measurement of a layer is waited for: its first step
must be right, too.

Trust is lost above the threshold and regained below a quarter of it. A layer that is not trusted is `plain.kept`: it
keeps x, as torch does, and scales by the weight itself, also where that is within eps of zero.

What is compiled, captured or traced stays in the mode that the layer had: that would need the host to wait. What is
computed again in a backward pass stays in the mode of the forward pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from inplace_abn import _torch, ops, recovery
from inplace_abn.settings import Settings


class Threshold(NamedTuple):
    """Errors above which trust is lost."""

    x: float
    """Of dx over the layer."""
    weight: float
    """Of the worst channel's dweight."""

    def exceeded(self, x: float, weight: float) -> bool:
        return x > self.x or weight > self.weight


THRESHOLDS = {
    torch.bfloat16: Threshold(6 * 2.0**-8, 2.0**-4),
    torch.float16: Threshold(2.0**-6, 2.0**-4),
    torch.float32: Threshold(2.0**-14, 2.0**-10),
    torch.float64: Threshold(2.0**-30, 2.0**-20),
}
"""For dx 6, 32, 2**10 and 2**23 unit roundoffs. Typical parameters give 0.5 to 2 of them; next to the minimum of silu
and hardswish, where errors grow as roundoff to the 3/4, 4.5 in bfloat16, 12 in float16 and 200 in float32
(``scripts/fidelity.py``). dweight is given more room: its figure is of the worst dz, that of a real one is smaller by
the root of the values that are summed, and among many channels there is always one whose gamma is small."""
HYSTERESIS = 4.0
ON_UNTRUSTED = ("fallback", "warn", "raise")

generation = 0
"""Steps that optimizers of this process have taken."""

_logger = logging.getLogger("inplace_abn")


def _advance(*_: Any) -> None:
    global generation
    generation += 1


register_optimizer_step_post_hook(_advance)


class Figures(NamedTuple):
    """What a measurement found, as numbers."""

    x: float
    """`recovery.Errors.x`."""
    weight: float
    """The largest of `recovery.Errors.weight`, or 0 where there is no weight."""
    channel: int
    least: float
    """The smallest magnitude of a signed weight, in units of eps below which it would scale by eps."""

    def trusted(self, before: bool, threshold: Threshold) -> bool:
        """Whether the layer is to be trusted that was ``before``. Figures of a batch with infinities or NaN change
        nothing."""
        if math.isnan(self.x) or math.isnan(self.weight) or math.isnan(self.least):
            return before
        room = 1.0 if before else HYSTERESIS
        return not threshold.exceeded(room * self.x, room * self.weight) and self.least >= room


class State:
    """What the guard knows of a layer, besides its mode."""

    def __init__(self) -> None:
        self.measured_at = -1
        self.scaled_at = -1
        self.scales = True
        self.pending: tuple[Tensor, torch.Event | None, torch.dtype] | None = None

    def take(self) -> tuple[Figures, torch.dtype] | None:
        """The figures that wait to be looked at, once."""
        if self.pending is None:
            return None
        packed, event, dtype = self.pending
        if event is not None:
            event.synchronize()
        self.pending = None
        return _figures(packed), dtype

    def __getstate__(self) -> dict[str, Any]:
        """Events cannot be copied, so their figures are waited for."""
        state = dict(vars(self))
        if self.pending is not None and self.pending[1] is not None:
            self.pending[1].synchronize()
            state["pending"] = (self.pending[0], None, self.pending[2])
        return state


def _figures(packed: Tensor) -> Figures:
    x, weight, channel, least = packed.tolist()
    return Figures(x, weight, int(channel), least)


class Guarded:
    """What a module has that the guard watches. The guard leaves its marks in the instance's dictionary."""

    guard_interval: int = 100
    guard_threshold: float | None = None
    on_untrusted: str = "fallback"
    _guard: State | None = None
    _guard_generation: int = -1
    _trusted: bool = True

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *rest: Any) -> None:
        forget(self)
        super()._load_from_state_dict(state_dict, *rest)  # type: ignore[misc]


class Look(NamedTuple):
    """What a layer is to do in a call."""

    trusted: bool
    """Its mode, before a measurement that is the first."""
    due: bool = False
    """Whether it measures."""
    first: bool = False


def look(module: Any, x: Tensor, residual: Tensor | None, empty: bool = False) -> Look:
    """What an in-place module is to do with this x, in this generation.

    Args:
        module: a `Guarded` one.
        x, residual: its arguments, which need not be valid; nothing is measured on what is not.
        empty: whether a share of the batch counts that has no values to measure.
    """
    if module.guard_interval == 0 or not is_measurable(module, x, residual, empty):
        return Look(bool(module._trusted))
    state: State | None = module._guard
    if state is None:
        state = module.__dict__["_guard"] = State()
    weight = module.weight
    first, interval = state.measured_at < 0, module.guard_interval
    due = first or state.measured_at > generation or generation // interval > state.measured_at // interval
    tensors = (x, weight, module.bias, residual)
    recovers = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if first and not recovers:
        return Look(_scales(module, state, weight))
    if not first and _torch.in_backward():
        return Look(bool(module._trusted))
    if not first and state.measured_at != generation:
        _settle(module, state)
    if recovers or not due:
        module.__dict__["_guard_generation"] = generation
    return Look(bool(module._trusted), due and recovers, first)


def take(module: Any, figures: Tensor, first: bool, dtype: torch.dtype) -> bool:
    """Keeps what was measured for the next generation; the first time it is waited for and decides at once."""
    state: State = module._guard
    state.measured_at = generation
    state.pending = *((figures, None) if first else _fetched(figures)), dtype
    if first:
        _settle(module, state)
    return bool(module._trusted)


def trusts(module: Any, x: Tensor, residual: Tensor | None) -> bool:
    """Whether an in-place module may run in place in this generation, on this x. Arguments are those of `look`."""
    looked = look(module, x, residual)
    return take(module, measure(module, x, residual), looked.first, x.dtype) if looked.due else looked.trusted


WIDTH = 4
"""Figures of a rank."""


class Frozen:
    """A mode that does not change, with no figures, as in compiled code."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted

    def figures(self, x: Tensor) -> Tensor:
        """Those of a rank that has not measured; float64 of shape (4,)."""
        return torch.tensor([0.0, 0.0, 0.0, math.inf], dtype=torch.float64, device=x.device)

    def trusts(self, gathered: Tensor) -> bool:
        return self.trusted


class Watch(Frozen):
    """The guard of one synchronised call, whose figures travel with the statistics."""

    def __init__(self, module: Any, x: Tensor, residual: Tensor | None) -> None:
        self.module, self.residual, self.dtype = module, residual, x.dtype
        self.look = look(module, x, residual, empty=True)
        super().__init__(self.look.trusted)

    def figures(self, x: Tensor) -> Tensor:
        """This rank's, of its own statistics; float64 of shape (4,)."""
        if not self.look.due or x.numel() <= x.shape[1]:
            return super().figures(x)
        return measure(self.module, x, self.residual)

    def trusts(self, gathered: Tensor) -> bool:
        """Whether the call may be in place, from all ranks' figures, (ranks, 4)."""
        if not self.look.due:
            return self.look.trusted
        x, weight, channel, least = gathered.double().unbind(dim=1)
        worst, rank = weight.max(dim=0)
        figures = torch.stack([x.max(), worst, channel[rank], least.min()])
        return take(self.module, figures, self.look.first, self.dtype)


def _scales(module: Any, state: State, weight: Tensor | None) -> bool:
    """Whether a layer scales by its weight, which alone matters where nothing is recovered. Looked at once in a
    generation, until the layer is measured."""
    if state.scaled_at != generation:
        state.scaled_at = generation
        state.scales = weight is None or not module.signed_weight or bool((weight.detach().abs() >= module.eps).all())
    return state.scales


def _settle(module: Any, state: State) -> None:
    """Changes the mode to what the last measurement asks for."""
    found = state.take()
    if found is not None:
        _decide(module, *found)


def measure(module: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    """`Figures` in one tensor, on x's device. Nothing is waited for."""
    with torch.no_grad():
        return _measure(module, x, residual)


def _measure(module: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    return observe(module, x).figures(module.activation, module.activation_param, residual)


class Observation(NamedTuple):
    """What a measurement needs of a call, taken before its x is overwritten."""

    x: Tensor
    """A sample."""
    mean: Tensor
    var: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    signed_weight: bool
    training: bool

    def figures(self, activation: str, param: float, residual: Tensor | None) -> Tensor:
        """`Figures` in one tensor, once it is known what follows. Nothing is waited for; to be asked once."""
        settings = Settings(activation, param, self.eps, self.signed_weight, self.training, None)
        with torch.no_grad():
            added = None if residual is None else recovery.sample(residual)
            errors = recovery.measured(self.x, self.mean, self.var, self.weight, self.bias, added, settings)
            return packed(errors, self.weight, settings)


def observe(module: Any, x: Tensor) -> Observation:
    running_mean, running_var = _running(module)
    training = module.training or running_mean is None or running_var is None
    with torch.no_grad():
        mean, var = (
            ops.run(ops.statistics, [], x) if training else (cast(Tensor, running_mean), cast(Tensor, running_var))
        )
        sample = recovery.sample(x)
    return Observation(sample, mean, var, module.weight, module.bias, module.eps, module.signed_weight, training)


def packed(errors: recovery.Errors, weight: Tensor | None, settings: Settings) -> Tensor:
    """`Figures` in one tensor."""
    if weight is None:
        zero = torch.zeros_like(errors.x)
        return torch.stack([errors.x, zero, zero, zero + math.inf])
    worst, channel = errors.weight.max(dim=0)
    least = torch.full_like(worst, math.inf)
    if settings.signed_weight:
        # In the weight's dtype, as the kernels and `trusts` compare.
        least = (weight.detach().abs().min() / settings.eps).double()
    return torch.stack([errors.x, worst, channel.double(), least])


def _fetched(packed: Tensor) -> tuple[Tensor, torch.Event | None]:
    """A copy on the host that arrives at the event."""
    if packed.is_cpu:
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=packed.is_cuda)
    host.copy_(packed, non_blocking=True)
    event = torch.Event(packed.device)
    event.record()
    return host, event


def _decide(module: Any, figures: Figures, dtype: torch.dtype) -> None:
    before = bool(module._trusted)
    given = module.guard_threshold
    threshold = THRESHOLDS[dtype] if given is None else Threshold(given, given)
    now = figures.trusted(before, threshold)
    if now == before:
        return
    module.__dict__["_trusted"] = now
    name = module.__dict__.get("_guard_name") or f"{type(module).__name__}({module.extra_repr()})"
    if now:
        _logger.info("%s: z tells xhat again (%s); it runs in place", name, _described(figures, threshold))
        return
    text = f"{name}: z does not tell xhat ({_described(figures, threshold)}); it keeps its input, as torch does"
    if module.on_untrusted == "raise":
        raise RuntimeError(f"inplace_abn: {text}")
    _logger.log(logging.WARNING if module.on_untrusted == "warn" else logging.INFO, "%s", text)


def _described(figures: Figures, threshold: Threshold) -> str:
    text = f"error of dx {figures.x:.2g}, of dweight {figures.weight:.2g} in channel {figures.channel}, "
    text += f"trusted up to {threshold.x:.2g} and {threshold.weight:.2g}"
    return text + (f"; a weight is {figures.least:.2g} eps" if figures.least < HYSTERESIS else "")


def _running(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Subclasses may have none."""
    buffers = module._buffers
    return buffers.get("running_mean"), buffers.get("running_var")


def is_measurable(module: Any, x: Tensor, residual: Tensor | None, empty: bool) -> bool:
    """`is_suitable`, while no tracer, transform or capture is watching."""
    if not is_suitable(module, x, residual, empty) or _torch.transforms_active() or _torch.is_captured():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def is_suitable(module: Any, x: Tensor, residual: Tensor | None, empty: bool) -> bool:
    """Whether the tensors are what the ops take."""
    if type(x) not in (Tensor, nn.Parameter) or x.device.type == "meta" or x.layout is not torch.strided:
        return False
    if x.dtype not in THRESHOLDS or x.dim() < 2 or x.is_neg() or x.shape[1] != module.num_features:
        return False
    if x.numel() <= x.shape[1] and not empty:
        return False
    if residual is not None and (
        type(residual) not in (Tensor, nn.Parameter)
        or (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device)
        or residual.is_neg()
    ):
        return False
    device, shape = x.device, (x.shape[1],)
    dtypes = (x.dtype, torch.float64 if x.dtype == torch.float64 else torch.float32)
    return all(
        t is None or (t.dtype in dtypes and t.shape == shape and t.device == device)
        for t in (module.weight, module.bias, *_running(module))
    )


def set_guard(
    model: nn.Module,
    interval: int | None = None,
    threshold: float | None = None,
    on_untrusted: str = "fallback",
) -> nn.Module:
    """Says how the in-place modules of ``model`` watch whether z still tells xhat. All are measured anew.

    Args:
        model: any module; names in messages are those of its modules.
        interval: optimizer steps between two measurements; 0 for none at all, and every layer in place. None leaves
            it as it is (100 if nothing else was said).
        threshold: the relative error of dx, and of the worst channel's dweight, above which a layer is not trusted; it
            is again below a quarter. None for the default of the activations' dtype, `THRESHOLDS`: for dx 0.023 in
            bfloat16, 2**-6 in float16, 2**-14 in float32, 2**-30 in float64.
        on_untrusted: "fallback" keeps the layer's input, as torch does, until it is trusted again, and says so as
            information through ``logging.getLogger("inplace_abn")``; "warn" does it with a warning there; "raise"
            raises a RuntimeError instead, before anything is written.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: a negative interval, a threshold that is not positive, or another word. Nothing has been modified.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inplace_abn.set_guard: expected model to be a torch.nn.Module, got {type(model).__name__}")
    if interval is not None:
        check_interval(interval)
    if threshold is not None and not threshold > 0:
        raise ValueError(f"inplace_abn.set_guard: expected a threshold > 0, got {threshold}")
    if on_untrusted not in ON_UNTRUSTED:
        raise ValueError(
            f"inplace_abn.set_guard: expected on_untrusted to be one of {ON_UNTRUSTED}, got {on_untrusted!r}"
        )
    for name, module in model.named_modules():
        if isinstance(module, Guarded):
            forget(module)
            module.__dict__.update(guard_threshold=threshold, on_untrusted=on_untrusted)
            if name:
                module.__dict__["_guard_name"] = name
            if interval is not None:
                module.__dict__["guard_interval"] = interval
    return model


def check_interval(interval: int) -> None:
    """Raises ValueError for an interval that is no count of steps."""
    if not isinstance(interval, int) or interval < 0:
        raise ValueError(f"inplace_abn: expected a guard_interval >= 0, got {interval}")


_STATE = ("_guard", "_guard_generation", "_trusted")
_SETTINGS = ("guard_interval", "guard_threshold", "on_untrusted", "_guard_name")


def forget(module: Any) -> None:
    """Has the module measure again before it is trusted or not: its weights are others."""
    for name in _STATE:
        module.__dict__.pop(name, None)


def strip(module: nn.Module) -> None:
    """Takes away all that the guard has left on a module."""
    forget(module)
    for name in _SETTINGS:
        module.__dict__.pop(name, None)
