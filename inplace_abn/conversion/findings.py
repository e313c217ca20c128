"""What one recorded forward pass shows about a norm: hazards, the activation that follows, and who keeps the result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from inplace_abn import tags
from inplace_abn.activations import taken_over
from inplace_abn.recording import Call, Op, Recording, Seen, Watch

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Activation:
    """An op that activates."""

    name: str
    param: float
    op: int
    result: int
    """The storage of the result."""
    copies: tuple[int, ...]
    """Copies of its input that autograd made because the op overwrites it."""


@dataclass
class Finding:
    """What is known about one call of a norm in one recording."""

    call: Call
    input: int
    output: int
    op: int
    reasons: list[str] = field(default_factory=list)
    """Why the norm cannot be in place."""
    kept_reasons: list[str] = field(default_factory=list)
    """Why its input is not to be overwritten."""
    activation: Activation | None = None
    fused_reasons: list[str] = field(default_factory=list)
    identity_reasons: list[str] = field(default_factory=list)
    followed_by: str = ""
    saved_by: tuple[str, ...] = ()
    residual: ResidualFinding | None = None
    copied: tuple[int, ...] = ()
    """Copies of its input in another memory format. The norm normalises them instead of the input."""


@dataclass
class ResidualFinding:
    activation: Activation
    storage: int
    """The storage of the residual."""
    total: int
    """The storage of the sum."""
    reasons: list[str]
    partner: str = ""


def examine(recording: Recording, name: str) -> list[Finding]:
    """A finding about each call of the norm of that name."""
    calls = recording.calls.get(name, [])
    return [_examined(recording, call, len(calls)) for call in calls]


def _examined(recording: Recording, call: Call, calls: int) -> Finding:
    ops = range(call.start, call.stop)
    op = next((i for i in ops if "batch_norm" in recording.ops[i].name), None)
    if op is None or call.input is None:
        return Finding(call, -1, -1, -1, ["it did not normalise a tensor that was its argument"])
    x, y, copied = _normalised(recording, call, op)
    finding = Finding(call, x.storage, y.storage, op, _reasons(call, x, y))
    finding.copied = copied
    finding.kept_reasons = _kept_reasons(recording, calls, call, x, op)
    inside = [i for i in recording.touching(x.storage, -1) if i in ops and i != op]
    if inside and not copied:
        finding.reasons.append("it does more with its input than to normalise it")
    finding.activation = _activation_after(recording, y, op)
    first = recording.touching(y.storage, op)
    finding.followed_by = recording.ops[first[0]].name if first else ""
    if finding.activation is not None:
        finding.fused_reasons = _fused_reasons(recording, y.storage, op, finding.activation)
    finding.identity_reasons = _modified_reasons(recording, y.storage, op) + _node_reasons(recording, y.storage, op)
    last = y.storage if finding.activation is None else finding.activation.result
    savers = {recording.saved_by(s): None for s in recording.saves if s.storage == last and recording.training}
    finding.saved_by = tuple(savers)
    return finding


def examine_residual(
    recording: Recording, findings: Mapping[str, Sequence[Finding]], name: str, unfit: Mapping[str, Sequence[str]]
) -> None:
    """Adds a `ResidualFinding` to each finding of the norm that an addition and an activation follow.

    ``unfit`` has the reasons against each norm that do not depend on the recording.
    """
    for finding in findings[name]:
        if finding.op >= 0 and finding.activation is None:
            finding.residual = _residual(recording, findings, finding, unfit)


def _residual(
    recording: Recording,
    findings: Mapping[str, Sequence[Finding]],
    finding: Finding,
    unfit: Mapping[str, Sequence[str]],
) -> ResidualFinding | None:
    touching = recording.touching(finding.output, finding.op)
    addition = recording.ops[touching[0]] if touching else None
    if addition is None or addition.name not in ("add", "add_") or len(addition.tensors) != 2:
        return None
    others = [t for t in addition.tensors if t.storage != finding.output]
    _, y, _ = _normalised(recording, finding.call, finding.op)
    if len(others) != 1 or addition.values.get("alpha", 1) != 1:
        return None
    r, total = others[0], addition.results[0]
    activation = _activation_after(recording, total, touching[0])
    if activation is None or total.storage == r.storage:
        return None
    reasons = []
    if (r.shape, r.dtype) != (y.shape, y.dtype):
        reasons.append("the residual's shape or dtype is another")
    if total.storage != finding.output and len(touching) > 1:
        reasons.append(f"its output is also read by {recording.ops[touching[1]]}")
    if total.storage != finding.output and finding.output in recording.alive:
        reasons.append("its output is kept")
    if any(r.storage in recording.ops[i].writes for i in recording.touching(r.storage, touching[0])):
        reasons.append("the residual is modified in place later")
    reasons += _fused_reasons(recording, total.storage, touching[0], activation)
    until = None if total.storage != finding.output else touching[0]
    reasons += _watched_reasons("its output", recording.watched(finding.output, finding.op, until))
    partner = ""
    if not recording.is_held(r.storage):
        own = {n: f for n, found in findings.items() for f in found if f.output == r.storage and f.activation is None}
        partner = next(iter(own), "")
        if partner and addition.tensors[0].storage != finding.output:
            return None  # The other norm takes this one's output as its residual.
        if partner:
            reasons += [f"{partner}: {reason}" for reason in (*own[partner].reasons, *unfit[partner])]
            modified = _modified_reasons(recording, own[partner].output, own[partner].op)
            reasons += [f"{partner}: {reason}" for reason in modified]
    return ResidualFinding(activation, r.storage, total.storage, reasons, partner)


def _normalised(recording: Recording, call: Call, op: int) -> tuple[Seen, Seen, tuple[int, ...]]:
    """The tensor that a norm normalised, its result, and the storages of copies that it made of its input.

    torch computes an instance norm as a batch norm of one sample. This sample has all channels of all samples, in
    contiguous memory.
    """
    x, y = recording.ops[op].tensors[0], recording.ops[op].results[0]
    given = call.input
    if given is None or math.prod(given.shape) != math.prod(x.shape):
        return x, y, ()
    if (x.storage, x.shape) == (given.storage, given.shape):
        return x, y, ()
    copied: tuple[int, ...] = ()
    if x.storage != given.storage:
        copies = [o for o in recording.ops[call.start : op] if o.name == "clone" and given.storage in o.reads]
        if not any(copy.results[0].storage == x.storage for copy in copies):
            return x, y, ()
        copied = (x.storage,)
    return replace(given, dtype=x.dtype), replace(y, shape=given.shape), copied


def _reasons(call: Call, x: Seen, y: Seen) -> list[str]:
    reasons = []
    if call.input is not None and call.input.storage != x.storage:
        reasons.append("it normalises another tensor than its argument")
    if (x.dtype, x.shape) != (y.dtype, y.shape) or x.dtype not in _DTYPES:
        reasons.append(f"it makes {y.dtype} of {x.dtype}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        reasons.append(f"device {x.device.type} is not supported")
    return reasons


def _kept_reasons(recording: Recording, calls: int, call: Call, x: Seen, op: int) -> list[str]:
    reasons = []
    if calls > 1:
        reasons.append(f"it is called {calls} times in a forward pass")
    if x.storage in recording.inputs:
        reasons.append("its input is an input of the model")
    if x.storage in recording.state:
        reasons.append("its input is a parameter or buffer")
    if x.storage in recording.outputs:
        reasons.append("its input is an output of the model")
    if not x.whole:
        reasons.append("its input is a partial view of other memory")
    if call.protected:
        reasons.append("its input is a leaf or view that autograd protects")
    if call.custom_function:
        reasons.append(f"its input comes from a custom autograd Function, {call.custom_function}")
    for save in recording.saves:
        if save.storage == x.storage and call.module not in save.modules:
            reasons.append(f"its input is also kept for backward by {recording.saved_by(save)}")
    for i in recording.touching(x.storage, op):
        later = recording.ops[i]
        if not call.start <= i < call.stop:
            verb = "modified" if x.storage in later.writes else "read"
            reasons.append(f"its input is {verb} afterwards by {later}")
    reasons += _watched_reasons("its input", recording.watched(x.storage, op))
    if x.storage in recording.alive - recording.outputs - recording.inputs - recording.state:
        reasons.append("its input is kept by somebody after the forward pass")
    return reasons


def _fused_reasons(recording: Recording, y: int, op: int, activation: Activation) -> list[str]:
    """Why norm and activation cannot be fused.

    Either something else needs y, the pre-activation, or the result is used in a way that is wrong in place.
    """
    reasons = []
    z = activation.result
    for i in recording.touching(y, op):
        reader = recording.ops[i]
        made = {result.storage for result in reader.results}
        if i == activation.op or made & set(activation.copies) or (z == y and i > activation.op):
            continue
        reasons.append(f"its pre-activation is also read by {reader}")
    for copy in activation.copies:
        if recording.touching(copy, activation.op) or copy in recording.alive:
            reasons.append("a copy of its pre-activation is used")
    if z != y and y in recording.outputs:
        reasons.append("its pre-activation is an output of the model")
    elif z != y and y in recording.alive:
        reasons.append("its pre-activation is kept by somebody after the forward pass")
    if z != y:
        foreign = [s for s in recording.saves if s.storage == y and abs(s.before - activation.op) > 1]
        reasons += [f"its pre-activation is also kept for backward by {recording.saved_by(s)}" for s in foreign]
    reasons += _watched_reasons("its pre-activation", recording.watched(y, op, activation.op if z == y else None))
    reasons += _node_reasons(recording, z, activation.op)
    reasons += tags.readers(recording, z, activation.op, activation.name, activation.param)
    return reasons + _modified_reasons(recording, z, activation.op)


def _watched_reasons(what: str, watches: Sequence[Watch]) -> list[str]:
    """Why a tensor is needed without an op that reads it. In place it vanishes, or has another content."""
    words = {
        "gradient": f"{what}'s gradient is hooked: {{}}",
        "node": f"{what}'s graph node is asked for, where a hook would see other gradients: {{}}",
        "function": f"{what} goes through {{}}",
        "memory": f"{what} is also read by {{}}",
        "truth": f"{what} is also read by {{}}",
    }
    return [words[watch.kind].format(watch.what) for watch in watches]


def _node_reasons(recording: Recording, z: int, op: int) -> list[str]:
    """Why the result's graph node is needed.

    A hook on the node gets the gradients of all of the node's inputs. In place the node has other inputs.
    """
    return _watched_reasons("its output", [w for w in recording.watched(z, op) if w.kind == "node"])


def _modified_reasons(recording: Recording, z: int, op: int) -> list[str]:
    """Why z, which backward needs, will be modified."""
    for i in recording.touching(z, op):
        later = recording.ops[i]
        if z in later.writes:
            form = {"add_": "y = y + x instead of y += x", "mul_": "y = y * x instead of y *= x"}.get(
                later.name, f"{later.name.removesuffix('_')}, or inplace=False"
            )
            return [f"its output is modified in place by {later}; use the out-of-place form ({form})"]
    return []


def _activation_after(recording: Recording, y: Seen, op: int) -> Activation | None:
    """The supported activation that reads y, if one does before y is modified."""
    copies: list[int] = []
    for i in recording.touching(y.storage, op):
        reader = recording.ops[i]
        # Inside of a custom autograd Function there is no grad mode, and its backward is its own.
        known = _known_activation(reader) if reader.differentiable or not recording.ops[op].differentiable else None
        written = y.storage in reader.writes
        whole = bool(reader.tensors) and math.prod(reader.tensors[0].shape) == math.prod(y.shape)
        if known is not None and whole:
            result = y.storage if written else reader.results[0].storage
            return Activation(*known, i, result, tuple(copies) if written else ())
        if written:
            return None
        # Autograd copies a tensor that an op overwrites but backward needs.
        copies = [reader.results[0].storage] if reader.name == "clone" else []
        copies = [copy for copy in copies if recording.is_held(copy)]
    return None


def _known_activation(op: Op) -> tuple[str, float] | None:
    name = op.name.removesuffix("_")
    values = op.values
    if name == "leaky_relu" and 0 <= values["negative_slope"] < math.inf:
        return name, float(values["negative_slope"])
    if name == "elu" and values["alpha"] > 0 and values["scale"] == values["input_scale"] == 1:
        return name, float(values["alpha"])
    if name in ("leaky_relu", "elu"):
        return None
    found = taken_over(name, values.get("approximate", ""))
    return None if found is None else (found, 0.0)
