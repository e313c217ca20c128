"""Nets whose last norms have weights of zero at first. They convert, are exact from the first step, and hold less once
the weights have grown."""

import copy
import re

import torch
from modes import distrust, is_trusted
from torch import nn

from inplace_abn import analyze, convert, memory, report, set_guard
from inplace_abn.conversion.norms import InPlaceNorm


class Block(nn.Module):
    """A residual block of a ResNet, with or without a bottleneck."""

    def __init__(self, inputs, width, expansion, stride):
        super().__init__()
        outputs = width * expansion
        kernels = [(1, 1), (3, stride), (1, 1)] if expansion > 1 else [(3, stride), (3, 1)]
        sizes = [inputs] + [width] * (len(kernels) - 1) + [outputs]
        layers = []
        for (kernel, step), source, target in zip(kernels, sizes, sizes[1:], strict=False):
            layers += [nn.Conv2d(source, target, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(target)]
            layers += [nn.ReLU()]
        nn.init.zeros_(layers[-2].weight)
        self.body = nn.Sequential(*layers[:-1])
        self.last = layers[-1]
        self.skip = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return self.last(self.body(x) + self.skip(x))


def resnet(depths, width, expansion):
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            layers.append(Block(inputs, width << stage, expansion, 2 if stage and not i else 1))
            inputs = (width << stage) * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def saves_all(layer):
    """Whether a layer of a report keeps its input because of all of its channels."""
    return re.search(r"\b(\d+) of \1 channels\b", layer.why) is not None


def held(model, x):
    return memory.measure(model, x).held


def test_a_zero_gamma_resnet_50_converts_completely_and_its_first_step_is_the_native_one():
    model = resnet((3, 4, 6, 3), 64, 4)
    x, target = torch.randn(2, 3, 64, 64), torch.randint(0, 10, (2,))
    original = copy.deepcopy(model)
    convert(model)
    assert sum(isinstance(m, InPlaceNorm) for m in model.modules()) == 53
    results = []
    for net in (original, model):
        loss = nn.functional.cross_entropy(net(x), target)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in net.parameters())])
    for native, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, native, rtol=1e-3, atol=1e-4 * native.abs().max().item())
    waiting = {layer.name for layer in report(model).layers if saves_all(layer)}
    assert len(waiting) == 16
    # The norms of shortcuts have nothing to be fused with.
    as_torch = {layer.name for layer in report(model).layers if not layer.in_place}
    assert {name for name in as_torch if "skip" not in name} == waiting
    assert waiting == {name for name, m in model.named_modules() if isinstance(m, InPlaceNorm) and not is_trusted(m)}


def test_training_a_zero_gamma_net_ends_in_place_and_memory_falls():
    model = resnet((2, 2), 16, 1)
    x, target = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
    native = held(copy.deepcopy(model), x)
    convert(model)
    set_guard(model, interval=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = held(model, x)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = held(model, x)
    assert all(is_trusted(m) for m in model.modules() if isinstance(m, InPlaceNorm))
    assert after < before < native
    assert losses[-1] < losses[0]


def test_the_report_tells_what_waits():
    x = torch.randn(2, 3, 64, 64)
    found = analyze(resnet((1,), 16, 1), x)
    assert [layer.name for layer in found.layers if saves_all(layer)] == ["4.body.4"]
    assert [layer.channels_saved for layer in found.layers] == [{"float32": 0.0}, {"float32": 0.0}, {"float32": 1.0}]
    said = " ".join(str(found).split())
    assert "norms whose weights begin with zeros (zero_init_last) save less once these have grown" in said
    assert all(layer.in_place for layer in analyze(resnet((1,), 16, 1).apply(ones), x).layers)


def ones(module):
    if isinstance(module, nn.BatchNorm2d):
        nn.init.ones_(module.weight)


def test_a_layer_that_was_never_measured_runs_while_the_guard_pauses():
    """The shortcut's norm is never measured, because its output is added to that of a norm that the guard does not
    trust. Memory is measured while the guard pauses, and this ended in an error."""

    class AddingInPlace(Block):
        def forward(self, x):
            y = self.body(x)
            y += self.skip(x)
            return self.last(y)

    model = nn.Sequential(nn.Conv2d(3, 16, 3), AddingInPlace(16, 16, 4, 2), nn.Conv2d(64, 4, 1))
    x = torch.randn(2, 3, 64, 64)
    convert(model)
    distrust(model[1].body[-1], x.dtype)
    assert held(model, x) > 0
    assert model[1].skip[1]._guard is None
