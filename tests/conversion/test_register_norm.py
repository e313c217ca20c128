"""Norm classes that users register."""

import copy

import pytest
import torch
from torch import nn

from inplace_abn import convert, register_norm, report, revert
from inplace_abn.conversion import classes

COUNTS = []


def rms(x, eps):
    """A helper of a module's, which conversion does not read."""
    COUNTS.append(1)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Scaler(nn.Module):
    """Has no name of a norm, names of its own, and a weight that is kept less one."""

    def __init__(self, dim, epsilon=1e-6):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(dim))
        self.epsilon = epsilon

    def forward(self, x):
        return rms(x, self.epsilon) * (1 + self.gain)


class ShiftedNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return rms(x, 1e-5) * self.gamma + self.beta


class Other(Scaler):
    """Is registered as what it is not."""

    def forward(self, x):
        return x / (x.abs().mean(-1, keepdim=True) + self.epsilon) * (1 + self.gain)


register_norm(Scaler, "rms", weight="gain", offset=1.0, eps="epsilon")
register_norm(Other, "rms", weight="gain", offset=1.0, eps="epsilon")


def net(norm):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 16), norm, nn.Linear(16, 4))
    for p in norm.parameters():
        nn.init.normal_(p, 0.1, 0.3)
    return module


def step(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_registered_class_is_in_place_and_trains_as_before(dtype):
    native = net(Scaler(16)).to(dtype)
    converted, x = convert(copy.deepcopy(native)), torch.randn(3, 7, 5, dtype=dtype)
    for _ in range(3):
        for found, expected in zip(step(converted, x), step(native, x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9 if dtype == torch.float64 else 1e-4, atol=1e-5)
    (layer,) = [each for each in report(converted).layers if each.is_norm]
    assert layer.in_place, layer.why
    assert layer.bytes_saved > 0
    assert type(revert(converted)[1]) is Scaler


def test_a_registered_class_compiles(fresh_compiler):
    native = net(Scaler(16)).double()
    converted, x = convert(copy.deepcopy(native)), torch.randn(3, 7, 5, dtype=torch.float64)
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    compiled(x).square().sum().backward()
    native(x).square().sum().backward()
    for p, q in zip(converted.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_weights_that_somebody_sets_are_noticed():
    native = net(Scaler(16)).double()
    converted, x = convert(copy.deepcopy(native)), torch.randn(3, 7, 5, dtype=torch.float64)
    step(converted, x)
    for m in (converted, native):
        nn.init.constant_(m[1].gain, -1.0)
    for found, expected in zip(step(converted, x), step(native, x), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_class_that_computes_something_else_is_left_as_it_is():
    native = net(Other(16)).double()
    converted, x = convert(copy.deepcopy(native)), torch.randn(3, 7, 5, dtype=torch.float64)
    for found, expected in zip(step(converted, x), step(native, x), strict=True):
        torch.testing.assert_close(found, expected)
    (layer,) = [each for each in report(converted).layers if each.is_norm]
    assert "its forward pass is not that of a layer norm or an RMS norm" in layer.why


def test_a_class_that_is_left_alone_is_told_with_the_reason():
    """A norm of other names was "not supported" without a word more."""
    text = str(report(convert(net(ShiftedNorm(16)))))
    assert "not supported: 1 ShiftedNorm" in text
    assert "ShiftedNorm: it has no weight of one dimension" in text
    assert "inplace_abn.register_norm" in text


@pytest.mark.parametrize(
    ("cls", "kind", "error"),
    [(nn.Linear(2, 2), "rms", TypeError), (int, "rms", TypeError), (Scaler, "batch", ValueError)],
)
def test_wrong_arguments_are_errors(cls, kind, error):
    with pytest.raises(error, match=r"inplace_abn.register_norm: expected"):
        register_norm(cls, kind)


class Gated(Scaler):
    """Depends on attributes that no formula has."""

    gate = 1.0

    def forward(self, x):
        y = super().forward(x)
        return self.gate * y if self.training else 3 * y


@pytest.mark.parametrize("change", ["gate", "training"])
def test_a_registered_class_may_depend_on_its_attributes(change):
    """The gradient was that of the formula, whatever the forward pass computed since the first call."""
    native = net(Gated(16)).double()
    native[1].gate = 1.0
    converted, x = convert(copy.deepcopy(native)), torch.randn(3, 7, 5, dtype=torch.float64)
    step(converted, x)
    for m in (converted, native):
        if change == "gate":
            m[1].gate = 3.0
        else:
            m.eval()
    for found, expected in zip(step(converted, x), step(native, x), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_class_with_names_of_both_kinds_is_read_by_those_that_were_registered():
    class Both(Scaler):
        def __init__(self, dim):
            super().__init__(dim)
            self.weight, self.bias = nn.Parameter(torch.ones(dim)), None

    native = net(Both(16)).double()
    converted, x = convert(copy.deepcopy(native)), torch.randn(3, 7, 5, dtype=torch.float64)
    for m in (converted, native):
        (m(x).square().sum() + m[1].weight.sum()).backward()
    for p, q in zip(converted.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_trial_takes_no_random_numbers_and_leaves_modules_within_alone():
    class WithPart(Scaler):
        def __init__(self, dim):
            super().__init__(dim)
            self.part = nn.BatchNorm1d(dim)

    class Dropping(Scaler):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    for kind in (WithPart, Dropping):
        native = net(kind(16)).double()
        converted, x = convert(copy.deepcopy(native)), torch.randn(3, 7, 5, dtype=torch.float64)
        results = []
        for m in (converted, native):
            torch.manual_seed(3)
            results.append(m(x))
        assert torch.equal(*results)


class InstanceNormOfSomebody(nn.InstanceNorm2d):
    def forward(self, x):
        return super().forward(x)


def test_a_subclass_of_an_instance_norm_that_is_known_is_an_instance_norm(monkeypatch):
    """It was taken for a batch norm."""
    name = f"{__name__}.{InstanceNormOfSomebody.__qualname__}"
    monkeypatch.setattr(classes, "_KNOWN_SUBCLASSES", (*classes._KNOWN_SUBCLASSES, name))
    torch.manual_seed(0)
    norm = InstanceNormOfSomebody(8, affine=True)
    native = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 2, 3)).double()
    converted, x = convert(copy.deepcopy(native)), torch.randn(2, 3, 9, 8, dtype=torch.float64)
    for found, expected in zip(step(converted, x), step(native, x), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_qconfig_of_none_is_no_quantisation_and_another_is_an_error():
    norm = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))[1]
    assert not hasattr(norm, "qconfig")
    norm.qconfig = None
    assert norm.qconfig is None
    with pytest.raises(RuntimeError, match=r"inplace_abn: 1 is InPlaceBatchNorm2d.*call inplace_abn.revert before"):
        norm.qconfig = object()
