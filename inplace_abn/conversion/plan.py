"""The result of `inplace_abn.analyze`: for each norm a verdict, its reasons, and the bytes it saves."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from inplace_abn.conversion import table


@dataclass(frozen=True)
class Residual:
    """A norm, an addition and an activation that ``residual=True`` fuses."""

    activation: str
    activation_param: float
    bytes_saved: int
    """Per training step, if the three are fused."""
    reasons: tuple[str, ...] = ()
    """Why they cannot be fused; empty if they can."""
    partner: str = ""
    """The norm that makes the other operand, if it goes in place with this one."""


@dataclass(frozen=True)
class Layer:
    """A norm of the model."""

    name: str
    kind: str
    """The name of its class."""
    producer: str
    """The op that makes its input."""
    activation: str
    """The activation that follows; "identity" if no known one does."""
    activation_param: float
    reasons: tuple[str, ...]
    """Why it is refused; empty if it is converted."""
    kept: tuple[str, ...] = ()
    """Why its input stays as it is, and the result goes to new memory; empty if the input is overwritten."""
    bytes_saved: int = 0
    """Bytes of activations that the forward pass holds for backward natively, but not in place."""
    saved_by: tuple[str, ...] = ()
    """The ops that keep its output, or its activation's, for backward."""
    followed_by: str = ""
    """The op that reads its output first, if that is not the activation."""
    residual: Residual | None = None
    note: str = ""
    """Why the layer keeps its input at first although it is converted: the input could not be recovered from the
    output. Empty if it does not."""

    @property
    def convertible(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Plan:
    """The verdict on every norm of a model. Print it, or use `to_dict`."""

    layers: tuple[Layer, ...]
    evaluation_errors: tuple[str, ...] = ()
    """The errors of the model's forward pass in evaluation, for examples that raise one.

    Nothing is then known of the evaluation.
    """
    residual: bool = True
    """Whether residual blocks are converted too. ``residual=False`` of `inplace_abn.convert` leaves them out."""

    @property
    def convertible(self) -> tuple[Layer, ...]:
        """The layers that `inplace_abn.convert` converts."""
        return tuple(layer for layer in self.layers if layer.convertible)

    @property
    def bytes_saved(self) -> int:
        """The bytes that all converted layers save per training step."""
        return sum(layer.bytes_saved for layer in self.convertible)

    @property
    def residuals(self) -> tuple[Layer, ...]:
        """The layers that are fused with an addition and an activation, unless ``residual=False``."""
        return tuple(layer for layer in self.layers if layer.residual is not None and not layer.residual.reasons)

    @property
    def residual_bytes_saved(self) -> int:
        """The bytes that `residuals` save in addition."""
        return sum(layer.residual.bytes_saved for layer in self.residuals if layer.residual is not None)

    @property
    def waiting(self) -> tuple[Layer, ...]:
        """The converted layers that keep their input until it can be recovered from their output."""
        return tuple(layer for layer in self.layers if layer.note and (layer.convertible or self._has_residual(layer)))

    @property
    def bytes_waiting(self) -> int:
        """The bytes that are not saved while all layers of `waiting` keep their input.

        They are a part of `bytes_saved`, and of `residual_bytes_saved` where residual blocks are converted.
        """
        saved = sum(layer.bytes_saved for layer in self.waiting if layer.convertible)
        return saved + sum(
            r.bytes_saved for layer in self.waiting if (r := layer.residual) and self._has_residual(layer)
        )

    def _has_residual(self, layer: Layer) -> bool:
        return self.residual and layer.residual is not None and not layer.residual.reasons

    def to_dict(self) -> dict[str, Any]:
        """The plan as a dictionary of plain values, for json."""
        return {
            "layers": [asdict(layer) | {"convertible": layer.convertible} for layer in self.layers],
            "converted": len(self.convertible),
            "bytes_saved": self.bytes_saved,
            "residuals": len(self.residuals),
            "residual_bytes_saved": self.residual_bytes_saved,
            "residual": self.residual,
            "waiting": len(self.waiting),
            "bytes_waiting": self.bytes_waiting,
            "evaluation_errors": self.evaluation_errors,
        }

    def __str__(self) -> str:
        """The table, as wide as the terminal (100 columns where there is none)."""
        return self.table(shutil.get_terminal_size((100, 24)).columns)

    def table(self, width: int) -> str:
        """The table: a row for each norm, the reasons below it, and the totals.

        Several norms share a row if only the numbers in their names, producers and reasons, and their bytes, are
        different.

        Args:
            width: of the lines, at least 60. Names and reasons are wrapped. The column "input from" is left out if
                there is no room for it.
        """
        width = max(width, 60)
        groups: dict[tuple[str, ...], list[Layer]] = {}
        for layer in self.layers:
            activation, verdict = self._verdict(layer)
            same = (table.numberless(text) for text in (layer.producer, *self._notes(layer)))
            groups.setdefault((table.shape_of(layer.name), activation, verdict, *same), []).append(layer)
        rows = [("name", "norms", "activation", "verdict", "saves", "input from")]
        for (_, activation, verdict, *_), layers in groups.items():
            names, producers = (
                table.joined(texts) for texts in zip(*((x.name, x.producer) for x in layers), strict=True)
            )
            saved = sum(map(self._saved, layers))
            saves = "-" if verdict == "refused" or not saved else readable(saved)
            rows.append((names, str(len(layers)), activation, verdict, saves, producers))
        rows.append(("total", str(len(self.layers)), "", "", readable(sum(map(self._saved, self.layers))), ""))
        header, *body, total, rule = table.lay_out(rows, (1, 4), width)
        for i, layers in enumerate(groups.values()):
            for notes in zip(*map(self._notes, layers), strict=True):
                body[i] += "\n" + textwrap.fill(
                    table.joined(notes),
                    width,
                    initial_indent="    ",
                    subsequent_indent="      ",
                    break_on_hyphens=False,
                )
        lines = [header, rule, *body, rule, total, ""]
        totals = [
            f"{len(self.convertible)} of {len(self.layers)} norms go in place and save "
            f"{readable(self.bytes_saved)} per training step"
        ]
        if self.waiting:
            totals.append(
                f"{len(self.waiting)} of them keep their input at first; {readable(self.bytes_waiting)} are saved only "
                "once they do not"
            )
        if self.residuals:
            verb = ("converts", "saves") if self.residual else ("would convert", "save")
            totals.append(
                f"residual=True {verb[0]} {len(self.residuals)} residual blocks and {verb[1]} "
                f"{readable(self.residual_bytes_saved)} more"
            )
        totals += [
            f"The model failed in evaluation, so what it reads only there is not known: {error}"
            for error in self.evaluation_errors
        ]
        lines += [textwrap.fill(text, width, break_on_hyphens=False) for text in totals]
        return "\n".join(lines)

    def _partners(self) -> dict[str, str]:
        """The name of each residual block's partner, and the name of the norm whose residual the partner makes."""
        return {layer.residual.partner: layer.name for layer in self.residuals if layer.residual is not None}

    @property
    def converted(self) -> tuple[Layer, ...]:
        """The layers that `inplace_abn.convert` makes in-place norms, including those of residual blocks."""
        return tuple(layer for layer in self.layers if self._verdict(layer)[1] != "refused")

    def _verdict(self, layer: Layer) -> tuple[str, str]:
        """The activation that is fused with the norm, and the verdict on the norm."""
        if self._has_residual(layer) and layer.residual is not None:
            return layer.residual.activation, "residual"
        if layer.convertible:
            return layer.activation, "beside input" if layer.kept else "in place"
        if self.residual and layer.name in self._partners():
            return "identity", "residual"
        return layer.activation, "refused"

    def _saved(self, layer: Layer) -> int:
        saved = layer.bytes_saved * layer.convertible
        return saved + layer.residual.bytes_saved if layer.residual and self._has_residual(layer) else saved

    def _notes(self, layer: Layer) -> list[str]:
        residual = layer.residual
        if self.residual and layer in self.residuals:
            return [layer.note] if layer.note else []
        if self.residual and layer.name in self._partners() and not layer.convertible:
            return [f"it makes the residual of {self._partners()[layer.name]}"]
        notes = ["; ".join(layer.reasons)] if layer.reasons else [n for n in (layer.note, "; ".join(layer.kept)) if n]
        if residual is not None:
            saved = readable(residual.bytes_saved)
            notes.append(
                f"it is not one with its residual, because {'; '.join(residual.reasons)}"
                if residual.reasons
                else f"residual=True would save {saved}"
            )
            if layer.note and not residual.reasons and not layer.convertible:
                notes.append(layer.note)
        return notes


def readable(size: float) -> str:
    """A number of bytes, with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
