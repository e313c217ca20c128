"""Tells what each norm of a converted model did in its last call, in training."""

from __future__ import annotations

import copy
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from inplace_abn.conversion import classes, table
from inplace_abn.conversion.convert import convert
from inplace_abn.conversion.norms import InPlaceNorm
from inplace_abn.conversion.table import readable
from inplace_abn.conversion.waiting import NEAR_ZERO
from inplace_abn.modules.abn import InPlaceABN
from inplace_abn.modules.instance_norm import InPlaceInstanceNorm
from inplace_abn.trial import loss, randomness_restored, trainable


@dataclass(frozen=True)
class Layer:
    """What a norm did in its last call."""

    name: str
    kind: str
    """The name of its class before conversion."""
    follows: str
    """What followed: an activation, "add" and an activation, or a function; empty if that is not known."""
    in_place: bool
    why: str
    """Why it was not in place; empty if it was."""
    bytes_saved: int | None
    """Bytes that the forward pass did not hold for backward because of this norm, in all its calls.

    None if that was not measured: it is measured in the steps in which the model is watched.
    """


@dataclass(frozen=True)
class Report:
    """What the norms of a model did. Print it, or use `to_dict`."""

    layers: tuple[Layer, ...]
    unsupported: dict[str, int]
    """How many norms there are of each class that is not converted."""
    built: int = 0
    """How many in-place modules there are that were not converted, but built."""

    @property
    def in_place(self) -> tuple[Layer, ...]:
        """The norms that were in place."""
        return tuple(layer for layer in self.layers if layer.in_place)

    @property
    def bytes_saved(self) -> int:
        """The bytes that all norms saved in a training step, as far as they were measured."""
        return sum(layer.bytes_saved or 0 for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The report as a dictionary of plain values, for json."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "in_place": len(self.in_place),
            "bytes_saved": self.bytes_saved,
            "unsupported": dict(self.unsupported),
            "built": self.built,
        }

    def __str__(self) -> str:
        """The table, as wide as the terminal (100 columns where there is none)."""
        return self.table(shutil.get_terminal_size((100, 24)).columns)

    def table(self, width: int) -> str:
        """The table: a row for each norm, the reasons below it, and the totals.

        Several norms share a row if only the numbers in their names and reasons, and their bytes, are different.

        Args:
            width: of the lines, at least 60. Names and reasons are wrapped.
        """
        width = max(width, 60)
        groups: dict[tuple[str, ...], list[Layer]] = {}
        for layer in self.layers:
            key = (table.shape_of(layer.name), layer.follows, _verdict(layer), table.numberless(layer.why))
            groups.setdefault(key, []).append(layer)
        rows = [("name", "norms", "saves", "it is", "what follows")]
        for layers in groups.values():
            first = layers[0]
            names = table.joined([layer.name for layer in layers])
            rows.append((names, str(len(layers)), _saved(layers), _verdict(first), first.follows or "-"))
        rows.append(("total", str(len(self.layers)), _saved(self.layers), "", ""))
        header, *body, total, rule = table.lay_out(rows, (1, 2), width)
        for i, layers in enumerate(groups.values()):
            if layers[0].why:
                why = table.joined([layer.why for layer in layers])
                body[i] += "\n" + textwrap.fill(
                    why, width, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False
                )
        told = [textwrap.fill(line, width, break_on_hyphens=False) for line in self._totals()]
        return "\n".join([header, rule, *body, rule, total, "", *told] if self.layers else told)

    def _totals(self) -> list[str]:
        return [*self._found(), *self.left_out()]

    def _found(self) -> list[str]:
        lines = ["the model has no norms that can be converted"]
        if self.layers:
            lines = [f"{len(self.in_place)} of {len(self.layers)} norms are in place"]
            if any(layer.bytes_saved is not None for layer in self.layers):
                lines[0] += f" and save {readable(self.bytes_saved)} per training step"
        if any(layer.why == NEAR_ZERO for layer in self.layers):
            lines.append(
                f"{NEAR_ZERO}: many models begin with weights of zero (zero_init_last), which a trained model has not; "
                "such a norm is in place once its weight has grown"
            )
        return lines

    def left_out(self) -> list[str]:
        """What is no norm that could be converted, in lines."""
        lines = [f"{self.built} norms were built in place"] if self.built else []
        if self.unsupported:
            found = ", ".join(f"{count} {kind}" for kind, count in self.unsupported.items())
            lines.append(f"not supported: {found}")
        return lines


def _verdict(layer: Layer) -> str:
    return "in place" if layer.in_place else "as torch"


def _saved(layers: Sequence[Layer]) -> str:
    known = [layer.bytes_saved for layer in layers if layer.bytes_saved is not None]
    return readable(sum(known)) if known else "-"


def report(model: nn.Module) -> Report:
    """What each norm of ``model`` did in its last call in training, why it was not in place, and what it saved.

    Nothing runs, and nothing is changed. Before the first training step nothing is known of a norm.

    Args:
        model: a converted model, or a module that contains it.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inplace_abn.report: expected model to be a torch.nn.Module, got {type(model).__name__}")
    layers: list[Layer] = []
    unsupported: Counter[str] = Counter()
    built = sum(isinstance(module, (InPlaceABN, InPlaceInstanceNorm)) for module in model.modules())
    for name, module in model.named_modules():
        if not classes.is_norm(module):
            continue
        if isinstance(module, InPlaceNorm):
            saved = module.bytes_saved if module.note().in_place else None
            kind, note = classes.original_class(type(module)).__name__, module.note()
            layers.append(Layer(name, kind, note.follows, note.in_place, note.why, saved))
        elif isinstance(module, classes.KINDS):
            why = classes.unfit_reason(module) or "it was not converted"
            layers.append(Layer(name, type(module).__name__, "", False, why, None))
        else:
            unsupported[type(module).__name__] += 1
    return Report(tuple(layers), dict(unsupported), built)


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
        for module in other.modules():
            if isinstance(module, InPlaceNorm):
                module.forget()
        loss(other, copy.deepcopy(args), copy.deepcopy(kwargs)).backward()
        return report(other)
