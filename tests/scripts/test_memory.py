"""The memory report: what is measured, what norms did, and its plot."""

import builtins
import copy

import pytest
import torch
from convertible_nets import chain
from foreign_nets import ResNet, conv, spread
from torch import nn

from inplace_abn import analyze, convert, verify
from inplace_abn.conversion.norms import InPlaceNorm
from inplace_abn.memory import Usage, measure, memory_report, save_plot
from inplace_abn.memory.plot import _places


def test_held_bytes_are_those_of_the_saved_activations():
    x = torch.randn(2, 4, 32, 32)
    short, long = (measure(chain(n), x) for n in (1, 4))
    assert (long.held - short.held) / 3 == pytest.approx(2 * x.nbytes, rel=0.01)
    assert long.peak >= long.held
    assert max(size for _, size in long.timeline) == long.peak
    times = [time for time, _ in long.timeline]
    assert times == sorted(times)
    assert 0 < long.backward_start < times[-1]


def test_weights_that_autocast_has_copied_are_held():
    model = nn.Linear(64, 32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        usage = measure(model, torch.randn(2, 64))
    assert usage.held >= 64 * 32 * 2


def test_a_report_compares_and_tells_what_norms_did():
    x = torch.randn(2, 3, 64, 64)
    model = ResNet()
    model.eval()
    report = memory_report(model, x)
    assert report.before.held - report.after.held == pytest.approx(report.norms.bytes_saved, rel=0.05)
    assert len(report.norms.in_place) == 10
    assert report.after.peak < report.before.peak
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines] == ["held", "native", "converted", "saved", "at"]
    assert not model.training
    assert not any(isinstance(m, InPlaceNorm) for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    alone = memory_report(model, x, converted=False)
    assert alone.after is None
    assert alone.norms is None
    assert len(str(alone).splitlines()) == 2


def test_a_model_without_training_step_is_refused():
    with pytest.raises(ValueError, match="expected an output that requires grad"):
        measure(nn.ReLU(), torch.randn(2, 3))


def test_a_plot_shows_both_timelines(tmp_path):
    pytest.importorskip("matplotlib")
    report = memory_report(chain(2), torch.randn(2, 4, 16, 16))
    save_plot(report, str(tmp_path / "out.png"), "chain")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_forward_and_backward_take_half_of_a_plot_each_whatever_their_times():
    times = [(0.0, 1), (1.0, 2), (90.0, 3), (91.0, 2), (91.5, 1), (99.0, 0)]
    assert _places(Usage(3, 3, tuple(times), 90.0)) == pytest.approx([0, 1 / 3, 2 / 3, 1, 4 / 3, 5 / 3])
    assert _places(Usage(0, 0, (), 0.0)) == []


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    original = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *rest)

    report = memory_report(chain(1), torch.randn(2, 4, 8, 8))
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'inplace-abn\[demo\]'"):
        save_plot(report, str(tmp_path / "out.png"))


def test_all_functions_take_the_arguments_of_a_call_alike():
    """Hugging Face's models need keyword arguments."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = chain(1)

        def forward(self, model, *, mask=None):
            return self.body(model) * (2.0 if mask is None else mask)

    net, x, mask = spread(Masked()), torch.randn(2, 4, 8, 8), torch.rand(2, 1, 8, 8)
    converted = convert(copy.deepcopy(net))
    for args, kwargs in (((x,), {"mask": mask}), ((), {"model": x, "mask": mask}), ((x,), {})):
        expected = analyze(net, *args, **kwargs)
        assert len(expected.in_place) == 1
        assert verify(net, converted, *args, **kwargs)
        assert memory_report(net, *args, **kwargs).norms == expected
        # A step updates running statistics.
        held = [measure(copy.deepcopy(m), *args, **kwargs).held for m in (net, converted)]
        assert held[1] < held[0]


def test_what_a_first_batch_must_decide_is_decided_before_memory_is_measured():
    """The second of two steps is measured. It is one in which nothing is watched."""
    model, x = chain(3), torch.randn(2, 4, 32, 32)
    native = measure(model, x).held
    converted = convert(model)
    assert measure(converted, x).held == measure(converted, x).held < 0.52 * native


def test_what_is_held_under_autocast_is_what_later_steps_hold():
    """A layer norm keeps its result in 16 bits from the second step on."""
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.LayerNorm(64), nn.Linear(64, 64)))).train()
    converted, x = convert(copy.deepcopy(model)), torch.randn(512, 64, requires_grad=True)
    optimizer = torch.optim.SGD(converted.parameters(), 1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        told = memory_report(model, x)
        for _ in range(3):
            converted(x).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert told.after.held == measure(converted, x).held < 0.7 * told.before.held


class BeginsAtZero(nn.Module):
    """A residual block as public models initialise it. Its last norm has a weight of zero, so that it is torch's at
    first."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(3, 8), conv(3, 8)
        self.last, self.shortcut = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        h = self.last(self.a(x))
        h += self.shortcut(self.b(x))
        return h.relu()


def test_a_step_is_measured_of_a_block_that_begins_as_its_shortcut():
    """The shortcut's norm has nothing to measure in the first step. The next step must run all the same."""
    report = memory_report(BeginsAtZero(), torch.randn(2, 3, 8, 8))
    assert report.after.held <= report.before.held


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_caching_allocator_is_asked():
    x = torch.randn(4, 4, 64, 64, device="cuda")
    report = memory_report(chain(4).cuda(), x)
    assert report.before.held - report.after.held >= 0.95 * report.norms.bytes_saved
    assert report.after.peak < report.before.peak


def test_a_models_writes_to_its_inputs_do_not_reach_the_callers():
    """A forward pass that wrote to its input changed the tensor that was given to the report."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = chain(1)

        def forward(self, x, given):
            given["calls"] += 1
            return self.net(x.add_(1))

    x, given = torch.zeros(2, 4, 8, 8), {"calls": 0}
    memory_report(Writes(), x, given)
    assert not x.any()
    assert given == {"calls": 0}


def test_a_converted_model_is_compared_with_what_it_was():
    """Both measurements were of converted models, and the report said that 0 % were saved."""
    model, x = ResNet(), torch.randn(2, 3, 64, 64)
    before = memory_report(model, x)
    after = memory_report(convert(model), x)
    assert after.before.held == before.before.held
    assert after.after.held < 0.8 * after.before.held
    assert any(isinstance(module, InPlaceNorm) for module in model.modules())
