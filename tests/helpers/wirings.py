"""Wirings: the computation between a net's leaves and its outputs."""

import torch
import torch.nn.functional as F
from returned_gradients import RETURNED, GradientFrom, ReturnsItsInput, SameToBoth
from torch.autograd.graph import register_multi_grad_hook
from wired_nets import SHAPE, C, ramp


def views_of(*functions):
    """A wiring that sums the squares of several functions of z."""

    def wiring(n):
        z = n.unit()
        return sum(f(z).square().sum() for f in functions)

    return wiring


def consumer(function):
    return lambda n: function(n, n.unit())


def producer(function):
    """A wiring whose ABN gets ``function`` of the stem."""
    return lambda n: n.conv(n.abn(function(n, n.stem())), 1)


def chain(n):
    return n.conv(n.unit(), 1)


def deep_chain(n):
    x = n.a
    for i in range(4):
        x = n.unit(i, x)
    return x


def residual_of_overwritten(n):
    x = n.stem()
    z = n.abn(x)
    return n.conv(z, 1) + n.overwritten(x, z)


def residual_of_copy(n):
    x = n.stem()
    return n.conv(n.abn(x.clone()), 1) + x


def sum_with_overwritten(n):
    x = n.stem()
    z = n.abn(x)
    return z + n.overwritten(x, z)


def residual_block(n):
    r = n.unit(0)
    z = n.unit(1, r)
    return n.abn(n.stem(2, z), 2) + r


def two_residual_blocks(n):
    r = n.unit(0)
    r = n.conv(n.unit(1, r), 1) + r
    return n.conv(n.unit(2, r), 2) + r


def residual_argument(n):
    r = n.unit(0)
    return n.conv(n.abn(n.stem(1, r), 1, residual=r), 2)


def residual_argument_used_again(n):
    r = n.unit(0)
    z = n.abn(n.stem(1, r), 1, residual=r)
    return n.abn(n.stem(2, z), 2, residual=z) + r


def residual_argument_expanded(n):
    r = n.a.mean((2, 3), keepdim=True).expand(SHAPE)
    return n.abn(n.stem(), residual=r)


def residual_argument_leaf(n):
    return n.abn(n.stem(), residual=n.a)


def dense_block(n):
    parts = [n.unit(0)]
    for i in range(1, 4):
        parts.append(n.unit(i, torch.cat(parts, 1)[:, :C] + parts[-1]))
    return torch.cat(parts, 1)


def same_module_twice(n):
    return n.conv(n.abn(n.stem(1, n.unit(0)), 0), 2)


def shared_by_two_branches(n):
    return n.abn(n.stem(0), 0) * n.abn(n.stem(1), 0)


def detached_copy_feeds_a_second_loss(n):
    z = n.unit()
    return n.conv(z, 1).square().sum() + n.conv(z.detach(), 2).square().sum() + (z.detach() * z).sum()


def one_branch_unused(n):
    z = n.unit(0)
    n.kept.append(n.unit(1, z).detach())
    return n.conv(z, 2)


def squeeze_and_excite(n):
    z = n.unit()
    return z * torch.sigmoid(z.mean((2, 3), keepdim=True))


def gated(n):
    return torch.sigmoid(n.unit(0)) * torch.tanh(n.unit(1))


def attention(n):
    z = n.unit().flatten(2)
    return (z.transpose(1, 2) @ z).softmax(-1) @ z.transpose(1, 2)


def in_place_consumer(n):
    z = n.unit()
    y = n.conv(z, 1)
    y += z
    return F.relu_(y)


def in_place_sum_of_units(n):
    y = n.conv(n.unit(0), 2)
    y += n.unit(1)
    y -= n.unit(2)
    return y


def statistics_without_grad(n):
    z = n.unit()
    with torch.no_grad():
        n.kept.append(z.mean((0, 2, 3)))
    return z * 2


def same_gradient_to_two(n):
    return SameToBoth.apply(n.unit(0), n.unit(1), n.kept)


def same_gradient_to_two_units_and_a_leaf(n):
    return SameToBoth.apply(n.unit(0) + n.a, n.unit(1), n.kept)


def leaf_takes_the_gradient(n):
    return n.a + n.unit()


def part_of_the_batch(n):
    return n.conv(n.abn(n.stem()[:2]), 1)


def part_of_the_channels(n):
    x = torch.cat([n.stem(), n.stem(1)], 1)
    return n.conv(n.abn(x[:, 2 : 2 + C]), 2)


