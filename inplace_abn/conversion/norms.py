"""Converted norms: they do what torch's norms do, in place where that is right."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed import ProcessGroup

from inplace_abn import _torch, distributed, functions, guard
from inplace_abn.activations import IDENTITY
from inplace_abn.autograd import checks, forward, native, nodes
from inplace_abn.compiling import norms, trust
from inplace_abn.conversion.converted import Converted, has_standard_strides, may_have_node, unsuitable
from inplace_abn.conversion.offered import kept_by, offer
from inplace_abn.conversion.recipes import UNREAD, OfNorm
from inplace_abn.guard import measuring
from inplace_abn.modules.abn import as_leaf
from inplace_abn.settings import DISABLED, WEIGHT, Operands, Settings, counted_batches, parameters, running_statistics


class InPlaceNorm(Converted):
    """The part that all converted norms have in common. A converted norm stays a norm, with the same state.

    In training the norm's output is an ordinary tensor with the node of torch's norm, and is offered to what follows
    (`conversion.recipes`). For compilers the norm is `compiling.norms`. Where no graph is recorded, under tracers,
    transforms and dispatch modes, and while the guard does not trust the norm, it does what it did before conversion.
    """

    signed_weight = True
    _synchronised: bool = False
    _group: ProcessGroup | None = None

    @property
    def returns_view(self) -> bool:
        """Whether torch's norm returns a view of what it computed."""
        return self.per_instance

    def has_batch(self, x: Tensor) -> bool:
        """Whether x has a dimension of samples, which torch does not require of every norm."""
        return True

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_leaf(self, input)
        x = kept_by(input, "norm")
        y = self._normalised(x)
        return self._watched(self._native(x)) if y is None else y

    def _in_cpp(self, x: Any) -> Any:
        """The output by the node in C++, if the call is like an earlier one; None if Python has to look at it."""
        node, module = self._cpp_node(x), cast(Any, self)
        if node is None:
            return None
        dtype, dim, eps, momentum = module._record.cpp_call
        if x.dtype is not dtype or x.dim() != dim or not module.training:
            return None
        if module.eps is not eps or module.momentum is not momentum:
            return None
        if self.per_instance and (x.shape[1] != module.num_features or not self.has_batch(x)):
            return None
        mean, var = running_statistics(module)
        statistics: tuple[Tensor | None, ...] = (None, None, None)
        if self.per_instance and not (mean is None and var is None):
            return None
        if module.track_running_stats:
            statistics = mean, var, counted_batches(module)
        call = *parameters(module), *statistics, momentum or 0.0, eps, self.shared if self.per_instance else 0
        y = node.norm(x, *call, self.__dict__["_guard_name"])
        if y is not None:
            base = y if self.returns_view else None
            y = y if base is None else base.view_as(base)
            offer(y, OfNorm.in_cpp(self, base=base))
        return y

    def _watched(self, y: Tensor) -> Tensor:
        """y as torch computes it."""
        watching = self._watch_without_gradients()
        if watching is not None and guard.given_up(self) is None:
            watching.follow_native(self, y)
        return y

    def _normalised(self, x: Tensor) -> Tensor | None:
        """The norm's output, which is offered; None where the norm does what it did before conversion."""
        y = self._in_cpp(x)
        if y is not None or not torch.is_grad_enabled() or self.is_parametrized():
            return y  # type: ignore[no-any-return]
        if torch.compiler.is_compiling():
            return self._compiled(x)
        # In inference mode no tensor that is made here has a version.
        return None if torch.is_inference_mode_enabled() else self._offered(x)

    def _offered(self, x: Tensor) -> Tensor | None:
        """The norm's output, which is offered to what follows; None as in `_normalised`."""
        record = self._record
        self._remember_watch()
        if self._is_given_up():
            return None
        module: Any = self
        if module.eps != record.eps:
            # The figures are those of the old one.
            guard.forget(self)
            record.eps = module.eps
        if not _may_be_offered(self, x):
            record.outcome = unsuitable(x.device)
            return None
        if guard.stays_untrusted(self, x.dtype):
            record.outcome = record.outcome._replace(in_place=False, why=self.why_untrusted)
            return None
        of_cast, x = x, self._laid_out(self._cast(x))
        module._check_input_dim(x)
        nodes.calibrate()
        y, operands = torch.empty_like(x, requires_grad=False), _unversioned(_operands(module))
        training = measuring.uses_own_statistics(module)
        group = self._participating() if training else None
        what = (*IDENTITY, module.eps, WEIGHT, training, group, self.shared if training else 0)
        settings = Settings(*what, self.__dict__["_guard_name"])
        of_call = operands.of_samples(x) if settings.per_instance else operands
        statistics = forward.normalised(x.detach(), y, of_call, settings)
        of_graph = Operands(operands.weight, operands.bias)
        node = native.attached(nodes.cpp, y, x, of_graph, statistics, settings)
        if settings.per_instance:
            # As in torch, after x was saved, where a checkpoint's recomputation may end.
            operands.take_means(of_call)
        recipe = OfNorm(self, x, of_graph, y, node, statistics, settings)
        if self._is_simple(settings):
            record.cpp_call = x.dtype, x.dim(), module.eps, module.momentum
        if of_cast.dtype != x.dtype:
            recipe.narrow = self._laid_out(of_cast).detach()
        # torch's instance norm returns a view, whose hooks a write leaves behind.
        y = y.view_as(y) if self.returns_view else y
        record.outcome = UNREAD
        offer(y, recipe)
        return y

    def _is_simple(self, settings: Settings) -> bool:
        """Whether the node in C++ may make calls like this one: in training, by local statistics."""
        module: Any = self
        if settings.per_instance:
            return isinstance(module.eps, (int, float)) and module.training and not module.track_running_stats
        are_numbers = isinstance(module.momentum, (int, float)) and isinstance(module.eps, (int, float))
        return are_numbers and module.training and not self.is_synchronised()

    def _cast(self, x: Tensor) -> Tensor:
        """x in the dtype in which torch computes the norm."""
        return x

    def _laid_out(self, x: Tensor) -> Tensor:
        """x in the memory format in which torch returns the result."""
        return x.contiguous() if self.per_instance else x

    def _compiled(self, x: Tensor) -> Tensor | None:
        """The norm for compilers, which see what follows; None where the norm does what it did before conversion."""
        module: Any = self
        if DISABLED or _torch.transforms_active() or (self.per_instance and not self.has_batch(x)):
            return None
        training = measuring.uses_own_statistics(module)
        group = self._participating() if training else None
        if not _has_usual_statistics(module) or not norms.is_suitable(x, module.weight, module.bias, group is not None):
            return None
        groups = module.num_features // self.shared if self.per_instance and training else 0
        if groups and x.numel() == x.shape[0] * groups:
            return None
        narrow = x.dtype if self._is_widened(x.dtype, x.device.type) else None
        x = x if narrow is None else x.float()
        # Compilers compile anew when an attribute changes that they have read here.
        trusted, has_saved = self._fusible_with(x.dtype, narrow) if self._revision >= 0 else ("", False)
        # All processes do the same, whatever is trusted.
        if not trusted and group is None:
            return None
        module._check_input_dim(x)
        if training and not groups and group is None:
            checks.check_count(x)
        name = "" if group is None else group.group_name
        eps = norms.constant(module.eps)
        slots = guard.slots(self) if has_saved else None
        return norms.normalised(x, _operands(module), training, eps, trusted, slots, groups, name)

    @_torch.read_while_tracing
    def _is_widened(self, dtype: torch.dtype, device: str) -> bool:
        """Whether autocast computes the norm of an input in float32."""
        return False

    # This is a method, because the compiler of torch 2.11 does not pass a module to a function.
    @_torch.read_while_tracing
    def _fusible_with(self, dtype: torch.dtype, narrow: torch.dtype | None) -> tuple[str, bool]:
        return trust.converted(self, dtype, narrow)

    def _native(self, x: Tensor) -> Tensor:
        module: Any = self
        group = self._participating() if module.training else None
        if group is None:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        module._check_input_dim(x)
        settings = Settings(*IDENTITY, module.eps, WEIGHT, True, group)
        return functions.run(x, _operands(module), settings, False, True)

    def is_synchronised(self) -> bool:
        """Whether the norm synchronises its statistics where there are other processes."""
        return not self.per_instance and (self._synchronised or isinstance(self, nn.SyncBatchNorm))

    def _participating(self) -> ProcessGroup | None:
        """The group to synchronise statistics with in training; None where they are local."""
        if not self.is_synchronised() or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        return distributed.participating_group(getattr(self, "process_group", self._group))

    def release(self) -> None:
        super().release()
        for name in ("_synchronised", "_group"):
            self.__dict__.pop(name, None)

    def set_group(self, group: ProcessGroup | None) -> None:
        """Makes this norm, if it is synchronised, synchronise with ``group``; None for the default group."""
        self.__dict__["process_group" if isinstance(self, nn.SyncBatchNorm) else "_group"] = group


