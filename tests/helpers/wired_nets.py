"""Nets for wirings: leaves, layers that are in place or the oracle, and watchers of every output of a layer."""

from typing import NamedTuple

import maths
import torch
import torch.nn.functional as F

from inplace_abn import inplace_abn

C = 4
SHAPE = (4, C, 5, 6)
EPS = 1e-3


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


class WiredNet:
    """Leaves, layers, and tensors that the caller keeps. Layers are in place if ``inplace``, and the oracle
    otherwise."""

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
        function = inplace_abn if self.inplace else maths.forward
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
        """Returns x as it is afterwards, and abn(x[part]). ``part`` is a range of samples."""
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
        """The tensor that the caller finds in x after z = abn(x)."""
        return x if self.inplace else z


def ramp(t):
    return torch.linspace(-1, 1.3, t.numel(), dtype=t.dtype, device=t.device).view(t.shape).cos() * 2


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


# --- One layer's operands, where there is no net ---------------------------------------------------------------------


def parameters(device, requires_grad=True):
    return (
        torch.linspace(0.5, 1.5, C, dtype=torch.float64, device=device).requires_grad_(requires_grad),
        torch.linspace(-1, 1, C, dtype=torch.float64, device=device).requires_grad_(requires_grad),
    )


def leaf_input(device):
    torch.manual_seed(4)
    return torch.randn(SHAPE, dtype=torch.float64, device=device).requires_grad_()