def part_while_all_is_used(n):
    x, z = n.abn_of_part(n.stem(), slice(1, 3))
    return n.conv(x, 1) + 2 * z.sum(0)


def every_other(n):
    x = n.stem()
    return n.conv(n.abn(x[::2, :, 1:, ::3]), 1)


def transposed(n):
    return n.conv(n.abn(n.stem().transpose(2, 3)), 1)


def flattened(n):
    return n.abn(n.stem().reshape(SHAPE[0], C, -1))


def two_dimensional(n):
    return n.abn(n.stem().mean((2, 3)))


def kept_base_of_view(n):
    x, z = n.abn_of_part(n.stem(), slice(0, 2))
    n.kept.append(x.detach())
    return z * 2


def alias_made_before(n):
    x = n.stem()
    alias = x.detach()
    z = n.abn(x)
    n.kept.append(alias if n.inplace else z.detach())
    return z * 2


def input_is_data(n):
    """x needs no gradient, and the caller goes on holding x."""
    x = n.a.detach().clone()
    z = n.abn(x)
    n.kept.append(n.overwritten(x, z).detach())
    return n.conv(z, 1)


def with_numpy(n):
    z = n.unit()
    n.kept.append(z.detach().cpu().numpy())
    return z * 2


def grad_is_z(n):
    return ReturnsItsInput.apply(n.unit()) * 1


def hook_before_and_after(n):
    x, gradients = n.stem(), []
    n.kept.append(gradients)
    if x.requires_grad:
        x.register_hook(gradients.append)
    z = n.abn(x)
    if z.requires_grad:
        z.register_hook(gradients.append)
    return z * ramp(z)


def multi_grad_hook(n):
    y, z = n.unit(0), n.unit(1)
    n.kept.append([])
    if y.requires_grad and z.requires_grad:
        register_multi_grad_hook((y, z), n.kept[-1].append)
    return y * z


def dropout(n, x):
    torch.manual_seed(3)
    return F.dropout(x, 0.4)


