"""Modules of batch norm: `ABN`, `InPlaceABN`, `InPlaceABNSync`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed import ProcessGroup

from inplace_abn import _torch, distributed, functions, guard
from inplace_abn.activations import check_activation, find
from inplace_abn.autograd import checks, plain
from inplace_abn.compiling import trust
from inplace_abn.guard import measuring
from inplace_abn.settings import (
    Channels,
    Operands,
    Settings,
    check_hyperparameters,
    counted_batches,
    parameters,
    running_statistics,
)


def as_leaf(module: nn.Module, *args: Any) -> Any:
    """The call of a norm or an activation that `torch.fx` traces: one node, as of torch's own modules.

    Raises:
        RuntimeError: it is traced for quantization.
    """
    tracer: Any = args[0].tracer
    name = tracer.path_of_module(module)
    # Quantization knows modules by their exact classes. It would leave others as they are, without a word.
    if any(kind.__module__.startswith("torch.ao.quantization.") for kind in type(tracer).__mro__):
        raise RuntimeError(
            f"inplace_abn: the module {name!r} is {type(module).__name__}, and torch.ao.quantization knows torch's own "
            "modules only; make it one before, as inplace_abn.revert does with what was converted"
        )
    return tracer.create_proxy("call_module", name, args, {})


class ActivatedNorm(_torch.NormBase):
    """The common part of norms with an activation. torch's base has parameters, running statistics and state dicts."""

    signed_weight: bool = True
    """Whether the scale is the weight itself."""
    per_instance: bool = False
    """Whether each sample has its own statistics."""
    weight: nn.Parameter | None  # type: ignore[assignment]
    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_activation(activation, activation_param)
        check_hyperparameters(eps, momentum)
        # `reset_parameters` of a subclass may read them.
        self.activation = activation
        self.activation_param = activation_param
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _call(
        self,
        function: Callable[..., Tensor],
        x: Tensor,
        residual: Tensor | None,
        *options: Any,
        group: ProcessGroup | None = None,
        verbatim: Channels = Channels(),  # noqa: B008
    ) -> Tensor:
        """Calls ``function`` with x, this module's tensors and settings, and the options.

        A batch that raises is not counted. Checkpoints end a recomputation by an exception, after the statistics were
        updated, so such a batch counts.
        """
        weight, bias = parameters(self)
        running_mean, running_var = running_statistics(self)
        counts = self.training and running_mean is not None and not self.per_instance
        batches = counted_batches(self) if counts else None
        momentum: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.momentum is None and batches is not None:
            momentum = (batches + 1).double().reciprocal()
        if batches is not None and not torch.compiler.is_compiling() and _torch.transforms_active():
            # Writing to a counter that the transform has captured raises. This must happen before the running
            # statistics are updated.
            if function is not _out_of_place:
                checks.check_transforms((x, weight, bias, residual))
            batches.add_(0)
        operands = Operands(weight, bias, residual, running_mean, running_var, momentum)
        training = measuring.uses_own_statistics(self)
        shared = self._shared_by(x) if self.per_instance and training else 0
        what = (self.activation, self.activation_param, self.eps, int(self.signed_weight), training, group)
        settings = Settings(*what, shared, guard.name(self), verbatim)
        try:
            z = function(x, operands, settings, *options)
        except BaseException as error:
            if batches is not None and _torch.in_backward():
                batches.add_(1)
            if not torch.compiler.is_compiling():
                checks.name_layer(error, settings.name)
            raise
        if batches is not None:
            batches.add_(1)
        return z

    def _shared_by(self, x: Tensor) -> int:
        """How many neighbouring channels of a sample share statistics."""
        return 1

    @_torch.read_while_tracing
    def _may_be_compiled_in_place(self, dtype: torch.dtype) -> bool:
        return trust.trusts(self, dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, {self._end_of_repr()}"
        )

    def _end_of_repr(self) -> str:
        """What the representations of all modules end with."""
        param = f"[{self.activation_param}]" if find(self.activation).param else ""
        kept = "" if getattr(self, "overwrite_input", True) else ", overwrite_input=False"
        return f"activation={self.activation}{param}{kept}"


class ABN(ActivatedNorm):
    """Batch normalisation and activation, out of place. It is the counterpart of `InPlaceABN`.

    Input, output and the optional residual have shape (batch, channel, \\*). The residual is added before the
    activation. The scale is the weight itself, as in torch's BatchNorm.

    Args:
        num_features: number of channels.
        eps: added to the variance. Positive.
        momentum: share of a batch's statistics in the running ones; None for their cumulative average.
        affine: whether there are a ``weight`` (initially 1) and a ``bias`` (initially 0). Either may be set to None.
        track_running_stats: whether there are ``running_mean``, ``running_var`` and ``num_batches_tracked``; without
            them evaluation uses the batch's statistics too.
        activation: a name of `inplace_abn.activations.ACTIVATIONS`, such as "relu"; "identity" or "none" for none.
        activation_param: slope of leaky_relu (>= 0; zero means relu), alpha of elu (> 0). Others have none.
        device, dtype: of parameters and running statistics.

    Raises:
        ValueError: an argument is out of range.

    State dicts are interchangeable with those of torch's BatchNorm.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``act(norm(x) + residual)`` in a new tensor of x's shape and dtype. ValueError if the channels do not fit."""
        if isinstance(x, fx.Proxy):
            return as_leaf(self, x, residual)  # type: ignore[no-any-return]
        return self._call(_out_of_place, x, residual)


