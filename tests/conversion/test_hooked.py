"""analyze notices hooks and graph nodes of tensors that a conversion would take away, and values that are read without
an op."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import BasicBlock, conv, spread
from torch import nn

from inplace_abn import analyze, convert, verify


def images():
    return torch.randn(2, 3, 8, 8)


def halved(g):
    return g * 0.5


def halve_all(gradients, *_):
    return tuple(None if g is None else g * 0.5 for g in gradients)


class Net(nn.Module):
    """``watch`` gets the tensor between norm and activation, the one before the norm, or the one after the
    activation."""

    def __init__(self, watch=None, activation=None, where="between"):
        super().__init__()
        self.conv, self.bn, self.last = conv(3, 4), nn.BatchNorm2d(4), conv(4, 4)
        self.activation = nn.ReLU() if activation is None else activation
        self.watch, self.where = watch, where

    def seen(self, where, t):
        """Calls ``watch`` at its place. Without grad there is nothing to hook, so ``watch`` is not called."""
        seen = self.watch(t) if self.watch is not None and where == self.where and torch.is_grad_enabled() else None
        return seen if isinstance(seen, torch.Tensor) else t

    def forward(self, x):
        h = self.seen("between", self.bn(self.seen("before", self.conv(x))))
        return self.last(self.seen("after", self.activation(h)))


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
    "register_hook": (lambda h: h.register_hook(halved), "gradient is hooked: register_hook in the model"),
    "register_hook of a view": (lambda h: nothing(h.flatten(1).register_hook(halved)), "register_hook"),
    "retain_grad": (lambda h: nothing(h.retain_grad()), "gradient is hooked: retain_grad in the model"),
    "node's prehook": (lambda h: h.grad_fn.register_prehook(halve_all), "graph node is asked for"),
    "node's hook": (lambda h: h.grad_fn.register_hook(halve_all), "graph node is asked for"),
    "gradient edge": (lambda h: nothing(torch.autograd.graph.get_gradient_edge(h)), "graph node is asked for"),
    "multi-grad hook": (
        lambda h: nothing(torch.autograd.graph.register_multi_grad_hook([h], nothing)),
        "gradient is hooked",
    ),
    "a function that makes a view": (Reversed.apply, "goes through the custom autograd Function Reversed"),
    "a view of that": (lambda h: Reversed.apply(h).view(h.shape), "goes through the custom autograd Function Reversed"),
    "numpy": (lambda h: nothing(h.detach().numpy().mean()), "is also read by numpy in the model"),
    "tolist": (lambda h: nothing(h.tolist()), "is also read by tolist in the model"),
}


# torch itself forbids writing to a view that a custom function has made.
@pytest.mark.parametrize(
    ("name", "inplace"), [(n, i) for n in WATCHES for i in (False, True) if not (i and "Function" in WATCHES[n][1])]
)
def test_what_is_hooked_before_its_activation_does_not_vanish(name, inplace):
    """A hook on the norm's output must not be lost."""
    watch, reason = WATCHES[name]
    model = spread(Net(watch, nn.ReLU(inplace)))
    (layer,) = analyze(model, images()).layers
    assert any(reason in r for r in layer.reasons), layer.reasons
    assert verify(model, convert(copy.deepcopy(model), images()), images())


def ending_in_the_norm(register):
    body = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4))
    register(body)
    return nn.Sequential(body, nn.ReLU(), conv(4, 4))


def beginning_with_the_activation(register):
    tail = nn.Sequential(nn.ReLU(), conv(4, 4))
    register(tail)
    return nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), tail)


MODULE_HOOKS = {
    "full backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda _, g: halve_all(g)),
    "full backward hook": lambda m: m.register_full_backward_hook(lambda _, i, o: halve_all(i)),
    "backward hook": lambda m: m.register_backward_hook(lambda _, i, o: halve_all(i)),
    "forward hook that hooks": lambda m: m.register_forward_hook(lambda _, i, o: nothing(o.register_hook(halved))),
    "forward hook that reads": lambda m: m.register_forward_hook(lambda _, i, o: nothing(o.detach().numpy().max())),
    "forward hook that computes": lambda m: m.register_forward_hook(lambda _, i, o: nothing(o.detach().max())),
}


