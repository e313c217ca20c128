"""Converts a model's norms and activations to in-place ones, and back.

A module is converted by giving it a subclass of its class (`conversion.classes`). So it stays the same object wherever
it is referred to, and it stays a norm for code that looks for norms. It keeps its parameters, buffers, hooks, flags and
state-dict keys. Nothing else in the model changes.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from inplace_abn import reference
from inplace_abn.activations import find
from inplace_abn.conversion import called, classes, hooks
from inplace_abn.conversion.converted import Converted, why_nowhere
from inplace_abn.guard import strip
from inplace_abn.modules.abn import InPlaceABN, InPlaceActivatedNorm
from inplace_abn.modules.group_norm import InPlaceGroupNorm

_logger = logging.getLogger("inplace_abn")


class NormActivation(nn.Sequential):
    """A standard norm and an activation, in place of a module that was built in place."""


def convert(
    model: nn.Module, *, sync: bool = False, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> nn.Module:
    """Makes the norms and activations of ``model`` work in place.

    A module becomes a subclass of its class (`conversion.classes`), with the same parameters, buffers and keys of the
    state dict. So optimizers that were made before remain valid, and checkpoints load both ways. Nothing else changes,
    and the model does not run. In training it is seen what reads the norm's output first. A known activation is fused
    with the norm, and only the result is kept for backward. An addition before the activation is fused as well. If a
    function follows that saves its input for backward, the norm keeps the same tensor instead of its own input. If
    anything else follows, the norm keeps what it kept before.

    An activation without a norm before it (GELU, SiLU, Mish, Hardswish, ELU and LeakyReLU, which do not write to their
    input) keeps its result for backward instead of its input, if what follows keeps that result anyway. It may be a
    module, or a function that is called with the output of a linear layer or a convolution (``F.gelu(self.fc1(x))``),
    or with a sum of that output. Such functions are found in training steps. The same holds for a layer norm or an RMS
    norm of any package, whose class is tried in its first step, and for a linear layer whose output is multiplied by a
    vector, as in LayerScale: it does not keep its output.

    Args:
        model: is modified. Copy it before (``copy.deepcopy``) to keep the original.
        sync: make all converted BatchNorms synchronise their statistics, in the default process group or the one of
            `inplace_abn.set_active_group`.
        filter_fn: called with each norm, each activation, each linear layer and each convolution, and its name. Those
            for which it returns False are left as they are.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module.

    One line at level INFO through ``logging.getLogger("inplace_abn")`` says what was found. `inplace_abn.report` tells
    what each norm does, once the model has run.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inplace_abn.convert: expected model to be a torch.nn.Module, got {type(model).__name__}")
    modules = dict(model.named_modules())
    norms = [module for module in modules.values() if classes.is_norm(module)]
    before = sum(isinstance(module, Converted) for module in norms)
    fit = {name: module for name, module in modules.items() if classes.is_fit(module) or called.is_fit(module)}
    chosen = {name: module for name, module in fit.items() if filter_fn is None or filter_fn(module, name)}
    for name, module in chosen.items():
        (called.carry if called.is_fit(module) else classes.adopt)(module, name)
    for module in norms if sync else ():
        if isinstance(module, Converted) and isinstance(module, classes.KINDS):
            module.__dict__["_synchronised"] = True
    if chosen:
        hooks.hook(model)
    activations = sum(classes.is_activation(module) for module in chosen.values())
    summary = _summary(model, norms, sum(isinstance(module, Converted) for module in norms) - before, before)
    reasons = dict.fromkeys(filter(None, (why_nowhere(p.device) for p in model.parameters())))
    counted = f", and {activations} activations" if activations else ""
    _logger.info("%s%s%s", summary, counted, "".join(f"; {why}" for why in reasons))
    return model


