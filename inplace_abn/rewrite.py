"""Forward passes rewritten with torch.fx: activations that are function calls, and residual additions.

The rewritten forward pass belongs to a subclass of the module's own class; the module stays the object it is, with its
parameters, hooks and names. Tracing runs the forward pass in Python once, and what it reads there becomes constant.
So it is refused where the training flag or a random number decides what is traced.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import random
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from inplace_abn.activations import activate
from inplace_abn.preservation import preserved

_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")


class Edit(NamedTuple):
    """``activation(norm(x))``, or with ``residual`` ``activation(norm(x) + r)``, becomes one call of ``norm``."""

    norm: str
    """Relative to the module that is rewritten."""
    activation: str
    activation_param: float
    residual: bool


class NotRewritable(ValueError):
    """Says why."""


def is_activation(function: Callable[[Tensor], Any], activation: str, param: float) -> bool:
    """Whether it gives what the activation gives, on values that tell activations apart."""
    probe = torch.linspace(-9, 9, 145, dtype=torch.float64).reshape(1, 5, 29)
    try:
        with torch.no_grad():
            result = function(probe.clone())
    except Exception:
        return False
    expected = activate(probe, activation, param)
    return isinstance(result, Tensor) and result.shape == expected.shape and torch.allclose(result, expected, atol=1e-9)


def is_observed(module: nn.Module) -> bool:
    """Whether somebody has given this one module hooks or another forward pass."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def is_activation_module(module: nn.Module, activation: str, param: float) -> bool:
    """Whether it is this activation and nothing else, in training and evaluation."""
    state = (module.state_dict(), list(module.parameters()), list(module.children()))
    if any(state) or is_observed(module):
        return False
    training = module.training
    try:
        for flag in (False, True):
            module.training = flag
            if not is_activation(module, activation, param):
                return False
    finally:
        module.training = training
    return True


class _Proxy(fx.Proxy):
    """One that keeps ``+=`` what it is; fx's own would make it ``+``, which other names of the tensor do not see."""


def _in_place(name: str) -> Callable[[_Proxy, Any], Any]:
    target = getattr(operator, f"i{name}")
    return lambda self, other: self.tracer.create_proxy("call_function", target, (self, other), {})


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(_Proxy, f"__i{_name}__", _in_place(_name))


class _Tracer(fx.Tracer):
    """Traces through the modules that contain the norms, and no others."""

    def __init__(self, norms: Sequence[str]) -> None:
        super().__init__()
        self.through = {".".join(n.split(".")[:i]) for n in norms for i in range(1, n.count(".") + 1)}
        self._context = _context()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.through

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _context() != self._context:
            raise NotRewritable("it works under no_grad, autocast or checkpointing in part")
        return super().create_node(*args, **kwargs)


def _context() -> tuple[Any, ...]:
    """What a with statement may change, and a traced forward pass would forget."""
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, hooks


def _trace(module: nn.Module, norms: Sequence[str], training: bool) -> fx.Graph:
    tracer = _Tracer(norms)
    for name in tracer.through:
        if is_observed(module.get_submodule(name)):
            raise NotRewritable(f"{name} has hooks or a forward pass of its own")
    with preserved(module):
        module.train(training)
        before = _state(module)
        try:
            graph = tracer.trace(module)
        except NotRewritable:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise NotRewritable(f"torch.fx cannot trace {type(module).__name__}.forward ({reason})") from error
        after = _state(module)
    if after[0] != before[0]:
        raise NotRewritable(f"{type(module).__name__}.forward draws random numbers")
    if after[1] != before[1]:
        raise NotRewritable(f"{type(module).__name__}.forward changes attributes or buffers")
    return graph


def _state(module: nn.Module) -> tuple[Any, Any]:
    """Random generators; and everything that the modules have, by identity, one level deep."""
    found: list[Any] = []
    for m in module.modules():
        for name, value in vars(m).items():
            found.append((name, id(value)))
            if isinstance(value, dict):
                found.append([(key, id(item)) for key, item in value.items()])
            elif isinstance(value, (list, set)):
                found.append([id(item) for item in value])
    versions = [t._version for t in (*module.buffers(), *module.parameters())]
    return (random.getstate(), torch.get_rng_state().tolist()), (found, versions)


