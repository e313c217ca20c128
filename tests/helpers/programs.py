"""Programs that call a norm and use its output. A program maps (net, a) to the tensors that the loss is made of.

``net`` has ``conv``, the norms ``bn``, ``bn2`` and ``bn3`` (which takes ``a`` itself), a tensor ``r`` with the shape of
the norms' outputs, and a list ``kept``. Programs that add to the norm's output are in ``sum_programs.py``, and those
that call custom or scripted functions in ``unseen_programs.py``.
"""

import threading

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def rebind(function):
    def program(net, a):
        h = net.bn(net.conv(a))
        function(h)
        return h * 1.5

    return program


def after(function):
    return lambda net, a: function(net.bn(net.conv(a)))


def then(function):
    """A program that calls ``function`` with net and the norm's output."""
    return lambda net, a: function(net, net.bn(net.conv(a)))


def parameters_changed(net, a):
    h = net.bn(net.conv(a))
    net.eval()
    net.bn.weight.requires_grad_(True)
    z = F.relu(h)
    net.train()
    return z


def no_grad_between(net, a):
    h = net.bn(net.conv(a))
    with torch.no_grad():
        net.kept.append(F.relu(h).sum().item())
        net.kept.append(h.mean().item())
    return F.relu(h)


def activated_without_grad(net, a):
    h = net.bn(net.conv(a))
    with torch.no_grad():
        z = F.relu(h)
    return h * z


def in_place_without_grad(net, a):
    h = net.bn(net.conv(a))
    with torch.no_grad():
        h.relu_()
    return h * h.detach()


def under_autocast(net, a):
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        h = net.bn(net.conv(a))
    with torch.autocast("cpu", torch.bfloat16):
        return F.silu(h)


def exception_between(net, a):
    try:
        h = net.bn(net.conv(a))
        raise ValueError(h.shape)
    except ValueError as error:
        assert error.args[0] == net.r.shape
    return F.relu(net.bn(net.conv(a)))


def generated(net, a):
    def layers():
        h = net.bn(net.conv(a))
        yield h
        yield F.relu(h)

    return tuple(layers())


def stored(net, a):
    net.h = net.bn(net.conv(a))
    z = F.relu(net.h)
    h, net.h = net.h, None
    return z, h.tanh()


def by_numpy(net, a):
    h = net.bn(net.conv(a))
    net.kept.append(float(np.abs(h.detach().numpy()).mean()))
    return F.relu(h)


def squeeze(net, a):
    h = net.bn(net.conv(a))
    return h * torch.sigmoid(h.mean((2, 3), keepdim=True))


def hooked(net, a):
    h = net.bn(net.conv(a))
    if h.requires_grad:
        h.register_hook(lambda g: g * 0.5)
    return F.relu(h)


def hooked_after(net, a):
    h = net.bn(net.conv(a))
    z = F.relu(h, inplace=True)
    if h.requires_grad:
        h.register_hook(lambda g: g * 0.5)
    return z * h


def retained(net, a):
    h = net.bn(net.conv(a))
    if h.requires_grad:
        h.retain_grad()
    return F.relu(h)


def two_threads(net, a):
    h, results = net.bn(net.conv(a)), {}

    def read(i):
        with torch.set_grad_enabled(i < 2):
            results[i] = h.sin() if i else h.cos()

    threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    return results[0], results[1]


def checkpointed(**options):
    return lambda net, a: checkpoint(lambda a: F.relu(net.bn(net.conv(a))) * 2, a, **options)


def checkpoint_begins_with_it(**options):
    return lambda net, a: checkpoint(lambda h: F.silu(h) * 2, net.bn(net.conv(a)), **options)


def checkpoint_begins_after_a_write(**options):
    """A checkpoint without reentrance saves its input with the version, before any function sees the input."""

    def run(net, a):
        h = net.bn(net.conv(a))
        h[:, :2].relu_()
        return checkpoint(lambda h: F.silu(h * 2), h, **options)

    return run


def checkpoint_ends_with_it(**options):
    return lambda net, a: F.relu(checkpoint(lambda a: net.bn(net.conv(a)), a, **options))


