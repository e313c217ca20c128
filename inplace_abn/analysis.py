"""Which BatchNorms of a model can go in place, decided from what a recorded forward pass did with their memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from inplace_abn import reference, rewrite
from inplace_abn.conditioning import expected_error
from inplace_abn.functions import check_hyperparameters
from inplace_abn.plan import Layer, Plan, Residual
from inplace_abn.recording import Call, Example, Op, Recording, Seen, record

_THRESHOLD = 1e-2
"""Of `inplace_abn.check_conditioning`: relative error of dweight that is still acceptable."""
_STANDARD = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_fused_batch_norm(module: nn.Module) -> bool:
    """Whether it is timm's BatchNorm with activation, which timm need not be imported for."""
    return (
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and type(module).__name__ == "BatchNormAct2d"
        and all(isinstance(getattr(module, name, None), nn.Module) for name in ("act", "drop"))
    )


@dataclass
class _Activation:
    """An op that was seen to activate."""

    name: str
    param: float
    op: int
    result: int
    """Storage."""
    copies: tuple[int, ...]
    """Copies of its input that autograd made because the op overwrites it."""


@dataclass
class _Finding:
    """About one BatchNorm in one recording."""

    call: Call
    input: int
    output: int
    size: int
    op: int
    input_reasons: list[str] = field(default_factory=list)
    activation: _Activation | None = None
    fused_reasons: list[str] = field(default_factory=list)
    fused_bytes: int = 0
    identity_reasons: list[str] = field(default_factory=list)
    identity_bytes: int = 0
    followed_by: str = ""
    saved_by: tuple[str, ...] = ()
    residual: _Residual | None = None


@dataclass
class _Residual:
    parent: str
    activation: _Activation
    bytes: int
    reasons: list[str]
    partner: str = ""


