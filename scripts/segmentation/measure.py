"""What the demo measures: intersection over union, and the peak memory of a training step."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from .data import IGNORE


def confusion_matrix(prediction: Tensor, label: Tensor, classes: int) -> Tensor:
    """Pixel counts, int64 [classes, classes] by (label, prediction), of two int64 tensors of one shape."""
    known = label != IGNORE
    pairs = label[known] * classes + prediction[known]
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def class_iou(confusion: Tensor) -> list[float | None]:
    """Intersection over union of each class; None for one that is in neither the labels nor the predictions."""
    hits = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - hits
    return [h / u if u else None for h, u in zip(hits.tolist(), union.tolist(), strict=True)]


def mean_iou(iou: list[float | None]) -> float | None:
    """The mean over the classes that have a value; None if none has."""
    known = [value for value in iou if value is not None]
    return sum(known) / len(known) if known else None


def peak_memory(step: Callable[[], object], device: torch.device) -> int:
    """Bytes that PyTorch's allocator held at most during `step()`, above what it held before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        # The exported trace is the one public place where the allocator's events keep their order.
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