def _summary(model: nn.Module, found: list[nn.Module], converted: int, before: int) -> str:
    """What norms were found, in one line."""
    supported = [module for module in found if isinstance(module, classes.KINDS) or classes.is_norm_of_rows(module)]
    others = Counter(type(module).__name__ for module in found if module not in supported)
    text = f"converted {converted} of {len(supported) - before} norms" if supported else "no norms to convert"
    if before:
        text = f"{text}, {before} are converted already" if converted else f"{before} norms are converted already"
    scripted = sum(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    if scripted:
        text += f"; {scripted} modules are scripted, and stay as they are: convert before torch.jit.script"
    if others:
        text += "; not supported: " + ", ".join(f"{count} {name}" for name, count in others.items())
    return text


def revert(
    model: nn.Module,
    batch_norm: type[nn.Module] = nn.BatchNorm2d,
    instance_norm: type[nn.Module] = nn.InstanceNorm2d,
) -> nn.Module:
    """Makes the in-place norms of ``model`` standard norms and activations again, for export, quantisation and fusion.

    Converted norms get their class back, and keep all that they have. A module that was built in place becomes a norm
    if its activation is the identity. Otherwise it becomes a Sequential of ``norm`` and ``activation``, with those
    names in the keys. Its weight becomes its scale: ``|weight| + eps``, or the signed weight with a magnitude of at
    least eps.

    Args:
        model: is modified.
        batch_norm, instance_norm: the classes that modules that were built in place get, because such modules do not
            know the number of dimensions. An `InPlaceGroupNorm` becomes a `torch.nn.GroupNorm`.

    Returns:
        ``model``, or what takes its place if it is an in-place module itself.

    Raises:
        ValueError: a converted norm has another class now, other than by torch.nn.utils.parametrize; or a module that
            was built in place has a weight that cannot be set to its scale, because the weight is computed from other
            parameters. Nothing has been modified.
    """
    originals: dict[Any, type[nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Converted):
            originals[module] = _original_class(name, module)
        elif isinstance(module, InPlaceActivatedNorm):
            _check_scale(name, module)
    for norm, original in originals.items():
        norm.release()
        norm.__class__ = original
    hooks.unhook(model)
    called.release(model)
    built = [module for module in model.modules() if isinstance(module, InPlaceActivatedNorm)]
    replaced: dict[nn.Module, nn.Module] = {module: _standard(module, batch_norm, instance_norm) for module in built}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in replaced:
                module._modules[name] = replaced[child]
    return replaced.get(model, model)


def _original_class(name: str, module: Any) -> type[nn.Module]:
    """The class that a converted norm gets back, parametrized if the norm is parametrized now.

    Raises:
        ValueError: the norm's class was changed after conversion.
    """
    current = type(module)
    if classes.is_made_by_conversion(current):
        return classes.original_class(current)
    if parametrize.is_parametrized(module) and classes.is_made_by_conversion(current.__bases__[0]):
        # torch.nn.utils.parametrize makes a subclass for each module, whose attributes are the parametrized tensors.
        original = classes.original_class(current.__bases__[0])
        members = {key: value for key, value in vars(current).items() if key not in ("__dict__", "__weakref__")}
        return type(f"Parametrized{original.__name__}", (original,), members)
    raise ValueError(
        f"inplace_abn.revert: {name or 'the model'} has become a {current.__name__} since it was converted; undo that "
        "before"
    )


def _check_scale(name: str, module: InPlaceActivatedNorm) -> None:
    """Raises ValueError for a parametrized module, and for a weight that a hook computes and that is not the scale."""
    if parametrize.is_parametrized(module):
        raise ValueError(
            f"inplace_abn.revert: {name or 'the model'} is parametrized, and not a module that was converted; use "
            "torch.nn.utils.parametrize.remove_parametrizations before"
        )
    if module.weight is None or "weight" in module._parameters:
        return
    scale = reference.gamma(module.weight.detach(), module.eps, module.signed_weight)
    if not torch.equal(scale, module.weight):
        raise ValueError(
            f"inplace_abn.revert: {name or 'the model'} has a weight that is computed from other parameters, and "
            "scales by another one (within eps of zero, or by the magnitude); remove the weight norm or pruning before"
        )


def _standard(module: InPlaceActivatedNorm, batch_norm: type[nn.Module], instance_norm: type[nn.Module]) -> nn.Module:
    activation = find(module.activation).module
    if "weight" in module._parameters and module.weight is not None:
        with torch.no_grad():
            module.weight.copy_(reference.gamma(module.weight, module.eps, module.signed_weight))
    names = ["activation", "activation_param", "signed_weight", "overwrite_input", "group"]
    kind = instance_norm if module.per_instance else batch_norm
    if isinstance(module, InPlaceGroupNorm):
        kind = nn.GroupNorm
        names += ["num_features", "momentum", "track_running_stats"]
    norm = kind.__new__(kind)
    norm.__dict__.update(module.__dict__)
    strip(norm)
    if kind is nn.GroupNorm:
        norm._buffers = {}
    for name in names:
        norm.__dict__.pop(name, None)
    if activation is None:
        return norm
    both = NormActivation()
    both.add_module("norm", norm)
    both.add_module("activation", activation(module.activation_param))
    return both.train(module.training)


def load_public_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, layers: Collection[str] | None = None
) -> Any:
    """Loads a checkpoint of the public package ``inplace-abn``, whose in-place modules scale by ``|weight| + eps``.

    A BatchNorm, or an `InPlaceABN` with ``signed_weight=True``, scales by the weight itself. So its weight becomes
    ``|weight| + eps``. An `InPlaceABN` without ``signed_weight`` gets the weight as it is.

    Args:
        model: a model that was converted, reverted, or built with either kind of norm.
        state_dict: is not modified. Batch counters, which old checkpoints lack, become zero.
        strict: as for `torch.nn.Module.load_state_dict`.
        layers: names of the norms that were in place in the checkpoint's model; None if all were.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected keys.

    Raises:
        ValueError: ``layers`` names a module that does not exist or is no norm. Nothing has been modified.
    """
    norms: dict[str, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, InPlaceABN)):
            parent, _, last = name.rpartition(".")
            is_part = last == "norm" and isinstance(model.get_submodule(parent), NormActivation)
            norms[parent if is_part else name] = name, module
    unknown = sorted(set(layers or ()) - norms.keys())
    if unknown:
        raise ValueError(f"inplace_abn.load_public_state_dict: expected layers to name norms, got {unknown}")
    state = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        state._metadata = state_dict._metadata  # type: ignore[attr-defined]
    for given, (name, module) in norms.items():
        prefix = given + "." if given else ""
        own = name + "." if name else ""
        for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            if prefix + key in state:
                state[own + key] = state.pop(prefix + key)
        by_magnitude = isinstance(module, InPlaceABN) and not module.signed_weight
        if own + "weight" in state and (layers is None or given in layers) and not by_magnitude:
            state[own + "weight"] = state[own + "weight"].abs() + module.eps
        if module.num_batches_tracked is not None and own + "running_mean" in state:
            state.setdefault(own + "num_batches_tracked", torch.tensor(0))
    return model.load_state_dict(state, strict)
