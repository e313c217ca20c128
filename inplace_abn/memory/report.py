"""The memory of a model's training step, native and converted."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from inplace_abn import guard
from inplace_abn.conversion.convert import convert, revert
from inplace_abn.conversion.converted import Converted
from inplace_abn.conversion.report import Report, report
from inplace_abn.conversion.table import lay_out, readable
from inplace_abn.memory.step import Usage, measure
from inplace_abn.trial import randomness_restored, trainable


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a model's training step, and that of a converted copy if it was measured. Print it to see a table.

    Attributes:
        before: of the model as it is.
        after: of the converted copy.
        norms: what each norm and activation of the converted copy did.
    """

    before: Usage
    after: Usage | None = None
    norms: Report | None = None

    def __str__(self) -> str:
        rows = [("", "held for backward", "peak of a step")]
        rows.append(("native", readable(self.before.held), readable(self.before.peak)))
        if self.after is not None:
            rows.append(("converted", readable(self.after.held), readable(self.after.peak)))
            rows.append(("saved", _less(self.after.held, self.before.held), _less(self.after.peak, self.before.peak)))
            rows.append(("at first", readable(self.after.first_held), readable(self.after.first_peak)))
        *lines, _ = lay_out(rows, (1, 2), 100)
        if self.norms is not None and not self.norms.layers:
            lines += self.norms.left_out()
        return "\n".join(lines)


def _less(after: int, before: int) -> str:
    return f"({(before - after) / before:.0%}) {readable(before - after)}" if before else "-"


def memory_report(model: nn.Module, /, *args: Any, converted: bool = True, **kwargs: Any) -> MemoryReport:
    """Measures a training step of a copy of ``model`` and, unless ``converted`` is False, of a converted copy of it.

    Args:
        model: stays as it is. If it is converted already, the native step is that of a reverted copy.
        args, kwargs: arguments of the forward pass.
        converted: measure a converted copy too.

    Returns:
        Both measurements, and what each norm of the converted copy did. Print it to see a table.

    Raises:
        ValueError: no output requires grad.
        RuntimeError: the model cannot be copied.
    """
    with randomness_restored(model):
        # The model may write to what it is given.
        native = trainable(model)
        if any(isinstance(layer, Converted) for _, layer in guard.layers_of(native)):
            native = revert(native)
        before = measure(native, *copy.deepcopy(args), **copy.deepcopy(kwargs))
        if not converted:
            return MemoryReport(before)
        other = convert(trainable(model))
        after = measure(other, *copy.deepcopy(args), **copy.deepcopy(kwargs))
        return MemoryReport(before, after, report(other))
