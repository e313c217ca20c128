"""Nets whose last norms have weights of zero at first. They convert, are exact from the first step, and hold less once
the weights have grown."""

import copy
from dataclasses import replace

import torch
from torch import nn

from inplace_abn import analyze, convert, memory, set_guard
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


def held(model, x):
    return memory.measure(model, x).held


def test_a_zero_gamma_resnet_50_converts_completely_and_its_first_step_is_the_native_one():
    model = resnet((3, 4, 6, 3), 64, 4)
    x, target = torch.randn(2, 3, 64, 64), torch.randint(0, 10, (2,))
    original = copy.deepcopy(model)
    plan = analyze(model, x)
    convert(model, plan)
    assert sum(isinstance(m, InPlaceNorm) for m in model.modules()) == len(plan.layers) == 53
    assert len(plan.waiting) == 16
    notes = {layer.name: layer.note for layer in plan.layers if layer.note}
    assert all(note.startswith("in place once its weights have grown") for note in notes.values())
    assert "in place once its weights have grown" in str(plan).replace("\n      ", " ")
    results = []
    for net in (original, model):
        loss = nn.functional.cross_entropy(net(x), target)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in net.parameters())])
    for native, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, native, rtol=1e-3, atol=1e-4 * native.abs().max().item())
    untrusted = {name for name, m in model.named_modules() if isinstance(m, InPlaceNorm) and not m._trusted}
    assert untrusted == set(notes)


def test_training_a_zero_gamma_net_ends_in_place_and_memory_falls():
    model = resnet((2, 2), 16, 1)
    x, target = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
    native = held(copy.deepcopy(model), x)
    convert(model, analyze(model, x), residual=True)
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
    assert all(m._trusted for m in model.modules() if isinstance(m, InPlaceNorm))
    assert after < before < native
    assert losses[-1] < losses[0]


def test_the_plan_tells_what_waits_and_what_that_costs():
    model = resnet((1,), 16, 1)
    plan = analyze(model, torch.randn(2, 3, 64, 64))
    assert "in place once its weights have grown" in str(plan).replace("\n      ", " ")
    plan = replace(plan, residual=True)
    (waiting,) = plan.waiting
    assert plan.to_dict()["waiting"] == 1
    assert plan.bytes_waiting == waiting.residual.bytes_saved <= plan.residual_bytes_saved
    assert plan.to_dict()["layers"][[layer.name for layer in plan.layers].index(waiting.name)]["note"] == waiting.note
    assert analyze(resnet((1,), 16, 1).apply(ones), torch.randn(2, 3, 64, 64)).waiting == ()


def ones(module):
    if isinstance(module, nn.BatchNorm2d):
        nn.init.ones_(module.weight)


def test_a_layer_that_was_never_measured_is_not_overwritten_while_the_guard_pauses():
    """The shortcut's norm was never measured, so it must not overwrite its input. Its output is added in place to that
    of a norm that the guard does not trust."""

    class AddingInPlace(Block):
        def forward(self, x):
            y = self.body(x)
            y += self.skip(x)
            return self.last(y)

    model = nn.Sequential(nn.Conv2d(3, 16, 3), AddingInPlace(16, 16, 4, 2), nn.Conv2d(64, 4, 1))
    x = torch.randn(2, 3, 64, 64)
    convert(model, analyze(model, x))
    assert held(model, x) > 0
    assert model[1].skip[1]._guard.measured_at < 0
