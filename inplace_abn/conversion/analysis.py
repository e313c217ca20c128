"""Decides which norms of a model can go in place, by what a recorded forward pass did with their memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from inplace_abn import recovery
from inplace_abn.conversion import norms
from inplace_abn.conversion.findings import Finding, examine, examine_residual
from inplace_abn.conversion.plan import Layer, Plan, Residual
from inplace_abn.conversion.prediction import Planned, saved
from inplace_abn.conversion.recorder import record
from inplace_abn.example import examples_of
from inplace_abn.figures import THRESHOLDS
from inplace_abn.recording import Recording
from inplace_abn.settings import check_hyperparameters

_NO_GAIN = "nothing would be gained: as much would be kept for backward as before"


def analyze(model: nn.Module, /, *example_inputs: Any, **kwargs: Any) -> Plan:
    """Tells which norms of ``model`` can go in place, why the others cannot, and how much memory this saves.

    The model runs once in training mode and once in evaluation, on fake tensors: nothing is computed, and no memory is
    taken. A model whose forward pass depends on values runs on its real tensors instead. Buffers, attributes, hooks,
    training flags and random generators stay as they were.

    Args:
        model: any module. BatchNorm1d, 2d, 3d, SyncBatchNorm, InstanceNorm1d, 2d, 3d and timm's BatchNormAct2d are
            analyzed. Their subclasses are refused.
        example_inputs: arguments of the model's forward pass; or several `Example`, each with the arguments of one
            call, if the model can take different ways. A norm is refused if any of them gives a reason.
        kwargs: keyword arguments of the model's forward pass.

    Returns:
        The plan, for `print` and for `inplace_abn.convert`.

    Raises:
        TypeError: ``model`` is no module, or an `Example` is mixed with other arguments.

    Errors of the model's forward pass in training mode are passed on. Those in evaluation are in the plan. Norms in
    scripted and traced submodules are not looked at, but what such submodules read is recorded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inplace_abn.analyze: expected model to be a torch.nn.Module, got {type(model).__name__}")
    examples = examples_of("inplace_abn.analyze", example_inputs, kwargs)
    found: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, norms.KINDS) and not isinstance(module, norms.InPlaceNorm)
    }
    unfit = {name: unfit_reasons(module) for name, module in found.items()}
    recordings: list[Recording] = []
    errors: list[str] = []
    for example in examples:
        recorded, error = record(model, example)
        recordings += recorded
        errors += [error] if error else []
    return replace(_Decision(found, unfit, recordings).plan(), evaluation_errors=_unique(errors))


def unfit_reasons(module: nn.Module) -> list[str]:
    """Why a norm cannot be converted, whatever a forward pass does with it."""
    if norms.converted_class(module) is None:
        return [f"{type(module).__name__} is a subclass whose forward pass is unknown"]
    reasons = []
    if "forward" in vars(module):
        reasons.append("it has a forward pass of its own")
    try:
        check_hyperparameters(module.eps, module.momentum)  # type: ignore[arg-type]
    except ValueError as error:
        reasons.append(str(error).removeprefix("inplace_abn: "))
    return reasons


