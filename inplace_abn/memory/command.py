"""The command ``python -m inplace_abn.memory``."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inplace_abn.memory.plot import check_plot, save_plot
from inplace_abn.memory.report import memory_report


def parse_shape(text: str) -> tuple[int, ...]:
    """``"8x3x512x512"`` as numbers.

    Raises:
        ValueError: the text is not positive numbers with ``x`` between them.
    """
    parts = text.lower().split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"expected a shape such as 8x3x512x512, got {text!r}")
    return tuple(int(part) for part in parts)


def _shape(text: str) -> tuple[int, ...]:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def load_model(text: str, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """The model that ``MODULE:FACTORY`` names: a module object, or what calling it with ``kwargs`` returns.

    Raises:
        ValueError: the text has another form, or names something else, or the call fails.
        ImportError: there is no such Python module.
    """
    found = _named(text)
    if isinstance(found, nn.Module):
        if kwargs:
            raise ValueError(f"{text} is a module, which takes no arguments {sorted(kwargs)}")
        return found
    if not callable(found):
        raise ValueError(f"expected {text} to be a module or to make one, got {type(found).__name__}")
    try:
        model = found(**(kwargs or {}))
    except Exception as error:
        raise ValueError(f"{_call(text, kwargs or {})} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected {text} to give a torch.nn.Module, got {type(model).__name__}")
    return model


def _named(text: str) -> Any:
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"expected MODULE:FACTORY, such as torchvision.models:resnet50, got {text!r}")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name}")
        found = getattr(found, part)
    return found


def _call(name: str, kwargs: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in kwargs.items())})"


def _keywords(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command ``python -m inplace_abn.memory``, with these arguments instead of its own."""
    described = "Memory of a training step, measured by the allocator's own events, before and after conversion."
    parser = argparse.ArgumentParser(prog="python -m inplace_abn.memory", description=described)
    parser.add_argument(
        "model", metavar="MODULE:FACTORY", help="what makes the model, such as torchvision.models:vgg11_bn"
    )
    parser.add_argument(
        "--kwargs",
        metavar="JSON",
        default={},
        type=_keywords,
        help='arguments of FACTORY: \'{"model_name": "resnet50"}\'',
    )
    parser.add_argument(
        "--input",
        metavar="SHAPE",
        required=True,
        nargs="+",
        type=_shape,
        help="of the model's inputs: 8x3x512x512",
    )
    parser.add_argument(
        "--convert", action="store_true", help="measure a converted copy too, and say what its norms do"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1")
    parser.add_argument("--png", metavar="FILE", help="write the timeline as a picture")
    args = parser.parse_args(arguments)
    try:
        if args.png:
            check_plot(args.png)
        device = torch.device(args.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            parser.error("torch sees no CUDA device")
        model = load_model(args.model, args.kwargs).to(device)
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        parser.error(str(error))
    example = [torch.randn(shape, device=device) for shape in args.input]
    shapes = ", ".join("x".join(map(str, shape)) for shape in args.input)
    try:
        report = memory_report(model, *example, converted=args.convert)
    except Exception as error:
        own = error if str(error).startswith("inplace_abn") else _own_error(model, example)
        if own is None:
            raise
        parser.error(f"{args.model} cannot train on {shapes}: {type(own).__name__}: {own}")
    if report.norms is not None and report.norms.layers:
        print(f"{report.norms}\n")
    print(report)
    if args.png:
        save_plot(report, args.png, f"{_call(args.model, args.kwargs)}, {shapes}")
        print(f"\nThe timeline is in {args.png}")


def _own_error(model: nn.Module, example: Sequence[Tensor]) -> Exception | None:
    """The error of the model as it is, which is no error of this package."""
    try:
        model.train()(*example)
    except Exception as error:
        return error
    return None
