"""Checkpoints compute a forward pass again in backward. That pass does what the first one did, whatever optimizer has
stepped in between, and updates running statistics as often as torch's norms do."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from cases import covering
from foreign_nets import spread
from modes import is_trusted
from one_norm import OneNorm, plain
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

from inplace_abn import InPlaceABN, InPlaceABNSync, convert, guard, set_guard

KINDS = {
    "not reentrant": (False, True),
    "not reentrant, without early stop": (False, False),
    "reentrant": (True, True),
}


def repeated(kind, function, *args):
    reentrant, stops = KINDS[kind]
    with set_checkpoint_early_stop(stops):
        return checkpoint(function, *args, use_reentrant=reentrant)


class Changing(nn.Module):
    """An activation that is another one in each step."""

    step = 0

    def forward(self, y):
        return (torch.relu, F.silu, torch.tanh, F.gelu)[self.step % 4](y)


class Reading(nn.Module):
    """Reads which of relu's results are zero."""

    def forward(self, y):
        z = torch.relu(y)
        return z + 0.3 * (z == 0)


class Writing(nn.Module):
    """Writes to silu's result, which torch allows."""

    def forward(self, y):
        z = F.silu(y)
        z *= 0.7
        return z


CONSUMERS = {
    "PReLU": nn.PReLU,
    "Tanh": nn.Tanh,
    "ReLU6": nn.ReLU6,
    "Dropout": lambda: nn.Dropout(0.3),
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "SiLU": nn.SiLU,
    "GELU": nn.GELU,
    "none": nn.Identity,
    "Dropout, ReLU": lambda: nn.Sequential(nn.Dropout(0.3), nn.ReLU()),
    "ReLU, Dropout": lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.3)),
    "sum, ReLU": nn.ReLU,
    "another one in each step": Changing,
    "reads zeros": Reading,
    "writes to silu's result": Writing,
}


def added(m, x):
    return m.last(m.act(m.bn(m.conv(x)) + x))


def net(consumer, kind, part=None):
    """A checkpointed part, in which a norm is followed by what is asked for, and a part that is not checkpointed."""
    part = part or (added if consumer.startswith("sum") else plain)
    run = lambda m, x: torch.tanh(repeated(kind, functools.partial(part, m), x))  # noqa: E731
    return spread(OneNorm(run, CONSUMERS[consumer](), inputs=4)).double()


def batch():
    return torch.randn(3, 4, 5, 5, dtype=torch.float64).requires_grad_()


def train(generator, discriminator, two_passes):
    """Four steps of a GAN. The discriminator's optimizer steps between the generator's forward and backward.

    With ``two_passes`` the generator has another forward pass after that step, and backward goes through both.
    """
    torch.manual_seed(0)
    nets = (generator, discriminator)
    optimizers = [torch.optim.SGD(net.parameters(), 1e-2) for net in nets]
    found = []
    for step in range(4):
        for module in (*generator.modules(), *discriminator.modules()):
            if isinstance(module, Changing):
                module.step = step
        given, real, weight = batch(), batch(), batch().detach()
        fake = generator(given)
        other = discriminator(fake.detach().requires_grad_())
        (weight * (discriminator(real) - other)).sum().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        again = generator(0.5 * given) if two_passes else fake
        (weight * (discriminator(again) + fake * again)).sum().backward()
        optimizers[0].step()
        found += [given.grad, *(p.grad.clone() for net in nets for p in net.parameters())]
        found += [b.clone().double() for net in nets for b in net.buffers()]
        for optimizer in optimizers:
            optimizer.zero_grad()
    return found + [p.detach() for net in nets for p in net.parameters()]


def assert_trained_alike(ours, torchs):
    for a, e in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-7 * e.abs().max().item() + 1e-10)


@covering(2, consumer=CONSUMERS, kind=KINDS, two_passes=[False, True])
def test_another_optimizer_may_step_between_a_forward_pass_and_its_recomputation(consumer, kind, two_passes):
    """Norms did in the recomputation what they had learned since, which saved other tensors: a CheckpointError, or
    gradients that were 100 % off without a word."""
    nets = [net(consumer, kind) for _ in range(2)]
    converted = [convert(copy.deepcopy(net)) for net in nets]
    torchs = train(*nets, two_passes)
    assert_trained_alike(train(*converted, two_passes), torchs)


NORMS_ALONE = {
    "layer norm": lambda: nn.LayerNorm(4),
    "RMS norm": lambda: nn.RMSNorm(4),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [nn.Identity, nn.SiLU, nn.Tanh])
