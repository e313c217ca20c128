"""Weight, bias and running statistics are what the module has at the call, wherever wrappers have put them."""

import copy
import functools
import pickle

import pytest
import torch
from cases import covering
from layer_norms import ChannelsFirstNorm, RMSNormOfLlama
from modes import start_over
from ranks import on_each_rank
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

from inplace_abn import convert, guard, report, revert

NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, 8),
    "layer": lambda: nn.LayerNorm(8),
    "rms": lambda: nn.RMSNorm(8),
    "llama": lambda: RMSNormOfLlama(8),
    "channels": lambda: ChannelsFirstNorm(8),
}
OF_ROWS = ("layer", "rms", "llama")


class Net(nn.Module):
    """A norm with its initial weights, or others. ``prepare`` is called before each forward pass."""

    def __init__(self, kind, spread):
        super().__init__()
        torch.manual_seed(0)
        make = (lambda: nn.Linear(8, 8)) if kind in OF_ROWS else (lambda: nn.Conv2d(8, 8, 1))
        self.first, self.norm, self.last = make(), NORMS[kind](), make()
        self.act = nn.Identity() if kind in (*OF_ROWS, "channels") else nn.SiLU()
        self.others, self.prepare = nn.ParameterDict(), lambda: None
        with torch.no_grad():
            self.norm.weight.copy_(torch.linspace(-0.7, 1.5, 8) if spread else torch.ones(8))
            if has_bias(self):
                self.norm.bias.copy_(torch.linspace(-1, 1, 8) if spread else torch.zeros(8))
        self.double()

    def forward(self, x):
        self.prepare()
        return self.last(self.act(self.norm(self.first(x))))


def has_bias(net):
    return getattr(net.norm, "bias", None) is not None


def is_computed_elsewhere(net):
    """As in hypernetworks, meta-learning and FSDP: plain tensors with a place in the graph."""
    names = ["weight", "bias"] if has_bias(net) else ["weight"]
    for name in names:
        net.others[name] = nn.Parameter(getattr(net.norm, name).detach() * 1.3 + 0.1)
        delattr(net.norm, name)

    def prepare():
        for name in names:
            setattr(net.norm, name, net.others[name] * 1.0)

    net.prepare = prepare


def has_a_plain_bias(net):
    if has_bias(net):
        bias = net.norm.bias.detach() + 1
        del net.norm.bias
        net.norm.bias = bias


def has_plain_statistics(net):
    for name in ("running_mean", "running_var"):
        if name in net.norm._buffers:
            plain = getattr(net.norm, name) + 0.5
            delattr(net.norm, name)
            setattr(net.norm, name, plain)


def is_pruned(name, net):
    if name == "weight" or has_bias(net):
        prune.l1_unstructured(net.norm, name, 0.3)


class Scaled(nn.Module):
    def forward(self, t):
        return 1.1 * t + 0.05


class Counting(nn.Module):
    """Computes something else whenever it is called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, t):
        self.calls += 1
        return t * (1 + 0.1 * torch.sin(self.calls))


class Noisy(nn.Module):
    def forward(self, t):
        return t + 0.1 * torch.randn_like(t)


def is_parametrized(kind, net):
    parametrize.register_parametrization(net.norm, "weight", kind())


def has_a_parametrized_bias(net):
    if has_bias(net):
        parametrize.register_parametrization(net.norm, "bias", Scaled())


def lies_in_a_flat_buffer(net):
    """As in DeepSpeed: all parameters are views of one tensor, which is written to."""
    flat, start = torch.cat([p.detach().flatten() for p in net.parameters()]), 0
    for p in net.parameters():
        p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    flat *= 1.01


def is_loaded_by_assignment(net):
    state = {name: t * 1.1 if t.is_floating_point() else t for name, t in net.state_dict().items()}
    net.load_state_dict(state, assign=True)


def is_swapped(net):
    torch.utils.swap_tensors(net.norm.weight, nn.Parameter(net.norm.weight.detach() * 1.2))


def is_a_buffer(net):
    weight = net.norm.weight.detach() * 1.2
    del net.norm.weight
    net.norm.register_buffer("weight", weight)


def is_shadowed(net):
    """Python prefers the module's dictionary to its parameters."""
    net.norm.__dict__["weight"] = net.norm.weight.detach() * 1.2


def is_a_property(net):
    """Of a class that was changed after conversion."""
    net.others["raw"] = nn.Parameter(net.norm.weight.detach() * 1.1)
    net.norm.__class__ = type("Own", (type(net.norm),), {"weight": property(lambda norm: net.others["raw"] * 1.5)})


def is_pruned_again_and_again(net):
    """Later masks take more weights."""
    prune.l1_unstructured(net.norm, "weight", 0.2)
    count = iter(range(100))
    net.prepare = lambda: prune.l1_unstructured(net.norm, "weight", 0.3) if next(count) in (1, 3) else None


def is_a_buffer_that_is_written_to(net):
    is_a_buffer(net)
    count = iter(range(100))

    def prepare():
        if next(count) == 2:
            net.norm.weight[3] = 1.0e-4

    net.prepare = prepare


def has_no_bias_any_more(net):
    if has_bias(net) and not isinstance(net.norm, ChannelsFirstNorm):
        net.norm.bias = None


