"""Converts a model's BatchNorms to in-place ones, and back.

A module is converted by giving it another class. So it stays the object it is wherever it is referred to, with its
parameters (which optimizers hold), buffers, hooks, flags and state-dict keys, and what it was is one attribute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import parametrize

from inplace_abn import guard, reference, rewrite
from inplace_abn.abn import InPlaceABN, InPlaceABNSync
from inplace_abn.analysis import analyze, is_fused_batch_norm
from inplace_abn.example import Example
from inplace_abn.plan import Plan

_ORIGINAL = "_inplace_abn_original"
"""Attribute of a converted module: the class that it had."""
_ACTIVATED = "_inplace_abn_activated"
"""Attribute of a tensor: True where a shared activation module has to let it pass."""


class PassedActivation(nn.Module):
    """An activation module that is used elsewhere too: what an in-place module has activated passes through, once."""

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor):
            raise TypeError(
                "inplace_abn: a tracer does not see which tensors are activated; revert the model to trace it"
            )
        if getattr(input, _ACTIVATED, None) is True:
            setattr(input, _ACTIVATED, None)
            return input
        activated: Tensor = getattr(self, _ORIGINAL).forward(self, input)
        return activated

    def extra_repr(self) -> str:
        return str(getattr(self, _ORIGINAL).__name__)


class NormActivation(nn.Sequential):
    """Standard BatchNorm and activation that take the place of an `InPlaceABN` which was never converted."""


def _mark_activated(module: nn.Module, args: tuple[Any, ...], z: Tensor) -> None:
    setattr(z, _ACTIVATED, True)


def convert(
    model: nn.Module,
    plan_or_example: Plan | Example | Tensor | tuple[Any, ...],
    *,
    sync: bool = False,
    residual: bool = False,
) -> nn.Module:
    """Makes ``model``'s BatchNorms in-place ones where the plan says so.

    A BatchNorm becomes an `InPlaceABN` with ``signed_weight=True``, a SyncBatchNorm an `InPlaceABNSync` of its process
    group. The activation modules that they take over become Identity, or let what is activated pass if they are used
    elsewhere. Parameters, buffers and keys of the state dict stay what they are: optimizers made before remain valid,
    checkpoints load both ways.

    Args:
        model: is modified. Copy it before (``copy.deepcopy``) to keep the original.
        plan_or_example: what `analyze` returned for this model or a copy of it; or an example to analyze it with: a
            tensor, a tuple of arguments or an `Example`.
        sync: make all converted BatchNorms synchronise their statistics, in the default process group.
        residual: also make BatchNorm, addition of a residual and activation one, by rewriting the forward pass of the
            module that adds with torch.fx. A plan whose ``residual`` is True, as that of a memory report of it, does so
            anyway.

    Returns:
        ``model``.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: the plan is not this model's. Nothing has been modified.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inplace_abn.convert: expected model to be a torch.nn.Module, got {type(model).__name__}")
    plan = _plan(model, plan_or_example)
    residual = residual or plan.residual
    modules = dict(model.named_modules())
    activations = {layer.name: (layer.activation, layer.activation_param) for layer in plan.convertible}
    edits: dict[str, list[rewrite.Edit]] = {}
    for layer in plan.convertible:
        if layer.site == "call":
            edits.setdefault(layer.parent, []).append(
                rewrite.Edit(layer.name, layer.activation, layer.activation_param, False)
            )
    for layer in plan.residuals if residual else ():
        found = layer.residual
        assert found is not None
        activations[layer.name] = (found.activation, found.activation_param)
        if found.partner:
            activations.setdefault(found.partner, ("identity", 0.01))
        edits.setdefault(found.parent, []).append(
            rewrite.Edit(layer.name, found.activation, found.activation_param, True)
        )
    _check_plan(plan, modules)
    classes = {parent: _rewritten(modules, parent, wanted, edits) for parent, wanted in edits.items()}

    for parent, rewritten in classes.items():
        _change(modules[parent], rewritten)
    for name, (activation, param) in activations.items():
        _to_in_place(modules[name], activation, param, sync)
        modules[name].__dict__["_guard_name"] = name
    for layer in plan.convertible:
        if layer.site == "module":
            _change(modules[layer.activation_module], nn.Identity)
        elif layer.site == "shared":
            _change(modules[layer.activation_module], PassedActivation)
            modules[layer.name].register_forward_hook(_mark_activated)
    return model


def _plan(model: nn.Module, given: Any) -> Plan:
    if isinstance(given, Plan):
        return given
    if isinstance(given, (Example, Tensor)):
        return analyze(model, given)
    if isinstance(given, tuple):
        return analyze(model, *given)
    if isinstance(given, Mapping):
        return analyze(model, **given)
    raise TypeError(
        "inplace_abn.convert: expected a Plan, or an example: a tensor, a tuple of arguments, a dict of keyword "
        f"arguments or an Example, got {type(given).__name__}"
    )