WIRINGS = {
    "chain": chain,
    "unit alone": lambda n: n.unit(),
    "deep chain": deep_chain,
    "conv(abn(x)) + x": residual_of_overwritten,
    "conv(abn(x.clone())) + x": residual_of_copy,
    "abn(x) + x": sum_with_overwritten,
    "abn(a) + abn(b)": lambda n: n.unit(0) + n.unit(1),
    "abn(a) + abn(b) + abn(c)": lambda n: n.unit(0) + n.unit(1) + n.unit(2),
    "abn(a) + abn(b) + a": lambda n: n.unit(0) + n.unit(1) + n.a,
    "abn(a) - abn(b)": lambda n: n.unit(0) - n.unit(1),
    "conv(z) - z": consumer(lambda n, z: n.conv(z, 1) - z),
    "z - conv(z)": consumer(lambda n, z: z - n.conv(z, 1)),
    "z + z": consumer(lambda n, z: z + z),
    "z * z": consumer(lambda n, z: z * z),
    "residual block": residual_block,
    "two residual blocks": two_residual_blocks,
    "residual argument": residual_argument,
    "residual argument used again": residual_argument_used_again,
    "residual argument expanded": residual_argument_expanded,
    "residual argument is a leaf": residual_argument_leaf,
    "dense block": dense_block,
    "same module twice": same_module_twice,
    "same module in two branches": shared_by_two_branches,
    "detached copy in a second loss": detached_copy_feeds_a_second_loss,
    "one branch unused": one_branch_unused,
    "squeeze and excite": squeeze_and_excite,
    "gated": gated,
    "attention": attention,
    "in-place add to a consumer": in_place_consumer,
    "in-place sum of units": in_place_sum_of_units,
    "statistics without grad": statistics_without_grad,
    "cat": lambda n: torch.cat([n.unit(0), n.unit(1), n.a], 1),
    "cat of z and z": consumer(lambda n, z: torch.cat([z, z])),
    "stack": lambda n: torch.stack([n.unit(0), n.unit(1)]),
    "chunk": consumer(lambda n, z: torch.mul(*z.chunk(2, 1))),
    "split and cat": consumer(lambda n, z: torch.cat(z.split([1, 3], 1)[::-1], 1)),
    "unbind": consumer(lambda n, z: z.unbind(0)[1] * z.unbind(0)[2]),
    "several consumers": consumer(lambda n, z: n.conv(z, 1) * n.conv(z, 2) + z.exp() + z.sin()),
    "views": views_of(lambda z: z.flatten(1), lambda z: z.reshape(-1), lambda z: z[..., None]),
    "transposes": views_of(lambda z: z.transpose(1, 2), lambda z: z.permute(0, 2, 3, 1).contiguous()),
    "one transpose": consumer(lambda n, z: z.permute(0, 2, 3, 1).contiguous() * 2),
    "flips": views_of(lambda z: z.flip(0), lambda z: z.flip(2, 3), lambda z: z.roll(1, 3)),
    "slices": views_of(lambda z: z[1:], lambda z: z[:, 1], lambda z: z[..., ::2], lambda z: z.narrow(0, 1, 2)),
    "indexing": views_of(lambda z: z[[0, 0, 2]], lambda z: z[z > 0], lambda z: z.diagonal(0, 2, 3)),
    "as_strided": consumer(lambda n, z: z.as_strided((3, 4), (2, 1)) * 2),
    "unfold": consumer(lambda n, z: z.unfold(2, 3, 1) * 2),
    "broadcasting": consumer(lambda n, z: z * z[:, :1] + z.amax((2, 3), keepdim=True)),
    "expand": consumer(lambda n, z: z.mean((2, 3), keepdim=True).expand(SHAPE) * 2),
    "masking": consumer(lambda n, z: torch.where(z > 0.3, z, z * 3).masked_fill(z < -0.5, 0.2)),
    "pooling": consumer(lambda n, z: F.max_pool2d(z, 2) + F.avg_pool2d(z, 2)),
    "padding": consumer(lambda n, z: F.pad(z, (1, 1, 2, 0))),
    "interpolation": consumer(lambda n, z: F.interpolate(z, scale_factor=2.0)),
    "dropout": consumer(dropout),
    "clone": consumer(lambda n, z: z.clone()),
    "batch norm": consumer(lambda n, z: F.batch_norm(z, None, None, training=True)),
    "complex": consumer(lambda n, z: torch.view_as_real(torch.complex(z, z * 2))[..., 1]),
    "float32 and back": consumer(lambda n, z: z.float().double() * 2),
    "same gradient to two": same_gradient_to_two,
    "same gradient to two, one also a leaf's": same_gradient_to_two_units_and_a_leaf,
    "leaf takes the gradient": leaf_takes_the_gradient,
    "gradient is z": grad_is_z,
    "part of the batch": part_of_the_batch,
    "part of the channels": part_of_the_channels,
    "part while all is used": part_while_all_is_used,
    "strided part": every_other,
    "transposed x": transposed,
    "flattened x": flattened,
    "two-dimensional x": two_dimensional,
    "kept base of a view": kept_base_of_view,
    "alias made before": alias_made_before,
    "x is data": input_is_data,
    "kept as numpy array": with_numpy,
    "hooks before and after": hook_before_and_after,
    "multi-grad hook": multi_grad_hook,
    "after dropout": producer(dropout),
    "after max_pool2d": producer(lambda n, x: F.max_pool2d(x, 2)),
    "after gelu": producer(lambda n, x: F.gelu(x)),
    "after silu": producer(lambda n, x: F.silu(x)),
    "after softplus": producer(lambda n, x: F.softplus(x)),
    "after batch norm": producer(lambda n, x: F.batch_norm(x, None, None, training=True)),
    "after layer norm": producer(lambda n, x: F.layer_norm(x, x.shape[2:])),
    "after cat": producer(lambda n, x: torch.cat([x, x * 2])),
    "after cat with itself": producer(lambda n, x: torch.cat([x, x])),
    "after matmul": producer(lambda n, x: x @ x.transpose(2, 3)),
    "after add": producer(lambda n, x: x + n.a),
    "after in-place add": producer(lambda n, x: x.add_(n.a)),
    "after interpolate": producer(lambda n, x: F.interpolate(x, scale_factor=2.0)),
    "after clone of sigmoid": producer(lambda n, x: torch.sigmoid(x).clone()),
    "after linear": producer(lambda n, x: x @ torch.ones(6, 3).to(x)),
    **{
        f"gradient: {make.__name__}": consumer(lambda n, z, make=make: GradientFrom.apply(z, make, n.kept))
        for make in RETURNED
    },
}