def called_functionally(net, a):
    state = {k: v.clone() for k, v in net.bn.state_dict().items()} | {"weight": net.bn.weight * 2}
    return F.relu(torch.func.functional_call(net.bn, state, (net.conv(a),)))


def norm_of_norm(net, a):
    return F.relu(net.bn2(net.bn(net.conv(a))))


def called_twice(net, a):
    return F.relu(net.bn(net.conv(a))) + net.bn(net.conv(a.sin())).tanh()


def of_a_leaf(net, a):
    return F.relu(net.bn3(a))


def of_what_is_needed_again(net, a):
    x = net.conv(a)
    return F.relu(net.bn(x)) + x


def pre_activation(net, a):
    x = net.conv(a)
    return F.relu(net.bn(x)) * 2 + x, net.bn2(x).relu_()


def frozen(net, a):
    net.bn.eval()
    z = F.relu(net.bn(net.conv(a)))
    net.bn.train()
    return z


def weights_frozen(net, a):
    for p in net.bn.parameters():
        p.requires_grad_(False)
    z = F.relu(net.bn(net.conv(a)))
    for p in net.bn.parameters():
        p.requires_grad_(True)
    return z


def backward_twice(net, a):
    z = F.relu(net.bn(net.conv(a)))
    (g,) = torch.autograd.grad(z.square().sum(), a, retain_graph=True)
    return z, g


def second_order(activation):
    def program(net, a):
        h = net.bn(net.conv(a))
        z = activation(h)
        if not a.requires_grad or not torch.is_grad_enabled():
            return z
        (g,) = torch.autograd.grad(z.square().sum(), a, create_graph=True)
        return z, g

    return program


def own_linear_algebra(net, a):
    h = net.bn(net.conv(a))
    return torch.einsum("nchw,nchw->nc", h, h), F.conv2d(h, torch.ones(2, 4, 1, 1, dtype=h.dtype))


def concatenated(net, a):
    h = net.bn(net.conv(a))
    return F.relu(torch.cat([h, net.r], 1)), torch.stack((h, h))


def by_keyword(net, a):
    return F.relu(input=net.bn(net.conv(a)), inplace=True), torch.add(input=net.bn(net.conv(a)), other=net.r)


def written_to(net, a):
    h = net.bn(net.conv(a))
    h[:, 1] = 0.5
    return F.relu(h)


def part_written_later(net, a):
    y = net.bn(net.conv(a)).flatten(2)
    y += 1.0
    return y


def out_argument(net, a):
    h = net.bn(net.conv(a))
    with torch.no_grad():
        out = torch.empty_like(net.r)
        torch.mul(h, 2, out=out)
    return F.relu(h) * out


def metadata(net, a):
    h = net.bn(net.conv(a))
    assert isinstance(h, torch.Tensor)
    assert h.shape == h.size() == net.r.shape
    assert (h.dim(), h.ndim, len(h)) == (4, 4, 4)
    assert h.dtype == net.r.dtype
    assert h.device == net.r.device
    assert h.is_contiguous()
    assert h.stride() == net.r.stride()
    assert h.numel() == net.r.numel()
    assert h.is_floating_point()
    assert torch.is_tensor(h)
    assert h.requires_grad == torch.is_grad_enabled()
    return F.relu(h)


def shape_changed(net, a):
    h = net.bn(net.conv(a))
    h.unsqueeze_(0)
    net.kept.extend([h.dim(), len(h), h.size(1), *h.shape])
    return F.relu(h)


def under_a_transform(net, a):
    h = net.bn(net.conv(a))
    g = torch.func.grad(lambda t: (F.relu(h) * t).sum().sin())(net.r)
    return g, torch.func.vmap(lambda t: (t * h[0]).sum())(net.r), F.silu(h)


