"""Memory of a training step, measured by the allocator's own events, before and after conversion.

    python -m inplace_abn.memory torchvision.models:resnet50 --input 8x3x512x512 --convert --png memory.png

measures any model that is a module object or that a function makes, with ``--kwargs '{"model_name": "resnet50"}'`` for
its arguments.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from inplace_abn import guard
from inplace_abn.analysis import analyze
from inplace_abn.convert import convert
from inplace_abn.example import Example, examples_of, tensors_in
from inplace_abn.plan import Plan, readable
from inplace_abn.plot import check_plot, save_plot

_BACKWARD = "inplace_abn.memory: backward"
_END = "inplace_abn.memory: end"


@dataclass(frozen=True)
class Usage:
    """Memory of one training step, in bytes above what was allocated before it."""

    held: int
    """By the forward pass, for backward."""
    peak: int
    """At any moment of forward and backward."""
    timeline: tuple[tuple[float, int], ...]
    """(milliseconds since the start, bytes allocated), at each event of the allocator."""
    backward_start: float
    """Milliseconds since the start."""


@dataclass(frozen=True)
class MemoryReport:
    """Of a model as it is, and converted if that was asked for."""

    before: Usage
    after: Usage | None = None
    plan: Plan | None = None

    def __str__(self) -> str:
        rows = [("", "held for backward", "peak of a step")]
        rows.append(("native", readable(self.before.held), readable(self.before.peak)))
        if self.after is not None:
            rows.append(("in place", readable(self.after.held), readable(self.after.peak)))
            rows.append(("saved", _less(self.after.held, self.before.held), _less(self.after.peak, self.before.peak)))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def _less(after: int, before: int) -> str:
    return f"{readable(before - after)} ({(before - after) / before:.0%})" if before else "-"


def measure(model: nn.Module, /, *example: Any, tick: Callable[[], None] | None = None, **kwargs: Any) -> Usage:
    """Runs one training step of ``model`` and tells what the allocator did.

    The loss is the sum of the outputs. Buffers are updated and gradients set to None, as by a training step that is
    then forgotten. On CUDA the bytes are those of the caching allocator.

    Args:
        model: on the device of its inputs; is put into training mode for the step.
        example: arguments of the forward pass, or one `Example`.
        tick: called after each call of a submodule, for a progress bar. An argument of the model that has this name is
            given within an `Example`.
        kwargs: keyword arguments of the forward pass.

    Returns:
        Bytes held after the forward pass, the peak of the step, and the timeline.

    Raises:
        TypeError: an `Example` is mixed with other arguments, or there are several: a step has one.
        ValueError: no output requires grad.
    """
    first, *more = examples_of("inplace_abn.memory.measure", example, kwargs)
    if more:
        raise TypeError(f"inplace_abn.memory.measure: expected the arguments of one call, got {1 + len(more)} Examples")
    cuda = any(t.device.type == "cuda" for t in (*model.parameters(), *tensors_in((first.args, first.kwargs))))
    training = [(module, module.training) for module in model.modules()]
    model.train()
    model.zero_grad(set_to_none=True)
    with _ticking(model, tick), _quiet():
        try:
            # What libraries allocate once is not the step's.
            _loss(model, first).backward()
            model.zero_grad(set_to_none=True)
            gc.collect()
            # A training step makes its own copies of the weights.
            torch.clear_autocast_cache()
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                start = torch.cuda.memory_allocated()
            activities = [torch.profiler.ProfilerActivity.CPU]
            # Few steps are of those in which the guard measures.
            with guard.paused(), torch.profiler.profile(profile_memory=True, activities=activities) as profile:
                loss = _loss(model, first)
                held = torch.cuda.memory_allocated() - start if cuda else 0
                with torch.profiler.record_function(_BACKWARD):
                    pass
                loss.backward()
                with torch.profiler.record_function(_END):
                    pass
            peak = torch.cuda.max_memory_allocated() - start if cuda else 0
        finally:
            model.zero_grad(set_to_none=True)
            for module, flag in training:
                module.training = flag
    timeline, backward_start = _timeline(profile, "cuda" if cuda else "cpu")
    if not cuda:
        before_backward = [size for time, size in timeline if time <= backward_start]
        held = before_backward[-1] if before_backward else 0
        peak = max((size for _, size in timeline), default=0)
    return Usage(held, peak, tuple(timeline), backward_start)


def _loss(model: nn.Module, example: Example) -> Tensor:
    outputs = [t for t in tensors_in(model(*example.args, **example.kwargs)) if t.requires_grad]
    if not outputs:
        raise ValueError("inplace_abn.memory: no output of the model requires grad, so there is no training step")
    return torch.stack([t.float().sum() for t in outputs]).sum()


def _timeline(profile: Any, device: str) -> tuple[list[tuple[float, int]], float]:
    """Bytes over time, and when backward starts, in milliseconds since the first event."""
    events = profile.profiler.kineto_results.events()
    wanted = torch.device(device).type
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and str(event.device_type()).split(".")[-1].lower() == wanted
    )
    marks = {event.name(): event.start_ns() for event in events if event.name() in (_BACKWARD, _END)}
    start = changes[0][0] if changes else 0
    size = 0
    timeline = []
    for time, change in changes:
        if time > marks[_END]:
            break
        size += change
        timeline.append(((time - start) / 1e6, size))
    return timeline, (marks[_BACKWARD] - start) / 1e6


@contextmanager
def _ticking(model: nn.Module, tick: Callable[[], None] | None) -> Iterator[None]:
    def ticked(*_: Any) -> None:
        if tick is not None:
            tick()

    leaves = _leaves(model) if tick is not None else []
    handles = [module.register_forward_hook(ticked) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler writes a line on standard error each time that it starts or stops."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
        else:
            os.environ["KINETO_LOG_LEVEL"] = before


def _leaves(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not any(True for _ in module.children())]


def memory_report(
    model: nn.Module,
    /,
    *example: Any,
    converted: bool = True,
    residual: bool = True,
    progress: bool = False,
    **kwargs: Any,
) -> MemoryReport:
    """Measures a training step of ``model`` and, unless ``converted`` is False, of a converted copy of it.

    Args:
        model: left as it is, but for its buffers, which a training step updates.
        example: arguments of the forward pass; or several `Example`, of which all are analyzed and the first is
            measured.
        converted: measure a converted copy too.
        residual: as for `inplace_abn.convert`. The plan then tells of it.
        progress: show a bar, for which tqdm is needed.
        kwargs: keyword arguments of the forward pass. Those that are named as an option of this function are given
            within an `Example`.

    Returns:
        Both measurements and the plan; print it.

    Raises:
        TypeError: an `Example` is mixed with other arguments.
        ValueError: no output requires grad.
        ImportError: a bar is wanted, but tqdm is not installed.
    """
    examples = examples_of("inplace_abn.memory.memory_report", example, kwargs)
    with _bar(progress) as bar:
        before = measure(model, examples[0], tick=bar.tick)
        if not converted:
            return MemoryReport(before)
        bar.expect(2 * bar.count)
        plan = replace(analyze(model, *examples), residual=residual)
        other = convert(copy.deepcopy(model), plan)
        return MemoryReport(before, measure(other, examples[0], tick=bar.tick), plan)


class _Progress:
    """Counts calls of submodules, and shows them. How many there are is known after the first measurement."""

    def __init__(self, shown: Any = None) -> None:
        self.count = 0
        self._shown = shown

    def tick(self) -> None:
        self.count += 1
        # A converted model may make more calls, which the end of the bar does not wait for.
        if self._shown is not None and (self._shown.total is None or self._shown.n < self._shown.total):
            self._shown.update()

    def expect(self, total: int) -> None:
        if self._shown is not None:
            self._shown.total = total
            self._shown.refresh()


@contextmanager
def _bar(shown: bool) -> Iterator[_Progress]:
    if not shown:
        yield _Progress()
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("inplace_abn.memory: a progress bar needs tqdm: pip install 'inplace-abn[demo]'") from error
    with tqdm(unit="call", desc="training steps", leave=False) as bar:
        yield _Progress(bar)


def parse_shape(text: str) -> tuple[int, ...]:
    """``"8x3x512x512"`` as numbers.

    Raises:
        ValueError: something else than positive numbers with ``x`` between them.
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
        ValueError: the text or what it names is something else, or calling it fails.
        ImportError: there is no such Python module.
    """
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"expected MODULE:FACTORY, such as torchvision.models:resnet50, got {text!r}")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name}")
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        if kwargs:
            raise ValueError(f"{text} is a module, which takes no arguments {sorted(kwargs)}")
        return found
    if not callable(found):
        raise ValueError(f"expected {text} to be a module or to make one, got {type(found).__name__}")
    try:
        model = found(**(kwargs or {}))
    except Exception as error:
        given = f"({', '.join(f'{key}={value!r}' for key, value in (kwargs or {}).items())})"
        raise ValueError(f"{text}{given} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected {text} to give a torch.nn.Module, got {type(model).__name__}")
    return model


def _keywords(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m inplace_abn.memory", description=__doc__.split("\n\n")[0])
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
    parser.add_argument("--convert", action="store_true", help="print the plan, convert, and measure again")
    parser.add_argument("--no-residual", action="store_true", help="with --convert: without residual blocks")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1")
    parser.add_argument("--png", metavar="FILE", help="write the timeline as a picture")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    args = parser.parse_args(arguments)
    if args.no_residual and not args.convert:
        parser.error("--no-residual is about the conversion: add --convert")
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
    progress = not args.no_progress and sys.stderr.isatty()
    report = memory_report(model, *example, converted=args.convert, residual=not args.no_residual, progress=progress)
    if report.plan is not None:
        print(report.plan, end="\n\n")
    print(report)
    if args.png:
        save_plot(report, args.png, args.model)
        print(f"\nThe timeline is in {args.png}")


if __name__ == "__main__":
    main()