@pytest.mark.parametrize("name", NORMS_ALONE)
def test_weights_may_change_between_a_forward_pass_and_its_recomputation(name, after, kind):
    """Norms recovered by the old weights what the new ones had made, or took the old statistics."""
    torch.manual_seed(0)
    native = nn.Sequential(nn.Linear(4, 4), NORMS_ALONE[name](), after(), nn.Linear(4, 4)).double()
    found, given = [], torch.randn(16, 4, dtype=torch.float64)
    for model in (convert(copy.deepcopy(native)), native):
        for _ in range(5):
            x = given.clone().requires_grad_()
            z = repeated(kind, model, x)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
            z.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_in_checkpoints_do_what_their_forward_pass_did(kind):
    def nested(m, x):
        return torch.relu(m.bn(repeated(kind, functools.partial(plain, m), x)))

    for inner in KINDS:
        nets = [net("Tanh", inner, nested) for _ in range(2)]
        converted = [convert(copy.deepcopy(net)) for net in nets]
        torchs = train(*nets, two_passes=True)
        assert_trained_alike(train(*converted, two_passes=True), torchs)


@pytest.mark.parametrize("layer", [InPlaceABN, InPlaceABNSync])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_whose_mode_changes_is_computed_again_in_its_former_mode(kind, layer):
    module = set_guard(layer(4, activation="silu", track_running_stats=False).double(), interval=1)
    twin, modes = copy.deepcopy(module), []
    # Beside a large residual xhat is lost.
    for size in (0.0, 1e9, 1e9, 0.0, 0.0, 0.0):
        x, other = batch(), batch()
        residual = torch.full_like(x, size, requires_grad=False)
        dz = torch.randn_like(x) + 2 * x.detach()
        leaf = x.detach().requires_grad_()
        results = repeated(kind, lambda t, residual=residual: module(t * 1, residual), x), twin(leaf * 1, residual)
        modes.append(is_trusted(module))
        guard.generations.advance()
        for each in (module, twin):
            each(other * 1, residual).sum().backward()
        modes.append(is_trusted(module))
        for z in results:
            z.backward(dz)
        torch.testing.assert_close(x.grad, leaf.grad)
        guard.generations.advance()
    changes = [tuple(modes[i : i + 2]) for i in range(0, len(modes), 2)]
    # Under reentrant checkpoints only the recomputation is measured.
    assert kind == "reentrant" or {(True, False), (False, True)} <= set(changes)


# --- Running statistics -----------------------------------------------------------------------------------------------

NORMS = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "cumulative average": lambda: nn.BatchNorm2d(4, momentum=None),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}
PARTS = {
    "alone": lambda m, x: m.bn(x),
    "last": lambda m, x: m.bn(m.conv(x)),
    "in the middle": lambda m, x: m.conv(torch.relu(m.bn(m.conv(x)))),
    "before tanh": lambda m, x: m.conv(torch.tanh(m.bn(m.conv(x)))),
    "before the last activation": lambda m, x: torch.relu(m.bn(m.conv(x))),
    "before a view": lambda m, x: m.bn(m.conv(x)).view(x.shape),
    "before a sum": lambda m, x: m.bn(m.conv(x)) + 1,
    "before a sum and relu": lambda m, x: torch.relu(m.bn(m.conv(x)) + x),
    "twice": lambda m, x: m.bn(torch.relu(m.bn(m.conv(x)))),
}


def holder(norm, part, kind):
    return OneNorm(lambda m, x: repeated(kind, functools.partial(PARTS[part], m), x), norm=norm, inputs=4).double()


def states_of(net):
    """The buffers after each of four steps."""
    optimizer, found = torch.optim.SGD(net.parameters(), 1e-2), []
    torch.manual_seed(0)
    for _ in range(4):
        torch.tanh(net(batch())).sum().backward()
        optimizer.step()
        found += [b.clone() for b in net.buffers()]
    return found


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS)
def test_running_statistics_under_checkpoints_are_updated_as_often_as_torchs(norm, kind, part):
    """The norm at the end of a part was not computed again in the first step, so its statistics were updated once."""
    net = holder(NORMS[norm](), part, kind)
    converted = convert(copy.deepcopy(net))
    torch.testing.assert_close(states_of(converted), states_of(net))


