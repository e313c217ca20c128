"""Hooks, graph nodes and custom functions around a norm see the gradients that they saw before the conversion."""

import copy

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import BasicBlock, conv, spread
from graph_programs import READS, WRITES
from one_norm import OneNorm, images, plain
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import check_training

from inplace_abn import analyze, convert, verify


def halved(g):
    return g * 0.5


def halve_all(gradients, *_):
    return tuple(None if g is None else g * 0.5 for g in gradients)


def watched(watch, where="between"):
    """A forward pass. ``watch`` gets the tensor between norm and activation, the one before the norm, or the one after
    the activation."""

    def seen(place, t):
        """Calls ``watch`` at its place. Without grad there is nothing to hook, so ``watch`` is not called."""
        seen = watch(t) if place == where and torch.is_grad_enabled() else None
        return seen if isinstance(seen, torch.Tensor) else t

    def run(m, x):
        h = seen("between", m.bn(seen("before", m.conv(x))))
        return m.last(seen("after", m.act(h)))

    return run


class Reversed(torch.autograd.Function):
    """The identity, with a clipped gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.1, 0.1)


class Guided(torch.autograd.Function):
    """A ReLU whose backward passes on positive gradients only."""

    @staticmethod
    def forward(ctx, x):
        z = F.relu(x)
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return g.clamp(min=0) * (z > 0)


class GuidedReLU(nn.Module):
    def forward(self, x):
        return Guided.apply(x)


def nothing(_):
    return None


WATCHES = {
    "register_hook": lambda h: h.register_hook(halved),
    "register_hook of a view": lambda h: nothing(h.flatten(1).register_hook(halved)),
    "retain_grad": lambda h: nothing(h.retain_grad()),
    "node's prehook": lambda h: h.grad_fn.register_prehook(halve_all),
    "node's hook": lambda h: h.grad_fn.register_hook(halve_all),
    "gradient edge": lambda h: nothing(torch.autograd.graph.get_gradient_edge(h)),
    "multi-grad hook": lambda h: nothing(torch.autograd.graph.register_multi_grad_hook([h], nothing)),
    "a function that makes a view": Reversed.apply,
    "a view of that": lambda h: Reversed.apply(h).view(h.shape),
    "numpy": lambda h: nothing(h.detach().numpy().mean()),
    "tolist": lambda h: nothing(h.tolist()),
}


# torch itself forbids writing to a view that a custom function has made.
INPLACE = [name for name in WATCHES if name not in ("a function that makes a view", "a view of that")]


@pytest.mark.parametrize(("name", "inplace"), [*((n, False) for n in WATCHES), *((n, True) for n in INPLACE)])
def test_what_is_hooked_before_its_activation_does_not_vanish(name, inplace):
    """A hook on the norm's output must not be lost."""
    check_training(spread(OneNorm(watched(WATCHES[name]), nn.ReLU(inplace))), images())


def ending_in_the_norm(register):
    body = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4))
    register(body)
    return nn.Sequential(body, nn.ReLU(), conv(4, 4))


def beginning_with_the_activation(register):
    tail = nn.Sequential(nn.ReLU(), conv(4, 4))
    register(tail)
    return nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), tail)


def around_both(register):
    block = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU())
    register(block)
    return nn.Sequential(block, conv(4, 4))


MODULE_HOOKS = {
    "full backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda _, g: halve_all(g)),
    "full backward hook": lambda m: m.register_full_backward_hook(lambda _, i, o: halve_all(i)),
    "backward hook": lambda m: m.register_backward_hook(lambda _, i, o: halve_all(i)),
    "forward hook that hooks": lambda m: m.register_forward_hook(lambda _, i, o: nothing(o.register_hook(halved))),
    "forward hook that reads": lambda m: m.register_forward_hook(lambda _, i, o: nothing(o.detach().numpy().max())),
    "forward hook that computes": lambda m: m.register_forward_hook(lambda _, i, o: nothing(o.detach().max())),
}


@pytest.mark.parametrize("hook", MODULE_HOOKS)
@pytest.mark.parametrize("make", [ending_in_the_norm, beginning_with_the_activation, around_both])
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook", "ignore:Full backward hook is firing")
def test_hooks_of_a_module_around_or_between_norm_and_activation_see_what_they_saw(hook, make):
    """A backward hook of a Sequential that ends in the norm must not get the gradient of the activated tensor."""
    check_training(spread(make(MODULE_HOOKS[hook])), images())


