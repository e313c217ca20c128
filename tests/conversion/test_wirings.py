"""A converted model trains as the original does, whatever its forward pass does with a norm's input, output and
activated output."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from convertible_nets import Siblings
from foreign_nets import CalledActivation, conv, spread
from one_norm import OneNorm, activated_twice, images, multiplied, plain, without_grad
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training

from inplace_abn import convert, verify
from inplace_abn.conversion.classes import InPlaceBatchNorm2d
from inplace_abn.memory import measure


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def skipped(m, x):
    x = m.conv(x)
    return m.last(m.act(m.bn(x))) + x


def concatenated(m, x):
    x = m.conv(x)
    return torch.cat([m.last(m.act(m.bn(x))), x], 1)


def stored(m, x):
    m.feature = m.conv(x)
    y = m.last(m.act(m.bn(m.feature)))
    # A model with a tensor that is no leaf cannot be copied.
    del m.feature
    return y


def called_twice(m, x):
    return m.last(m.act(m.bn(m.last(m.act(m.bn(m.conv(x)))))))


def returned(m, x):
    y = m.conv(x)
    return m.last(m.act(m.bn(y))), y


def returned_in_an_object(m, x):
    y = m.conv(x)
    return {"features": [y], "logits": m.last(m.act(m.bn(y)))}


def returned_before_activation(m, x):
    y = m.bn(m.conv(x))
    return m.last(m.act(y)), y


def read_in_evaluation(m, x):
    x = m.conv(x)
    y = m.last(m.act(m.bn(x)))
    return y if m.training else y + x


def led_nowhere(m, x):
    m.act(m.bn(m.conv(x))).sum()
    return m.last(m.conv(x))


def another_way_by_value(m, x):
    y = m.conv(x)
    z = m.last(m.act(m.bn(y)))
    return z * (1.0 if y.mean().item() > 1e9 else 2.0)


def view_read_again(m, x):
    y = m.conv(x)
    flat = y.flatten(2).transpose(1, 2)
    return m.last(m.act(m.bn(y))) + flat.transpose(1, 2).view(2, 4, 8, 8)


def read_before(m, x):
    y = m.bn(m.conv(x))
    return m.last(m.act(y) if y.sum() > -1e9 else y)


def freed_before(m, x):
    for _ in range(5):
        y = m.conv(x).exp()
        del y
    return plain(m, x)


WIRINGS = {
    "called twice": called_twice,
    "of an input of the model": lambda m, x: m.last(m.act(m.bn(x[:, :1].expand(-1, 4, -1, -1)))),
    "of a parameter": lambda m, x: m.act(m.bn(m.last.weight)),
    "of a part of a tensor": lambda m, x: m.last(m.act(m.bn(torch.cat([m.conv(x)] * 2, 1).chunk(2, 1)[0]))),
    "of a split that is whole": lambda m, x: m.last(m.act(m.bn(m.conv(x).split(4, 1)[0]))),
    "of a view": lambda m, x: m.last(m.act(m.bn(m.conv(x).flatten(2).view(2, 4, 8, 8)))),
    "of a sigmoid": lambda m, x: m.last(m.act(m.bn(torch.sigmoid(m.conv(x))))),
    "of a view of a sigmoid": lambda m, x: m.last(m.act(m.bn(torch.sigmoid(m.conv(x).flatten(1)).view(2, 4, 8, 8)))),
    "of exp": lambda m, x: m.last(m.act(m.bn(m.conv(x).exp()))),
    "of a custom function": lambda m, x: m.last(m.act(m.bn(Doubled.apply(m.conv(x))))),
    "of a view of a custom function": lambda m, x: m.last(m.act(m.bn(Doubled.apply(m.conv(x)).view(2, 4, 64, 1)))),
    "input added": skipped,
    "input concatenated": concatenated,
    "input and output concatenated": lambda m, x: torch.cat([m.act(m.bn(y := m.conv(x))), y], 1),
    "input stored": stored,
    "input returned": returned,
    "input returned in an object": returned_in_an_object,
    "input read through a view": view_read_again,
    "input read in evaluation": read_in_evaluation,
    "output read again": activated_twice,
    "output read before": read_before,
    "output returned": returned_before_activation,
    "output multiplied in place": multiplied,
    "relu6 in place": lambda m, x: m.last(F.relu6(m.bn(m.conv(x)), inplace=True)),
    "nothing follows": lambda m, x: m.bn(m.conv(x)),
    "checkpointed": lambda m, x: m.last(checkpoint(lambda x: m.act(m.bn(m.conv(x))), x, use_reentrant=False)),
    "without grad": without_grad,
    "not called": lambda m, x: m.last(m.conv(x)),
    "leads nowhere": led_nowhere,
    "another way by value": another_way_by_value,
    "memory freed before": freed_before,
    "clamped": lambda m, x: m.last(m.bn(m.conv(x)).clamp(min=0)),
    "a residual that nobody keeps": lambda m, x: m.last(
        F.relu(m.bn(m.conv(x)) + x[:, :1].expand(-1, 4, -1, -1).clone())
    ),
}


@pytest.mark.parametrize("name", WIRINGS)
def test_a_model_of_any_wiring_trains_as_it_did(name):
    model = spread(OneNorm(WIRINGS[name]))
    converted = check_training(model, images())
    assert type(converted.bn) is InPlaceBatchNorm2d
    assert type(converted.act) is nn.ReLU
    assert verify(model, convert(copy.deepcopy(model)), images())


def test_two_norms_of_one_input_save_it_together():
    model, x = spread(Siblings()), torch.randn(4, 4, 32, 32)
    check_training(model, x)
    size = 4 * 4 * 4 * 32 * 32
    native = measure(model, x).held
    assert native - measure(convert(copy.deepcopy(model)), x).held == pytest.approx(size, rel=0.02)
    one = convert(copy.deepcopy(model), filter_fn=lambda _, name: name == "first")
    assert measure(one, x).held == pytest.approx(native, abs=0.02 * size)


@pytest.mark.parametrize("residual", [True, False])
def test_a_norm_whose_output_is_kept_as_well_as_what_was_made_of_it_holds_no_more_than_torchs(residual):
    def gated(m, x):
        h = m.bn(m.conv(x))
        y = h + m.conv(x) if residual else h
        return m.last(y * torch.sigmoid(F.mish(y)))

    model, x = spread(OneNorm(gated)), torch.randn(4, 3, 64, 64)
    check_training(model, x)
    native = measure(model, x).held
    assert measure(convert(copy.deepcopy(model)), x).held == pytest.approx(native, rel=0.02)


@pytest.mark.parametrize("hook", ["producer keeps", "producer's backward", "activation", "own forward"])
def test_hooks_and_forward_passes_of_their_own_change_nothing(hook):
    model, seen = spread(OneNorm(plain)), []
    if hook == "producer keeps":
        model.conv.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    elif hook == "producer's backward":
        model.conv.register_full_backward_hook(lambda *_: None)
    elif hook == "activation":
        model.act.register_forward_hook(lambda module, args, z: seen.append(z.shape))
        model.bn.register_forward_hook(lambda *_: None)
    else:
        model.act.forward = model.act.forward
    check_training(model, images())
    assert len(set(seen)) <= 1


def counted(block, y):
    block.bn.num_batches_tracked += 1
    return y


def stored_on(block, y):
    block.shape = y.shape
    return y


def partly_without_grad(y):
    with torch.no_grad():
        scale = y.mean() + 1
    return y * scale


def optional(self, x, mask=None):
    y = F.relu(self.bn(self.conv(x)))
    return y if mask is None else y * mask


FORWARDS = {
    "training flag": lambda self, x: F.dropout(F.relu(self.bn(self.conv(x))), 0.5, self.training),
    "random": lambda self, x: F.relu(self.bn(self.conv(x))) * random.random(),
    "torch.rand": lambda self, x: F.relu(self.bn(self.conv(x))) * torch.rand(1).item(),
    "numpy": lambda self, x: F.relu(self.bn(self.conv(x))) * np.random.rand(),  # noqa: NPY002
    "buffers": lambda self, x: counted(self, F.relu(self.bn(self.conv(x)))),
    "attributes": lambda self, x: stored_on(self, F.relu(self.bn(self.conv(x)))),
    "no_grad": lambda self, x: partly_without_grad(F.relu(self.bn(self.conv(x)))),
    "optional arguments": optional,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward_passes_that_tracing_would_have_changed_are_what_they_were(name):
    block = type("Block", (CalledActivation,), {"forward": FORWARDS[name]})
    check_training(spread(nn.Sequential(block(3, 4), conv(4, 4))), images())
