"""Trains a model and a converted copy of it from the same weights, and compares all that can be seen of each step."""

import copy
import math
import random

import numpy as np
import torch

from inplace_abn import convert, guard
from inplace_abn.trial import tensors_in

STEPS = 4
"""Converted norms measure in the first of these steps and in the third, and remember what they found in the others."""


def trained(model, x, steps=STEPS, rate=1e-3):
    """What each step gives: outputs, gradients and buffers, by name. Each step has a batch of its own, of x's shape."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    found = {}
    # The guard measures again when a hundred steps are done, which is before the third step here.
    guard.generations.current += 198 - guard.generations.current % 100
    for step in range(steps):
        for seeded in (random.seed, torch.manual_seed, np.random.seed):
            seeded(step)
        batch = torch.randn(x.shape, dtype=torch.float64).contiguous(memory_format=layout_of(x)).requires_grad_()
        optimizer.zero_grad()
        # A model may write over its input, but not over a leaf.
        outputs = list(tensors_in(model(batch * 1.0)))
        losses = [(t * torch.randn_like(t)).sum() / t.numel() ** 0.5 for t in outputs if t.requires_grad]
        torch.stack(losses).sum().backward()
        values = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
        values["gradient of the input"] = batch.grad
        values |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
        optimizer.step()
        values |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
        found |= {f"step {step + 1}, {name}": value for name, value in values.items()}
    return found


def layout_of(x):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    format = formats.get(x.dim())
    is_last = format is not None and x.is_contiguous(memory_format=format) and not x.is_contiguous()
    return format if is_last else torch.contiguous_format


def differences(actual, expected):
    """The relative error of each value in the 2-norm. Those of gradients are relative to a millionth of the whole
    gradient at least."""
    gradients = [t for name, t in expected.items() if "gradient" in name and t is not None]
    scale = 1e-6 * math.sqrt(sum(float(g.square().sum()) for g in gradients))
    found = {}
    assert actual.keys() == expected.keys()
    for name, other in expected.items():
        own = actual[name]
        if other is None or own is None or own.shape != other.shape:
            found[name] = 0.0 if own is None and other is None else math.inf
            continue
        least = scale if "gradient" in name else 1e-6
        error = (own.double() - other.double()).norm() / max(float(other.double().norm()), least)
        found[name] = math.inf if error.isnan() else float(error)
    return found


def check_training(model, x, steps=STEPS, tolerance=1e-9):
    """Asserts that a converted copy trains as the model does, in float64, and returns the copy after its last step."""
    native = copy.deepcopy(model).double().train()
    converted = convert(copy.deepcopy(native))
    errors = differences(trained(converted, x, steps), trained(native, x, steps))
    wrong = {name: error for name, error in errors.items() if error > tolerance}
    assert not wrong, wrong
    return converted
