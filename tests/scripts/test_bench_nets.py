"""The nets of the benchmark: their contenders, their measurements, and the notes on failures."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from cases import needs_compiler
from torch import nn

pytest.importorskip("matplotlib")

from benchmark import report, steps
from benchmark.cases import Setting

from inplace_abn import guard

CPU = torch.device("cpu")
FP32 = Setting("fp32", "contiguous")
EAGER = [name for name, contender in steps.CONTENDERS.items() if not contender.compiled]
COMPILED = [name for name in steps.CONTENDERS if name not in EAGER]


class Tiny(nn.Module):
    """Norms that are followed by an activation in place, by one out of place, and by an addition."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 2, 1))

    def forward(self, images):
        x = self.stem(images)
        return {"logits": self.head(F.relu(self.block(x) + x)), "features": [x]}


def tiny_course(device=CPU, size=16, net=Tiny):
    torch.manual_seed(0)
    return steps.Course(net(), FP32, size, device)


def chain():
    """A net that takes half of the time to compile."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 2, 1))


def test_converted_nets_hold_less():
    measured = steps.measure_net(tiny_course(), 2, steps=2, contenders=EAGER)
    assert measured["notes"] == {}
    native, converted = (measured["contenders"][name] for name in EAGER)
    assert native["ratio"] == [1, 1, 1]
    assert converted["held"] < 0.7 * native["held"]


@pytest.mark.slow
@needs_compiler
def test_compiled_nets_are_measured_and_the_budget_lets_them_hold_less():
    measured = steps.measure_net(tiny_course(size=32, net=chain), 2, steps=1)
    assert measured["notes"] == {}
    assert list(measured["contenders"]) == list(steps.CONTENDERS)
    held = {name: got["held"] for name, got in measured["contenders"].items()}
    assert held["compiled native, budget 0.5"] < held["compiled native"] < held[steps.EAGER_NATIVE]


def test_compiled_nets_have_their_activations_out_of_place_and_the_same_weights():
    course = tiny_course()
    inplace = {name: [] for name in steps.CONTENDERS}
    losses = {}
    for name, contender in steps.CONTENDERS.items():
        training = course.training(contender._replace(compiled=False), 2)
        net = contender._replace(converted=False).prepared(course.copy())
        inplace[name] = [m.inplace for m in net.modules() if hasattr(m, "inplace")]
        losses[name] = training.loss()
    assert inplace == {name: [not contender.compiled, False] for name, contender in steps.CONTENDERS.items()}
    for loss in losses.values():
        torch.testing.assert_close(loss, losses[steps.EAGER_NATIVE], rtol=1e-4, atol=0)


def test_a_compiler_that_fails_is_a_note_and_the_others_are_measured(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch._inductor, "compile", fail)
    measured = steps.measure_net(tiny_course(), 2, steps=1)
    assert list(measured["contenders"]) == EAGER
    assert list(measured["notes"]) == COMPILED
    assert all("RuntimeError: no compiler" in note for note in measured["notes"].values())


def test_a_contender_that_fails_while_it_is_timed_is_a_note():
    runs = {"first": [None, RuntimeError("CUDA out of memory")], "second": [None, None, None]}
    trainings = {}
    for name, effects in runs.items():
        trainings[name] = SimpleNamespace(net=nn.Identity(), images=torch.zeros(1), step=Mock(side_effect=effects))
    notes = {}
    timed = steps.time_steps(trainings, 3, notes)
    assert list(timed) == list(trainings) == ["second"]
    assert len(timed["second"]) == 3
    assert notes == {"first": "RuntimeError: CUDA out of memory"}


def test_timed_steps_are_not_measured_by_the_guard():
    training = tiny_course().training(steps.CONTENDERS[steps.EAGER_CONVERTED], 2, warm_up=2)
    states = [layer._guard for _, layer in guard.layers_of(training.net) if layer._guard is not None]
    modes = [mode for state in states for mode in state.modes.values()]
    measured_at = [mode.measured_at for mode in modes]
    guard.generations.current += 1000
    steps.time_steps({"converted": training}, 3, {})
    assert [mode.measured_at for mode in modes] == measured_at
    assert min(measured_at) >= 0


def test_without_time_no_contender_is_begun():
    measured = steps.measure_net(tiny_course(), 2, steps=1, has_time=lambda name: name == steps.EAGER_NATIVE)
    assert list(measured["contenders"]) == [steps.EAGER_NATIVE]


def test_tables_of_nets_give_ratios_to_eager_native_and_notes():
    native = {"ms": [9.0, 10.0, 11.0], "ratio": [1, 1, 1], "held": 4 << 20, "peak": 8 << 20}
    converted = {"ms": [7.0, 8.0, 9.0], "ratio": [0.7, 0.8, 0.9], "held": 2 << 20, "peak": 6 << 20}
    described = {"net": "a", "weights": "trained", "dtype": "fp32", "layout": "contiguous", "batch": 2, "size": 32}
    whole = {"contenders": dict(zip(EAGER, (native, converted), strict=True)), "notes": {"compiled native": "why"}}
    # The second net has no eager native contender to compare with.
    partial = {"contenders": {EAGER[1]: {k: v for k, v in converted.items() if k != "ratio"}}, "notes": {}}
    text = report.nets_tables({"nets": [described | whole, described | {"net": "b"} | partial]})
    assert "| net | eager native | eager converted | compiled native |" in text
    assert "| 4.0 (100%) / 8.0 (100%) | 2.0 (50%) / 6.0 (75%) | - |" in text
    assert "| 10.0 | 8.00, 0.800x (0.700-0.900) | - |" in text
    assert "| b trained, fp32 contiguous, 2x3x32x32 | - | 8.00 | - |" in text
    assert "- a trained, fp32 contiguous, 2x3x32x32, compiled native: why" in text
    assert report.nets_tables({"nets": []}) == ""


@pytest.mark.parametrize("most", [0, 1, 5, 64, 1000])
@pytest.mark.parametrize("start", [1, 64])
def test_the_largest_batch_is_found_to_a_sixteenth(most, start):
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= most

    found = steps.largest(fits, start)
    assert found <= most
    assert most - found <= most // 16
    assert len(tried) <= 16