def rewritten(module: nn.Module, edits: Sequence[Edit]) -> type[nn.Module]:
    """A subclass of the module's class whose forward pass has the edits.

    Raises:
        NotRewritable: the forward pass is not what the edits need. Nothing has been modified.
    """
    if "forward" in vars(module):
        raise NotRewritable(f"this {type(module).__name__} has a forward pass of its own")
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for parameter in inspect.signature(module.forward).parameters.values():
        # A tracer sees a value in place of None, and would keep the wrong branch.
        if parameter.default is not inspect.Parameter.empty or parameter.kind not in plain:
            raise NotRewritable(f"{type(module).__name__}.forward has optional arguments")
    norms = [edit.norm for edit in edits]
    graph = _trace(module, norms, True)
    if _described(graph) != _described(_trace(module, norms, False)):
        raise NotRewritable(f"{type(module).__name__}.forward depends on the training flag")
    for edit in edits:
        _apply(graph, module, edit)
    graph.lint()
    code = graph.python_code("self")
    return _subclass(type(module), code.src, {k: v for k, v in code.globals.items() if k != "__builtins__"})


def _described(graph: fx.Graph) -> str:
    return "\n".join(f"{node.format_node()} {node.args} {node.kwargs}" for node in graph.nodes)


def _apply(graph: fx.Graph, module: nn.Module, edit: Edit) -> None:
    found = [node for node in graph.nodes if node.op == "call_module" and node.target == edit.norm]
    if len(found) != 1 or len(found[0].args) != 1 or found[0].kwargs:
        raise NotRewritable(f"{type(module).__name__}.forward does not call {edit.norm} once, with one argument")
    norm = found[0]
    result = norm
    residual = None
    if edit.residual:
        addition = _only_user(norm, module)
        if addition.target not in _ADDITIONS or len(addition.args) != 2 or addition.kwargs:
            raise NotRewritable(f"{type(module).__name__}.forward does not add a residual to {edit.norm}'s output")
        others = [argument for argument in addition.args if argument is not norm]
        if len(others) != 1 or not isinstance(others[0], fx.Node):
            raise NotRewritable(f"{type(module).__name__}.forward does not add another tensor to {edit.norm}'s output")
        result, residual = addition, others[0]
    activation = _only_user(result, module)
    if not _is_activation_node(activation, result, module, edit):
        raise NotRewritable(f"{type(module).__name__}.forward applies something else than a plain {edit.activation}")
    with graph.inserting_before(activation):
        fused = graph.call_module(edit.norm, norm.args, {} if residual is None else {"residual": residual})
    activation.replace_all_uses_with(fused)
    graph.erase_node(activation)
    if result is not norm:
        graph.erase_node(result)
    graph.erase_node(norm)


def _only_user(node: fx.Node, module: nn.Module) -> fx.Node:
    for user in list(node.users):
        if user.op == "call_module" and type(module.get_submodule(str(user.target))) is nn.Identity:
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)
    if len(node.users) != 1:
        raise NotRewritable(f"{type(module).__name__}.forward uses the result of {node.target} {len(node.users)} times")
    return next(iter(node.users))


def _is_activation_node(node: fx.Node, argument: fx.Node, module: nn.Module, edit: Edit) -> bool:
    if node.all_input_nodes != [argument]:
        return False
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return is_activation_module(called, edit.activation, edit.activation_param)

    def call(x: Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: x)
        if node.op == "call_function" and callable(node.target):
            return node.target(*args, **kwargs)
        if node.op == "call_method":
            return getattr(x, str(node.target))(*args[1:], **kwargs)
        return None

    return is_activation(call, edit.activation, edit.activation_param)


def _subclass(base: type[nn.Module], source: str, names: dict[str, Any]) -> type[nn.Module]:
    scope = dict(names)
    exec(compile(source, f"<{base.__name__} rewritten by inplace_abn>", "exec"), scope)
    members = {"forward": scope["forward"], "__reduce_ex__": _reduce, "__module__": base.__module__}
    created = type(base.__name__, (base,), members)
    created._inplace_abn_source = (source, names)  # type: ignore[attr-defined]
    return created


def is_rewritten(kind: type[nn.Module]) -> bool:
    """Whether `rewritten` made the class."""
    return "_inplace_abn_source" in vars(kind)


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    """How copy and pickle, which would look for the class by its name, make the module again."""
    source, names = type(module)._inplace_abn_source
    parts = {name: (value.__name__,) if isinstance(value, types.ModuleType) else value for name, value in names.items()}
    return _made_again, (type(module).__mro__[1], source, parts), module.__getstate__()


def _made_again(base: type[nn.Module], source: str, parts: dict[str, Any]) -> nn.Module:
    names = {k: importlib.import_module(v[0]) if isinstance(v, tuple) else v for k, v in parts.items()}
    created = _subclass(base, source, names)
    return created.__new__(created)