@pytest.mark.parametrize("part", ["alone", "last", "in the middle", "before a view"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("activation", ["identity", "leaky_relu"])
@pytest.mark.parametrize("layer", [InPlaceABN, InPlaceABNSync])
def test_modules_count_batches_under_checkpoints_as_torch_does(layer, activation, momentum, kind, part):
    """Checkpoints end a recomputation by an exception, and the module that was computed last did not count."""
    module = layer(4, activation=activation, momentum=momentum, signed_weight=True)
    activated = nn.Identity() if activation == "identity" else nn.LeakyReLU(0.01)
    native = holder(nn.Sequential(nn.BatchNorm2d(4, momentum=momentum), activated), part, kind)
    # In-place modules do not overwrite a leaf.
    ours = holder(nn.Sequential(nn.Identity() if part != "alone" else Copy(), module), part, kind)
    ours.conv.load_state_dict(native.conv.state_dict())
    torch.testing.assert_close(states_of(ours), states_of(native))


class Copy(nn.Module):
    def forward(self, x):
        return x * 1


@pytest.mark.parametrize("trains_first", [True, False])
@pytest.mark.parametrize("activation", [nn.Identity, nn.ReLU, nn.SiLU, nn.Tanh])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, InPlaceABN])
@pytest.mark.parametrize("after", [[], [nn.Conv2d(4, 2, 1)]], ids=["last", "in the middle"])
def test_a_recomputation_in_the_other_mode_is_torchs_error(norm, activation, trains_first, after):
    """The recomputation was that of another net, and gradients were wrong by up to 70 %."""
    net = convert(nn.Sequential(nn.Conv2d(3, 4, 1), norm(4), activation(), *after)).train(trains_first)
    result = repeated("not reentrant", net, torch.randn(2, 3, 5, 5))
    net.train(not trains_first)
    with pytest.raises(CheckpointError):
        result.sum().backward()


def selectively(function, x):
    """A selective checkpoint, which keeps the results of convolutions."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.convolution.default])
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


def counted(function, x):
    with FlopCounterMode(display=False):
        return function(x)


MODES_OF_FORWARD = {"selective checkpointing": selectively, "a counter of operations": counted}
NETS_OF_MODES = {
    "batch norm": nn.BatchNorm2d,
    "group norm": functools.partial(nn.GroupNorm, 2),
    "layer norm": lambda _: nn.LayerNorm(5),
    "nothing": lambda _: nn.Identity(),
    "InPlaceABN": InPlaceABN,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", [nn.Identity, nn.ReLU, nn.SiLU, nn.Tanh])
@pytest.mark.parametrize("norm", NETS_OF_MODES)
@pytest.mark.parametrize("mode", MODES_OF_FORWARD)
def test_a_recomputation_outside_of_a_dispatch_mode_does_what_its_forward_pass_did_in_it(mode, norm, activation, kind):
    torch.manual_seed(0)
    part = nn.Sequential(nn.Conv2d(4, 4, 1), NETS_OF_MODES[norm](4), activation(), nn.Conv2d(4, 2, 1)).double()
    x, found = batch(), []
    for net in (part, convert(copy.deepcopy(part))):
        for _ in range(2):
            output = MODES_OF_FORWARD[mode](lambda t, net=net: repeated(kind, net, t), x)
            output.square().sum().backward()
            found.append([p.grad for p in (x, *net.parameters())])
            x.grad = None
            net.zero_grad()
    for ours, torchs in zip(found[2:], found[:2], strict=True):
        assert_trained_alike(ours, torchs)


class Block(nn.Module):
    """Ends with a norm, or with the sum of a norm and the block's input."""

    def __init__(self, norm, adds):
        super().__init__()
        self.conv, self.norm, self.adds = nn.Conv2d(4, 4, 3, padding=1), norm, adds

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y + x if self.adds else y


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("norm", ["batch norm", "group norm", "layer norm"])
def test_blocks_of_one_checkpoint_are_recomputed_as_they_were_watched_one_by_one(norm, reentrant, adds):
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(NETS_OF_MODES[norm](4), adds) for _ in range(5)]).double()
    runs = []
    for each in (net, convert(copy.deepcopy(net))):
        optimizer, found = torch.optim.SGD(each.parameters(), 1e-2), []
        torch.manual_seed(1)
        for _ in range(4):
            x = batch()
            checkpoint_sequential(each, 2, x, use_reentrant=reentrant).square().sum().backward()
            found += [x.grad, *(p.grad.clone() for p in each.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        runs.append(found)
    assert_trained_alike(*reversed(runs))


@pytest.mark.parametrize("name", NORMS_ALONE)
def test_a_gradient_that_is_taken_in_a_checkpoint_is_computed_again_as_often_as_with_torch(name):
    torch.manual_seed(0)
    last = nn.BatchNorm1d(4), nn.Linear(4, 4)
    net = nn.Sequential(nn.Linear(4, 4), NORMS_ALONE[name](), nn.GELU(), *last).double()
    found, x = [], torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    for each in (net, convert(copy.deepcopy(net))):

        def penalised(x, net=each):
            with torch.enable_grad():
                inner = x.detach().clone().requires_grad_()
                (g,) = torch.autograd.grad(net(inner).square().sum(), inner)
            return net(x + 1e-3 * g)

        for _ in range(3):
            checkpoint(penalised, x, use_reentrant=False).square().sum().backward()
        found.append([p.grad for p in each.parameters()] + [b.clone().double() for b in each.buffers()])
    assert_trained_alike(*reversed(found))