AFTER = {
    "register_hook": lambda z: z.register_hook(halved),
    "retain_grad": lambda z: z.retain_grad(),
    "node's hook": lambda z: z.grad_fn.register_hook(halve_all),
    "numpy": lambda z: z.detach().numpy().max(),
}


@pytest.mark.parametrize("name", AFTER)
def test_hooks_on_the_activated_tensor_see_what_they_saw(name):
    model = spread(OneNorm(watched(AFTER[name], "after")))
    assert analyze(model, images()).layers[0].in_place
    check_training(model, images())


def test_a_hook_on_the_input_is_one_on_the_input_whenever_it_comes():
    check_training(spread(OneNorm(watched(lambda x: nothing(x.register_hook(halved)), "before"))), images())

    def late(m, x):
        x = m.conv(x)
        h = m.act(m.bn(x))
        if torch.is_grad_enabled():
            x.register_hook(halved)
        return m.last(h)

    model = spread(OneNorm(late))
    assert analyze(model, images()).layers[0].in_place
    check_training(model, images())


@pytest.mark.parametrize("read", ["read by a function", "unread"])
@pytest.mark.parametrize("write", WRITES)
def test_a_hook_that_an_instance_norms_output_leaves_behind_sees_what_it_sees_with_torch(read, write):
    """The hook halved gradients of what came after the write, which torch's hook does not see, without a word."""
    found = []
    original = nn.Sequential(nn.InstanceNorm2d(4, affine=True)).double()
    for net in (original, convert(copy.deepcopy(original))):
        x = torch.linspace(-1, 1, 200, dtype=torch.float64).view(2, 4, 5, 5).sin().requires_grad_()
        h = net[0](x * 1.0)
        kept = READS[read](h)
        h.register_hook(halved)
        z = (WRITES[write](h) * 1.0).square().sum()
        (z + torch.as_tensor(kept).sum()).backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_a_relu_with_a_backward_of_its_own_is_not_taken_over():
    model = spread(OneNorm(plain, GuidedReLU()))
    assert analyze(model, images()).layers[0].follows != "relu"
    check_training(model, images())


def test_verify_tells_a_lost_hook_and_what_to_look_at():
    model = spread(OneNorm(watched(WATCHES["register_hook"])))
    converted = convert(copy.deepcopy(model))
    assert verify(model, converted, images())
    converted.run = plain
    verification = verify(model, converted, images())
    assert not verification
    name, error = verification.worst
    assert name in ("gradient of conv.weight", "gradient of bn.weight", "gradient of bn.bias", "gradient of input 0")
    assert error > 0.3
    assert name in str(verification)


@pytest.mark.parametrize("watched", ["before the addition", "after the addition"])
def test_hooks_within_a_residual_block_see_what_they_saw(watched):
    class Watched(BasicBlock):
        def forward(self, x):
            out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            if watched == "before the addition" and torch.is_grad_enabled():
                out.register_hook(halved)
            out = out + x
            if watched == "after the addition" and torch.is_grad_enabled():
                out.register_hook(halved)
            return self.relu(out)

    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), Watched(4, 4), conv(4, 4))
    check_training(spread(model), images())


def test_saved_tensor_hooks_get_no_empty_tensor_of_an_activation_alone():
    net, shapes = convert(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        net(torch.randn(3, 4))
    assert shapes
    assert all(shape.numel() > 0 for shape in shapes)


@pytest.mark.parametrize("pack", [torch.Tensor.detach, lambda t: t, torch.clone], ids=["alias", "same", "copy"])
@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.Identity])
def test_a_result_that_saved_tensor_hooks_give_back_is_not_read_where_a_mode_sees_backward(act, pack):
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    found, net = [], nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), act(), conv(4, 4)).double()
    for each in (net, convert(copy.deepcopy(net))):
        optimizer = torch.optim.SGD(each.parameters(), 1e-2)
        torch.manual_seed(1)
        for _ in range(3):
            x = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = each(x)
            with Seeing():
                y.square().sum().backward()
            found.append(x.grad)
            optimizer.step()
            optimizer.zero_grad()
    for native, ours in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(ours, native)