SEEN = {
    "relu": after(F.relu),
    "relu in place": after(lambda h: F.relu(h, inplace=True)),
    "torch.relu": after(torch.relu),
    "method": after(lambda h: h.relu()),
    "method in place": after(lambda h: h.relu_()),
    "torch.relu_": after(torch.relu_),
    "nn.ReLU": after(nn.ReLU()),
    "nn.ReLU in place": after(nn.ReLU(inplace=True)),
    "aten": after(lambda h: torch.ops.aten.relu(h)),
    "aten overload": after(lambda h: torch.ops.aten.relu.default(h)),
    "aten in place": after(lambda h: torch.ops.aten.relu_(h)),
    "silu": after(F.silu),
    "silu in place": after(nn.SiLU(inplace=True)),
    "hardswish": after(F.hardswish),
    "hardswish in place": after(nn.Hardswish(inplace=True)),
    "leaky_relu": after(lambda h: F.leaky_relu(h, negative_slope=0.2)),
    "leaky_relu_": after(lambda h: F.leaky_relu_(h, 0.2)),
    "leaky_relu of slope 0": after(nn.LeakyReLU(0.0)),
    "leaky_relu of a negative slope": after(nn.LeakyReLU(-0.1)),
    "elu": after(lambda h: F.elu(h, 0.7)),
    "elu_": after(lambda h: F.elu_(h)),
    "elu, scaled": after(lambda h: torch.ops.aten.elu(h, 0.7, 2.0)),
    "gelu": after(lambda h: F.gelu(h, approximate="tanh")),
    "relu6": after(nn.ReLU6(inplace=True)),
    "softplus": after(F.softplus),
    "nothing": after(lambda h: h),
    "nothing in a dictionary": after(lambda h: {"h": [h]}),
    "rebound by relu_": rebind(lambda h: h.relu_()),
    "rebound by add_": rebind(lambda h: h.add_(1.0)),
    "rebound by a module": rebind(nn.ReLU(inplace=True)),
    "rebound by __iadd__": rebind(lambda h: h.__iadd__(h.detach().clone())),
    "rebound by mul_": rebind(lambda h: h.mul_(2)),
    "relu twice": after(lambda h: (F.relu(h), F.relu(h))),
    "relu of both signs": after(lambda h: torch.cat([F.relu(h), F.relu(-h)], 1)),
    "silu and again": after(lambda h: (F.silu(h), h.tanh())),
    "elu and again": after(lambda h: F.elu(h) + h),
    "again in place": after(lambda h: F.relu_(F.relu(h) * h)),
    "unused": then(lambda net, h: net.r * 2),
    "unused and used": then(lambda net, h: F.relu(net.bn2(net.r))),
    "flags": parameters_changed,
    "read without grad": no_grad_between,
    "activated without grad": activated_without_grad,
    "in place without grad": in_place_without_grad,
    "autocast": under_autocast,
    "exception": exception_between,
    "generator": generated,
    "stored": stored,
    "numpy": by_numpy,
    "squeeze and excite": squeeze,
    "hook": hooked,
    "hook after the activation": hooked_after,
    "retain_grad": retained,
    "threads": two_threads,
    "checkpoint": checkpointed(use_reentrant=False),
    "reentrant checkpoint": checkpointed(use_reentrant=True),
    "checkpoint begins": checkpoint_begins_with_it(use_reentrant=False),
    "checkpoint begins after a write to a slice": checkpoint_begins_after_a_write(use_reentrant=False),
    "reentrant checkpoint begins": checkpoint_begins_with_it(use_reentrant=True),
    "checkpoint ends": checkpoint_ends_with_it(use_reentrant=False),
    "reentrant checkpoint ends": checkpoint_ends_with_it(use_reentrant=True),
    "functional_call": called_functionally,
    "norm of a norm": norm_of_norm,
    "called twice": called_twice,
    "a leaf": of_a_leaf,
    "input needed again": of_what_is_needed_again,
    "pre-activation": pre_activation,
    "frozen statistics": frozen,
    "frozen parameters": weights_frozen,
    "backward twice": backward_twice,
    "second order": second_order(F.silu),
    "second order of nothing": second_order(torch.tanh),
    "linear algebra": own_linear_algebra,
    "containers": concatenated,
    "keywords": by_keyword,
    "item assignment": written_to,
    "view written to": part_written_later,
    "out=": out_argument,
    "metadata": metadata,
    "shape changed in place": shape_changed,
    "under a transform": under_a_transform,
}