def _check_plan(plan: Plan, modules: Mapping[str, nn.Module]) -> None:
    for layer in plan.layers:
        module = modules.get(layer.name)
        if type(module).__name__ != layer.kind:
            raise ValueError(
                f"inplace_abn.convert: the plan is not this model's: it has a {layer.kind} {layer.name!r}, the model "
                + ("has none" if module is None else f"a {type(module).__name__}")
            )
        if layer.activation_module and layer.activation_module not in modules:
            raise ValueError(f"inplace_abn.convert: the model has no module {layer.activation_module!r}")
        if layer.site in ("module", "shared") and layer.convertible:
            activation = modules[layer.activation_module]
            if not rewrite.is_activation_module(activation, layer.activation, layer.activation_param):
                raise ValueError(
                    f"inplace_abn.convert: expected {layer.activation_module!r} to be {layer.activation}, as planned, "
                    f"got {activation}"
                )


def _rewritten(
    modules: Mapping[str, nn.Module],
    parent: str,
    edits: list[rewrite.Edit],
    parents: Collection[str],
) -> type[nn.Module]:
    prefix = parent + "." if parent else ""
    for edit in edits:
        inner = [p for p in parents if p != parent and p.startswith(prefix) and edit.norm.startswith(p + ".")]
        if inner or parent not in modules:
            raise ValueError(f"inplace_abn.convert: {parent!r} cannot be rewritten, because {inner} is rewritten too")
    try:
        return rewrite.rewritten(modules[parent], [e._replace(norm=e.norm.removeprefix(prefix)) for e in edits])
    except rewrite.NotRewritable as error:
        raise ValueError(f"inplace_abn.convert: {parent!r} cannot be rewritten as planned: {error}") from error


def _change(module: nn.Module, to: type[nn.Module]) -> None:
    """Gives the module another class, once."""
    if _ORIGINAL not in vars(module):
        module.__dict__[_ORIGINAL] = type(module)
        module.__class__ = to


def _to_in_place(module: nn.Module, activation: str, param: float, sync: bool) -> None:
    synchronised = isinstance(module, nn.SyncBatchNorm)
    _change(module, InPlaceABNSync if sync or synchronised else InPlaceABN)
    module.__dict__.update(activation=activation, activation_param=param, signed_weight=True)
    if sync or synchronised:
        module.__dict__["group"] = module.__dict__.get("process_group")


def revert(model: nn.Module, batch_norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """Makes ``model`` standard BatchNorms and activations again, for export, quantisation and fusion.

    In evaluation the result is what it was. Converted modules get back their class, with the state-dict keys and the
    parameters that they have; weights within eps of zero become plus or minus eps, by which they scaled. In-place
    modules that were built as such become a BatchNorm if their activation is the identity, and otherwise a Sequential
    of ``norm`` and ``activation``, with those names in the keys; their weight becomes ``|weight| + eps`` if it was not
    signed.

    Args:
        model: is modified.
        batch_norm: what in-place modules become that were built as such, since they do not tell the number of
            dimensions.

    Returns:
        ``model``, or what takes its place if it is an in-place module itself.

    Raises:
        ValueError: a converted module has got another class since, other than by torch.nn.utils.parametrize; or a
            weight cannot be set to what it scaled by, because it is computed from other parameters. Nothing has been
            modified.
    """
    classes = {
        name: _original_class(name, module) for name, module in model.named_modules() if _ORIGINAL in vars(module)
    }
    for name, module in model.named_modules():
        if isinstance(module, InPlaceABN):
            _check_scale(name, module)
    modules = dict(model.named_modules())
    for name, original in classes.items():
        module = modules[name]
        if isinstance(module, InPlaceABN):
            _take_scale(module)
            _strip(module)
        del module.__dict__[_ORIGINAL]
        module.__class__ = original
    replaced: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        if isinstance(module, InPlaceABN):
            replaced[module] = _standard(module, batch_norm)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in replaced:
                module._modules[name] = replaced[child]
    return replaced.get(model, model)


def _original_class(name: str, module: nn.Module) -> type[nn.Module]:
    """What a converted module is to become: the class that it had, parametrized if it is now.

    Raises:
        ValueError: somebody has given it another class since.
    """
    original: type[nn.Module] = vars(module)[_ORIGINAL]
    current = type(module)
    if _is_made_by_convert(current):
        return original
    if parametrize.is_parametrized(module) and _is_made_by_convert(current.__bases__[0]):
        # torch.nn.utils.parametrize makes a subclass for each module, whose attributes are the parametrized tensors.
        members = {key: value for key, value in vars(current).items() if key not in ("__dict__", "__weakref__")}
        return type(f"Parametrized{original.__name__}", (original,), members)
    raise ValueError(
        f"inplace_abn.revert: {name or 'the model'} has become a {current.__name__} since it was converted; undo that "
        "before"
    )


def _is_made_by_convert(kind: type[nn.Module]) -> bool:
    return kind in (InPlaceABN, InPlaceABNSync, nn.Identity, PassedActivation) or rewrite.is_rewritten(kind)


def _check_scale(name: str, module: InPlaceABN) -> None:
    """Refuses a weight that is computed, by a parametrization or a hook, and is not what it scales by."""
    converted = _ORIGINAL in vars(module)
    if not converted and parametrize.is_parametrized(module):
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
            "scales by another one (within eps of zero, or by the magnitude); remove the parametrization, weight "
            "norm or pruning before"
        )