MOVES = {
    "computed elsewhere": is_computed_elsewhere,
    "plain bias": has_a_plain_bias,
    "plain statistics": has_plain_statistics,
    "pruned weight": functools.partial(is_pruned, "weight"),
    "pruned bias": functools.partial(is_pruned, "bias"),
    "parametrized": functools.partial(is_parametrized, Scaled),
    "parametrized bias": has_a_parametrized_bias,
    "counting": functools.partial(is_parametrized, Counting),
    "noisy": functools.partial(is_parametrized, Noisy),
    "weight norm": lambda net: parametrizations.weight_norm(net.norm, "weight"),
    "weight norm by a hook": lambda net: weight_norm(net.norm, "weight"),
    "spectral norm": lambda net: parametrizations.spectral_norm(net.norm, "weight"),
    "flat": lies_in_a_flat_buffer,
    "assigned": is_loaded_by_assignment,
    "swapped": is_swapped,
    "buffer": is_a_buffer,
    "buffer that is written to": is_a_buffer_that_is_written_to,
    "shadowed": is_shadowed,
    "property": is_a_property,
    "pruned again and again": is_pruned_again_and_again,
    "no bias": has_no_bias_any_more,
    "tied": lambda net: setattr(net.first, "bias", net.norm.weight),
    "frozen": lambda net: net.norm.weight.requires_grad_(False),
}


def batch(kind, seed):
    shape = (4, 5, 8) if kind in OF_ROWS else (3, 8, 4, 4)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(model, kind, at=None, move=None, steps=5, compiler=None, rank=0):
    """Outputs and gradients of some steps, in which the parameters are moved, and buffers after them."""
    start_over()
    run, found = model if compiler is None else torch.compile(model, backend=compiler), []
    torch.manual_seed(3)
    for step in range(steps):
        if step == at:
            move(model)
        model.zero_grad()
        y = run(batch(kind, 10 * step + rank))
        (y * (y + 0.3)).mean().backward()
        gradients = [t for p in model.parameters() for t in (p.detach(), p.grad) if t is not None]
        found += [getattr(t, "full_tensor", lambda t=t: t)().clone() for t in (y.detach(), *gradients)]
        torch.optim.SGD(model.parameters(), lr=0.05).step()
    statistics = [getattr(m, name, None) for m in model.modules() for name in ("running_mean", "running_var")]
    return [*found, *(t.double() for t in [*model.buffers(), *statistics] if t is not None)]


def check(actual, expected):
    for ours, others in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, others, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
@covering(2, move=MOVES, kind=NORMS, spread=[False, True])
def test_it_trains_as_torchs_wherever_its_parameters_are(move, kind, spread):
    """Formulas read `_parameters` only, so layer norms with plain tensors as parameters did not train, or lost the
    bias. Parametrizations that draw random numbers or count were called several times in a call."""
    for at in (0, 3):
        expected = train(Net(kind, spread), kind, at, MOVES[move])
        model = convert(Net(kind, spread))
        check(train(model, kind, at, MOVES[move]), expected)
        assert str(report(model))
        if move != "property":
            revert(model)


@covering(
    2,
    move=["computed elsewhere", "plain bias", "pruned bias", "counting", "buffer", "no bias"],
    kind=["layer", "llama", "batch", "group"],
    at=[0, 3],
)
def test_compiled_it_trains_as_torchs_wherever_its_parameters_are(move, kind, at, fresh_compiler):
    # torch compiles a computation that counts as something else than it is.
    expected = train(Net(kind, False), kind, at, MOVES[move], compiler="aot_eager" if move == "counting" else None)
    torch._dynamo.reset()
    check(train(convert(Net(kind, False)), kind, at, MOVES[move], compiler="aot_eager"), expected)


@pytest.mark.parametrize("move", [has_a_plain_bias, is_a_buffer])
def test_plain_tensors_as_parameters_save_as_much_as_parameters(move):
    model = convert(Net("layer", True))
    train(model, "layer", 0, move)
    assert [layer.name for layer in report(model).in_place] == ["norm"]


@pytest.mark.parametrize("kind", OF_ROWS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_whose_weights_are_written_to_before_its_first_call_is_measured(copied, kind):
    """A copy kept the figures of what it was copied from, and noticed writes from its first call on only."""
    norm = NORMS[kind]
    native = nn.Sequential(nn.Linear(8, 8), norm(), nn.Linear(8, 8)).double()
    converted = convert(copy.deepcopy(native))
    for step in range(3):
        converted(batch(kind, step)).square().mean().backward()
        guard.generations.advance()
    found = []
    for model in (native, copied(converted)):
        model.zero_grad()
        with torch.no_grad():
            model[1].weight[2] = 0
        model(batch(kind, 7)).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    check(found[1], found[0])


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fsdp1 with original parameters": lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    ),
    "fsdp2": fully_shard,
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_each_rank(2)
def test_sharded_it_trains_as_torchs(wrapper):
    """Under FSDP with its default, converted layer norms kept weights of 1 and biases of 0, without a gradient."""
    rank = torch.distributed.get_rank()
    for kind in NORMS:
        expected = train(WRAPPERS[wrapper](Net(kind, False)), kind, rank=rank)
        check(train(WRAPPERS[wrapper](convert(Net(kind, False))), kind, rank=rank), expected)
        check(train(convert(WRAPPERS[wrapper](Net(kind, False))), kind, rank=rank), expected)


@pytest.mark.parametrize("wrapper", ["fsdp1 with original parameters", "fsdp2"])
@on_each_rank(2)
def test_sharded_and_compiled_it_trains_as_torchs(wrapper):
    """The review of compiled norms mixed sharded parameters with tensors, and the first optimizer step raised."""
    rank = torch.distributed.get_rank()
    for kind in ("batch", "layer"):
        torch._dynamo.reset()
        expected = train(WRAPPERS[wrapper](Net(kind, False)), kind, rank=rank)
        check(train(WRAPPERS[wrapper](convert(Net(kind, False))), kind, rank=rank, compiler="aot_eager"), expected)
