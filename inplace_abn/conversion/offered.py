"""Tensors whose first reader is seen: outputs of norms, of linear layers and of convolutions.

Such a tensor is an ordinary one, with memory and a place in torch's graph. Only its class is another one until it is
read. It carries a recipe: how to make a leaner node for a reader that needs less than the tensor's own node keeps. What
the recipe does not know gets the tensor itself. The tensor's own node dies with the tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from inplace_abn import _torch, checkpoints, tags
from inplace_abn.conversion import observed, watch
from inplace_abn.conversion.consumers import KEEPING, Keeper, kept
from inplace_abn.conversion.recognition import IN_GRAPH, KNOWN, METADATA, NO_GRADIENT, SHOWING, Activating, Adding
from inplace_abn.conversion.scaled import PRODUCTS, VIEWING
from inplace_abn.trial import LEAVES, tensors_in

_ASKING = IN_GRAPH | SHOWING | frozenset(_torch.HOOKS)


class Recipe:
    """How to serve a tensor's first reader. Methods get the tensor as a plain one."""

    layer: Any
    """The layer that made the tensor."""
    is_left: bool = False
    """Whether a result was made beside the tensor, whose gradient does not pass the tensor's place in the graph."""
    bypasses: bool = True
    """Whether results are made beside the tensor, and not of it."""
    is_result: bool = False
    """Whether the tensor is what was made of a norm's output, or of an activation's input (`conversion.results`)."""
    _version: int
    """That of the tensor. Recipes that are never left need none."""
    is_of_compiled: bool = False
    """Whether a compiled function, which runs as it is written in this watched step, made the tensor."""
    is_asked: bool = False
    """Whether somebody has asked for the tensor's place in the graph, which gradients must pass from then on."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Saved-tensor hooks may pickle a tensor while it is read. Its recipe is left out of that."""
        return OrderedDict, ()

    def lacks(self, t: Tensor) -> bool:
        """Whether `is_left` is true of the tensor, which was not written to since."""
        return self.is_left and t._version == self._version

    def activated(self, t: Tensor, call: Activating, native: Callable[[], Tensor]) -> Tensor | None:
        """The result of an activation; None if it is torch's."""
        return None

    def scaled(self, t: Tensor, factor: Any, product: Callable[[], Tensor]) -> Tensor | None:
        """The product with a vector; None if it is torch's."""
        return None

    def keep(self, t: Tensor, reader: str) -> None:
        """Makes the tensor's node keep the tensor, because the reader keeps it anyway."""

    def not_kept(self, reader: str) -> None:
        """Notes that the reader does not keep the tensor."""

    def cast(self, t: Tensor, dtype: torch.dtype, reader: str) -> Tensor | None:
        """The values in 16 bits for a reader that gets, and keeps, such a copy from autocast; None for torch's."""
        return None

    def adds(self, t: Tensor, other: Any, call: Adding) -> bool:
        """Whether the sum of the tensor and something else, which is torch's, has a recipe."""
        return False

    def of_sum(self, result: Tensor, residual: Any, call: Adding) -> Recipe:
        """The recipe of the sum."""
        raise NotImplementedError

    def of_view(self, t: Tensor, func: Any, args: tuple[Any, ...]) -> Recipe | None:
        """The recipe of a view, which the function makes with these other arguments."""
        return None

    def given(self, t: Tensor, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """What a function gets instead of a result."""
        return t

    def was_read(self, t: Tensor, func: Any, result: Any) -> None:
        """A function got a result, and returned this."""


class Offered(Tensor):
    """A tensor whose readers are seen."""

    _recipe: Recipe

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            return _called(func, args, kwargs)
        is_first = len(args) > 0 and type(args[0]) is Offered
        if tags.is_told(tags.name_of(func), "either", is_first, (*args[is_first:], *kwargs.values())):
            # Compilers do not know what stands for a zero.
            return _torch.call_uncompiled(_called, func, args, kwargs)
        # Operators whose first operand is a number look at the classes of their operands once more.
        func = getattr(func, "__wrapped__", func)
        with _torch.NoTorchFunction():
            return func(*args, **kwargs)


_torch.take_for_tensors(Offered)


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function that is called with offered tensors."""
    given = _offered_in(args)
    if kwargs:
        given += _offered_in(kwargs.values())
    # Functions that keep their input tell no tags from zeros, and return no view of it.
    is_plain = func in METADATA or (func in KEEPING and len(given) == 1 and given[0]._recipe.is_result)
    if is_plain and not kwargs.get("inplace"):
        with _torch.NoTorchFunction():
            return func(*args, **kwargs)
    recipes = {id(t): t._recipe for t in given}
    for t in given:
        t.__class__ = Tensor
    try:
        return _read(func, args, kwargs, given, recipes)
    finally:
        for t in given:
            if "_recipe" in t.__dict__:
                t.__class__ = Offered


def _offered_in(values: Iterable[Any]) -> list[Any]:
    """The offered tensors among arguments, at any depth."""
    found = []
    for value in values:
        kind = type(value)
        if kind is Offered:
            found.append(value)
        elif kind not in LEAVES and not (kind is tuple and LEAVES.issuperset(map(type, value))):
            found += [t for t in tensors_in(value) if type(t) is Offered]
    return found


def offer(t: Any, recipe: Recipe) -> None:
    """Makes a plain tensor one whose readers are seen."""
    if type(t) is Tensor:
        if watch.active or recipe.layer._record.was_watched:
            name = f"of compiled {id(recipe.layer)}"
            recipe.is_of_compiled = checkpoints.of_forward_pass(name, _torch.in_compiled_function())
        t._recipe = recipe  # type: ignore[attr-defined]
        t.__class__ = Offered


def plain(t: Any) -> Any:
    """The value as a plain tensor."""
    if type(t) is not Offered:
        return t
    # Compilers set no classes. Whoever asks for the gradient of a tensor that is left is told that it lacks a part.
    if torch.compiler.is_compiling() or t._recipe.is_left:
        with _torch.NoTorchFunction():
            return t.view_as(t)
    if watch.active:
        _give_up_entered([t._recipe])
    return made_plain(t)


def kept_by(t: Any, reader: str) -> Tensor:
    """The tensor as a plain one, for a reader that keeps it."""
    if type(t) is Offered and not torch.compiler.is_compiling():
        recipe, t.__class__ = t._recipe, Tensor  # type: ignore[assignment]
        recipe.keep(t, reader)
        t.__class__ = Offered
    return plain(t)  # type: ignore[no-any-return]


def added(t: Tensor) -> Tensor:
    """The tensor as a plain one, for the node of a norm that it is added to. A result stays offered to who reads it
    later."""
    if type(t) is Offered and t._recipe.is_result:
        with _torch.NoTorchFunction():
            return t.view_as(t)
    return kept_by(t, "add")


def made_plain(t: Any) -> Tensor:
    """Makes the tensor a plain one for ever."""
    t.__dict__.pop("_recipe", None)
    t.__class__ = Tensor
    return t  # type: ignore[no-any-return]


def _read(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], offered: list[Tensor], recipes: dict[int, Recipe]
) -> Any:
    """The result of a function that is called with offered tensors, which are plain ones meanwhile."""

    def native() -> Any:
        return func(*args, **kwargs)

    read = KNOWN.get(func)
    call = None if read is None else read(args, kwargs)
    if isinstance(call, Tensor):
        # A dropout that drops nothing returns what it is given.
        return call
    watched = bool(watch.active) and watch.current() is not None
    for recipe in recipes.values():
        if recipe.is_result:
            results = [t for t in offered if recipes[id(t)].is_result]
            return _read_results(func, args, kwargs, results, offered, recipes)
        watched = watched or recipe.layer._record.was_watched
    is_entered = watched and _give_up_entered(recipes.values())
    if func in _ASKING:
        _ask(func, offered, recipes)
        return native()
    if is_entered:
        for t in offered:
            _spend(t, recipes)
        return native()
    result: Any = None
    if isinstance(call, Activating) and id(call.input) in recipes:
        result = recipes[id(call.input)].activated(call.input, call, native)
    elif isinstance(call, Adding) and torch.is_grad_enabled():
        found = _sum_with_recipe(call, recipes)
        if found is not None:
            result = native()
            offer(result, found[0].of_sum(result, found[1], call))
    elif func in PRODUCTS and len(args) == 2 and not kwargs:
        for t, factor in (args, args[::-1]):
            if result is None and id(t) in recipes:
                result = recipes[id(t)].scaled(t, factor, native)
    if result is not None:
        return result
    reader = getattr(func, "__name__", "what follows")
    keeper, keeps, given = KEEPING.get(func), dict[int, Tensor](), args
    if keeper is not None:
        keeps = {id(t): t for t in kept(keeper, args, kwargs) if id(t) in recipes}
        for key, t in keeps.items():
            recipes[key].keep(t, reader)
        if keeper.narrow:
            given = tuple(_cast(keeper, t, recipes[id(t)], reader) if id(t) in recipes else t for t in args)
    result = func(*given, **kwargs)
    if func in VIEWING and not kwargs and id(args[0]) in recipes:
        of_view = recipes[id(args[0])].of_view(args[0], func, args[1:])
        if of_view is not None:
            offer(result, of_view)
    replaced = {id(t) for t, other in zip(args, given, strict=True) if other is not t}
    for t in offered:
        if id(t) not in replaced:
            if id(t) not in keeps and not isinstance(call, Activating):
                recipes[id(t)].not_kept(reader)
            _spend(t, recipes)
    return result


def _read_results(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: list[Tensor],
    offered: list[Tensor],
    recipes: dict[int, Recipe],
) -> Any:
    """The same for a function that is called with results, and perhaps other offered tensors."""
    given = {id(t): recipes[id(t)].given(t, func, args, kwargs) for t in results}
    if any(given[id(t)] is not t for t in results):
        args, kwargs = tree_map_only(Tensor, lambda t: given.get(id(t), t), (args, kwargs))
    others = {id(t): t for t in offered if id(t) not in given}
    of_others = {key: recipes[key] for key in others}
    result = _read(func, args, kwargs, [*others.values()], of_others) if others else func(*args, **kwargs)
    for t in results:
        recipes[id(t)].was_read(t, func, result)
    return result


def _give_up_entered(recipes: Iterable[Recipe]) -> bool:
    """Gives up layers whose outputs a compiled function reads that did not make them.

    Compilers know plain tensors only. In a watched step the function runs as it is written. Backward may call a part of
    it again, without its wrapper.
    """
    layers = {id(recipe.layer): recipe.layer for recipe in recipes if not recipe.is_of_compiled}
    if not any(checkpoints.of_forward_pass(f"compiled {key}", _torch.in_compiled_function()) for key in layers):
        return False
    for layer in layers.values():
        observed.give_up(layer, "compiled code reads its input")
    return True


def _spend(t: Tensor, recipes: dict[int, Recipe]) -> None:
    """Makes the tensor a plain one, unless whoever asks for its gradient has to be told something."""
    if t.__dict__.get("_recipe") is recipes[id(t)] and not recipes[id(t)].lacks(t):
        made_plain(t)


def _cast(keeper: Keeper, t: Tensor, recipe: Recipe, reader: str) -> Tensor:
    """What the function gets: a copy in 16 bits if autocast makes one."""
    dtype = keeper.dtype_for(t)
    narrow = None if t.dtype == dtype else recipe.cast(t, dtype, reader)
    return t if narrow is None else narrow


def _ask(func: Any, offered: list[Tensor], recipes: dict[int, Recipe]) -> None:
    """Makes tensors plain ones whose place in the graph is asked for.

    Raises:
        RuntimeError: a hook, or a gradient, is asked for that would lack that of a result beside the tensor.
    """
    for t in offered:
        recipe = recipes[id(t)]
        if recipe.lacks(t) and func in IN_GRAPH and func not in NO_GRADIENT:
            name = recipe.layer.__dict__["_guard_name"]
            raise RuntimeError(
                f"inplace_abn: a gradient of the output of {name}, or a hook on it, is asked for after it was "
                "activated or cast, and the gradient of the result does not pass it. Ask before, or leave this layer "
                "out of the conversion (filter_fn)"
            )
        if recipe.bypasses:
            recipe.is_asked = True
            _spend(t, recipes)


def _sum_with_recipe(call: Adding, recipes: dict[int, Recipe]) -> tuple[Recipe, Any] | None:
    """The recipe of one of the operands, and what is added."""
    for t, other in ((call.first, call.second), (call.second, call.first)):
        recipe = recipes.get(id(t))
        if recipe is None or t is other or (call.in_place and t is not call.first):
            continue
        if not recipe.adds(t, other, call):
            continue
        return recipe, other
    return None


class StandsForFunction(torch.autograd.Function):
    """Places a copy of a tensor after the tensor in the graph."""

    @staticmethod
    def forward(before: Tensor, after: tuple[Tensor]) -> Tensor:
        return after[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


stand: Callable[..., Any] = super(torch.autograd.Function, StandsForFunction).apply
