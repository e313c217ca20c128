"""Programs, as in ``programs.py``, that add to the norm's output: a residual, another norm's output or a number."""

import torch
import torch.nn.functional as F
from programs import then


def residual_changed(net, a):
    r = net.r * 1.0
    h = net.bn(net.conv(a)) + r
    s = F.leaky_relu(h, 0.1)
    r = r * 2
    return s, r


def residual_modified(net, a):
    r = net.r * 1.0
    h = net.bn(net.conv(a)) + r
    r.mul_(2)
    return F.relu(h), r


def residual_modified_in_place(net, a):
    r = net.r * 1.0
    h = net.bn(net.conv(a))
    h += r
    r.mul_(2)
    return h * h, r


def both_norms(net, a):
    return F.relu(net.bn(net.conv(a)) + net.bn2(net.conv(a * 2)))


def both_norms_in_place(net, a):
    h, r = net.bn(net.conv(a)), net.bn2(net.conv(a * 2))
    h += r
    return F.relu(h, inplace=True)


def residual_is_used_too(net, a):
    h, r = net.bn(net.conv(a)), net.bn2(net.conv(a * 2))
    h += r
    return F.relu_(h), r.sin()


def three(net, a):
    return F.relu(net.bn(net.conv(a)) + net.r + net.r.sin())


def sum_used_too(net, a):
    h = net.bn(net.conv(a))
    s = h + net.r
    z = F.relu(s)
    return z, s.sin(), h.cos()


def residual_is_the_input(net, a):
    x = net.conv(a)
    return F.relu(net.bn(x) + x)


def sum_under_a_transform(net, a):
    s = net.bn(net.conv(a)) + net.r
    return torch.func.grad(lambda t: (F.relu(s) * t).sum().sin())(net.r), s


SUMS = {
    "another residual of the name": residual_changed,
    "residual modified": residual_modified,
    "residual modified, nothing follows": residual_modified_in_place,
    "residual": then(lambda net, h: F.relu(h + net.r)),
    "residual first": then(lambda net, h: F.relu(net.r + h)),
    "torch.add": then(lambda net, h: F.relu(torch.add(h, net.r))),
    "torch.add, alpha 2": then(lambda net, h: F.relu(torch.add(h, net.r, alpha=2))),
    "add_": then(lambda net, h: h.add_(net.r).relu_()),
    "sub": then(lambda net, h: F.relu(h - net.r)),
    "add a number": then(lambda net, h: F.relu(h + 1)),
    "sum()": then(lambda net, h: F.relu(sum([h, net.r]))),
    "broadcast residual": then(lambda net, h: F.relu(h + net.r[:1])),
    "residual of another dtype": then(lambda net, h: F.relu(h + net.r.float())),
    "transposed residual": then(lambda net, h: F.relu(h + net.r.transpose(2, 3).contiguous().transpose(2, 3))),
    "residual into which it is added": then(lambda net, h: F.relu((net.r * 1).add_(h))),
    "residual without activation": then(lambda net, h: h + net.r),
    "residual and silu": then(lambda net, h: F.silu(h + net.r, inplace=True)),
    "itself": then(lambda net, h: F.relu(h + h)),
    "both norms": both_norms,
    "both norms in place": both_norms_in_place,
    "residual used too": residual_is_used_too,
    "three": three,
    "sum used too": sum_used_too,
    "residual is the input": residual_is_the_input,
    "sum under a transform": sum_under_a_transform,
}
