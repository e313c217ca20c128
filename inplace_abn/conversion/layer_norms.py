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

from inplace_abn import _torch, guard, reference
from inplace_abn.autograd import native, nodes
from inplace_abn.compiling import norms, rows, trust
from inplace_abn.conversion.converted import Converted, Outcome, is_usual, unsuitable
from inplace_abn.conversion.formulas import Kind, attributes_of, autocast_of, key_of, kind_of, length
from inplace_abn.conversion.offered import kept_by, offer
from inplace_abn.conversion.recipes import UNREAD
from inplace_abn.conversion.recipes_of_rows import OfRows, moved_axis, settings_of_rows
from inplace_abn.modules.abn import as_leaf
from inplace_abn.settings import DISABLED, Operands, names_of, parameters

_UNKNOWN = "its forward pass is not that of a layer norm or an RMS norm"


class ConvertedLayerNorm(Converted):
    """The part that all converted layer norms and RMS norms have in common.

    The result has the bits that the module computes. Without a graph, for compilers, under tracers, transforms and
    dispatch modes, and while the guard does not trust the norm, it does what it did before conversion.
    """

    per_instance = True
    signed_weight = True
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
        return next(filter(None, self._record.kinds.values()), None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if isinstance(args[0], fx.Proxy):
            return as_leaf(self, args[0])  # type: ignore[arg-type]
        x, y = kept_by(args[0], "layer_norm"), None
        if torch.compiler.is_compiling():
            y = self._compiled(x)
        elif torch.is_grad_enabled():
            y = self._in_cpp(x)
            y = self._offered(x) if y is None else y
        return super().forward(x) if y is None else y  # type: ignore[misc]

    def _in_cpp(self, x: Tensor) -> Any:
        """The result by the node in C++, if the call is like an earlier one; None if Python has to look at it."""
        node = self._cpp_node(x)
        if node is None:
            return None
        like, size, attributes, kind = self._record.cpp_call  # type: ignore[misc]
        given = vars(self)
        if like != (x.dtype, x.dim(), autocast_of(x)) or any(given.get(name) is not v for name, v in attributes):
            return None
        y = node.norm_rows(x, *parameters(self), size, kind.eps, given["_guard_name"])
        if y is not None:
            offer(y, OfRows.in_cpp(self, kind=kind))
        return y

    def _offered(self, x: Tensor) -> Tensor | None:
        """The result, which is offered to what follows; None where it is not."""
        self._remember_watch()
        if self._is_given_up():
            return None
        if not self._is_suitable(x):
            self._record.outcome = unsuitable(x.device)
            return None
        kind = self._kind(x)
        if kind is None:
            names = names_of(type(self))
            registered = f" ({names.kind}, {names.weight} + {names.offset:g}, {names.eps})" * bool(names.kind)
            self._record.outcome = Outcome(why=_UNKNOWN + registered)
            return None
        if not (kind.is_torch or x.requires_grad):
            # torch's layer norm keeps such an input, which nobody may write to. Norms by hand need not.
            self._record.outcome = unsuitable(x.device)
            return None
        nodes.calibrate()
        weight, bias = parameters(self)
        operands = Operands(weight if weight is None or not kind.offset else weight + kind.offset, bias)
        moved, mean, rstd = moved_axis(x, kind.axis, -1), None, None
        with torch.no_grad():
            if kind.is_torch:
                scale, offset = operands.weight, operands.bias
                y, mean, rstd = torch.native_layer_norm(moved, moved.shape[-1:], scale, offset, kind.eps)
            else:
                y = moved_axis(super().forward(x), kind.axis, -1)  # type: ignore[misc]
        base = y.detach()
        node = native.attached(nodes.cpp, base, moved, operands, (mean, rstd), settings_of_rows(self, kind))
        y = moved_axis(base, -1, kind.axis)
        self._record.outcome = UNREAD
        hooks, watched = _torch.top_saved_tensors_hooks(True), self._record.was_watched
        if nodes.cpp is None or y is not base or hooks is not None or watched:
            offer(y, OfRows(self, moved, operands, y, node, kind, rstd, None if y is base else base))
            return y
        offer(y, OfRows.in_cpp(self, kind=kind))
        if kind.is_torch:
            given = vars(self)
            attributes = tuple((name, given.get(name)) for name in attributes_of(self))
            self._record.cpp_call = (x.dtype, x.dim(), autocast_of(x)), x.shape[-1], attributes, kind
        return y

    def _compiled(self, x: Tensor) -> Tensor | None:
        """The result for compilers, which see whether what follows keeps it; None as in `_offered`."""
        if not torch.is_grad_enabled() or DISABLED or _torch.is_exporting() or x.dim() < 2:
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
        given = [getattr(self, name, None) for name in self._attributes()]
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
            kept: tuple[Tensor | None, Tensor | None] = None, None
            if has_saved:
                kept = self._saved_rows, rows.verbatim(moved, statistics, self._saved_channels)
        z: Tensor = rows.NORM(y, moved, *statistics, scale, bias, *kept, trusted)
        return z if axis == -1 else z.movedim(-1, axis)

    @_torch.read_while_tracing
    def _attributes(self) -> tuple[str, ...]:
        return attributes_of(self)

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
        if not is_usual(x) or self.is_parametrized():
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

    def is_unknown(self) -> bool:
        """Whether the norm was called, and never computed what is known of layer norms and RMS norms."""
        kinds = self._record.kinds.values()
        return bool(kinds) and all(kind is None for kind in kinds)

    def _kind(self, x: Tensor) -> Kind | None:
        """How the norm computes an input like x."""
        kinds, key = self._record.kinds, key_of(self, x)
        if key not in kinds and _torch.is_capturing(x):
            return None
        if key not in kinds:
            kinds[key] = kind_of(self, _original(self), x)
        return kinds[key]  # type: ignore[no-any-return]


def _original(module: Any) -> type:
    """The class before conversion, in which methods are looked up after those of this package."""
    order = type(module).__mro__
    return order[order.index(guard.Guarded) + 1]
