"""The recipe of the output of a layer norm or an RMS norm, whose statistics are those of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch, guard, reference
from inplace_abn.activations import IDENTITY
from inplace_abn.autograd import native
from inplace_abn.autograd.backward import Saved, by_value
from inplace_abn.conversion import observed
from inplace_abn.conversion.formulas import Kind
from inplace_abn.conversion.recipes import OfCall, in_place_with, outcome_of
from inplace_abn.guard.measuring import figures_of_rows
from inplace_abn.settings import MAGNITUDE, Operands, Settings


class OfRows(OfCall):
    """The recipe of the output of a norm of rows. x is along the last dimension, and so is the output's `_base`."""

    kind: Kind
    _narrow: Tensor | None = None
    _rstd: Tensor | None = None
    _base: Tensor | None = None
    """The tensor that has the norm's node, if the output is a view of it."""

    def __init__(
        self,
        layer: Any,
        x: Tensor,
        operands: Operands,
        y: Tensor,
        node: native.Keep | None,
        kind: Kind,
        rstd: Tensor | None,
        base: Tensor | None,
    ) -> None:
        super().__init__(layer, x, operands, y, node)
        self.kind, self._rstd, self._base = kind, rstd, base

    def _take(self, statistics: Any) -> None:
        self._rstd = statistics[1]

    def keep(self, t: Tensor, reader: str) -> None:
        self._keep(t, t, reader)

    def cast(self, t: Tensor, dtype: torch.dtype, reader: str) -> Tensor | None:
        if t._version != self._version or (self._is_loaded and self._keep_node is None and self._narrow is None):
            return None
        if self._narrow is None:
            narrow = t.to(dtype)
            self._narrow = narrow if self._keep(t, narrow, reader) else None
        return self._narrow if self._narrow is not None and self._narrow.dtype == dtype else None

    def _keep(self, t: Tensor, kept: Tensor, reader: str) -> bool:
        """Makes the node keep the output t, or this copy of it, which a reader keeps anyway. False if it does not."""
        settled = self._cpp_and_decision(t, (), kept.dtype)
        if settled is not None and self._keep_in_cpp(*settled, t, None if kept is t else kept):
            self.layer._record.outcome = in_place_with(reader, False)
            return True
        if not self.is_open(t) or self._keep_node is None:
            return False
        base = t if self._base is None else self._base
        y = base.detach() if kept is t else moved_axis(kept.detach(), self.kind.axis, -1)
        found = self._decided(y, reader)
        if found is not None:
            keep, self._keep_node = self._keep_node, None
            (saved, settings), observer = found, self.layer.observer()
            alias = observer.saved(y, IDENTITY, True) if kept is t and not observer.is_blind else None
            keep(base, saved if alias is None else saved._replace(z=alias), self.x, self.operands, settings)
            observer.record(observed.Result(self.layer, *IDENTITY, False, is_alone=True, saved=alias), self.x, t, None)
        return found is not None

    def _decided(self, kept: Tensor, reader: str) -> tuple[Saved, Settings] | None:
        """What a node needs that keeps the output in this dtype; None if the guard does not trust the layer."""
        layer, kind, x, (weight, bias, _) = self.layer, self.kind, self.x.detach(), self.operands.of_graph()
        settings = settings_of_rows(layer, kind)
        # As far as the guard looks at the rows before it measures.
        size = x.numel() // x.shape[-1], x.shape[-1]
        rows = torch.empty_strided(size, (0, 0), dtype=x.dtype, device=x.device, requires_grad=self.x.requires_grad)
        planned = guard.plan(layer, rows, None, (), kept.dtype)
        with torch.no_grad(), _torch.unwatched():
            scale, offset = by_value(weight, bias)
            decision = guard.decided(layer, planned, lambda: figures_of_rows(x, kept, scale, offset, settings))
            layer._record.outcome = outcome_of(layer, reader, decision)
            if not decision.trusted:
                return None
            columns, values = decision.verbatim, None
            _, numbers = columns.places(x.device)
            rstd = reference.inverse_std_of_rows(x, kind.rows, kind.eps) if self._rstd is None else self._rstd
            if numbers is not None:
                values = reference.standardised_rows(x, rstd, kind.rows, numbers).to(kept.dtype)
        saved = Saved(kept, scale, offset, None, rstd.flatten(), values, numbers)
        return saved, settings._replace(verbatim=columns)


def settings_of_rows(layer: Any, kind: Kind) -> Settings:
    name = layer.__dict__["_guard_name"]
    return Settings(*IDENTITY, kind.eps, MAGNITUDE, True, None, 0, name, rows=kind.rows)


def moved_axis(t: Tensor, source: int, destination: int) -> Tensor:
    return t if source == destination else t.movedim(source, destination)
