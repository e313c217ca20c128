"""However a net is wired and differentiated, its values and gradients are those of the out-of-place oracle, what others
hold keeps its content, and what cannot be right is an error."""

import gc
import itertools
import re
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


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    "after linear": producer(lambda n, x: x @ torch.ones(6, 3).to(x)),
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


def checkpointed(reentrant, nested=False):
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
    if isinstance(held, (list, tuple)):
        for h in held:
            if isinstance(h, Unchanged):
                torch.testing.assert_close(h.now, h.then, rtol=0, atol=0)
        return [values(h) for h in held if not isinstance(h, Unchanged)]
    return None if held is None else torch.as_tensor(held).detach().clone().cpu()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_wiring_equals_the_out_of_place_oracle(row, device):
    expected = evaluate(row, False, device)
    actual = evaluate(row, True, device)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# --- Modules and their hooks -----------------------------------------------------------------------------------------


class Twin(InPlaceABN):
    """Out of place, with the weight's scale of the in-place module."""

    def forward(self, x):
        return reference.forward(
            x,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.training,
            self.momentum,
            self.eps,
            self.activation,
            self.activation_param,
        )


def conv_net(norm, device):
    torch.manual_seed(2)
    layers = [nn.Conv2d(C, C, 3), norm(C), nn.Conv2d(C, C, 3), nn.Conv2d(C, C, 1), norm(C, activation="elu")]
    return nn.Sequential(*layers).to(device, torch.float64)


def keep_output(net, kept):
    net[1].register_forward_hook(lambda module, args, output: kept.append(output))


def keep_detached_output(net, kept):
    net[1].register_forward_hook(lambda module, args, output: kept.append(output.detach()))


def replace_output(net, kept):
    net[1].register_forward_hook(lambda module, args, output: output * 2)


def clone_input(net, kept):
    net[1].register_forward_pre_hook(lambda module, args: (args[0].clone(),))


def full_backward_hook_around(net, kept):
    net.register_full_backward_hook(lambda module, grad_input, grad_output: kept.extend([*grad_input, *grad_output]))


def full_backward_pre_hook_around(net, kept):
    net.register_full_backward_pre_hook(lambda module, grad_output: kept.extend(grad_output))


def full_backward_hook_on_conv(net, kept):
    net[2].register_full_backward_hook(lambda module, grad_input, grad_output: kept.extend([*grad_input, *grad_output]))


def full_backward_hook_on_conv_replaces(net, kept):
    net[2].register_full_backward_hook(lambda module, grad_input, grad_output: tuple(g * 2 for g in grad_input))


def post_accumulate_hook(net, kept):
    net[1].weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.clone()))


@pytest.mark.parametrize(
    "hook",
    [
        keep_output,
        keep_detached_output,
        replace_output,
        clone_input,
        full_backward_hook_around,
        full_backward_pre_hook_around,
        full_backward_hook_on_conv,
        full_backward_hook_on_conv_replaces,
        post_accumulate_hook,
    ],
)
def test_module_hooks_see_and_keep_what_they_would_out_of_place(hook, device):
    a = torch.randn(SHAPE, dtype=torch.float64, device=device)

    def run(norm):
        net, kept = conv_net(norm, device), []
        hook(net, kept)
        x = a.clone().requires_grad_()
        for _ in range(2):
            weighted(net(x)).backward()
        return {
            "x": values(x.grad),
            "parameters": {name: values(p.grad) for name, p in net.named_parameters()},
            "kept": values(kept),
            "buffers": {name: values(b) for name, b in net.named_buffers() if not name.endswith("tracked")},
        }

    torch.testing.assert_close(run(InPlaceABN), run(Twin), rtol=1e-9, atol=1e-9)


# --- Threads and exceptions ------------------------------------------------------------------------------------------