@pytest.mark.parametrize(
    ("hook", "make"),
    # A forward hook of a module that begins with the activation sees the same in place, so it is no reason to refuse.
    [(hook, ending_in_the_norm) for hook in MODULE_HOOKS]
    + [(hook, beginning_with_the_activation) for hook in MODULE_HOOKS if not hook.startswith("forward")],
)
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook", "ignore:Full backward hook is firing")
def test_hooks_of_a_module_between_norm_and_activation_are_noticed(hook, make):
    """A backward hook of a Sequential that ends in the norm must not get the gradient of the activated tensor."""
    model = spread(make(MODULE_HOOKS[hook]))
    (layer,) = analyze(model, images()).layers
    assert not layer.convertible
    words = ("backward hook of", "register_hook", "graph node", "BackwardHookFunction", "is also read by")
    assert any(word in reason for word in words for reason in layer.reasons), layer.reasons


def test_hooks_of_a_module_around_both_are_no_reason():
    block = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU())
    model = spread(nn.Sequential(block, conv(4, 4)))
    block.register_full_backward_hook(lambda _, i, o: None)
    block.register_full_backward_pre_hook(lambda _, g: halve_all(g))
    (layer,) = analyze(model, images()).layers
    assert layer.convertible, layer.reasons
    converted = convert(copy.deepcopy(model), images())
    assert verify(model, converted, images())


def test_hooks_on_the_activated_tensor_see_what_they_saw():
    for after, refused in (
        (lambda z: z.register_hook(halved), False),
        (lambda z: z.retain_grad(), False),
        (lambda z: z.grad_fn.register_hook(halve_all), True),
        (lambda z: z.detach().numpy().max(), True),
    ):
        model = spread(Net(after, where="after"))
        (layer,) = analyze(model, images()).layers
        assert layer.convertible is not refused, layer.reasons
        assert verify(model, convert(copy.deepcopy(model), images()), images())


def test_a_hook_on_the_input_is_kept_if_it_was_there_before():
    model = spread(Net(lambda x: nothing(x.register_hook(halved)), where="before"))
    (layer,) = analyze(model, images()).layers
    assert layer.convertible, layer.reasons
    assert verify(model, convert(copy.deepcopy(model), images()), images())


def test_a_hook_on_the_input_that_comes_later_is_one_on_the_input():
    class Late(Net):
        def forward(self, x):
            x = self.conv(x)
            h = self.activation(self.bn(x))
            if torch.is_grad_enabled():
                x.register_hook(halved)
            return self.last(h)

    model = spread(Late())
    (layer,) = analyze(model, images()).layers
    assert layer.kept == ("its input's gradient is hooked: register_hook in the model",)
    assert verify(model, convert(copy.deepcopy(model), images()), images())


def forced(layer):
    return replace(layer, reasons=())


def test_a_relu_with_a_backward_of_its_own_is_not_taken_over():
    """Activations are recognised by what they compute in forward, and this one computes a relu."""
    model = spread(Net(activation=GuidedReLU()))
    (layer,) = analyze(model, images()).layers
    assert layer.activation == "identity"
    assert verify(model, convert(copy.deepcopy(model), images()), images())


def test_verify_tells_a_lost_hook_and_what_to_look_at():
    model = spread(Net(lambda h: h.register_hook(halved)))
    plan = analyze(model, images())
    converted = convert(copy.deepcopy(model), replace(plan, layers=(forced(plan.layers[0]),)))
    converted.watch = None
    verification = verify(model, converted, images())
    assert not verification
    name, error = verification.worst
    assert name in ("gradient of conv.weight", "gradient of bn.weight", "gradient of bn.bias", "gradient of input 0")
    assert error > 0.3
    assert name in str(verification)


@pytest.mark.parametrize("watched", ["before the addition", "after the addition"])
def test_hooks_within_a_residual_block_keep_it_as_it_is(watched):
    class Watched(BasicBlock):
        def forward(self, x):
            out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            if watched == "before the addition" and torch.is_grad_enabled():
                out.register_hook(halved)
            out = out + x
            if watched == "after the addition" and torch.is_grad_enabled():
                out.register_hook(halved)
            return self.relu(out)

    model = spread(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), Watched(4, 4), conv(4, 4)))
    layer = next(layer for layer in analyze(model, images()).layers if layer.name == "3.bn2")
    assert any("hooked: register_hook in 3" in reason for reason in layer.residual.reasons), layer.residual
    assert verify(model, convert(copy.deepcopy(model), images(), residual=True), images())