class InPlaceInstanceNorms(InPlaceNorm):
    """The part that all converted InstanceNorms have in common."""

    per_instance = True

    def has_batch(self, x: Tensor) -> bool:
        module: Any = self
        return bool(x.dim() != module._get_no_batch_dim())


class InPlaceGroupNorms(InPlaceNorm):
    """The part that all converted GroupNorms have in common."""

    per_instance = True
    returns_view = False
    momentum = None
    track_running_stats = False
    num_groups: int
    num_channels: int

    @property
    def num_features(self) -> int:
        return self.num_channels

    @property
    def shared(self) -> int:
        return self.num_channels // self.num_groups

    def has_batch(self, x: Tensor) -> bool:
        # timm's norm may do without autocast. torch has an error for other numbers of groups.
        is_divided = self.num_groups > 0 and self.num_channels % self.num_groups == 0
        return is_divided and not getattr(self, "_fast_norm", False)

    def _check_input_dim(self, x: Tensor) -> None:
        """GroupNorm takes any number of dimensions."""

    @_torch.read_while_tracing
    def _is_widened(self, dtype: torch.dtype, device: str) -> bool:
        if dtype in (torch.float32, torch.float64) or not torch.is_autocast_enabled(device):
            return False
        return _torch.has_kernel("aten::group_norm", f"Autocast{device.upper()}")

    def _cast(self, x: Tensor) -> Tensor:
        return x.float() if self._is_widened(x.dtype, x.device.type) else x

    def _laid_out(self, x: Tensor) -> Tensor:
        # Only torch's kernel for the CPU keeps the memory format.
        return x if x.is_cpu and has_standard_strides(x) else x.contiguous()


