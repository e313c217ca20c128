"""Implements torchvision's ops in plain torch if its binary cannot be loaded.

All processes that have this folder on their path import this module. It has only those ops that the examples call.
"""

import importlib

import models
import torch

library = models.import_torchvision()


def nms(boxes, scores, iou_threshold):
    """The indices of boxes (n, 4) that remain, best first."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    left, kept = scores.argsort(descending=True), []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        corners = torch.maximum(boxes[best, :2], boxes[left, :2]), torch.minimum(boxes[best, 2:], boxes[left, 2:])
        shared = (corners[1] - corners[0]).clamp(min=0).prod(dim=1)
        left = left[shared / (areas[best] + areas[left] - shared) <= iou_threshold]
    return torch.stack(kept) if kept else left


if library is not None:
    library.impl("nms", nms, "CPU")
    importlib.import_module("torchvision.ops.boxes")._assert_has_ops = lambda: None
