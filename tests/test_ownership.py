"""However a net is wired and differentiated, its values and gradients are those of the out-of-place oracle, what others
hold keeps its content, and what cannot be right is an error."""

import gc
import itertools
import threading
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from inplace_abn import InPlaceABN, InPlaceABNSync, inplace_abn, reference

C = 4
SHAPE = (4, C, 5, 6)
EPS = 1e-3
MODIFIED = "inplace operation|modified in place"


class Row(NamedTuple):
    wiring: str
    loss: str = "weighted"
    watch: str = "nothing"
    context: str = "plain"
    frozen: str = "nothing"
    layout: str = "contiguous"
    training: bool = True
    activation: str = "leaky_relu"

    def __str__(self):
        special = [f"{k}={v}" for k, v in self._asdict().items() if k != "wiring" and v != Row._field_defaults[k]]
        return ", ".join([self.wiring, *special])


# --- The nets: one set of leaves, and the layer in two versions ------------------------------------------------------


class Net:
    """Leaves, layers over them, and what the caller keeps. ``inplace`` or the oracle."""

    def __init__(self, row, inplace, device):
        generator = torch.Generator().manual_seed(1)

        def leaf(*shape, scale=1.0, shift=0.0):
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift
            return values.to(device).requires_grad_()

        self.row, self.inplace = row, inplace
        self.a = leaf(*SHAPE)
        self.convs = [leaf(C, C, 3, 3, scale=0.3) for _ in range(4)]
        self.weights = [leaf(C, scale=0.3, shift=1.0) for _ in range(4)]
        self.biases = [leaf(C, scale=0.5) for _ in range(4)]
        with torch.no_grad():
            self.weights[0][1] *= -1
        self.running = [(leaf(C, scale=0.2).detach(), leaf(C).detach().abs() + 0.5) for _ in range(4)]
        frozen = {
            "nothing": [],
            "input": [self.a],
            "input and first conv": [self.a, self.convs[0]],
            "weights": self.weights,
            "biases": self.biases,
            "weights and biases": self.weights + self.biases,
            "all but one bias": [self.a, *self.convs, *self.weights, *self.biases[1:]],
        }[row.frozen]
        for t in frozen:
            t.requires_grad_(False)
        self.leaves = {
            name: t
            for name, t in [
                ("a", self.a),
                *((f"conv{i}", t) for i, t in enumerate(self.convs)),
                *((f"weight{i}", t) for i, t in enumerate(self.weights)),
                *((f"bias{i}", t) for i, t in enumerate(self.biases)),
            ]
            if t.requires_grad
        }
        self.kept = []
        self.watched = True

    def stem(self, i=0, x=None):
        """A fresh activation that may be overwritten, in the row's layout."""
        format = torch.channels_last if self.row.layout == "channels_last" else torch.contiguous_format
        return self.conv(self.a if x is None else x, i).contiguous(memory_format=format)

    def conv(self, x, i):
        return F.conv2d(x, self.convs[i], padding=1)

    def abn(self, x, i=0, watch=True, **options):
        mean, var = (None, None) if self.row.training else self.running[i]
        function = inplace_abn if self.inplace else reference.forward
        z = function(
            x,
            self.weights[i],
            self.biases[i],
            mean,
            var,
            self.row.training,
            eps=EPS,
            activation=self.row.activation,
            activation_param={"leaky_relu": 0.1, "elu": 1.2}.get(self.row.activation, 0.0),
            **options,
        )
        if self.inplace:
            assert z is x
        if watch:
            self.watch(z)
        return z

    def watch(self, z):
        if self.watched:
            WATCH[self.row.watch](z, self.kept)

    def abn_of_part(self, x, part, i=0):
        """abn(x[part]), and what x is afterwards. ``part`` is a range of samples."""
        if self.inplace:
            z = self.abn(x[part], i, watch=False)
        else:
            z = self.abn(x[part], i, watch=False)
            x = torch.cat([x[: part.start], z, x[part.stop :]])
            z = x[part]
        self.watch(z)
        return x, z

    def unit(self, i=0, x=None):
        return self.abn(self.stem(i, x), i)

    def overwritten(self, x, z):
        """What the caller finds in x after z = abn(x)."""
        return x if self.inplace else z


def ramp(t):
    return torch.linspace(-1, 1.3, t.numel(), dtype=t.dtype, device=t.device).view(t.shape).cos() * 2


# --- Wirings: what is between the leaves and the outputs -------------------------------------------------------------