def _operands(module: Any) -> Operands:
    """The operands of this call. Also counts the batch in training, which instance norms do not do."""
    running: tuple[Tensor | None, Tensor | None] = running_statistics(module)
    momentum = 0.0 if module.momentum is None else module.momentum
    if module.per_instance:
        # torch's InstanceNorm updates the running statistics whenever it does not use them.
        return Operands(module.weight, module.bias, None, *running, momentum)
    if module.training and not module.track_running_stats:
        running = (None, None)
    elif module.training and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            momentum = module.num_batches_tracked.double().reciprocal()
    return Operands(module.weight, module.bias, None, *running, momentum)


def _unversioned(operands: Operands) -> Operands:
    """The operands with running statistics whose updates autograd does not notice.

    torch's own norm saves running statistics, and updates them without a new version.
    """
    mean, var = (None if t is None else t.data for t in (operands.running_mean, operands.running_var))
    return operands._replace(running_mean=mean, running_var=var)


def _may_be_offered(module: Any, x: Tensor) -> bool:
    """Whether a graph of plain tensors is recorded, and nobody watches the ops."""
    weight, bias = module.weight, module.bias
    if not may_have_node(x):
        return False
    requires_grad = x.requires_grad
    for t in (x, weight, bias):
        if t is not None:
            requires_grad |= t.requires_grad
            if t.is_inference():
                return False
    if not requires_grad or not 0 < module.eps < math.inf:
        return False
    if not _has_usual_statistics(module) or (module.per_instance and not module.has_batch(x)):
        return False
    # In torch a checkpoint's recomputation may end between an instance norm and the update of its running statistics.
    if module.per_instance and module.track_running_stats and _torch.top_saved_tensors_hooks(True) is not None:
        return False
    synchronised = module._participating() is not None
    return measuring.is_suitable(module, x, None, synchronised) and (module.per_instance or has_standard_strides(x))


def _has_usual_statistics(module: Any) -> bool:
    """Whether both running statistics are there, or none. torch has an error for the other cases, or for evaluation."""
    mean, var = running_statistics(module)
    if module.per_instance and mean is None and module.track_running_stats and not module.training:
        return False
    return (mean is None) == (var is None)
