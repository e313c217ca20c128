"""The classes that modules get by conversion, and how a module gets one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn

from inplace_abn.conversion import watch
from inplace_abn.conversion.activations import READERS, TORCHS, InPlaceActivation, applied, qualified
from inplace_abn.conversion.converted import Converted
from inplace_abn.conversion.formulas import why_not_tried
from inplace_abn.conversion.layer_norms import ConvertedLayerNorm
from inplace_abn.conversion.norms import InPlaceGroupNorms, InPlaceInstanceNorms, InPlaceNorm
from inplace_abn.conversion.offered import kept_by
from inplace_abn.modules.abn import as_leaf
from inplace_abn.settings import check_hyperparameters, names_of

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""The classes of converted modules, by the classes before conversion."""

for _part, _bases in {
    InPlaceNorm: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    InPlaceInstanceNorms: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    InPlaceGroupNorms: (nn.GroupNorm,),
    ConvertedLayerNorm: (nn.LayerNorm, nn.RMSNorm),
    InPlaceActivation: tuple(TORCHS),
}.items():
    for _base in _bases:
        # InPlaceGroupNorm is the module that users build.
        _name = "ConvertedGroupNorm" if _base is nn.GroupNorm else f"InPlace{_base.__name__}"
        _members = {"__module__": __name__, "__doc__": f"A `torch.nn.{_base.__name__}` that was converted."}
        # Pickles look for a class by its name.
        globals()[_name] = _CLASSES[_base] = type(_name, (_part, _base), _members)

_KNOWN_SUBCLASSES = ("timm.layers.norm.GroupNorm", "timm.layers.norm.GroupNorm1")
"""Subclasses that do what torch's GroupNorm does."""

KINDS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)
"""The base classes of all norms that are looked at."""


_NAMES_OF_ROWS = {
    name for base in ConvertedLayerNorm.__mro__[:-1] for name in vars(base) if not name.startswith("__")
} - {*dir(nn.Module), "qconfig"}


def has_own_activation(module: nn.Module) -> bool:
    """Whether the module is timm's BatchNormAct2d or GroupNormAct. This does not import timm."""
    return (
        isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm))
        and type(module).__name__.removeprefix("InPlace") in ("BatchNormAct2d", "GroupNormAct")
        and all(isinstance(getattr(module, name, None), nn.Module) for name in ("act", "drop"))
    )


def converted_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module gets by conversion; None if it cannot be converted."""
    kind = type(module)
    of_package = has_own_activation(module) or qualified(kind) in READERS or qualified(kind) in _KNOWN_SUBCLASSES
    if of_package or is_norm_of_rows(module):
        # A class may refuse to have subclasses.
        with suppress(TypeError):
            return _made(kind)
    return _CLASSES.get(kind)


def is_activation(module: nn.Module) -> bool:
    """Whether the module is an activation that can be converted, or was."""
    return isinstance(module, InPlaceActivation) or (qualified(type(module)) in READERS and applied(module) is not None)


def is_fit(module: nn.Module) -> bool:
    """Whether the module is a norm or an activation that `inplace_abn.convert` converts."""
    return (is_norm(module) or is_activation(module)) and not unfit_reason(module)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm, of a supported kind or by its name."""
    return _is_named_norm(module) or isinstance(module, KINDS)


def _is_named_norm(module: nn.Module) -> bool:
    is_named = "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
    return is_named or bool(names_of(type(module)).kind)


def is_norm_of_rows(module: nn.Module) -> bool:
    """Whether the module may be a layer norm or an RMS norm, or was. Its first call tells what it is."""
    if isinstance(module, ConvertedLayerNorm):
        return True
    if isinstance(module, KINDS) or not (_is_named_norm(module) or isinstance(module, (nn.LayerNorm, nn.RMSNorm))):
        return False
    return not why_no_norm_of_rows(module)