def analyze(model: nn.Module, *example_inputs: Any, **kwargs: Any) -> Plan:
    """Tells which BatchNorms of ``model`` can go in place, why the others cannot, and what it saves.

    The model runs once in training mode, and once more to see what only evaluation does, on fake tensors: nothing is
    computed, no memory is taken, and buffers, attributes, hooks, training flags and random generators are left as they
    were. A model whose forward pass depends on values runs on its real tensors instead.

    Args:
        model: any module. BatchNorm1d, 2d, 3d, SyncBatchNorm and timm's BatchNormAct2d are looked at, not subclasses.
        example_inputs: arguments of the model's forward pass. Or several `Example`, each with the arguments of a call,
            where the model takes different ways: a BatchNorm is refused if any of them gives a reason to.
        kwargs: keyword arguments of the model's forward pass.

    Returns:
        The plan, for `print` and for `inplace_abn.convert`.

    Raises:
        TypeError: ``model`` is no module, or an `Example` is mixed with other arguments.

    Errors of the model's own forward pass are passed on.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inplace_abn.analyze: expected model to be a torch.nn.Module, got {type(model).__name__}")
    several = [example for example in example_inputs if isinstance(example, Example)]
    if several and (kwargs or len(several) != len(example_inputs)):
        raise TypeError("inplace_abn.analyze: expected either Example objects or the arguments of one call, got both")
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or is_fused_batch_norm(module)
    }
    unfit = {name: _unfit(module) for name, module in norms.items()}
    examples = several or [Example(*example_inputs, **kwargs)]
    recordings = [recording for example in examples for recording in record(model, example)]
    return _Decision(model, norms, unfit, recordings).plan()


def _unfit(module: nn.Module) -> list[str]:
    """Reasons that do not depend on the forward pass."""
    reasons = []
    fused = is_fused_batch_norm(module)
    if type(module) not in _STANDARD and not fused:
        reasons.append(f"{type(module).__name__} is a subclass whose forward pass is unknown")
        return reasons
    if rewrite.is_observed(module):
        reasons.append("it has hooks, or a forward pass of its own, which would see other tensors")
    if fused and type(module.drop) is not nn.Identity:
        reasons.append("it has a drop layer between normalisation and activation")
    try:
        check_hyperparameters(module.eps, module.momentum)  # type: ignore[arg-type]
    except ValueError as error:
        reasons.append(str(error).removeprefix("inplace_abn: "))
    weight = module.weight
    if isinstance(weight, torch.Tensor) and weight.device.type != "meta":
        pruned = int((weight.detach().abs() < module.eps).sum())  # type: ignore[operator]
        if pruned:
            reasons.append(f"{pruned} weights are within eps of zero, where in place would scale by eps instead")
    return reasons


class _Decision:
    """Unites the findings of all recordings."""

    def __init__(
        self,
        model: nn.Module,
        norms: dict[str, nn.Module],
        unfit: dict[str, list[str]],
        recordings: list[Recording],
    ) -> None:
        self.modules = dict(model.named_modules())
        self.norms = norms
        self.unfit = unfit
        self.recordings = recordings
        self.findings: list[dict[str, _Finding]] = [{} for _ in recordings]
        for findings, recording in zip(self.findings, recordings, strict=True):
            for name in norms:
                finding = self._examine(recording, name)
                if finding is not None:
                    findings[name] = finding
            for name in findings:
                self._examine_residual(recording, findings, name)

    def plan(self) -> Plan:
        layers = [self._layer(name) for name in self.norms]
        layers = self._without_chains(layers)
        layers = self._with_shared_activations(layers)
        return Plan(tuple(layers))

    def _without_chains(self, layers: list[Layer]) -> list[Layer]:
        """What is in place keeps its output, which therefore cannot be the input of another that is."""
        chosen: list[Layer] = []
        for layer in layers:
            for other in chosen:
                for findings in self.findings:
                    if not (layer.convertible and other.convertible and {layer.name, other.name} <= findings.keys()):
                        continue
                    first, second = findings[other.name], findings[layer.name]
                    reason = ""
                    if second.input == self._result(first, other):
                        reason = f"its input is the output of {other.name}, which keeps it in place"
                    elif first.input == self._result(second, layer):
                        reason = f"its output is the input of {other.name}, which overwrites it in place"
                    if reason:
                        layer = replace(layer, reasons=(*layer.reasons, reason))
            chosen.append(layer)
        return [self._without_residual_chain(layer, chosen) for layer in chosen]

    def _without_residual_chain(self, layer: Layer, layers: list[Layer]) -> Layer:
        residual = layer.residual
        if residual is None or residual.reasons:
            return layer
        for findings in self.findings:
            inputs = {findings[name].input for name in (layer.name, residual.partner) if name in findings}
            for other in layers:
                if other.convertible and other.name in findings and self._result(findings[other.name], other) in inputs:
                    reason = f"it or the residual is made of the output of {other.name}, which keeps it in place"
                    residual = replace(residual, reasons=(*residual.reasons, reason))
        return replace(layer, residual=residual)

    @staticmethod
    def _result(finding: _Finding, layer: Layer) -> int:
        """Storage of what the in-place module returns."""
        fused = layer.activation != "identity"
        return finding.activation.result if fused and finding.activation is not None else finding.output

    def _examine(self, recording: Recording, name: str) -> _Finding | None:
        calls = recording.calls.get(name, [])
        if not calls:
            return None
        call = calls[0]
        ops = range(call.start, call.stop)
        op = next((i for i in ops if "batch_norm" in recording.ops[i].name), None)
        if op is None or call.input is None:
            return _Finding(call, -1, -1, 0, -1, ["it did not normalise a tensor that was its argument"])
        x, y = recording.ops[op].tensors[0], recording.ops[op].results[0]
        finding = _Finding(call, x.storage, y.storage, recording.sizes[x.storage], op)
        finding.input_reasons = _input_reasons(recording, len(calls), call, x, y, op)
        inside = [i for i in recording.touching(x.storage, -1) if i in ops and i != op]
        if inside:
            finding.input_reasons.append("it does more with its input than to normalise it")
        own = _holds_input(recording, name, x.storage)
        finding.activation = _activation_after(recording, y, op)
        first = recording.touching(y.storage, op)
        finding.followed_by = recording.ops[first[0]].name if first else ""
        before = finding.size if own else 0
        copies = () if finding.activation is None else finding.activation.copies
        if finding.activation is not None:
            z = finding.activation.result
            finding.fused_reasons = _fused_reasons(recording, y.storage, op, finding.activation)
            kept = {s for s in {y.storage, z, *copies} if recording.is_held(s)}
            finding.fused_bytes = before + sum(recording.sizes[s] for s in kept) - finding.size
        finding.identity_reasons = _modified_reasons(recording, y.storage, op)
        finding.identity_bytes = before + finding.size * recording.is_held(y.storage) - finding.size
        last = y.storage if finding.activation is None else finding.activation.result
        savers = {recording.saved_by(s): None for s in recording.saves if s.storage == last and recording.training}
        finding.saved_by = tuple(savers)
        if not recording.training:
            finding.fused_bytes = finding.identity_bytes = 0
        elif not own:
            gain = "nothing would be gained: autograd does not keep its input"
            finding.fused_reasons.append(gain)
            finding.identity_reasons.append(gain)
        else:
            if finding.fused_bytes <= 0:
                finding.fused_reasons.append("nothing would be gained: neither input nor output is kept for backward")
            if finding.identity_bytes <= 0:
                finding.identity_reasons.append(
                    "nothing would be gained: its output is kept by nobody, but would be in place"
                )
        return finding

    def _activation_site(self, name: str) -> tuple[str, str, str]:
        """(site, parent, activation module) of the activation that follows; the same in all recordings."""
        sites = set()
        for recording, findings in zip(self.recordings, self.findings, strict=True):
            if name in findings and (activation := findings[name].activation) is not None:
                module = recording.ops[activation.op].module
                if is_fused_batch_norm(self.norms[name]) and (module + ".").startswith(name + "."):
                    sites.add(("own", "", module))
                elif self._is_plain_activation(recording, module, activation):
                    sites.add(("module", "", module))
                else:
                    sites.add(("call", module, ""))
        return sites.pop() if len(sites) == 1 else ("", "", "")

    def _is_plain_activation(self, recording: Recording, module: str, activation: _Activation) -> bool:
        calls = [c for c in recording.calls.get(module, []) if c.start <= activation.op < c.stop]
        if len(calls) != 1:
            return False
        ops = [recording.ops[i] for i in range(calls[0].start, calls[0].stop)]
        return all(o.name in ("clone", recording.ops[activation.op].name) for o in ops) and (
            rewrite.is_activation_module(self.modules[module], activation.name, activation.param)
        )

    def _layer(self, name: str) -> Layer:
        module = self.norms[name]
        found = [findings[name] for findings in self.findings if name in findings]
        reasons = list(self.unfit[name])
        if not any(name in f for r, f in zip(self.recordings, self.findings, strict=True) if r.training):
            reasons.append("it was not called in the recorded forward pass")
        for finding in found:
            reasons += finding.input_reasons
        producers = [
            r.producer(f[name].input) for r, f in zip(self.recordings, self.findings, strict=True) if name in f
        ]
        producer = next((str(op) for op in producers if op is not None), "a model input" if found else "")
        saved_by = _unique(saver for finding in found for saver in finding.saved_by)
        activations = {None if f.activation is None else (f.activation.name, f.activation.param) for f in found}
        activation, param, site, parent, activated_by = "identity", 0.01, "", "", ""
        output_reasons: list[str]
        if len(activations) == 1 and None not in activations:
            ((activation, param),) = activations  # type: ignore[misc]
            site, parent, activated_by = self._activation_site(name)
            output_reasons = [reason for f in found for reason in f.fused_reasons]
            blocked = "" if site else "its activation is applied in different places"
            if site == "call" and not output_reasons:
                blocked = self._not_rewritable(name, parent, rewrite.Edit("", activation, param, False))
            if site != "own" and is_fused_batch_norm(module) and type(module.act) is not nn.Identity:
                blocked = "more than one activation follows it"
            if blocked:
                output_reasons.append(f"its {activation} is a function call: {blocked}" if site == "call" else blocked)
                identity_reasons = [reason for f in found for reason in f.identity_reasons]
                if site == "call" and not identity_reasons:
                    activation, site, parent, output_reasons = "identity", "", "", []
        elif len(activations) > 1:
            output_reasons = ["different activations follow it, in different examples or in training and evaluation"]
        else:
            output_reasons = [reason for f in found for reason in f.identity_reasons]
            if is_fused_batch_norm(module) and type(module.act) is not nn.Identity:
                output_reasons.append(f"its activation, {type(module.act).__name__}, is not supported")
        reasons += output_reasons
        if found:
            reasons += _ill_conditioned(module, activation, self._dtype(name))
        fused = activation != "identity"
        saved = max((f.fused_bytes if fused else f.identity_bytes for f in found), default=0)
        return Layer(
            name=name,
            kind=type(module).__name__,
            producer=producer,
            activation=activation,
            activation_param=param,
            site=site,
            parent=parent,
            activation_module=activated_by if site in ("module", "own") else "",
            reasons=_unique(reasons),
            bytes_saved=saved,
            saved_by=saved_by,
            followed_by=next((f.followed_by for f in found), "") if activation == "identity" else "",
            residual=self._residual(name, reasons),
        )

    def _dtype(self, name: str) -> torch.dtype:
        for recording, findings in zip(self.recordings, self.findings, strict=True):
            if name in findings and findings[name].op >= 0:
                return recording.ops[findings[name].op].tensors[0].dtype
        return torch.float32

    def _not_rewritable(self, name: str, parent: str, edit: rewrite.Edit) -> str:
        """Why the forward pass of ``parent`` cannot have the edit; empty if it can."""
        prefix = parent + "." if parent else ""
        if name == parent or not name.startswith(prefix):
            return f"it is in {parent or 'the model'}, which does not contain the BatchNorm"
        try:
            rewrite.rewritten(self.modules[parent], [edit._replace(norm=name.removeprefix(prefix))])
        except rewrite.NotRewritable as error:
            return str(error)
        return ""

    def _with_shared_activations(self, layers: list[Layer]) -> list[Layer]:
        """An activation module that does anything else than to activate one layer is passed through."""
        users: dict[str, list[Layer]] = {}
        for layer in layers:
            if layer.convertible and layer.site == "module":
                users.setdefault(layer.activation_module, []).append(layer)
        changed = {}
        for module, activated in users.items():
            exclusive = len(activated) == 1
            direct = dict.fromkeys((layer.name for layer in activated), True)
            for recording, findings in zip(self.recordings, self.findings, strict=True):
                calls = {call.start: call for call in recording.calls.get(module, [])}
                for layer in activated:
                    activation = findings[layer.name].activation if layer.name in findings else None
                    if activation is not None:
                        call = next(c for c in calls.values() if c.start <= activation.op < c.stop)
                        direct[layer.name] &= call.source == layer.name
                        calls.pop(call.start)
                exclusive &= not calls
            if not exclusive:
                for layer in activated:
                    reasons = layer.reasons
                    if not direct[layer.name]:
                        reasons += (
                            f"{module} is also used elsewhere, and does not get the BatchNorm's output itself here",
                        )
                    changed[layer.name] = replace(layer, site="shared", reasons=reasons)
        # A layer refused just now is one more use of its activation module, which is shared already.
        return [changed.get(layer.name, layer) for layer in layers]

    def _examine_residual(self, recording: Recording, findings: dict[str, _Finding], name: str) -> None:
        finding = findings[name]
        if finding.op < 0 or finding.activation is not None or is_fused_batch_norm(self.norms[name]):
            return
        touching = recording.touching(finding.output, finding.op)
        addition = recording.ops[touching[0]] if touching else None
        if addition is None or addition.name not in ("add", "add_") or len(addition.tensors) != 2:
            return
        others = [t for t in addition.tensors if t.storage != finding.output]
        y = recording.ops[finding.op].results[0]
        if len(others) != 1 or addition.values.get("alpha", 1) != 1:
            return
        r, total = others[0], addition.results[0]
        activation = _activation_after(recording, total, touching[0])
        if activation is None or total.storage == r.storage:
            return
        reasons = list(finding.input_reasons)
        if (r.shape, r.dtype) != (y.shape, y.dtype) or r.storage == finding.input:
            reasons.append("the residual's shape or dtype is another")
        if total.storage != finding.output and len(touching) > 1:
            reasons.append(f"its output is also read by {recording.ops[touching[1]]}")
        if total.storage != finding.output and finding.output in recording.alive:
            reasons.append("its output is kept")
        if any(r.storage in recording.ops[i].writes for i in recording.touching(r.storage, touching[0])):
            reasons.append("the residual is modified in place later")
        reasons += _fused_reasons(recording, total.storage, touching[0], activation)
        for user, found in findings.items():
            if found.input in (r.storage, activation.result):
                what = "the residual" if found.input == r.storage else "its output"
                reasons.append(f"{what} is the input of {user}")
        own = _holds_input(recording, name, finding.input)
        kept = {s for s in {total.storage, activation.result, *activation.copies} if recording.is_held(s)}
        saved = finding.size * own + sum(recording.sizes[s] for s in kept) - finding.size
        partner = ""
        if not recording.is_held(r.storage):
            saved -= finding.size
            partner = next((n for n, f in findings.items() if f.output == r.storage and f.activation is None), "")
            if partner and addition.tensors[0].storage != finding.output:
                return  # The other one takes this one as its residual.
            if partner:
                other = findings[partner]
                saved += other.size
                reasons += [f"{partner}: {reason}" for reason in (*other.input_reasons, *self.unfit[partner])]
                reasons += [f"{partner}: {reason}" for reason in _modified_reasons(recording, other.output, other.op)]
        if not recording.training:
            saved = 0
        elif saved <= 0:
            reasons.append("nothing would be gained, because the residual is not kept otherwise")
        parent = recording.ops[touching[0]].module
        finding.residual = _Residual(parent, activation, saved, reasons, partner)

    def _residual(self, name: str, reasons: list[str]) -> Residual | None:
        found = [findings[name].residual for findings in self.findings if name in findings]
        first = found[0] if found else None
        if first is None:
            return None
        activation, param = first.activation.name, first.activation.param
        united = list(self.unfit[name])
        for other in found:
            if other is None or (other.parent, other.partner, other.activation.name, other.activation.param) != (
                first.parent,
                first.partner,
                activation,
                param,
            ):
                united.append("it differs between examples")
            else:
                united += other.reasons
        united += _ill_conditioned(self.norms[name], activation, self._dtype(name))
        if first.partner:
            partner = self.norms[first.partner]
            united += [f"{first.partner}: {r}" for r in _ill_conditioned(partner, "identity", self._dtype(name))]
        if not united:
            blocked = self._not_rewritable(name, first.parent, rewrite.Edit("", activation, param, True))
            united += [blocked] if blocked else []
        saved = max(other.bytes for other in found if other is not None)
        return Residual(first.parent, activation, param, saved, _unique(united), first.partner)


def _unique(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reasons))


def _holds_input(recording: Recording, name: str, x: int) -> bool:
    return any(save.storage == x and name in save.modules and save.held for save in recording.saves)


def _input_reasons(recording: Recording, calls: int, call: Call, x: Seen, y: Seen, op: int) -> list[str]:
    reasons = []
    if calls > 1:
        reasons.append(f"it is called {calls} times in a forward pass")
    if call.by_keyword:
        reasons.append("it is called with a keyword argument")
    if call.input is not None and call.input.storage != x.storage:
        reasons.append("it normalises another tensor than its argument")
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
    if (x.dtype, x.shape) != (y.dtype, y.shape) or x.dtype not in _DTYPES:
        reasons.append(f"it makes {y.dtype} of {x.dtype}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        reasons.append(f"device {x.device.type} is not supported")
    for save in recording.saves:
        if save.storage == x.storage and call.module not in save.modules:
            reasons.append(f"its input is also kept for backward by {recording.saved_by(save)}")
    for i in recording.touching(x.storage, op):
        later = recording.ops[i]
        if not call.start <= i < call.stop:
            verb = "modified" if x.storage in later.writes else "read"
            reasons.append(f"its input is {verb} afterwards by {later}")
    if x.storage in recording.alive - recording.outputs - recording.inputs - recording.state:
        reasons.append("its input is kept by somebody after the forward pass")
    return reasons


def _fused_reasons(recording: Recording, y: int, op: int, activation: _Activation) -> list[str]:
    """Why y, which is activated, cannot vanish."""
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
    return reasons + _modified_reasons(recording, z, activation.op)


def _modified_reasons(recording: Recording, z: int, op: int) -> list[str]:
    """Why z, which backward needs, will not be what it was."""
    for i in recording.touching(z, op):
        later = recording.ops[i]
        if z in later.writes:
            form = {"add_": "y = y + x instead of y += x", "mul_": "y = y * x instead of y *= x"}.get(
                later.name, f"{later.name.removesuffix('_')}, or inplace=False"
            )
            return [f"its output is modified in place by {later}; use the out-of-place form ({form})"]
    return []


def _activation_after(recording: Recording, y: Seen, op: int) -> _Activation | None:
    """The supported activation that reads y, if one does before y is modified."""
    copies: list[int] = []
    for i in recording.touching(y.storage, op):
        reader = recording.ops[i]
        known = _known_activation(reader)
        written = y.storage in reader.writes
        whole = bool(reader.tensors) and math.prod(reader.tensors[0].shape) == math.prod(y.shape)
        if known is not None and whole:
            result = y.storage if written else reader.results[0].storage
            return _Activation(*known, i, result, tuple(copies) if written else ())
        if written:
            return None
        # Autograd copies what an op overwrites but backward needs.
        copies = [reader.results[0].storage] if reader.name == "clone" else []
        copies = [copy for copy in copies if recording.is_held(copy)]
    return None


def _known_activation(op: Op) -> tuple[str, float] | None:
    name = op.name.removesuffix("_")
    values = op.values
    if name in ("relu", "silu", "hardswish"):
        return name, 0.01
    if name == "leaky_relu" and 0 <= values["negative_slope"] < math.inf:
        return name, float(values["negative_slope"])
    if name == "elu" and values["alpha"] > 0 and values["scale"] == values["input_scale"] == 1:
        return name, float(values["alpha"])
    return None


def _ill_conditioned(module: nn.Module, activation: str, dtype: torch.dtype) -> list[str]:
    """dweight's error grows with |beta| / |gamma|."""
    weight, bias = module.weight, module.bias
    if not isinstance(weight, torch.Tensor) or not isinstance(bias, torch.Tensor) or weight.device.type == "meta":
        return []
    gamma = reference.gamma(weight.detach().double(), float(module.eps), True)  # type: ignore[arg-type]
    ratio = float((bias.detach().double().abs() / gamma.abs()).max())
    error = expected_error(ratio, activation, dtype)
    if error <= _THRESHOLD:
        return []
    return [
        f"its weight's gradient would be inexact: |bias| / |weight| reaches {ratio:.3g}, expected error {error:.1g}"
    ]