class SameToBoth(torch.autograd.Function):
    """x + y, whose backward hands one tensor to both inputs and keeps it."""

    @staticmethod
    def forward(ctx, x, y, kept):
        ctx.kept = kept
        return x + y

    @staticmethod
    def backward(ctx, g):
        g = g * 1.5
        ctx.kept.append(g)
        ctx.g = g
        return g, g, None


class GradientFrom(torch.autograd.Function):
    """Identity whose backward returns what ``make(g, kept)`` makes of the gradient."""

    @staticmethod
    def forward(ctx, x, make, kept):
        ctx.make, ctx.kept = make, kept
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.make(g, ctx.kept), None, None


class ReturnsItsInput(torch.autograd.Function):
    """sum(x^2) / 2, whose gradient is the very tensor that was saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum() / 2

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0]


def keep_and_return(g, kept):
    g = g * 1.5
    kept.append(g)
    return g


def keep_view_and_return(g, kept):
    g = g * 1.5
    kept.append(g.view(-1) if g.is_contiguous() else g.permute(0, 2, 3, 1))
    return g


def return_view_of_kept(g, kept):
    kept.append(g * 1.5)
    return kept[-1].view_as(kept[-1])


def return_numpy_memory(g, kept):
    kept.append((g * 1.5).cpu().numpy())
    return torch.from_numpy(kept[-1]).to(g.device)


def return_part_of_larger(g, kept):
    larger = torch.cat([g, g])
    kept.append(larger)
    return larger[: len(g)]


def return_strided(g, kept):
    return torch.stack([g, g], dim=-1)[..., 0]


def return_expanded(g, kept):
    return g.sum((0, 2, 3), keepdim=True).expand_as(g)


def return_negated_lazily(g, kept):
    return torch._neg_view(g * 1.5)


def return_conjugate_part(g, kept):
    return torch.complex(g, -g).conj().imag


def return_zero_tensor(g, kept):
    return torch._efficientzerotensor(g.shape, dtype=g.dtype, device=g.device)


def return_lazy_clone(g, kept):
    kept.append(g * 1.5)
    return torch._lazy_clone(kept[-1])


def views_of(*functions):
    """z, seen through each function, in one sum."""

    def wiring(n):
        z = n.unit()
        return sum(f(z).square().sum() for f in functions)

    return wiring


def consumer(function):
    return lambda n: function(n, n.unit())


def producer(function):
    """ABN on what the function makes of the stem."""
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
    """x needs no gradient and the caller goes on holding it."""
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
    "after linear": producer(lambda n, x: x @ n.convs[3][0, 0].new_ones(6, 3)),
    **{
        f"gradient: {make.__name__}": consumer(lambda n, z, make=make: GradientFrom.apply(z, make, n.kept))
        for make in (
            keep_and_return,
            keep_view_and_return,
            return_view_of_kept,
            return_numpy_memory,
            return_part_of_larger,
            return_strided,
            return_expanded,
            return_negated_lazily,
            return_conjugate_part,
            return_zero_tensor,
            return_lazy_clone,
        )
    },
}


# --- Losses and ways of calling backward: (net, run) -> gradients beside the leaves' .grad ---------------------------


def weighted(y):
    return (y * ramp(y)).sum()


def simple(loss):
    def backward(n, run):
        y = run()
        value = loss(y)
        del y
        value.backward()
        return [value]

    return backward


def gradient_by_the_caller(n, run):
    y = run()
    g = ramp(y)
    n.kept.append(g)
    y.backward(g)
    return [y]


def gradient_by_the_caller_and_forgotten(n, run):
    y = run()
    torch.autograd.backward([y], [ramp(y)])
    return []


def retained(times):
    def backward(n, run):
        loss = weighted(run())
        for _ in range(times):
            loss.backward(retain_graph=True)
        loss.backward()
        return [loss]

    return backward


def by_autograd_grad(n, run):
    return torch.autograd.grad(weighted(run()), list(n.leaves.values()), allow_unused=True)


def by_autograd_grad_of_some(n, run):
    loss = weighted(run())
    leaves = list(n.leaves.values())
    some = [
        torch.autograd.grad(loss, leaves[::step][:3], retain_graph=step != 1, allow_unused=True) for step in (3, 2, 1)
    ]
    return list(itertools.chain(*some))


def two_losses(n, run):
    y = run()
    first, second = weighted(y), y.square().sum()
    del y
    first.backward(retain_graph=True)
    second.backward()
    return []


def two_losses_at_once(n, run):
    y = run()
    torch.autograd.backward([weighted(y), y.square().sum()])
    return []


def micro_batches(n, run):
    for _ in range(3):
        weighted(run()).backward()
    return []


def two_graphs_alive(n, run):
    first, second = weighted(run()), run().square().sum()
    second.backward()
    first.backward()
    return []


def anomaly_mode(n, run):
    with torch.autograd.set_detect_anomaly(True):
        weighted(run()).backward()
    return []


def double_differentiable(n, run):
    return torch.autograd.grad(weighted(run()), list(n.leaves.values()), create_graph=True, allow_unused=True)


LOSSES = {
    "weighted": simple(weighted),
    "sum": simple(torch.sum),
    "mean": simple(torch.mean),
    "square": simple(lambda y: y.square().sum()),
    "norm": simple(torch.linalg.vector_norm),
    "gradient by the caller": gradient_by_the_caller,
    "gradient by the caller, forgotten": gradient_by_the_caller_and_forgotten,
    "retained once": retained(1),
    "retained twice": retained(2),
    "autograd.grad": by_autograd_grad,
    "autograd.grad of some": by_autograd_grad_of_some,
    "two losses": two_losses,
    "two losses at once": two_losses_at_once,
    "micro-batches": micro_batches,
    "two graphs alive": two_graphs_alive,
    "anomaly mode": anomaly_mode,
    "create_graph": double_differentiable,
}


# --- Watching every output of an ABN: (z, kept) -> None --------------------------------------------------------------


def on_grad(hook):
    def watch(z, kept):
        if z.requires_grad:
            own = []
            kept.append(own)
            z.register_hook(lambda g: hook(g, own))

    return watch


def replace_gradient(g, kept):
    kept.append(g * 0.5)
    return kept[-1]


def replace_gradient_by_view(g, kept):
    kept.append(g * 0.5)
    return kept[-1].view_as(kept[-1])


def on_node(method, hook):
    def watch(z, kept):
        if z.requires_grad:
            own = []
            kept.append(own)
            getattr(z.grad_fn, method)(lambda *gradients: hook(gradients, own))

    return watch


def keep_outgoing(gradients, kept):
    kept.extend(g for g in gradients[-1] if g is not None)


def keep_result(gradients, kept):
    kept.extend(Unchanged(g, g.clone()) for g in gradients[0] if g is not None)


def replace_outgoing(gradients, kept):
    kept.extend(g * 2 for g in gradients[-1])
    return tuple(kept[-len(gradients[-1]) :])


def retain_grad(z, kept):
    if z.requires_grad:
        z.retain_grad()
        kept.append(Retained(z))


class Retained(NamedTuple):
    of: torch.Tensor


class Unchanged(NamedTuple):
    now: torch.Tensor
    then: torch.Tensor


def nested_backward(z, kept):
    if not z.requires_grad:
        return

    def hook(g):
        other = torch.ones(4, C, 5, dtype=g.dtype, device=g.device, requires_grad=True)
        with torch.enable_grad():
            y = inplace_abn(other * ramp(other), None, None, None, None)
            y.square().sum().backward()
        kept.append(other.grad)

    z.register_hook(hook)


WATCH = {
    "nothing": lambda z, kept: None,
    "z kept": lambda z, kept: kept.append(z),
    "detach kept": lambda z, kept: kept.append(z.detach()),
    "data kept": lambda z, kept: kept.append(z.data),
    "view kept": lambda z, kept: kept.append(z.detach()[1:]),
    "transposed view kept": lambda z, kept: kept.append(z.detach().transpose(0, 1)),
    "view with graph kept": lambda z, kept: kept.append(z.flatten()),
    "gradient kept": on_grad(lambda g, kept: kept.append(g)),
    "detached gradient kept": on_grad(lambda g, kept: kept.append(g.detach())),
    "part of gradient kept": on_grad(lambda g, kept: kept.append(g[:1])),
    "gradient replaced": on_grad(replace_gradient),
    "gradient replaced by a view": on_grad(replace_gradient_by_view),
    "node keeps gradient": on_node("register_prehook", lambda gradients, kept: kept.append(gradients[0][0])),
    "node replaces gradient": on_node("register_prehook", replace_outgoing),
    "node keeps gradient afterwards": on_node("register_hook", keep_outgoing),
    "node keeps its result": on_node("register_hook", keep_result),
    "retain_grad": retain_grad,
    "backward within a hook": nested_backward,
}


# --- Contexts: how the wiring is run ---------------------------------------------------------------------------------


def checkpointed(reentrant, wiring=None, nested=False):
    def run(n, wiring):
        n.watched = False

        def function(_):
            if nested:
                return checkpoint(lambda _: wiring(n), n.a, use_reentrant=reentrant)
            return wiring(n)

        return lambda: checkpoint(function, n.a, use_reentrant=reentrant)

    return run


def under(context):
    def run(n, wiring):
        def function():
            with context():
                return wiring(n)

        return function

    return run


def without_grad_before(n, wiring):
    def run():
        with torch.no_grad():
            wiring(n)
        n.kept.clear()
        return wiring(n)

    return run


def kept_in_hooks():
    kept = []

    def pack(t):
        kept.append(t)
        return len(kept) - 1

    return saved_tensors_hooks(pack, lambda i: kept[i].view_as(kept[i]))


def identity_hooks():
    return saved_tensors_hooks(lambda t: t, lambda t: t)


CONTEXTS = {
    "plain": under(nullcontext),
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "nested checkpoint": checkpointed(False, nested=True),
    "nested reentrant checkpoint": checkpointed(True, nested=True),
    "identity hooks": under(identity_hooks),
    "hooks that keep": under(kept_in_hooks),
    "save_on_cpu": under(save_on_cpu),
    "after a run without grad": without_grad_before,
}


# --- The table -------------------------------------------------------------------------------------------------------

FEW = ["chain", "residual block", "abn(a) + abn(b)", "dense block", "conv(abn(x)) + x", "z + z"]

ROWS = [
    *(Row(w, layout=layout) for w in WIRINGS for layout in ("contiguous", "channels_last")),
    *(Row(w, loss="sum", layout=layout) for w in WIRINGS for layout in ("contiguous", "channels_last")),
    *(Row(w, loss=loss) for w in WIRINGS for loss in ("retained once", "gradient by the caller")),
    *(Row(w, loss=loss, layout=layout) for w in FEW for loss in LOSSES for layout in ("contiguous", "channels_last")),
    *(Row(w, watch=watch) for w in WIRINGS for watch in ("z kept", "detach kept", "gradient kept", "retain_grad")),
    *(Row(w, loss, watch) for w in FEW for loss in ("sum", "weighted", "retained once") for watch in WATCH),
    *(Row(w, context=context) for w in WIRINGS for context in CONTEXTS),
    *(Row(w, loss, context=context) for w in FEW for loss in ("sum", "retained twice") for context in CONTEXTS),
    *(Row(w, loss, frozen=f) for w in FEW for loss in ("weighted", "sum") for f in ("weights", "biases")),
    *(Row(w, loss, frozen="weights and biases") for w in FEW for loss in ("weighted", "sum")),
    *(Row(w, loss, frozen=f) for w in FEW for loss in ("weighted", "sum") for f in ("input", "input and first conv")),
    *(Row("chain", loss, frozen="all but one bias") for loss in LOSSES),
    *(Row(w, training=False) for w in WIRINGS),
    *(Row(w, loss, training=False, layout="channels_last") for w in FEW for loss in LOSSES),
    *(Row(w, loss, activation=a) for w in FEW for loss in ("weighted", "sum") for a in ("identity", "elu", "relu")),
]
ROWS = list(dict.fromkeys(row for row in ROWS))


def evaluate(row, inplace, device):
    """Everything a user can see after backward: loss and gradients returned, .grad of leaves, and what was kept."""
    n = Net(row, inplace, device)
    results = LOSSES[row.loss](n, CONTEXTS[row.context](n, WIRINGS[row.wiring]))
    gc.collect(0)
    return {
        "results": values(list(results)),
        "gradients": {name: values(leaf.grad) for name, leaf in n.leaves.items()},
        "kept": values(n.kept),
    }


def values(held):
    if isinstance(held, Retained):
        return values([held.of, held.of.grad])
    if isinstance(held, Unchanged):
        torch.testing.assert_close(held.now, held.then, rtol=0, atol=0)
        return None
    if isinstance(held, (list, tuple)):
        return [values(h) for h in held]
    return None if held is None else torch.as_tensor(held).detach().clone().cpu()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_wiring_equals_the_out_of_place_oracle(row, device):
    expected = evaluate(row, False, device)
    actual = evaluate(row, True, device)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