class _Decision:
    """Unites the findings of all recordings."""

    def __init__(self, modules: dict[str, nn.Module], unfit: dict[str, list[str]], recordings: list[Recording]) -> None:
        self.modules, self.unfit, self.recordings = modules, unfit, recordings
        self.findings = [{name: found for name in modules if (found := examine(r, name))} for r in recordings]
        for findings, recording in zip(self.findings, recordings, strict=True):
            for name in findings:
                examine_residual(recording, findings, name, unfit)

    def plan(self) -> Plan:
        layers = {name: self._layer(name) for name in self.modules}
        layers = self._with_gains(layers)
        return Plan(tuple(self._with_chains(layers).values()))

    def _of(self, name: str) -> list[Finding]:
        return [finding for findings in self.findings for finding in findings.get(name, [])]

    def _layer(self, name: str) -> Layer:
        module, found = self.modules[name], self._of(name)
        reasons = list(self.unfit[name])
        if not any(name in f for r, f in zip(self.recordings, self.findings, strict=True) if r.training):
            reasons.append("it was not called in the recorded forward pass")
        for finding in found:
            reasons += finding.reasons
        producers = [
            r.producer(f[name][0].input) for r, f in zip(self.recordings, self.findings, strict=True) if name in f
        ]
        producer = next((str(op) for op in producers if op is not None), "a model input" if found else "")
        activation, param, output_reasons = self._activation(found)
        reasons += output_reasons
        return Layer(
            name=name,
            kind=type(module).__name__,
            producer=producer,
            activation=activation,
            activation_param=param,
            reasons=_unique(reasons),
            kept=_unique(reason for finding in found for reason in finding.kept_reasons),
            saved_by=_unique(saver for finding in found for saver in finding.saved_by),
            followed_by=next((f.followed_by for f in found), "") if activation == "identity" else "",
            residual=self._residual(name, found, reasons),
            note=_note(module, activation, param, self._dtype(name)),
        )

    @staticmethod
    def _activation(found: list[Finding]) -> tuple[str, float, list[str]]:
        """Name and parameter of the activation that follows, and the reasons against it."""
        identity = "identity", 0.0
        activations = {None if f.activation is None else (f.activation.name, f.activation.param) for f in found}
        if len(activations) > 1:
            # Calls may have different activations. The norm sees each of them when it comes.
            return *identity, [reason for f in found for reason in f.fused_reasons or f.identity_reasons]
        known = next(iter(activations), None)
        if known is None:
            return *identity, [reason for f in found for reason in f.identity_reasons]
        return *known, [reason for f in found for reason in f.fused_reasons]

    @staticmethod
    def _residual(name: str, found: list[Finding], reasons: list[str]) -> Residual | None:
        residuals = [finding.residual for finding in found]
        first = residuals[0] if residuals else None
        if first is None:
            return None
        united = []
        for finding, other in zip(found, residuals, strict=True):
            if other is None or (other.partner, other.activation.name, other.activation.param) != (
                first.partner,
                first.activation.name,
                first.activation.param,
            ):
                united.append("it differs between examples or calls")
            else:
                united += [*finding.reasons, *other.reasons]
        return Residual(first.activation.name, first.activation.param, 0, _unique(united), first.partner)

    def _dtype(self, name: str) -> torch.dtype:
        for recording, findings in zip(self.recordings, self.findings, strict=True):
            if name in findings and findings[name][0].op >= 0:
                return recording.ops[findings[name][0].op].tensors[0].dtype
        return torch.float32

    def _with_gains(self, layers: dict[str, Layer]) -> dict[str, Layer]:
        """The layers with the bytes that each saves, first without and then with residuals.

        A layer that saves nothing is refused.
        """
        without = {name for name, layer in layers.items() if layer.convertible}
        while True:
            modes = {name: self._mode(layers[name]) for name in without}
            gains = self._gains(modes)
            lost = self._superfluous(modes, gains)
            if not lost:
                break
            without -= lost
        for name, layer in layers.items():
            if name in without:
                layers[name] = replace(layer, bytes_saved=gains[name])
            elif layer.convertible:
                layers[name] = replace(layer, reasons=(_NO_GAIN,))
        with_residual = {n for n, layer in layers.items() if layer.residual is not None and not layer.residual.reasons}
        with_residual = {n for n in with_residual if not self.unfit[n]}
        while True:
            modes = {name: self._mode(layers[name]) for name in without}
            for name in with_residual:
                residual = layers[name].residual
                assert residual is not None
                if residual.partner:
                    modes.setdefault(residual.partner, "identity")
            modes |= dict.fromkeys(with_residual, "residual")
            all_gains = self._gains(modes)

            more = {name: self._more(layers[name], with_residual, all_gains, gains) for name in with_residual}
            counted = with_residual | {layer.residual.partner for n in with_residual if (layer := layers[n]).residual}
            losses = {n: all_gains[n] - gain for n, gain in gains.items() if all_gains[n] < gain and n not in counted}
            self._charge(more, losses)
            lost = {name for name in with_residual if more[name] <= 0}
            if not lost:
                break
            for name in lost:
                layers[name] = replace(
                    layers[name],
                    residual=replace(
                        layers[name].residual,  # type: ignore[type-var]
                        reasons=("nothing would be gained, because the residual is not kept otherwise",),
                    ),
                )
            with_residual -= lost
        for name in with_residual:
            layers[name] = replace(
                layers[name],
                residual=replace(layers[name].residual, bytes_saved=more[name]),  # type: ignore[type-var]
            )
        return layers

    def _superfluous(self, modes: dict[str, str], gains: dict[str, int]) -> set[str]:
        """The norms without which as much is saved.

        A norm that saves nothing itself may be needed by another one, to release an input that both read.
        """
        total = sum(gains.values())

        def without(name: str) -> int:
            return sum(self._gains({n: mode for n, mode in modes.items() if n != name}).values())

        return {name for name, gain in gains.items() if gain <= 0 and without(name) >= total}

    @staticmethod
    def _more(layer: Layer, with_residual: set[str], gains: dict[str, int], before: dict[str, int]) -> int:
        """The bytes that a layer and its partner save with the residual, beyond what they save without it."""
        names = {layer.name}
        if layer.residual is not None and layer.residual.partner:
            names |= {layer.residual.partner} - with_residual
        return sum(gains[name] - before.get(name, 0) for name in names)

    def _charge(self, more: dict[str, int], losses: dict[str, int]) -> None:
        """Charges a residual block for what another norm no longer saves because the block keeps its input."""
        for findings in self.findings:
            keepers = {
                finding.residual.activation.result: name
                for name in more
                for finding in findings.get(name, [])
                if finding.residual is not None
            }
            for name in list(losses):
                keeper = next((keepers[f.input] for f in findings.get(name, []) if f.input in keepers), None)
                if keeper is not None:
                    more[keeper] += losses.pop(name)

    @staticmethod
    def _mode(layer: Layer) -> str:
        return "identity" if layer.activation == "identity" else "activation"

    def _gains(self, modes: dict[str, str]) -> dict[str, int]:
        """The most that each norm saves over the examples; negative if more is held in all of them."""
        most: dict[str, int] = {}
        for recording, findings in zip(self.recordings, self.findings, strict=True):
            if not recording.training:
                continue
            planned = []
            for name, mode in modes.items():
                for finding in findings.get(name, []):
                    own = mode
                    if mode != "residual":
                        own = "identity" if finding.activation is None else "activation"
                    planned.append(Planned(name, finding, own))
            for name, size in saved(recording, planned).items():
                most[name] = max(most.get(name, size), size)
        return {name: most.get(name, 0) for name in modes}

    def _with_chains(self, layers: dict[str, Layer]) -> dict[str, Layer]:
        """A norm in place keeps its output, so the norm that reads this output cannot overwrite it."""
        for findings in self.findings:
            results: dict[int, str] = {}
            for name, found in findings.items():
                layer = layers[name]
                for finding in found:
                    if layer.residual is not None and not layer.residual.reasons and finding.residual is not None:
                        results[finding.residual.activation.result] = name
                        results[finding.residual.storage] = f"{name}, as its residual"
                    if layer.convertible or layer.residual is not None:
                        results[finding.output] = name
                    if finding.activation is not None and layer.convertible:
                        results[finding.activation.result] = name
            for name, found in findings.items():
                for finding in found:
                    if finding.input in results:
                        reason = f"its input is kept in place by {results[finding.input]}"
                        layers[name] = replace(layers[name], kept=_unique([*layers[name].kept, reason]))
        return layers


def _unique(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reasons))


def _note(module: nn.Module, activation: str, param: float, dtype: torch.dtype) -> str:
    """Why the guard will not trust the layer now, by its parameters; empty if it will."""
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
