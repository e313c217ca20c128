"""What a measurement says of each channel, and what it takes."""

import pytest
import torch
import torch.nn.functional as F
from modes import layer
from test_host_waits import NoWaits
from torch.profiler import ProfilerActivity, profile

from inplace_abn import InPlaceABN, InPlaceGroupNorm, InPlaceInstanceNorm, reference
from inplace_abn.activations import TYPICAL, activation_backward
from inplace_abn.guard import figures, measuring, recovery
from inplace_abn.kernels import ops
from inplace_abn.settings import AT_LEAST_EPS, MAGNITUDE, Operands, Settings

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(x, statistics, operands, settings):
    """dx of `recovery.Errors`, from the errors of all values."""
    mean, var, (weight, bias, _, *_) = *(t.double() for t in statistics), operands
    inv_std, gamma = torch.rsqrt(var + EPS), weight.double()
    xhat = (x[0].double() - mean[:, None]) * inv_std[:, None]
    y = gamma[:, None] * xhat + bias.double()[:, None]
    activation, one = (settings.activation, settings.activation_param), torch.ones((), dtype=torch.float64)
    slope, torchs = (activation_backward(t, one, *activation) for t in (y, y.to(x.dtype).double()))
    z = x.clone()
    ops.run(ops.forward, [z], z, *statistics, weight, bias, None, *settings.arithmetic(), True)
    recovered_xhat, recovered, _ = (t[0] for t in recovery._recovered(z, operands, settings))
    slope = torch.where((recovered - torchs).abs() < (recovered - slope).abs(), torchs, slope)
    found, unit = [], torch.finfo(torch.float32).eps / 2
    # dx is made of multiples of y - residual, of the size of which it rounds.
    rounding = unit / 3**0.5 * (y / gamma[:, None]).square().mean(dim=1).sqrt()
    signs = [torch.ones_like(gamma)] if settings.shared < 2 else [torch.ones_like(gamma), gamma.sign()]
    for dz in [sign[:, None] * t for sign in signs for t in (xhat, slope * xhat)]:
        for share in (inv_std, torch.ones_like(inv_std)):

            def dx(xhat, slope, dz=dz, share=share):
                dy, projection = gamma[:, None] * slope * dz, torch.zeros(len(gamma), 1)
                if settings.training:
                    means = (t.mean(dim=1) for t in (dy, xhat * dy))
                    mean, projection = (reference.of_group(t, settings.shared)[:, None] for t in means)
                    dy = dy - mean - xhat * projection
                return share[:, None] * dy, share * projection[:, 0]

            exact, projection = dx(xhat, slope)
            size = ((share * gamma)[:, None] * slope * dz).square().mean(dim=1).sum()
            error = (dx(recovered_xhat, recovered)[0] - exact).square().mean(dim=1)
            found.append((error + (rounding * projection).square()) / size)
    return torch.stack(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("statistics", ["of the batch", "of groups", "frozen"])
@pytest.mark.parametrize(("activation", "param"), TYPICAL)
def test_the_figures_of_channels_are_those_of_the_errors_of_all_values(activation, param, statistics, dtype):
    shared, training = 4 if statistics == "of groups" else 0, statistics != "frozen"
    x = torch.randn(1, 8, 500) * torch.rand(8, 1).mul(3).exp()
    mean, var = ops.statistics(x, shared) if training else (torch.randn(8), torch.rand(8))
    operands = Operands(torch.randn(8), 3 * torch.randn(8))
    settings = Settings(activation, param, EPS, AT_LEAST_EPS, training, None, shared)
    of_dx = expected(x.to(dtype), (mean, var), operands, settings)
    errors = recovery.measured(x.to(dtype), mean, var, operands, settings)
    torch.testing.assert_close(errors.dx, of_dx, rtol=1e-4, atol=1e-14)


@pytest.mark.parametrize("activation", ["identity", "relu", "silu", "elu"])
def test_a_channel_of_large_beta_causes_the_error(activation):
    module = layer(activation)
    with torch.no_grad():
        module.bias[3] = 100.0
    found = figures.unpacked(measuring.measure(module, torch.randn(8, 8, 16, 16).bfloat16(), None))
    others = torch.arange(8) != 3
    assert (found.dx[:, 3] > 10 * found.dx[:, others].sum(dim=1)).all()
    assert found.weight[3] > 10 * found.weight[others].max()


@pytest.mark.parametrize("kind", ["batch", "instance", "group"])
def test_pieces_change_nothing(kind, monkeypatch):
    """A piece may be some channels, or some values of a channel."""
    module = {
        "batch": lambda: InPlaceABN(8, activation="silu"),
        "instance": lambda: InPlaceInstanceNorm(8, activation="silu"),
        "group": lambda: InPlaceGroupNorm(2, 8, activation="silu"),
    }[kind]()
    x, residual = torch.randn(2, 4, 8, 100, 3).unbind()
    x, residual = x.bfloat16(), residual.bfloat16()
    whole = measuring.measure(module, x, residual)
    for piece in (50, 1000):
        monkeypatch.setattr(recovery, "PIECE", piece)
        torch.testing.assert_close(measuring.measure(module, x, residual), whole, rtol=1e-9, atol=1e-18)


def test_the_worst_sample_counts_for_dweight_and_all_samples_for_dx():
    module, x = InPlaceGroupNorm(2, 8, activation="silu"), torch.randn(2, 8, 16, 16)
    x[1] += 300
    both, first, second = (measuring.measure(module, part, None) for part in (x, x[:1], x[1:]))
    torch.testing.assert_close(both[0], torch.maximum(first[0], second[0]))
    # Both samples have about the same dx.
    torch.testing.assert_close(both[1:-2], (first[1:-2] + second[1:-2]) / 2, rtol=0.1, atol=0)


def test_samples_that_have_too_many_channels_together_are_not_all_looked_at():
    x = torch.arange(64.0).view(64, 1, 1, 1).expand(64, 512, 7, 7)
    assert recovery.sample(x, per_instance=True).unique().tolist() == list(range(0, 64, 8))
    module = InPlaceInstanceNorm(512)
    given = torch.randn(x.shape)
    given[1::8] = torch.nan
    assert not figures.unpacked(measuring.measure(module, given, None)).unknown
    given[8] = torch.nan
    assert figures.unpacked(measuring.measure(module, given, None)).unknown


def test_the_figures_on_the_host_are_those_of_the_device():
    of_weight, *of_dx = torch.rand(5, 5).double()
    errors = recovery.Errors(of_weight, torch.stack(of_dx), torch.arange(5) == 1)
    weight = torch.tensor([1.0, -1e-4, 2.0**41, 0.5, 1.0])
    settings = Settings("relu", 0.0, EPS, AT_LEAST_EPS, True, None)
    bias = torch.tensor([0.0, -3.0, 0.0, 2.0, 1.0])
    packed = figures.packed(errors, weight, bias, settings)
    assert packed.shape == (9, 5)
    found = figures.unpacked(packed)
    assert found.weight.isinf().tolist() == [False, False, True, False, False]
    assert torch.equal(found.weight[:2], errors.weight[:2])
    assert torch.equal(found.dx, errors.dx)
    assert torch.equal(found.least, (weight.abs() / EPS).double())
    assert errors.dx.sum(dim=1).max().sqrt() == max(sum(row) for row in found.dx.tolist()) ** 0.5
    assert torch.equal(found.bias, bias.double())
    assert found.silent.tolist() == [0, 1, 0, 0, 0]
    without = figures.unpacked(figures.packed(errors, None, None, settings))
    assert without.size.tolist() == [1.0] * 5
    assert not without.bias.any()
    assert not without.weight.any()
    assert without.least.isinf().all()
    assert torch.equal(found.size, weight.abs().double())
    by_magnitude = figures.unpacked(figures.packed(errors, weight, bias, settings._replace(scale=MAGNITUDE)))
    assert by_magnitude.least.isinf().all()
    assert torch.equal(by_magnitude.size, weight.abs().double() + EPS)
    assert not found.unknown
    for row in range(len(packed)):
        broken = packed.clone()
        broken[row, 3] = torch.nan
        assert figures.unpacked(broken).unknown


@pytest.mark.parametrize("x", [torch.zeros(4, 8, 6, 6), torch.full((4, 8, 6, 6), 0.3)], ids=["zeros", "one value"])
def test_a_batch_of_one_value_is_silent_if_its_roundings_are_nothing(x):
    module = layer(beta=1.0)
    assert not figures.unpacked(measuring.measure(module, x.bfloat16(), None)).is_useful
    with torch.no_grad():
        module.weight[2:5], module.bias[2:5] = 1e-2, 0.3
    found = figures.unpacked(measuring.measure(module, x.bfloat16(), None))
    assert found.silent.tolist() == [1, 1, 0, 0, 0, 1, 1, 1]
    assert (found.weight[2:5] > 2.0**-4).all()


def test_what_a_residual_makes_dead_is_silent_and_what_the_bias_makes_dead_is_not():
    module, x = layer(beta=-100.0), torch.randn(4, 8, 6, 6)
    assert not figures.unpacked(measuring.measure(module, x, None)).silent.any()
    module, residual = layer(), torch.zeros_like(x)
    residual[:, 3] = -100.0
    found = figures.unpacked(measuring.measure(module, x, residual))
    assert found.silent.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_rows_of_one_value_are_silent():
    weight, bias, settings = torch.ones(8), torch.ones(8), Settings("identity", 0.0, EPS, MAGNITUDE, True, None)
    for x, is_silent in ((torch.full((4, 8), 0.5), True), (torch.randn(4, 8), False)):
        y = F.layer_norm(x, (8,), weight, bias, EPS)
        figures_of_rows = measuring.figures_of_rows(x, y, weight, bias, settings._replace(rows="layer"))
        assert figures.unpacked(figures_of_rows).is_useful != is_silent


PEAKS = {
    "few channels": (lambda: InPlaceABN(3, activation="mish"), (16, 3, 112, 112)),
    "some channels": (lambda: InPlaceABN(64, activation="gelu"), (8, 64, 56, 56)),
    "many channels": (lambda: InPlaceABN(4096, activation="silu"), (64, 4096)),
    "instance norm": (lambda: InPlaceInstanceNorm(512, activation="silu"), (16, 512, 7, 7)),
    "group norm": (lambda: InPlaceGroupNorm(1, 512, activation="hardswish"), (16, 512, 7, 7)),
}


def peak(function):
    """The largest memory in bytes that a call takes on the CPU at any moment."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = torch.tensor([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(sizes.cumsum(dim=0).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", PEAKS)
def test_a_measurement_takes_at_most_4_mib_besides_the_sample(kind, dtype):
    make, shape = PEAKS[kind]
    module, x, residual = make(), torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    sample = recovery.sample(x, module.per_instance)
    assert sample.numel() <= recovery.SAMPLE
    taken = peak(lambda: measuring.measure(module, x, residual)) - 2 * sample.nbytes
    assert 0 < taken <= 4 << 20


@pytest.mark.parametrize("kind", PEAKS)
def test_the_host_does_not_wait_for_a_measurement(kind):
    make, shape = PEAKS[kind]
    module, x = make(), torch.randn(shape)
    with torch.device("meta"), NoWaits():
        measuring.measure(module, x, None)


@pytest.mark.parametrize("norm", [reference.LAYER, reference.RMS])
def test_channels_of_rows(norm, monkeypatch):
    x, weight, bias = 3 * torch.randn(40, 16, 24) + 1, torch.randn(24), torch.zeros(24)
    weight[3], bias[5] = 0.0, 1e3
    settings = Settings("identity", 0.0, EPS, MAGNITUDE, True, None, rows=norm)
    y = reference.normalised_rows(x.double(), weight.double(), bias.double(), norm, EPS).bfloat16()
    x = x.bfloat16()
    packed = measuring.figures_of_rows(x, y, weight, bias, settings)
    assert packed.shape == (9, 24)
    assert packed[0].isinf().nonzero().flatten().tolist() == [3]
    assert (packed[1:-4, [3, 5]] > 100 * packed[1:-4, 6:].amax(dim=1, keepdim=True)).all()
    monkeypatch.setattr(measuring, "PIECE", 100)
    torch.testing.assert_close(measuring.figures_of_rows(x, y, weight, bias, settings), packed, rtol=1e-9, atol=0)


def test_a_measurement_of_rows_takes_at_most_4_mib():
    x, weight, bias = torch.randn(8, 196, 768), torch.ones(768), torch.zeros(768)
    y, settings = F.layer_norm(x, (768,)), Settings("identity", 0.0, EPS, MAGNITUDE, True, None, rows=reference.LAYER)
    assert peak(lambda: measuring.figures_of_rows(x, y, weight, bias, settings)) <= 4 << 20
