"""Programs, as in ``programs.py``, that ask for gradients of the norm's output and then write to it, and that call the
norm and what follows under different saved-tensor hooks. ``net.instance`` is an InstanceNorm."""

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from unseen_functions import DoubledInPlace, Gated, Halved


def offloaded(function, *args):
    """Calls the function while saved tensors are copied to another place."""
    with saved_tensors_hooks(torch.clone, lambda t: t):
        return function(*args)


@torch.no_grad()
def read_without_grad(h):
    return h.mean()


def read_in_a_checkpoint(h):
    return checkpoint(lambda t: t * 0.5, h, use_reentrant=False)


READS = {
    "unread": lambda h: 0,
    "read": lambda h: h * 0.5,
    "read without grad": read_without_grad,
    "read in a checkpoint": read_in_a_checkpoint,
    "read by a function": Halved.apply,
}
WRITES = {
    "silu in place": lambda h: F.silu(h, inplace=True),
    "mul_": lambda h: h.mul_(2),
    "a view is written to": lambda h: (h.view(-1).mul_(2), h)[1],
    "custom function in place": DoubledInPlace.apply,
}


def retained_then_written(norm, read, write):
    def program(net, a):
        h = getattr(net, norm)(net.conv(a))
        s = read(h)
        h.retain_grad()
        z = write(h)
        (z.square() + s).sum().backward(retain_graph=True)
        net.kept.append(h.grad.norm().item())
        return z * 1

    return program


def hooked_then_written(norm, read, write):
    def program(net, a):
        h = getattr(net, norm)(net.conv(a))
        s = read(h)
        h.register_hook(lambda g: g * 0.5)
        return write(h) * 1, h + s

    return program


def retained_and_flagged_then_written(net, a):
    """That a gradient is wanted was taken for a write, over which torch cannot move a retained gradient."""
    h = net.bn(net.conv(a))
    h.retain_grad()
    h.requires_grad_()
    z = h.mul_(2.0)
    z.square().sum().backward(retain_graph=True)
    net.kept.append(h.grad.norm().item())
    return z * 1


def retained_after_a_write(net, a):
    h = net.instance(net.conv(a))
    z = F.relu(h)
    h.mul_(2)
    h.retain_grad()
    h.square().sum().backward(retain_graph=True)
    net.kept.append(h.grad.norm().item())
    return z, h.sin()


def activated_then_offloaded(net, a):
    """The values are computed again, and written to."""
    h = net.instance(net.conv(a))
    z, s = F.relu(h), offloaded(torch.sin, h)
    h.mul_(z.detach().tanh())
    return z, s, h * 1


def input_changes_after_it_was_offloaded(net, a):
    x = net.conv(a) * 1
    h = offloaded(net.bn, x)
    z = F.leaky_relu(h, 0.2)
    x.mul_(2)
    return z, x


def written_through_a_view_and_read_without_grad(net, a):
    h = net.bn(net.conv(a))
    h[:, 1:] *= 2
    net.kept.append(read_without_grad(h).item())
    return h * 1.5


def bias_changes_before_backward(net, a):
    """torch's norm does not save its bias."""
    z = Gated.apply(net.bn(net.conv(a)))
    with torch.no_grad():
        net.bn.bias.add_(0.1)
    return z


def gradient_of_it_is_none(net, a):
    h = net.bn(net.conv(a))
    z = F.relu(h)
    net.kept.append(int(h.grad is None) + 2 * h.retains_grad)
    return z


def parts_are_written(net, a):
    first, second = net.bn(net.conv(a)).chunk(2, 1)
    return first.relu() * second, second.sin()


def called_with_another_layout_too(net, a):
    """torch's norm is called for the first one. It saves the running statistics, which the second call updates."""
    x = net.conv(a)
    return net.bn(x.transpose(2, 3)).sin(), F.relu(net.bn(x))


def view_of_it(net, a):
    h = net.instance(net.conv(a).contiguous(memory_format=torch.channels_last))
    return F.relu(h).view(len(h), -1)


def sum_has_the_layout_of_its_first_operand(net, a):
    h = net.bn(net.conv(a).contiguous(memory_format=torch.channels_last))
    return F.relu(net.r + h).view(len(h), -1)


GRAPH = {
    **{
        f"{norm}, {read}, retained, {write}": retained_then_written(norm, READS[read], WRITES[write])
        for norm in ("bn", "instance")
        for read in READS
        for write in WRITES
    },
    **{
        f"{norm}, {read}, hooked, {write}": hooked_then_written(norm, READS[read], WRITES[write])
        for norm in ("bn", "instance")
        for read in READS
        for write in WRITES
        # torch's InstanceNorm returns a view. A hook on it does not see what comes after a write. Where the hook on our
        # output would, the write is refused.
        if norm == "bn" or (read != "read by a function" and write != "custom function in place")
    },
    "retained, requires_grad_": retained_and_flagged_then_written,
    "retained after a write": retained_after_a_write,
    "activated, then offloaded": activated_then_offloaded,
    "input changes after it was offloaded": input_changes_after_it_was_offloaded,
    "written through a view, read without grad": written_through_a_view_and_read_without_grad,
    "bias changes before backward": bias_changes_before_backward,
    "its gradient is none": gradient_of_it_is_none,
    "parts are written": parts_are_written,
    "called with another layout, too": called_with_another_layout_too,
    "view of it": view_of_it,
    "sum with its first operand's layout": sum_has_the_layout_of_its_first_operand,
}