def _out_of_place(x: Tensor, operands: Operands, settings: Settings) -> Tensor:
    checks.check_channels(x, operands)
    return plain.abn(x, operands, settings)


class InPlaceActivatedNorm(guard.Guarded, ActivatedNorm):
    """The common part of norms with an activation that write their result over their input."""

    overwrite_input: bool = True

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``act(norm(x) + residual)``, written over x of shape (batch, channel, \\*) if ``overwrite_input``."""
        if isinstance(x, fx.Proxy):
            return as_leaf(self, x, residual)  # type: ignore[no-any-return]
        group = self._participating()
        decide = functools.partial(guard.decide, self, x, residual)
        if group is not None and not torch.compiler.is_compiling():
            return self._call(functions.run, x, residual, self.overwrite_input, False, None, decide, group=group)
        trusted, verbatim = decide()
        options = self.overwrite_input, not trusted, guard.slots(self)
        return self._call(functions.run, x, residual, *options, group=group, verbatim=verbatim)

    def _participating(self) -> ProcessGroup | None:
        """The group to synchronise statistics with; None where they are local."""
        return None


class InPlaceABN(InPlaceActivatedNorm, ABN):
    """`ABN` that writes its result over its input and keeps nothing else for backward (arXiv 1712.02616).

    The scale is ``|weight| + eps``. With ``signed_weight`` it is the weight itself, as in a standard BatchNorm, but
    with a magnitude of at least ``eps``. Dtypes and errors of a call are those of `inplace_abn.inplace_abn`.

    Channels whose input cannot be recovered exactly enough from the output are saved as well. While these are most,
    the layer keeps the input, as torch does, and returns a new tensor. `inplace_abn.set_guard` controls how this is
    measured.

    Args:
        signed_weight: scale by the weight itself, with its sign.
        overwrite_input: whether the result takes the memory of the input. If not, the input is unchanged, and not saved
            for backward.
        guard_interval: optimizer steps between two measurements of how exactly the input can be recovered; 0 for none.

    The other arguments are those of `ABN`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        signed_weight: bool = False,
        overwrite_input: bool = True,
        guard_interval: int = 100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        guard.check_interval(guard_interval)
        self.signed_weight = signed_weight
        self.overwrite_input = overwrite_input
        self.guard_interval = guard_interval
        of_abn = (num_features, eps, momentum, affine, track_running_stats, activation, activation_param)
        super().__init__(*of_abn, device=device, dtype=dtype)


class InPlaceABNSync(InPlaceABN):
    """`InPlaceABN` with the statistics of all ranks of a process group.

    Dtypes and errors of a call are those of `inplace_abn.inplace_abn_sync`. Every rank of the group must take part in
    forward and backward.

    Args:
        group: the ranks to synchronise with; None for the default group.

    The other arguments are those of `InPlaceABN`.
    """

    group: ProcessGroup | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        group: ProcessGroup | None = None,
        *,
        signed_weight: bool = False,
        overwrite_input: bool = True,
        guard_interval: int = 100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.group = group
        of_abn = (num_features, eps, momentum, affine, track_running_stats, activation, activation_param)
        super().__init__(
            *of_abn,
            signed_weight=signed_weight,
            overwrite_input=overwrite_input,
            guard_interval=guard_interval,
            device=device,
            dtype=dtype,
        )

    @classmethod
    def convert_sync_abn(cls, model: nn.Module, group: ProcessGroup | None = None) -> nn.Module:
        """Makes every `InPlaceABN` of ``model`` an `InPlaceABNSync`, as `torch.nn.SyncBatchNorm` does with BatchNorms.

        Args:
            model: is modified. Parameters, buffers and keys stay.
            group: the ranks to synchronise with; None for the default group.

        Returns:
            ``model``.

        Raises:
            TypeError: the model has a module of a subclass of the two, whose class cannot be changed. Nothing has been
                modified.
        """
        found = [module for module in model.modules() if isinstance(module, InPlaceABN)]
        for module in found:
            if type(module) not in (InPlaceABN, cls):
                raise TypeError(f"inplace_abn.convert_sync_abn: expected no subclass, got {type(module).__name__}")
        for module in found:
            module.__class__ = cls
            module.__dict__["group"] = group
        return model

    def set_group(self, group: ProcessGroup | None) -> None:
        """Makes this module synchronise with ``group``; None for the default group."""
        self.group = group

    def _participating(self) -> ProcessGroup | None:
        return distributed.participating_group(self.group) if measuring.uses_own_statistics(self) else None
