"""Norms of rows: layer norms and RMS norms, which keep their output for backward, and not their input.

In a transformer's block the input is the residual stream, which nothing else keeps, and a linear layer keeps the output
anyway. Backward recovers the normalised values from the output (`inplace_abn.autograd.rows`).

What a class computes is found out in its first call (`conversion.formulas`). Calls on real rows are checked when the
guard measures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from inplace_abn import _torch, functions, guard, reference
from inplace_abn.activations import IDENTITY
from inplace_abn.autograd import nodes
from inplace_abn.autograd.backward import Values, by_value
from inplace_abn.compiling import norms, rows, trust
from inplace_abn.conversion.converted import Alone, Note, may_have_node
from inplace_abn.conversion.formulas import ATTRIBUTES, Kind, key_of, kind_of, length
from inplace_abn.conversion.narrowed import narrowed, wide
from inplace_abn.conversion.offered import settled
from inplace_abn.conversion.pending import Pending
from inplace_abn.guard.figures import THRESHOLDS
from inplace_abn.guard.rows import figures
from inplace_abn.kernels import ops
from inplace_abn.modules.abn import as_leaf
from inplace_abn.settings import MAGNITUDE, ChannelSlots, Operands, Settings, parameters

_CONSUMER = (*IDENTITY, False)
_UNSUITABLE = "its input, its parameters or the mode of the call are not supported"
_UNKNOWN = "its forward pass is not that of a layer norm or an RMS norm"


class ConvertedLayerNorm(Alone):
    """The part that all converted layer norms and RMS norms have in common.

    The result has the bits that the module computes. Without a graph, for compilers, under tracers, transforms and
    dispatch modes, and while the guard does not trust the norm, it does what it did before conversion.
    """

    per_instance = True
    signed_weight = False
    track_running_stats = False

    @property
    def num_features(self) -> int:
        """The length of a row."""
        return length(self)

    @property
    def shared(self) -> int:
        return self.num_features

    @property
    def least_weight(self) -> float:
        return reference.LEAST_WEIGHT

    def scale_and_offset(self) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = parameters(self)
        kind = self.known_kind()
        offset = 0.0 if kind is None else kind.offset
        return weight if weight is None or not offset else weight.detach() + offset, bias

    def known_kind(self) -> Kind | None:
        """How the norm computes; None as long as it was not called."""
        return next(filter(None, self._past.kinds.values()), None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if isinstance(args[0], fx.Proxy):
            return as_leaf(self, args[0])  # type: ignore[arg-type]
        if type(args[0]) is Pending:
            # The norm before it keeps its output, if this one keeps it as well.
            return super().forward(*args)  # type: ignore[misc]
        x, y = wide(settled(args[0])), None
        if torch.compiler.is_compiling():
            y = self._compiled(x)
            return super().forward(x) if y is None else y  # type: ignore[misc]
        if torch.is_grad_enabled():
            y = self._kept(x)
        return self.noted(x, super().forward(x), IDENTITY) if y is None else y  # type: ignore[misc]

    def _kept(self, x: Tensor) -> Tensor | None:
        """The result, whose node keeps it; None where the norm does what it did before conversion."""
        self._note_watch()
        if self._is_given_up():
            return None
        if not self._is_suitable(x):
            self._past.note = Note(why=_UNSUITABLE)
            return None
        kind = self._kind(x)
        if kind is None:
            self._past.note = Note(why=_UNKNOWN)
            return None
        functions.calibrate()
        device = x.device.type
        is_narrow = self.narrow_activation() is not None and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_narrow else kind.dtype
        mode = guard.settled(self, dtype)
        look = guard.look(self, _like(x, kind, dtype), None) if mode is None else guard.Look(mode.decisions[-1], mode)
        look = guard.with_lost(self, look)
        if not look.due and not (look.trusted and guard.knows(self, look, _CONSUMER)):
            self._past.note = Note(why=self.why_untrusted or "it is measured first")
            return None
        return self._attempted(x, kind, look, dtype)

    def _attempted(self, x: Tensor, kind: Kind, look: guard.Look, dtype: torch.dtype) -> Tensor | None:
        """The result, unless the guard does not trust what it measures. It is kept in ``dtype``."""
        weight, bias = parameters(self)
        eps, name = kind.eps, self.__dict__["_guard_name"]
        settings = Settings(*IDENTITY, eps, MAGNITUDE, True, None, 0, name, look.decision.verbatim, kind.rows)
        moved = _moved(x, kind.axis, -1)
        data = moved.detach()
        with torch.no_grad():
            if kind.is_torch:
                y, _, rstd = torch.native_layer_norm(data, data.shape[-1:], weight, bias, eps)
            else:
                y = _moved(super().forward(x.detach()), kind.axis, -1).detach()  # type: ignore[misc]
                rstd = reference.inverse_std_of_rows(data, kind.rows, eps)
            kept = y.to(dtype)
            scale, offset = by_value(weight if weight is None or not kind.offset else weight + kind.offset, bias)
        if look.due:
            look = guard.learn(self, look, figures(data, kept, scale, offset, settings), _CONSUMER)
            if not look.trusted:
                self._past.note = Note(why=self.why_untrusted)
                return None
            settings = settings._replace(verbatim=look.decision.verbatim)
        values, columns = None, settings.verbatim
        if columns:
            with torch.no_grad():
                indices = columns.indices(data.device)
                values = reference.standardised_rows(data, rstd, kind.rows, indices).to(dtype)
        of_call = Values(scale, offset, rstd.flatten(), values)
        if not self._is_known():
            return None
        is_cast = kept is not y
        result = nodes.Result(y, kept if is_cast else None)
        z = _moved(self._attached(moved, result, Operands(weight, bias), of_call, settings), -1, kind.axis)
        device = x.device.type
        self._past.is_widened = torch.is_autocast_enabled(device) and y.dtype != torch.get_autocast_dtype(device)
        return narrowed(z, _moved(kept, -1, kind.axis), self._past) if is_cast else z

    def _compiled(self, x: Tensor) -> Tensor | None:
        """The result for compilers, which see whether what follows keeps it; None as in `_kept`."""
        if not torch.is_grad_enabled() or functions.is_disabled() or _torch.is_exporting() or x.dim() < 2:
            return None
        if self.is_parametrized():
            return None
        weight, bias = parameters(self)
        requires_grad = x.requires_grad
        for t in (weight, bias):
            if t is not None and t.requires_grad:
                if not isinstance(t, nn.Parameter):
                    return None
                requires_grad = True
        if not requires_grad or x.numel() == 0 or _torch.transforms_active() or self._revision < 0:
            return None
        size, device = self._length(), x.device.type
        is_at = tuple(axis for axis in (-1, 1) if x.shape[axis] == size)
        # Compilers compile anew when an attribute changes that they have read here.
        given = [getattr(self, name, None) for name in ATTRIBUTES]
        attributes = tuple(norms.constant(value) if isinstance(value, float) else value for value in given)
        found = self._formula(x.dtype, x.dim(), device, is_at, attributes)
        if found is None:
            return None
        axis, offset, eps, kind, is_torch, trusted, has_saved = found
        moved = x if axis == -1 else x.movedim(axis, -1)
        scale = weight if weight is None or not offset else weight + offset
        with torch.no_grad():
            if is_torch:
                y, *statistics = torch.native_layer_norm(moved, [size], weight, bias, eps)
            else:
                y = super().forward(x)  # type: ignore[misc]
                y, statistics = y if axis == -1 else y.movedim(axis, -1), rows.statistics(moved, kind, eps)
            kept = None
            if has_saved:
                kept = ChannelSlots(self._saved_rows, rows.verbatim(moved, statistics, self._saved_channels))
        z = rows.normalised(moved, y, statistics, (scale, bias), kept, trusted)
        return z if axis == -1 else z.movedim(-1, axis)

    @_torch.read_while_tracing
    def _length(self) -> int:
        return length(self)

    @_torch.read_while_tracing
    def _formula(
        self, dtype: torch.dtype, dim: int, device: str, axes: tuple[int, ...], attributes: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """How the norm computes for compilers, which have no values; None if it is not known or not trusted.

        ``attributes`` are what the module has now.
        """
        size = self.num_features
        shape = [size if i == 1 and 1 in axes else 2 for i in range(dim - 1)] + [size if -1 in axes else size + 1]
        # The rows are made up, so only their shape and dtype matter.
        kind = self._kind(torch.empty(shape, dtype=dtype, device=device))
        if kind is None:
            return None
        narrow = [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
        trusted, has_saved = trust.of_rows(self, dtype, torch.float32, *narrow)
        return (kind.axis, kind.offset, kind.eps, kind.rows, kind.is_torch, trusted, has_saved) if trusted else None

    def _is_suitable(self, x: Tensor) -> bool:
        """Whether a graph of plain tensors is recorded, and nobody watches the ops."""
        dtype, device, requires_grad = x.dtype, x.device, x.requires_grad
        if not may_have_node(x) or dtype not in THRESHOLDS or x.layout is not torch.strided or x.is_inference():
            return False
        if self.is_parametrized() or x.dim() < 2 or x.numel() == 0 or x.is_neg() or not ops.run_on(device):
            return False
        for t in parameters(self):
            if t is None:
                continue
            # What is computed for each call may be anything in the next one, and is not measured then.
            if type(t) not in (Tensor, nn.Parameter) or not t.is_leaf or t.device != device or t.is_inference():
                return False
            if t.dtype is not dtype and (t.dtype is not torch.float32 or dtype is torch.float64):
                return False
            requires_grad |= t.requires_grad
        return requires_grad

    def _kind(self, x: Tensor) -> Kind | None:
        """How the norm computes an input like x."""
        kinds, key = self._past.kinds, key_of(self, x)
        if key not in kinds and _torch.is_capturing(x):
            return None
        if key not in kinds:
            kinds[key] = kind_of(self, _original(self), x)
        return kinds[key]  # type: ignore[no-any-return]


def _original(module: Any) -> type:
    """The class before conversion, in which methods are looked up after those of this package."""
    order = type(module).__mro__
    return order[order.index(guard.Guarded) + 1]


def _moved(t: Tensor, source: int, destination: int) -> Tensor:
    return t if source == destination else t.movedim(source, destination)


def _like(x: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """A matrix of x's rows, as far as the guard looks at it before it measures."""
    size = x.numel() // x.shape[kind.axis], x.shape[kind.axis]
    return torch.empty_strided(size, (0, 0), dtype=dtype, device=x.device, requires_grad=x.requires_grad)
