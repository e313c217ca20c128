"""Programs, as in ``programs.py``, with functions whose call the norm's output does not see."""

import torch
import torch.nn.functional as F
from programs import after, rebind, second_order, then
from unseen_functions import (
    Doubled,
    DoubledInPlace,
    Gated,
    Passed,
    scripted_gate,
    scripted_relu,
    scripted_relu_in_place,
)


def saved_by_a_function(net, a):
    h = net.bn(net.conv(a))
    return Gated.apply(h), F.relu(h)


def in_place_function(net, a):
    h = net.bn(net.conv(a))
    z = DoubledInPlace.apply(h)
    return z * z


def changed(change, function):
    """A program that changes the norm's output in place, and then gives it to a function whose call it does not see."""

    def program(net, a):
        h = net.bn(net.conv(a))
        change(h)
        return function(h), h * 1.5

    return program


def changed_between_functions(net, a):
    h = net.bn(net.conv(a))
    DoubledInPlace.apply(h)
    h.mul_(3)
    DoubledInPlace.apply(h)
    h.add_(net.r)
    return Gated.apply(h), h.sin()


def changed_after_a_function(net, a):
    h = net.bn(net.conv(a))
    z = scripted_relu(h) + 0
    h.mul_(2)
    return Gated.apply(h), z


def item_set(h):
    h[:, 0] = 0.5


def detached(net, a):
    h = net.bn(net.conv(a))
    h.detach_()
    net.kept.append(int(h.requires_grad))
    return Gated.apply(h) + net.r


def written_by_another_name(net, a):
    """An op in place returns the tensor itself, wherever in the graph a custom function has put that tensor."""
    h = net.bn(net.conv(a))
    g = h
    g += 1
    w = DoubledInPlace.apply(h)
    return g * 1.0, w.sin()


def returned_as_it_is(net, a):
    h = net.bn(net.conv(a))
    g = h.contiguous()
    DoubledInPlace.apply(h)
    return g * 1.0, net.bn2(h)


def gradient_of_it(function):
    """A program that takes the gradient of all that was computed with the norm's output, by custom functions and by
    torch's."""

    def program(net, a):
        h = net.bn(net.conv(a))
        z = function(h)
        (g,) = torch.autograd.grad(z.square().sum(), h, retain_graph=True)
        return z, g

    return program


def hooked_after_a_function(net, a):
    h = net.bn(net.conv(a))
    z = Gated.apply(h)
    h.register_hook(lambda g: g * 0.5)
    return z


def hooked_after_both(net, a):
    h = net.bn(net.conv(a))
    s, z = h.sin(), Gated.apply(h)
    h.register_hook(lambda g: g * 0.5)
    return z, s


def retained_after_a_function(net, a):
    h = net.bn(net.conv(a))
    z = Gated.apply(h)
    h.retain_grad()
    z.square().sum().backward(retain_graph=True)
    net.kept.append(h.grad.norm().item())
    return z


def thawed_after_the_call(net, a):
    net.bn.weight.requires_grad_(False)
    h = net.bn(net.conv(a))
    net.bn.weight.requires_grad_(True)
    return Gated.apply(h), h.sin()


UNSEEN = {
    "written by another name": written_by_another_name,
    "returned as it is": returned_as_it_is,
    "second order of a function": second_order(Doubled.apply),
    "custom function": after(Doubled.apply),
    "custom function that makes a view": after(Passed.apply),
    "custom function, then relu": after(lambda h: F.relu(Passed.apply(h) * 1)),
    "relu, then custom function": after(lambda h: Doubled.apply(F.relu(h))),
    "relu_, then custom function": rebind(lambda h: h.relu_()),
    "relu_ of a name, then custom function": after(lambda h: (F.relu_(h), Doubled.apply(h))),
    "add_ of a name, then custom function": then(lambda net, h: (h.add_(net.r), Doubled.apply(h))),
    "saved by a function, then relu": saved_by_a_function,
    "custom function in place": in_place_function,
    "scripted relu": after(scripted_relu),
    "scripted relu_": after(lambda h: scripted_relu_in_place(h) * 1.5),
    "scripted relu_, then the name": rebind(scripted_relu_in_place),
    "scripted gate": after(scripted_gate),
    "mul_, then custom function": changed(lambda h: h.mul_(2), Gated.apply),
    "tanh_, then scripted gate": changed(lambda h: h.tanh_(), scripted_gate),
    "item assignment, then custom function": changed(item_set, Gated.apply),
    "dropout in place, then custom function": changed(lambda h: F.dropout(h, 0.0, True, True), Gated.apply),
    "mul_ without grad, then custom function": changed(torch.no_grad()(lambda h: h.mul_(2)), Gated.apply),
    "changed between functions": changed_between_functions,
    "changed after a function": changed_after_a_function,
    "detached in place": detached,
    "gradient of a custom function": gradient_of_it(Gated.apply),
    "gradient of both": gradient_of_it(lambda h: Gated.apply(h) + h.sin()),
    "gradient of both, in other order": gradient_of_it(lambda h: h.sin() * Gated.apply(h)),
    "hook after a custom function": hooked_after_a_function,
    "hook after both": hooked_after_both,
    "retain_grad after a custom function": retained_after_a_function,
    "thawed after the call": thawed_after_the_call,
}