def in_threads(functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("wiring", ["deep chain", "residual block", "conv(abn(x)) + x", "same module twice"])
def test_graphs_in_several_threads_do_not_disturb_each_other(wiring, device):
    row = Row(wiring)
    expected = evaluate(row, False, device)["gradients"]
    nets = [Net(row, True, device) for _ in range(8)]

    def step(n):
        for _ in range(10):
            for leaf in n.leaves.values():
                leaf.grad = None
            weighted(WIRINGS[wiring](n)).backward()

    in_threads([lambda n=n: step(n) for n in nets])
    for n in nets:
        actual = {name: values(leaf.grad) for name, leaf in n.leaves.items()}
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_threads_may_run_backward_through_one_retained_graph(device):
    def losses(n):
        z = n.unit(1, n.unit(0))
        return [weighted(n.conv(z, i) * (i + 1)) for i in range(4) for _ in range(2)]

    expected, actual = Net(Row("chain"), False, device), Net(Row("chain"), True, device)
    for loss in losses(expected):
        loss.backward(retain_graph=True)
    in_threads([lambda loss=loss: loss.backward(retain_graph=True) for loss in losses(actual)])
    for name, leaf in expected.leaves.items():
        torch.testing.assert_close(actual.leaves[name].grad, leaf.grad, rtol=1e-9, atol=1e-9)


class Interruption(Exception):
    pass


def raise_once(armed, *_):
    if armed:
        armed.pop()
        raise Interruption


PLACES = {
    "gradient of z": lambda x, z, hook: z.register_hook(hook),
    "gradient of x": lambda x, z, hook: x.register_hook(hook),
    "before the node": lambda x, z, hook: z.grad_fn.register_prehook(hook),
    "after the node": lambda x, z, hook: z.grad_fn.register_hook(hook),
}


@pytest.mark.parametrize("consumer", [lambda n, z: z.sum(), lambda n, z: -z, lambda n, z: n.conv(z, 1)])
@pytest.mark.parametrize("place", PLACES)
def test_after_an_exception_in_backward_the_graph_is_right_or_refuses(place, consumer, device):
    def forward(n, armed):
        x = n.stem()
        late = PLACES[place] is not PLACES["gradient of x"]
        if not late:
            PLACES[place](x, None, lambda *a: raise_once(armed))
        z = n.abn(x)
        if late:
            PLACES[place](x, z, lambda *a: raise_once(armed))
        return weighted(consumer(n, z))

    expected, actual = (Net(Row("chain"), inplace, device) for inplace in (False, True))
    forward(expected, []).backward()
    loss = forward(actual, [True])
    with pytest.raises(Interruption):
        loss.backward()
    assert actual.a.grad is None
    for leaf in actual.leaves.values():
        leaf.grad = None
    try:
        loss.backward()
    except RuntimeError:
        for leaf in actual.leaves.values():
            leaf.grad = None
        forward(actual, []).backward()
    for name, leaf in expected.leaves.items():
        torch.testing.assert_close(actual.leaves[name].grad, leaf.grad, rtol=1e-9, atol=1e-9)


# --- Loud: what cannot be right is an error, and nothing has been modified before it ---------------------------------


def parameters(device, requires_grad=True):
    return (
        torch.linspace(0.5, 1.5, C, dtype=torch.float64, device=device).requires_grad_(requires_grad),
        torch.linspace(-1, 1, C, dtype=torch.float64, device=device).requires_grad_(requires_grad),
    )


def leaf_input(device):
    torch.manual_seed(4)
    return torch.randn(SHAPE, dtype=torch.float64, device=device).requires_grad_()


CHANGES = {
    "mul_": lambda z: z.mul_(2),
    "+=": lambda z: z.__iadd__(1),
    "relu_": lambda z: F.relu_(z),
    "one value": lambda z: z.__setitem__((0, 0, 0, 0), 5.0),
    "zero_ of detach": lambda z: z.detach().zero_(),
    "through a view": lambda z: z[1:].mul_(3),
    "through a view of detach": lambda z: z.detach().flatten()[3:5].fill_(7),
    "out=": lambda z: torch.mul(z.detach(), 2, out=z.detach()),
    "copy_": lambda z: z.copy_(torch.ones_like(z)),
    "dropout in place": lambda z: F.dropout(z, 0.5, inplace=True),
    "another ABN": lambda z: inplace_abn(z.detach(), None, None, None, None),
}


HOOKED = ["identity hooks", "hooks that keep", "save_on_cpu", "checkpoint", "nested checkpoint"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("context", ["plain", "reentrant checkpoint", *HOOKED])
@pytest.mark.parametrize("consumer", ["nothing saved", "conv", "exp"])
def test_output_modified_afterwards_is_an_error_unless_hooks_saved_it_in_time(change, context, consumer, device):
    def wiring(n):
        z = n.unit()
        y = {"nothing saved": torch.neg, "conv": lambda z: n.conv(z, 1), "exp": torch.exp}[consumer](z)
        changed = z if n.inplace else z.clone()
        torch.manual_seed(5)
        CHANGES[change](changed)
        return y + changed.neg()

    expected, actual = (Net(Row("chain"), inplace, device) for inplace in (False, True))
    weighted(CONTEXTS[context](expected, wiring)()).backward()
    loss = weighted(CONTEXTS[context](actual, wiring)())
    with pytest.raises(RuntimeError, match=MODIFIED) if context not in HOOKED else nullcontext():
        try:
            loss.backward()
        except RuntimeError as error:
            if context in HOOKED and re.search(MODIFIED, str(error)):
                return
            raise
        for name, leaf in expected.leaves.items():
            torch.testing.assert_close(actual.leaves[name].grad, leaf.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "context", ["plain", "identity hooks", "hooks that keep", "checkpoint", "reentrant checkpoint"]
)
def test_message_about_a_modified_output_names_the_package_and_the_remedy(context, device):
    n = Net(Row("chain"), True, device)

    def wiring(n):
        r = n.unit(0)
        y = n.unit(1, r)
        y += r
        return n.abn(n.stem(2, y), 2)

    loss = weighted(CONTEXTS[context](n, wiring)())
    with pytest.raises(RuntimeError, match=r"inplace_abn.*modified in place.*z = z \+ y"):
        loss.backward()


@pytest.mark.parametrize("which", ["weight", "bias", "running_var", "residual"])
def test_operands_modified_between_forward_and_backward_are_an_error(which, device):
    weight, bias = parameters(device)
    mean, var = parameters(device, requires_grad=False)
    residual = leaf_input(device) * 2
    x = leaf_input(device) * 1
    z = inplace_abn(x, weight, bias, mean, var, training=which != "running_var", residual=residual)
    with torch.no_grad():
        {"weight": weight, "bias": bias, "running_var": var, "residual": residual}[which].add_(0.1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        z.sum().backward()


def test_running_statistics_of_training_may_change_between_forward_and_backward(device):
    weight, bias = parameters(device)
    mean, var = parameters(device, requires_grad=False)
    a = leaf_input(device)
    losses = [inplace_abn(a * k, weight, bias, mean, var).square().sum() for k in (1, 2)]
    sum(losses).backward()
    b = a.detach().clone().requires_grad_()
    sum(reference.forward(b * k, weight, bias, None, None).square().sum() for k in (1, 2)).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


def test_other_memory_put_under_the_output_leaves_backward_right(device):
    weight, bias = parameters(device)
    a, b = leaf_input(device), leaf_input(device)
    z = inplace_abn(a * 1, weight, bias, None, None)
    loss = (z * ramp(z)).sum()
    z.data = torch.zeros_like(z)
    loss.backward()
    weighted(reference.forward(b, weight, bias, None, None)).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


def test_a_second_backward_without_retain_graph_is_an_error(device):
    n = Net(Row("chain"), True, device)
    loss = weighted(chain(n))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


NEEDS_OUTPUT = {
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "relu_": lambda a: F.relu_(a * 1),
    "leaky_relu_": lambda a: F.leaky_relu_(a * 1),
    "elu_": lambda a: F.elu_(a * 1),
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sqrt": lambda a: (a * a + 1).sqrt(),
    "rsqrt": lambda a: (a * a + 1).rsqrt(),
    "reciprocal": lambda a: (a * a + 1).reciprocal(),
    "softmax": lambda a: a.softmax(1),
    "log_softmax": lambda a: a.log_softmax(1),
    "cumprod": lambda a: a.cumprod(2),
    "tan": torch.tan,
    "norm": lambda a: a.norm(dim=3),
    "view of sigmoid": lambda a: torch.sigmoid(a).view(SHAPE[0], C, -1),
    "part of sigmoid": lambda a: torch.sigmoid(a)[1:],
    "ABN": lambda a: inplace_abn(a * 1, None, None, None, None),
    "view of ABN": lambda a: inplace_abn(a * 1, None, None, None, None).flatten(2),
}

NEEDS_OUTPUT_LATE = {
    "attention": lambda a: F.scaled_dot_product_attention(a, a, a),
    "inverse": lambda a: torch.linalg.inv(a @ a.transpose(2, 3) + torch.eye(5, dtype=a.dtype, device=a.device)),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(5, dtype=a.dtype, device=a.device)),
    "another operation that saved x": lambda a: saved_elsewhere(a),
}


def saved_elsewhere(a):
    x = a * 1
    x.other = x * x
    return x


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("producer", NEEDS_OUTPUT)
def test_a_producer_that_needs_its_output_is_an_error_before_anything_is_modified(producer, context, device):
    n = Net(Row("chain"), True, device)
    inputs = []

    def wiring(n):
        x = NEEDS_OUTPUT[producer](n.a)
        inputs.append((x, x.detach().clone(), x._version))
        return n.abn(x)

    if context == "after a run without grad":
        context = "plain"
    with pytest.raises(RuntimeError, match=r"inplace_abn: x is the output of .*x\.clone\(\)"):
        CONTEXTS[context](n, wiring)().sum().backward()
    # A reentrant checkpoint overwrites its first x without grad, where that is allowed.
    x, before, version = inputs[-1]
    assert torch.equal(x.detach(), before)
    assert x._version == version


@pytest.mark.parametrize("producer", NEEDS_OUTPUT_LATE)
def test_whatever_else_saved_x_is_an_error_in_backward(producer, device):
    a = leaf_input(device)
    x = NEEDS_OUTPUT_LATE[producer](a)
    z = inplace_abn(x, None, None, None, None)
    with pytest.raises(RuntimeError, match=MODIFIED):
        (z.sum() + getattr(x, "other", z).sum()).backward()


def test_x_overwritten_without_grad_is_noticed_by_what_saved_it(device):
    a = leaf_input(device)
    x = torch.sigmoid(a)
    with torch.no_grad():
        inplace_abn(x, None, None, None, None)
    with pytest.raises(RuntimeError, match=MODIFIED):
        x.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_a_function_that_overwrites_its_argument_is_an_error(reentrant, device):
    n = Net(Row("chain"), True, device)
    loss = checkpoint(lambda x: n.conv(n.abn(x), 1), n.stem(), use_reentrant=reentrant).sum()
    with pytest.raises((RuntimeError, ValueError), match=f"{MODIFIED}|overwritten"):
        loss.backward()


def test_parts_of_one_tensor_that_know_of_each_other_are_an_error(device):
    n = Net(Row("chain"), True, device)
    x = n.stem()
    z = n.abn(x[:2]) + n.abn(x[2:])
    with pytest.raises(RuntimeError, match=MODIFIED):
        z.sum().backward()


def dual(function):
    def call(module, device):
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(leaf_input(device).detach(), torch.ones(SHAPE).to(device).double())
            return function(module, x)

    return call


def plain_x(make):
    return lambda module, device: module(make(leaf_input(device)))


def no_grad_view(a):
    x = a * 1
    with torch.no_grad():
        return x[1:]


def inference_tensor(a):
    with torch.inference_mode():
        return a * 1


def hooked(module, device):
    module.register_full_backward_hook(lambda *a: None)
    return module(leaf_input(device) * 1)


def before_hooked(module, device):
    module.register_full_backward_pre_hook(lambda *a: None)
    return module(leaf_input(device) * 1)


def after_hooked(module, device):
    before = nn.Identity()
    before.register_full_backward_hook(lambda *a: None)
    return module(before(leaf_input(device) * 1))


def with_residual(make):
    def call(module, device):
        x = leaf_input(device) * 1
        return module(x, make(x))

    return call


def batched_weight(module, device):
    weights = torch.ones(3, C, dtype=torch.float64, device=device)
    x = leaf_input(device) * 1
    return torch.func.vmap(lambda w: inplace_abn(x, w, None, None, None))(weights)


def functional(transform, *more):
    return lambda module, device: transform(lambda x: module(x * 1).square().sum(), *more)(leaf_input(device).detach())


def jvp(module, device):
    a = leaf_input(device).detach()
    return torch.func.jvp(lambda x: module(x * 1), (a,), (torch.ones_like(a),))


OVERWRITE = "cannot be overwritten|let x be overwritten"
REFUSED = {
    "leaf": (plain_x(lambda a: a), ValueError, OVERWRITE),
    "view of a leaf": (plain_x(lambda a: a.flatten(2)), ValueError, OVERWRITE),
    "chunk": (plain_x(lambda a: (a * 1).chunk(2)[0]), ValueError, "several views"),
    "split of channels": (plain_x(lambda a: torch.cat([a, a], 1).split(C, 1)[0]), ValueError, "several views"),
    "unbind": (plain_x(lambda a: torch.stack([a, a]).unbind(0)[0]), ValueError, "several views"),
    "view without grad": (plain_x(no_grad_view), ValueError, OVERWRITE),
    "expanded": (plain_x(lambda a: (a[:1] * 1).expand(SHAPE)), ValueError, "overlap"),
    "windows": (plain_x(lambda a: (a * 1).flatten().unfold(0, C, 1).T[None]), ValueError, "overlap"),
    "inference tensor": (plain_x(inference_tensor), ValueError, "inference_mode"),
    "module's full backward hook": (hooked, ValueError, "module's backward hook"),
    "module's full backward pre-hook": (before_hooked, ValueError, "module's backward hook"),
    "full backward hook of the module before": (after_hooked, ValueError, "module's backward hook"),
    "sigmoid": (plain_x(torch.sigmoid), RuntimeError, "SigmoidBackward"),
    "one value per channel": (plain_x(lambda a: a[:1, :, :1, :1] * 1), ValueError, "more than 1 value"),
    "wrong channels": (plain_x(lambda a: a[:, 1:] * 1), ValueError, "of shape"),
    "wrong dtype": (plain_x(lambda a: a.bfloat16()), TypeError, "dtype"),
    "residual is x": (with_residual(lambda x: x), (ValueError, RuntimeError), "overlap|memory"),
    "residual is a view of x": (with_residual(lambda x: x.detach()), (ValueError, RuntimeError), "overlap|memory"),
    "residual of another shape": (with_residual(lambda x: x[:1] * 1), ValueError, "residual"),
    "dual number": (dual(lambda module, x: module(x * 1)), ValueError, "forward-mode"),
    "dual number without grad": (dual(lambda m, x: torch.no_grad()(m)(x * 1)), ValueError, "forward-mode"),
    "jvp": (jvp, ValueError, "forward-mode"),
    "jacfwd": (functional(torch.func.jacfwd), ValueError, "forward-mode"),
    "hessian": (functional(torch.func.hessian), ValueError, "forward-mode"),
    "vmap": (functional(torch.func.vmap), ValueError, "vmap is not supported"),
    "vmap of grad": (lambda m, d: functional(lambda f: torch.func.vmap(torch.func.grad(f)))(m, d), ValueError, "vmap"),
    "vmap over weights": (batched_weight, ValueError, "vmap is not supported"),
}


@pytest.mark.parametrize("module", [InPlaceABN, InPlaceABNSync])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*not initialised", "ignore:.*torch.jit")
def test_refused_with_a_message_and_nothing_modified(case, module, device):
    call, error, message = REFUSED[case]
    norm = module(C).to(device, torch.float64)
    seen = []
    norm.register_forward_pre_hook(
        lambda _, args: seen.extend((x, x.detach().clone(), x._version) for x in unwrap(args))
    )
    state = {name: (t, t.detach().clone(), t._version) for name, t in norm.state_dict(keep_vars=True).items()}
    with pytest.raises(error, match=message):
        call(norm, device)
    for t, before, version in [*state.values(), *seen]:
        assert torch.equal(t.detach(), before)
        assert t._version == version


def unwrap(args):
    return [x for x in args if not torch._C._functorch.is_functorch_wrapped_tensor(x) and not x.is_inference()]


def test_gradients_in_batches_are_an_error(device):
    weight, bias = parameters(device)
    a = leaf_input(device)
    z = inplace_abn(a * 1, weight, bias, None, None) * 1
    with pytest.raises(RuntimeError, match="inplace_abn"):
        torch.autograd.grad(z, [a], torch.ones(2, *SHAPE).to(z), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="inplace_abn"):
        torch.func.jacrev(lambda x: inplace_abn(x * 1, None, None, None, None))(a.detach())
