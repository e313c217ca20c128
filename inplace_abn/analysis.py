"""Which BatchNorms of a model can go in place, decided from what a recorded forward pass did with their memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from inplace_abn import recovery, rewrite
from inplace_abn.example import examples_of
from inplace_abn.figures import THRESHOLDS
from inplace_abn.findings import Activation, Finding, examine, examine_residual
from inplace_abn.plan import Layer, Plan, Residual
from inplace_abn.recording import Recording, record
from inplace_abn.settings import check_hyperparameters

_STANDARD = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def is_fused_batch_norm(module: nn.Module) -> bool:
    """Whether it is timm's BatchNorm with activation, which timm need not be imported for."""
    return (
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and type(module).__name__ == "BatchNormAct2d"
        and all(isinstance(getattr(module, name, None), nn.Module) for name in ("act", "drop"))
    )


def analyze(model: nn.Module, /, *example_inputs: Any, **kwargs: Any) -> Plan:
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

    Errors of the model's own forward pass in training mode are passed on; those in evaluation are in the plan. Scripted
    and traced submodules are opaque: the BatchNorms in them are not looked at, what they read is.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inplace_abn.analyze: expected model to be a torch.nn.Module, got {type(model).__name__}")
    examples = examples_of("inplace_abn.analyze", example_inputs, kwargs)
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or is_fused_batch_norm(module)
    }
    unfit = {name: _unfit(module) for name, module in norms.items()}
    recordings: list[Recording] = []
    errors: list[str] = []
    for example in examples:
        recorded, error = record(model, example)
        recordings += recorded
        errors += [error] if error else []
    return replace(_Decision(model, norms, unfit, recordings).plan(), evaluation_errors=_unique(errors))


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
        self.findings: list[dict[str, Finding]] = [{} for _ in recordings]
        for findings, recording in zip(self.findings, recordings, strict=True):
            for name in norms:
                finding = examine(recording, name)
                if finding is not None:
                    findings[name] = finding
            for name in findings:
                if not is_fused_batch_norm(norms[name]):
                    examine_residual(recording, findings, name, unfit)

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
    def _result(finding: Finding, layer: Layer) -> int:
        """Storage of what the in-place module returns."""
        fused = layer.activation != "identity"
        return finding.activation.result if fused and finding.activation is not None else finding.output

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

    def _is_plain_activation(self, recording: Recording, module: str, activation: Activation) -> bool:
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
        activation, param, site, parent, activated_by, output_reasons = self._activation(name, found)
        reasons += output_reasons
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
            activation_module=activated_by,
            reasons=_unique(reasons),
            bytes_saved=saved,
            saved_by=saved_by,
            followed_by=next((f.followed_by for f in found), "") if activation == "identity" else "",
            residual=self._residual(name, reasons),
            note=_note(module, activation, param, self._dtype(name)),
        )

    def _activation(self, name: str, found: list[Finding]) -> tuple[str, float, str, str, str, list[str]]:
        """Name, parameter, site, parent and module of what the layer would apply, and the reasons against it."""
        module = self.norms[name]
        fused = is_fused_batch_norm(module) and type(module.act) is not nn.Identity
        identity_reasons = [reason for f in found for reason in f.identity_reasons]
        identity = "identity", 0.01, "", "", ""
        activations = {None if f.activation is None else (f.activation.name, f.activation.param) for f in found}
        if len(activations) > 1:
            reason = "different activations follow it, in different examples or in training and evaluation"
            return *identity, [reason]
        known = next(iter(activations), None)
        if known is None:
            unsupported = [f"its activation, {type(module.act).__name__}, is not supported"] if fused else []
            return *identity, identity_reasons + unsupported
        site, parent, activated_by = self._activation_site(name)
        reasons = [reason for f in found for reason in f.fused_reasons]
        if fused and site != "own":
            reasons.append("more than one activation follows it")
        elif not site:
            reasons.append("its activation is applied in different places")
        elif site == "call" and not reasons:
            blocked = self._not_rewritable(name, parent, rewrite.Edit("", *known, False))
            if blocked and not identity_reasons:
                return *identity, []
            if blocked:
                reasons.append(f"its {known[0]} is a function call: {blocked}")
        return *known, site, parent, activated_by, reasons

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
        if not united:
            blocked = self._not_rewritable(name, first.parent, rewrite.Edit("", activation, param, True))
            united += [blocked] if blocked else []
        saved = max(other.bytes for other in found if other is not None)
        return Residual(first.parent, activation, param, saved, _unique(united), first.partner)


def _unique(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reasons))


def _note(module: nn.Module, activation: str, param: float, dtype: torch.dtype) -> str:
    """Why the guard will not trust the layer as it is now, as far as its parameters tell."""
    weight, bias = module.weight, module.bias
    tensors = [t.detach() for t in (weight, bias) if isinstance(t, torch.Tensor)]
    if not tensors or any(t.device.type == "meta" or type(t) is not torch.Tensor for t in tensors):
        return ""
    eps: float = module.eps  # type: ignore[assignment]
    if isinstance(weight, torch.Tensor):
        small = int((weight.detach().abs() < eps).sum())
        if small:
            return f"in place once its weights have grown: {small} of {len(weight)} are within eps of zero"
    threshold = THRESHOLDS.get(dtype)
    errors = recovery.predicted(weight, bias, dtype, activation, param, eps)  # type: ignore[arg-type]
    if threshold is None or not threshold.exceeded(errors.x.item(), errors.weight.max().item()):
        return ""
    return (
        f"in place once its output tells its input: expected error of dx {errors.x:.2g}, of dweight "
        f"{errors.weight.max():.2g} in channel {int(errors.weight.argmax())}, trusted up to {threshold.x:.2g} and "
        f"{threshold.weight:.2g}"
    )