def _take_scale(module: InPlaceABN) -> None:
    if "weight" in module._parameters and module.weight is not None:
        with torch.no_grad():
            module.weight.copy_(reference.gamma(module.weight, module.eps, module.signed_weight))


def _strip(module: InPlaceABN) -> None:
    for name in ("activation", "activation_param", "signed_weight", "group"):
        module.__dict__.pop(name, None)
    guard.strip(module)
    for key, hook in list(module._forward_hooks.items()):
        if hook is _mark_activated:
            del module._forward_hooks[key]


def _standard(module: InPlaceABN, batch_norm: type[nn.Module]) -> nn.Module:
    activation, param = module.activation, module.activation_param
    activations: dict[str, Any] = {
        "relu": nn.ReLU,
        "silu": nn.SiLU,
        "hardswish": nn.Hardswish,
        "leaky_relu": lambda: nn.LeakyReLU(param),
        "elu": lambda: nn.ELU(param),
    }
    _take_scale(module)
    norm = batch_norm.__new__(batch_norm)
    norm.__dict__.update(module.__dict__)
    _strip(norm)  # type: ignore[arg-type]
    if activation not in activations:
        return norm
    both = NormActivation()
    both.add_module("norm", norm)
    both.add_module("activation", activations[activation]())
    return both.train(module.training)


def convert_sync(model: nn.Module, sync: bool = True, group: ProcessGroup | None = None) -> nn.Module:
    """Makes every `InPlaceABN` of ``model`` an `InPlaceABNSync`, or with ``sync=False`` the reverse.

    Args:
        model: is modified; parameters, buffers and keys stay.
        group: the ranks to synchronise with; None for the default group.

    Returns:
        ``model``.

    Raises:
        TypeError: a subclass of the two, which cannot be given another class. Nothing has been modified.
    """
    found = [module for module in model.modules() if isinstance(module, InPlaceABN)]
    for module in found:
        if type(module) not in (InPlaceABN, InPlaceABNSync):
            raise TypeError(f"inplace_abn.convert_sync: expected no subclass, got {type(module).__name__}")
    for module in found:
        if sync and type(module) is InPlaceABN:
            module.__class__ = InPlaceABNSync
            module.__dict__["group"] = group
        elif not sync and isinstance(module, InPlaceABNSync):
            module.__class__ = InPlaceABN  # type: ignore[assignment]
            module.__dict__.pop("group", None)
    return model


def load_public_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, layers: Collection[str] | None = None
) -> Any:
    """Loads a checkpoint of the public package ``inplace-abn``, where an in-place module scales by ``|weight| + eps``.

    A BatchNorm or an `InPlaceABN` with ``signed_weight=True``, which scale by the weight itself, get ``|weight| + eps``
    as their weight; an `InPlaceABN` without gets the weight as it is.

    Args:
        model: a model that was converted, reverted, or built with either kind of norm.
        state_dict: is not modified. Batch counters, which old checkpoints lack, become zero.
        strict: as for `torch.nn.Module.load_state_dict`.
        layers: names of the norms that were in-place ones in the checkpoint's model; None if all were.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected keys.

    Raises:
        ValueError: ``layers`` names a module that is not there, or is no norm. Nothing has been modified.
    """
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, InPlaceABN)) or is_fused_batch_norm(module)
    }
    outer = {name.removesuffix(".norm") if _is_part(model, name) else name: name for name in norms}
    unknown = sorted(set(layers or ()) - outer.keys())
    if unknown:
        raise ValueError(f"inplace_abn.load_public_state_dict: the model has no norms {unknown}")
    state = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        state._metadata = state_dict._metadata  # type: ignore[attr-defined]
    for given, name in outer.items():
        module: Any = norms[name]
        prefix = given + "." if given else ""
        own = name + "." if name else ""
        for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            if prefix + key in state:
                state[own + key] = state.pop(prefix + key)
        if own + "weight" in state and (layers is None or given in layers) and not _scales_by_magnitude(module):
            state[own + "weight"] = state[own + "weight"].abs() + module.eps
        if module.num_batches_tracked is not None and own + "running_mean" in state:
            state.setdefault(own + "num_batches_tracked", torch.tensor(0))
    return model.load_state_dict(state, strict)


def _scales_by_magnitude(module: nn.Module) -> bool:
    return isinstance(module, InPlaceABN) and not module.signed_weight


def _is_part(model: nn.Module, name: str) -> bool:
    parent, _, last = name.rpartition(".")
    return last == "norm" and isinstance(model.get_submodule(parent), NormActivation)