def why_no_norm_of_rows(module: nn.Module) -> str:
    """Why a norm by its name is not taken for a layer norm or an RMS norm, in words; empty if it is."""
    names = vars(module).keys() | {
        name for base in type(module).__mro__ if not issubclass(nn.Module, base) for name in vars(base)
    }
    taken = sorted(names & _NAMES_OF_ROWS)
    return f"converted modules have attributes named {', '.join(taken)}, too" if taken else why_not_tried(module)


def unfit_reason(module: nn.Module) -> str:
    """Why a norm or an activation is not converted; empty if it is."""
    if isinstance(module, Converted):
        return "it is converted already"
    if not (isinstance(module, KINDS) or is_activation(module) or is_norm_of_rows(module)):
        return f"{type(module).__name__} is not supported: {why_no_norm_of_rows(module)}"
    if converted_class(module) is None:
        return f"{type(module).__name__} is a subclass whose forward pass is unknown"
    if "forward" in vars(module):
        return "it has a forward pass of its own"
    if not isinstance(module, KINDS):
        return ""
    try:
        check_hyperparameters(module.eps, getattr(module, "momentum", None))  # type: ignore[arg-type]
    except ValueError as error:
        return str(error).removeprefix("inplace_abn: ")
    return ""


def is_made_by_conversion(kind: type[nn.Module]) -> bool:
    return kind in _CLASSES.values()


def original_class(kind: type) -> type[nn.Module]:
    """The class that a norm had before conversion."""
    # torch.nn.utils.parametrize makes a subclass for each module.
    return kind.__bases__[1] if is_made_by_conversion(kind) else original_class(kind.__bases__[0])


def _made(base: type[nn.Module]) -> type[nn.Module]:
    """The converted class of a class of another package: a norm, which may have an activation of its own, or an
    activation."""
    if base in _CLASSES:
        return _CLASSES[base]

    # Without this, copies and pickles would look for the class by its name, which no module has.
    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _made_again, (base,), self.__getstate__()

    members: dict[str, Any] = {"__reduce_ex__": reduce, "__module__": __name__, "__doc__": f"A converted {base}."}
    part: type = InPlaceActivation if qualified(base) in READERS else ConvertedLayerNorm
    if issubclass(base, KINDS):
        part = InPlaceGroupNorms if issubclass(base, nn.GroupNorm) else InPlaceNorm
        part = InPlaceInstanceNorms if issubclass(base, nn.modules.instancenorm._InstanceNorm) else part
        if qualified(base) not in _KNOWN_SUBCLASSES:
            members["forward"] = _forward_with_activation(base)
    _CLASSES[base] = type(f"InPlace{base.__name__}", (part, base), members)
    return _CLASSES[base]


def _forward_with_activation(base: type[nn.Module]) -> Callable[[Any, Tensor], Tensor]:
    """The forward pass of a norm that has an activation of its own."""
    of_norm = nn.GroupNorm if issubclass(base, nn.GroupNorm) else nn.modules.batchnorm._BatchNorm

    def forward(self: Any, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy):
            return as_leaf(self, x)
        x = kept_by(x, "norm")
        y = self._normalised(x)
        unwatched = watch.current() is None or torch.is_grad_enabled()
        if y is None and unwatched and (self._participating() is None or not self.training):
            return base.forward(self, x)  # type: ignore[no-any-return]
        if y is None and not unwatched:
            # The norm alone is noted, and the activation is seen by the watch.
            y = self._watched(of_norm.forward(self, x))
        return self.act(self.drop(self._native(x) if y is None else y))  # type: ignore[no-any-return]

    return forward


def _made_again(base: type[nn.Module]) -> nn.Module:
    kind = _made(base)
    return kind.__new__(kind)


def adopt(module: Any, name: str) -> None:
    """Gives a module its class after conversion."""
    kind = converted_class(module)
    assert kind is not None
    module.__class__ = kind
    module.adopt(name)
