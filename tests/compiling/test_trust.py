"""What compiled norms may be fused with: what eager steps measured, or what values of a normal distribution say."""

import fidelity
import pytest
import torch
from cases import rows_covering
from modes import distrust, optimize
from torch import nn
from torch.nn.utils import parametrize, prune

from inplace_abn import InPlaceABN, convert, guard, revert
from inplace_abn.compiling import trust
from inplace_abn.compiling.spelled import activation_key
from inplace_abn.guard.figures import THRESHOLDS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self, activation, adds):
        super().__init__()
        self.norm, self.activation, self.adds = nn.BatchNorm2d(4), activation, adds

    def forward(self, x):
        y = self.norm(x)
        return self.activation(y + x if self.adds else y)


def block(activation=None, adds=False):
    return convert(Block(activation or nn.SiLU(), adds))


def step(module, x):
    module(x.requires_grad_() * 1).sum().backward()


@pytest.mark.parametrize("channels", [1, 3, 5, 13, 21, 32])
def test_values_and_residuals_are_normal_and_independent(channels):
    values, others = trust._normal(channels)
    assert values.shape == others.shape == (1, channels, min(1 << 12, (1 << 14) // channels))
    assert (values[..., 0] == -trust._REACH).all()
    assert (values[..., -1] == trust._REACH).all()
    for t in (values, others):
        assert t.mean().abs() < 1e-3
        # The two ends add up to 0.04 to the variance of 512 values.
        assert abs(t.var() - 1) < 0.01 + 2 * trust._REACH**2 / t.shape[2] * (t is values)
        assert t.mean(2).abs().max() < 0.06
    for channel in range(channels):
        assert torch.corrcoef(torch.stack([values[0, channel], others[0, channel]]))[0, 1].abs() < 0.05


@pytest.mark.parametrize("label", DTYPES)
@pytest.mark.parametrize("activation", fidelity.ACTIVATIONS)
def test_the_answer_is_what_a_normal_batch_says(activation, label):
    torch.manual_seed(0)
    dtype, param = DTYPES[label], fidelity.ACTIVATIONS[activation]
    x, threshold = fidelity.inputs(dtype), THRESHOLDS[dtype]
    module = InPlaceABN(4, activation=activation, activation_param=param, signed_weight=True)
    for gamma, ratio in rows_covering(2, (1e-4, 1e-2, 1.0, 3.0, 10.0, 100.0), (0.0, -2.0, 2.0, -20.0, 20.0)):
        nn.init.constant_(module.weight, gamma), nn.init.constant_(module.bias, ratio * gamma)
        said = fidelity.measured(fidelity.Layer(x, gamma, ratio * gamma, activation))
        share = max(said.x / threshold.x, said.weight / threshold.weight)
        found = trust._tolerated(module, dtype, {"it": (activation, param)}, None).names
        # elu's error grows with the exponential of the largest value, and this batch has none of 4.5 deviations.
        is_refused_early = activation == "elu" and not found
        assert bool(found) == (share <= 1) or 0.5 < share < 2 or is_refused_early, (gamma, ratio, share)


def test_ill_channels_are_saved_and_the_others_are_recovered():
    module = InPlaceABN(512, activation="silu", signed_weight=True)
    ill = [3, 77, 400]
    with torch.no_grad():
        module.weight.normal_(1, 0.2), module.bias.normal_(0, 0.2)
        module.weight[ill], module.bias[ill] = 1e-4, 1.0
    answer = trust._tolerated(module, torch.float32, {"it": ("silu", 1.0)}, None)
    assert (answer.names, [*answer.channels.numbers]) == ({"it"}, ill)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_what_an_eager_step_measured_is_trusted_and_nothing_else(activation, adds):
    module = block(activation(), adds)
    assert trust._found(module.norm, torch.float32, None).names == trust._TYPICAL.keys()
    step(module, torch.randn(8, 4, 16, 16))
    expected = {activation.__name__.lower(), "identity"} | ({"residual"} if adds else set())
    assert trust._found(module.norm, torch.float32, None).names == expected
    assert trust._found(module.norm, torch.bfloat16, None).names == trust._TYPICAL.keys()


def test_what_an_eager_step_refused_is_refused():
    module, x = block(nn.ELU()), torch.randn(8, 4, 16, 16)
    x[0, :, 0, 0] = -1e4
    step(module, x)
    modes = guard.modes_of(module.norm, torch.float32)
    assert modes
    assert not any(mode.decisions[-1].trusted for mode in modes)
    assert not trust._found(module.norm, torch.float32, None).names
    distrusted = InPlaceABN(4)
    assert trust.trusts(distrusted, torch.float32)
    distrust(distrusted, torch.float32)
    guard.renew(distrusted)
    assert not trust.trusts(distrusted, torch.float32)


def test_what_was_measured_is_reviewed_with_the_weights_of_later():
    module = block(nn.ELU())
    step(module, torch.randn(8, 4, 16, 16))
    module.norm.guard_interval = 1
    assert trust.converted(module.norm, torch.float32)[0].split()[:-1] == [activation_key("elu", 1.0), "identity"]
    # A step is reviewed with the weights of its forward pass.
    for _ in range(2):
        optimize(30.0, module.norm)
    assert trust.converted(module.norm, torch.float32)[0].split()[:-1] == ["identity"]
    for _ in range(2):
        optimize(1.0, module.norm)
    assert trust.converted(module.norm, torch.float32)[0].split()[:-1] == [activation_key("elu", 1.0), "identity"]


def test_a_norm_that_was_reverted_is_not_reviewed():
    """Each optimizer step of the process raised an error once a compiled model had been reverted."""
    module = block()
    assert trust.converted(module.norm, torch.float32)[0]
    revert(module)
    optimize(1.0, nn.BatchNorm2d(4))
    assert module.norm not in trust._answers
    assert trust.converted(convert(module).norm, torch.float32)[0]


def test_a_weight_within_eps_of_zero_and_a_pausing_guard_decide_for_all():
    module = block()
    nn.init.constant_(module.norm.weight, 1e-6)
    assert not trust._found(module.norm, torch.float32, None).names
    module.norm.guard_interval = 0
    assert trust._found(module.norm, torch.float32, None).names == trust._TYPICAL.keys()
    assert not trust._found(module.norm.to("meta"), torch.complex64, None).names


def pruned(norm):
    prune.l1_unstructured(norm, "weight", 0.3)


def computed(norm):
    parametrize.register_parametrization(norm, "weight", nn.Softplus())


def of_another_size(norm):
    norm.weight = nn.Parameter(torch.ones(3))


def freed(norm):
    norm.weight.data.untyped_storage().resize_(0)


def with_an_odd_interval(norm):
    norm.guard_interval = "often"


@pytest.mark.parametrize("change", [pruned, computed, of_another_size, freed, with_an_odd_interval])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.LayerNorm])
def test_whatever_becomes_of_a_compiled_norm_other_peoples_optimizers_go_on(kind, change, fresh_compiler):
    """A pruned layer norm had a length of zero, by which every optimizer step of the process divided."""
    model = convert(nn.Sequential(nn.Conv2d(8, 8, 1) if kind is nn.BatchNorm2d else nn.Linear(8, 8), kind(8)))
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.randn(2, 8, 8, 8)).sum().backward()
    model[1].guard_interval = 1
    change(model[1])
    for _ in range(2):
        optimize(1.0, nn.BatchNorm2d(4))
    if change in (pruned, computed):
        compiled(torch.randn(2, 8, 8, 8)).sum().backward()


def test_an_error_in_a_review_is_told_and_makes_the_norm_torchs(monkeypatch, logged, fresh_compiler):
    module = block()
    module.norm.guard_interval = 1
    assert trust.converted(module.norm, torch.float32)[0]
    monkeypatch.setattr(trust, "_tolerated", lambda *_: 1 / 0)
    told = logged("WARNING")
    optimize(1.0, nn.BatchNorm2d(4))
    assert ["cannot be looked at" in record.getMessage() for record in told] == [True]
    # The compiler does not ask again.
    step(torch.compile(module, backend="aot_eager", fullgraph=True), torch.randn(2, 4, 5, 5))
