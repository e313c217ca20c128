"""Arguments of a model's calls, and the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only


class Example:
    """Arguments of one call of a model: ``Example(x, mask=m)`` stands for ``model(x, mask=m)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Example:
        """The example with ``function`` applied to each tensor."""
        args, kwargs = tree_map_only(Tensor, function, (self.args, self.kwargs))
        return Example(*args, **kwargs)


def examples_of(function: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Example]:
    """The calls that ``(*inputs, **kwargs)`` stand for: one, or one for each `Example`.

    Raises:
        TypeError: an `Example` is mixed with other arguments. The message begins with ``function``.
    """
    several = [example for example in inputs if isinstance(example, Example)]
    if several and (kwargs or len(several) != len(inputs)):
        raise TypeError(f"{function}: expected either Example objects or the arguments of one call, got both")
    return several or [Example(*inputs, **kwargs)]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: in lists, tuples, sets, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(vars(value))
