"""What `inplace_abn.analyze` found: per BatchNorm a verdict, its reasons, and the bytes it saves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Residual:
    """BatchNorm, addition and activation that ``residual=`` makes one."""

    parent: str
    """The module whose forward pass adds."""
    activation: str
    activation_param: float
    bytes_saved: int
    """Per training step, if it is rewritten."""
    reasons: tuple[str, ...] = ()
    """Why it cannot be rewritten; empty if it can."""
    partner: str = ""
    """A BatchNorm that makes the other operand, and goes in place with this one."""


@dataclass(frozen=True)
class Layer:
    """A BatchNorm of the model."""

    name: str
    kind: str
    """Its class."""
    producer: str
    """The op that makes its input."""
    activation: str
    """What the in-place module applies, or what was seen to follow."""
    activation_param: float
    site: str
    """Where the activation is: "module" (becomes Identity), "shared" (is passed through), "call" (a function call in
    the forward pass of ``parent``, which is rewritten), "own" (in the BatchNorm itself), or "" for none."""
    parent: str
    activation_module: str
    reasons: tuple[str, ...]
    """Why it is refused; empty if it is converted."""
    bytes_saved: int
    """Activation memory that the forward pass holds for backward natively, but not in place."""
    saved_by: tuple[str, ...] = ()
    """The ops that keep its output, or its activation's, for backward."""
    followed_by: str = ""
    """The op that reads its output first, if that is not the activation."""
    residual: Residual | None = None

    @property
    def convertible(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Plan:
    """The verdict on every BatchNorm of a model, by name. Print it, or see `to_dict`."""

    layers: tuple[Layer, ...]
    evaluation_errors: tuple[str, ...] = ()
    """Of the model's forward pass in evaluation, which therefore nothing is known of; one for each example."""
    residual: bool = False
    """Whether residual blocks are converted too, as by ``residual=True`` of `inplace_abn.convert`."""

    @property
    def convertible(self) -> tuple[Layer, ...]:
        """The layers that `inplace_abn.convert` converts."""
        return tuple(layer for layer in self.layers if layer.convertible)

    @property
    def bytes_saved(self) -> int:
        """By all layers that are converted, per training step."""
        return sum(layer.bytes_saved for layer in self.convertible)

    @property
    def residuals(self) -> tuple[Layer, ...]:
        """The layers that are converted with ``residual=True`` only."""
        return tuple(layer for layer in self.layers if layer.residual is not None and not layer.residual.reasons)

    @property
    def residual_bytes_saved(self) -> int:
        """What ``residual=True`` saves more."""
        return sum(layer.residual.bytes_saved for layer in self.residuals if layer.residual is not None)

    def to_dict(self) -> dict[str, Any]:
        """Of plain values only, for json."""
        return {
            "layers": [asdict(layer) | {"convertible": layer.convertible} for layer in self.layers],
            "converted": len(self.convertible),
            "bytes_saved": self.bytes_saved,
            "residuals": len(self.residuals),
            "residual_bytes_saved": self.residual_bytes_saved,
        }

    def __str__(self) -> str:
        rows = [("name", "input from", "activation", "verdict", "saves", "reasons")]
        for layer in self.layers:
            saves = readable(layer.bytes_saved) if layer.convertible else "-"
            verdict = "in place" if layer.convertible else "refused"
            activation = layer.activation + (f" ({layer.site})" if layer.site else "")
            rows.append((layer.name, layer.producer, activation, verdict, saves, "; ".join(_notes(layer))))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [" | ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]) for row in rows]
        lines.insert(1, "-|-".join("-" * width for width in [*widths, len("reasons")]))
        lines.append(
            f"{len(self.convertible)} of {len(self.layers)} BatchNorms go in place and save "
            f"{readable(self.bytes_saved)} per training step"
        )
        if self.residuals:
            lines.append(
                f"residual=True would convert {len(self.residuals)} residual blocks and save "
                f"{readable(self.residual_bytes_saved)} more"
            )
        return "\n".join(line.rstrip() for line in lines)


def _notes(layer: Layer) -> list[str]:
    notes = list(layer.reasons)
    if layer.residual is not None:
        saved = readable(layer.residual.bytes_saved)
        notes.append(
            f"residual= would save {saved}, but {'; '.join(layer.residual.reasons)}"
            if layer.residual.reasons
            else f"residual=True would save {saved}"
        )
    return notes


def readable(size: float) -> str:
    """A number of bytes, with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
