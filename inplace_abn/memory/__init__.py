"""Memory of a training step, measured by the allocator's own events, before and after conversion.

    python -m inplace_abn.memory torchvision.models:resnet50 --input 8x3x512x512 --convert --png memory.png

measures any model that is a module object, or that a function makes. ``--kwargs '{"model_name": "resnet50"}'`` gives
the function's arguments.
"""

from inplace_abn.memory.command import load_model, main, parse_shape
from inplace_abn.memory.plot import check_plot, draw_timeline, save_plot
from inplace_abn.memory.report import MemoryReport, memory_report
from inplace_abn.memory.step import Usage, measure

__all__ = [
    "MemoryReport",
    "Usage",
    "check_plot",
    "draw_timeline",
    "load_model",
    "main",
    "measure",
    "memory_report",
    "parse_shape",
    "save_plot",
]
