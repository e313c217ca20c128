"""Tells what each norm and activation of a converted model did in its last call, in training."""

from __future__ import annotations

import copy
import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from inplace_abn import guard
from inplace_abn.conversion import classes, table
from inplace_abn.conversion.activations import OF_NORM
from inplace_abn.conversion.called import CalledActivation
from inplace_abn.conversion.convert import convert
from inplace_abn.conversion.converted import Converted, Outcome
from inplace_abn.conversion.layer_norms import ConvertedLayerNorm
from inplace_abn.conversion.norms import InPlaceNorm
from inplace_abn.conversion.table import readable
from inplace_abn.modules.abn import InPlaceActivatedNorm
from inplace_abn.trial import loss, randomness_restored, trainable


@dataclass(frozen=True)
class Layer:
    """What a norm, or an activation without a norm, did in its last call.

    Attributes:
        name: of the module in the model.
        kind: the name of its class before conversion.
        follows: an activation, "add" and an activation, or a function; empty if what followed is not known.
        in_place: whether it was in place.
        why: why it was not in place; empty if it was.
        bytes_saved: bytes that the forward pass did not hold for backward because of this layer, in all its calls. None
            if that was not measured: it is measured in the steps in which the model is watched.
        is_norm: False for an activation without a norm, and for a linear layer that is scaled.
        channels_saved: the share of channels whose normalised input is saved beside the output now, because the output
            does not determine it, by the dtype of inputs; 1 where the input is.
    """

    name: str
    kind: str
    follows: str
    in_place: bool
    why: str
    bytes_saved: int | None
    is_norm: bool = True
    channels_saved: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What the norms and activations of a model did. Print it, or use `to_dict`.

    Attributes:
        layers: one for each norm and activation, with ``name``, ``kind``, ``follows``, ``in_place``, ``why`` and
            ``bytes_saved``.
        unsupported: how many norms there are of each class that is not converted.
        why_unsupported: why classes are not converted; see `inplace_abn.register_norm`.
        built: how many in-place modules there are that were not converted, but built.
    """

    layers: tuple[Layer, ...]
    unsupported: dict[str, int]
    built: int = 0
    why_unsupported: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_place(self) -> tuple[Layer, ...]:
        """The layers that were in place."""
        return tuple(layer for layer in self.layers if layer.in_place)

    @property
    def bytes_saved(self) -> int:
        """The bytes that all layers saved in a training step, as far as they were measured."""
        return sum(layer.bytes_saved or 0 for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The report as a dictionary of plain values, for json."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "in_place": len(self.in_place),
            "bytes_saved": self.bytes_saved,
            "unsupported": dict(self.unsupported),
            "why_unsupported": dict(self.why_unsupported),
            "built": self.built,
        }

    def __str__(self) -> str:
        """The table, as wide as the terminal (100 columns where there is none)."""
        return self.table(shutil.get_terminal_size((100, 24)).columns)

    def table(self, width: int) -> str:
        """The table: a row for each layer, the reasons below it, and the totals.

        Several layers share a row if only the numbers in their names and reasons, and their bytes, are different.

        Args:
            width: of the lines, at least 60. Names and reasons are wrapped.
        """
        width = max(width, 60)
        groups: dict[tuple[str, ...], list[Layer]] = {}
        for layer in self.layers:
            verdict = "in place" if layer.in_place else "as torch"
            key = (table.shape_of(layer.name), layer.follows, verdict, table.numberless(layer.why))
            groups.setdefault(key, []).append(layer)
        rows, reasons = [("name", "layers", "saves", "it is", "what follows")], []
        wrapper = textwrap.TextWrapper(width, "    ", "      ", break_on_hyphens=False)
        for (_, follows, verdict, _), layers in groups.items():
            names = table.joined([layer.name for layer in layers])
            rows.append((names, str(len(layers)), _saved(layers), verdict, follows or "-"))
            why = table.joined([layer.why for layer in layers])
            reasons.append(why and "\n" + wrapper.fill(why))
        rows.append(("total", str(len(self.layers)), _saved(self.layers), "", ""))
        header, *body, total, rule = table.lay_out(rows, (1, 2), width)
        body = [row + why for row, why in zip(body, reasons, strict=True)]
        lines = [*self._found(), *self.left_out()]
        summary = [textwrap.fill(line, width, break_on_hyphens=False) for line in lines]
        return "\n".join([header, rule, *body, rule, total, "", *summary] if self.layers else summary)

    def _found(self) -> list[str]:
        if not self.layers:
            return ["the model has no norms or activations that can be converted"]
        if all(layer.why == Outcome().why for layer in self.layers):
            return [f"none of {len(self.layers)} norms and activations was called in training yet"]
        counts = []
        for is_norm, what in ((True, "norms"), (False, "activations without a norm")):
            verdicts = [layer.in_place for layer in self.layers if layer.is_norm == is_norm]
            if verdicts:
                counts.append(f"{sum(verdicts)} of {len(verdicts)} {what}")
        lines = [f"{' and '.join(counts)} are in place"]
        if any(layer.bytes_saved is not None for layer in self.layers):
            lines[0] += f" and save {readable(self.bytes_saved)} per training step"
        for dtype in sorted({dtype for layer in self.layers for dtype in layer.channels_saved}):
            shares = [layer.channels_saved[dtype] for layer in self.layers if dtype in layer.channels_saved]
            some = [share for share in shares if share > 0]
            if some:
                lines.append(
                    f"{len(some)} of {len(shares)} norms save channels in {dtype}, {sum(shares) / len(shares):.1%} of "
                    "all on average: their weights are nearly zero, or small beside the bias or what is added"
                )
        if any(share == 1 for layer in self.layers for share in layer.channels_saved.values()):
            lines.append("norms whose weights begin with zeros (zero_init_last) save less once these have grown")
        return lines

    def left_out(self) -> list[str]:
        """What is no norm that could be converted, in lines."""
        lines = [f"{self.built} norms were built in place"] if self.built else []
        if self.unsupported:
            found = ", ".join(f"{count} {kind}" for kind, count in self.unsupported.items())
            lines.append(f"not supported: {found}")
            lines += [f"{kind}: {why} (inplace_abn.register_norm)" for kind, why in self.why_unsupported.items()]
        return lines


def _saved(layers: Sequence[Layer]) -> str:
    known = [layer.bytes_saved for layer in layers if layer.bytes_saved is not None]
    return readable(sum(known)) if known else "-"


def report(model: nn.Module) -> Report:
    """What each norm and activation of ``model`` did in its last call in training, why it was not in place, and what it
    saved.

    Nothing runs, and nothing is changed. Before the first training step nothing is known of a layer. An activation that
    is part of a norm is in the norm's row.

    Args:
        model: a converted model, or a module that contains it.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inplace_abn.report: expected model to be a torch.nn.Module, got {type(model).__name__}")
    layers: list[Layer] = []
    unsupported: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    built = sum(isinstance(module, InPlaceActivatedNorm) for module in model.modules())
    for name, module in model.named_modules():
        found = module.__dict__.get(guard.CARRIED, module)
        if isinstance(found, Converted):
            outcome = found.outcome()
            kind = type(module) if found is not module else classes.original_class(type(module))
            saved = found._record.bytes_saved if outcome.in_place else None
            if outcome != OF_NORM and not (isinstance(found, CalledActivation) and not found.is_called):
                is_norm = isinstance(found, (InPlaceNorm, ConvertedLayerNorm))
                shares = {str(dtype).removeprefix("torch."): share for dtype, share in found.shares_saved().items()}
                layers.append(Layer(name, kind.__name__, *outcome, saved, is_norm, shares if is_norm else {}))
        elif isinstance(module, classes.KINDS) or classes.is_norm_of_rows(module):
            why = classes.unfit_reason(module) or "it was not converted"
            layers.append(Layer(name, type(module).__name__, "", False, why, None))
        elif classes.is_norm(module):
            unsupported[type(module).__name__] += 1
            if not type(module).__module__.startswith("torch."):
                reasons[type(module).__name__] = classes.why_no_norm_of_rows(module)
    return Report(tuple(layers), dict(unsupported), built, reasons)


def analyze(model: nn.Module, /, *args: Any, **kwargs: Any) -> Report:
    """The `report` of a converted copy of ``model`` after one training step.

    The loss is the sum of the outputs. The model stays as it is.

    Args:
        model: any module, converted or not.
        args, kwargs: arguments of the forward pass.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no output requires grad.
        RuntimeError: the model cannot be copied.

    Errors of the model's forward pass are passed on.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inplace_abn.analyze: expected model to be a torch.nn.Module, got {type(model).__name__}")
    with randomness_restored(model):
        other = convert(trainable(model))
        for _, layer in guard.layers_of(other):
            if isinstance(layer, Converted):
                layer.forget()
        loss(other, copy.deepcopy(args), copy.deepcopy(kwargs)).backward()
        return report(other)
