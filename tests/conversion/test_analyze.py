"""analyze reports what a converted copy does in a training step, and leaves the model as it was."""

import copy
import random
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foreign_nets import ResNet, conv, spread
from one_norm import OneNorm, images, plain
from torch import nn

from inplace_abn import Report, analyze, convert, report, verify
from inplace_abn.conversion.norms import InPlaceNorm
from inplace_abn.memory import memory_report


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_a_model_is_left_as_it_was(mode):
    def forward(m, x):
        y = F.dropout(m.act(m.bn(m.conv(x))), 0.5)
        m.feature = y.shape
        m.history.append(y.sum().item())
        random.random()
        np.random.rand()  # noqa: NPY002
        return m.last(y)

    model = OneNorm(forward).train(mode == "training")
    model.history = []
    model.feature = None
    model.last.eval()
    states = torch.get_rng_state(), random.getstate(), {k: v.clone() for k, v in model.state_dict().items()}
    numpys = np.random.get_state()[1].copy()  # noqa: NPY002
    attributes = set(vars(model))
    modes = [m.training for m in model.modules()]
    found = analyze(model, given := torch.ones(2, 3, 8, 8))
    assert isinstance(found, Report)
    assert len(found.layers) == 1
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == numpys).all()  # noqa: NPY002
    for key, value in model.state_dict().items():
        assert torch.equal(value, states[2][key])
    assert [m.training for m in model.modules()] == modes
    assert set(vars(model)) == attributes
    assert model.feature is None
    assert model.history == []
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert not any(isinstance(m, InPlaceNorm) for m in model.modules())
    assert torch.equal(given, torch.ones(2, 3, 8, 8))


class Frozen(dict):
    """A dictionary that refuses to be written to, as configurations of diffusers."""

    def __setitem__(self, key, value):
        raise TypeError("frozen")

    update = pop = clear = setdefault = __delitem__ = __setitem__


class Configured(nn.Sequential):
    def __init__(self):
        super().__init__(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4))
        self.config, self.recent = Frozen({str(i): i for i in range(19)}), deque([1, 2, 3], maxlen=3)

    def forward(self, x):
        self.recent.append(0)
        return super().forward(x)


class Copyable(Frozen):
    def __deepcopy__(self, memo):
        return Copyable(self)


LOOKS = {
    "analyze": lambda model: analyze(model, images()),
    "convert": convert,
    "memory_report": lambda model: memory_report(model, images()),
    "report": report,
    "verify": lambda model: verify(model, convert(copy.deepcopy(model)), images()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_configurations_and_queues_stay_as_they_are(look):
    """Looking at a model of diffusers emptied its configuration, and queues came back longer."""
    model = Configured()
    model.config = Copyable(model.config)
    LOOKS[look](model)
    assert len(model.config) == 19
    assert list(model.recent) == [1, 2, 3]


@pytest.mark.parametrize("look", ["analyze", "memory_report", "verify"])
def test_a_model_that_cannot_be_copied_is_an_error_that_says_so_and_leaves_the_model(look):
    """The error was that of a dictionary, and said neither who copied nor what to do."""
    model = Configured()
    other = convert(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4)))
    call = LOOKS[look] if look != "verify" else lambda model: verify(model, other, images())
    with pytest.raises(RuntimeError, match=r"inplace_abn: Configured cannot be copied .*TypeError: frozen.*report"):
        call(model)
    assert len(model.config) == 19


def test_a_model_whose_forward_pass_fails_raises_its_own_error_and_is_left_as_it_was():
    def forward(m, x):
        raise KeyError("mine")

    model = OneNorm(forward).eval()
    with pytest.raises(KeyError, match="mine"):
        analyze(model, images())
    assert not model.training
    with pytest.raises(TypeError, match=r"expected model to be a torch\.nn\.Module, got int"):
        analyze(3, images())
    with pytest.raises(ValueError, match="expected an output that requires grad"):
        analyze(nn.ReLU(), images())


def test_inputs_are_left_as_they_were_whatever_the_model_writes_to_them():
    x, named = images(), images()

    def forward(m, x):
        x[0].add_(1)
        x[1]["x"].add_(1)
        return plain(m, x[0] + x[1]["x"])

    before = x.clone(), named.clone()
    analyze(OneNorm(forward), [x, {"x": named}])
    assert torch.equal(x, before[0])
    assert torch.equal(named, before[1])


def test_a_converted_model_is_analyzed_as_if_it_had_just_been_converted():
    model = OneNorm(plain)
    expected = analyze(model, images())
    convert(model)
    nn.init.zeros_(model.bn.weight)
    model(images()).sum().backward()
    nn.init.ones_(model.bn.weight)
    assert not model.bn.outcome().in_place
    assert analyze(model, images()) == expected
    assert not model.bn.outcome().in_place


@pytest.mark.parametrize(
    ("norm", "layer", "shape"),
    [
        (nn.BatchNorm1d(4), nn.Linear(3, 4), (8, 3)),
        (nn.BatchNorm1d(4), nn.Conv1d(3, 4, 1), (2, 3, 8)),
        (nn.BatchNorm3d(4), nn.Conv3d(3, 4, 1), (2, 3, 4, 4, 4)),
    ],
)
def test_one_dimension_three_and_vectors_are_converted(norm, layer, shape):
    last = nn.Linear(4, 4) if len(shape) == 2 else type(layer)(4, 4, 1)
    model = nn.Sequential(layer, spread(norm), nn.ReLU(), last)
    assert analyze(model, torch.randn(shape)).layers[0].in_place


def test_synchronised_batch_norm_is_analyzed_without_a_process_group():
    model = OneNorm(plain, norm=nn.SyncBatchNorm(4))
    (layer,) = analyze(model, images()).layers
    assert (layer.kind, layer.in_place) == ("SyncBatchNorm", True)
    assert type(model.bn) is nn.SyncBatchNorm


def test_arguments_are_those_of_the_model():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = OneNorm(plain)

        def forward(self, model, *, mask=None, tolerance=1.0):
            return self.body(model) * (2.0 if mask is None else mask) * tolerance

    net, x = Masked(), images()
    for args, kwargs in (((x,), {}), ((), {"model": x}), ((x,), {"mask": x[:, :1], "tolerance": 2.0})):
        assert [layer.in_place for layer in analyze(net, *args, **kwargs).layers] == [True]


def test_an_activation_module_that_several_norms_share_is_no_obstacle():
    found = analyze(ResNet(), torch.randn(2, 3, 32, 32))
    first = [layer for layer in found.layers if layer.name.endswith("bn1")]
    assert [(layer.follows, layer.in_place) for layer in first] == [("relu", True)] * 5
