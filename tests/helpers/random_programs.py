"""Random programs of norms, and of what people do with their outputs. A program is source that a person can read.

All values have the same shape. In the templates ``{a}`` and ``{b}`` are earlier values, ``{n}`` and ``{m}`` are norms,
``{c}`` is a convolution, and ``{act:...}`` an activation of what stands there. ``{r}`` is the result. A template that
does not name the result is an expression, and its value is the result.
"""

import copy
import random
import re

import torch
import torch.nn.functional as F
from foreign_nets import BatchNormAct2d
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from unseen_functions import Doubled, DoubledInPlace, Gated, Passed, scripted_gate, scripted_relu_in_place

SHAPE = (3, 8, 5, 5)

NORMS = [
    "nn.BatchNorm2d(8)",
    "nn.BatchNorm2d(8, momentum=None)",
    "nn.BatchNorm2d(8, affine=False)",
    "nn.BatchNorm2d(8, track_running_stats=False)",
    "nn.BatchNorm2d(8).eval()",
    "BatchNormAct2d(8, nn.SiLU)",
    "nn.InstanceNorm2d(8)",
    "nn.InstanceNorm2d(8, affine=True)",
    "nn.InstanceNorm2d(8, affine=True, track_running_stats=True)",
    "nn.InstanceNorm2d(8, affine=True, track_running_stats=True).eval()",
    "nn.GroupNorm(2, 8)",
    "nn.GroupNorm(4, 8)",
    "nn.GroupNorm(1, 8, affine=False)",
    "nn.GroupNorm(8, 8)",
]
# What is done to a norm before the model trains.
CHANGES = [
    *["nn.init.constant_({n}.weight, -0.7)", "nn.init.normal_({n}.bias)", "{n}.weight.requires_grad_(False)"],
    *[
        "{n}.weight = None",
        "{n}.bias = None",
        "{n}.requires_grad_(False)",
        "{n}.weight, {n}.bias = {m}.weight, {m}.bias",
    ],
    'parametrize.register_parametrization({n}, "weight", nn.Tanh())',
    "{n}.register_forward_hook(lambda module, inputs, y: y * 1.1)",
    "{n}.register_forward_hook(lambda module, inputs, y: seen.append(y.detach().mean()))",
    "{n}.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))",
    "{n}.register_full_backward_hook(lambda module, inputs, outputs: None)",
    "{n}.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.1,))",
]
ACTIVATIONS = [
    *["torch.relu({a})", "F.relu({a})", "F.relu({a}, inplace=True)", "F.relu({a}, True)", "torch.relu_({a})"],
    *["{a}.relu()", "{a}.relu_()", "F.silu({a})", "F.silu({a}, inplace=True)", "F.gelu({a})", "F.elu({a})"],
    *['F.gelu({a}, approximate="tanh")', "F.elu({a}, 0.5, True)", "F.elu_({a})", "F.leaky_relu({a}, 0.2)"],
    *["F.leaky_relu({a}, 0.01, True)", "F.leaky_relu_({a}, 0.3)", "F.leaky_relu({a}, 1.5)", "F.hardswish({a})"],
    *["F.leaky_relu(input={a}, negative_slope=0.0)", "F.hardswish({a}, True)", "F.mish({a})", "F.mish({a}, True)"],
    *["torch.ops.aten.relu({a})", "torch.ops.aten.silu_.default({a})", "torch.ops.aten.gelu({a})", "shared({a})"],
]
OTHERS = [
    # Arithmetic
    *["torch.sin({a})", "{a} * 0.5", "{a}.mul_(0.5)", "{a}.clone()", "{a} + 1", "{a}.add_(1.0)", "1.0 - {a}"],
    *["torch.sigmoid({a})", "{a}.tanh_()", "{a}.clamp(min=0)", "{a}.clamp_(min=-0.2)", "{a} * {a}.detach()"],
    *["{a} + {a}", "{a}.add_({a})", "{a} + {a}.mean()", "{a}.double()", "torch.where({a} > 0.1, {a}, 0.2 * {a})"],
    *["{a}.masked_fill({a} < -0.5, 0.0)", "{a}.masked_fill_({a}.detach() < -0.5, 0.0)", "torch.add({a}, 1)"],
    *["torch.addcmul({a}, {a}, {a}, value=0.1)", "torch.lerp({a}, {a}.roll(1, 0), 0.3)", "{a}.detach() + {a}"],
    # Layers that are no norms
    *["F.dropout({a}, 0.0)", "F.dropout({a}, 0.3)", "F.dropout({a}, 0.3, training=False)", "F.relu6({a})"],
    *["F.dropout({a}, 0.3, True, True)", "F.hardtanh_({a})", "F.selu({a})", "F.softplus({a})", "slope({a})"],
    *["F.avg_pool2d({a}, 3, 1, 1)", "F.max_pool2d({a}, 3, 1, 1)", "F.group_norm({a}, 2)", "F.layer_norm({a}, (5, 5))"],
    *["{a} * {a}.mean((2, 3), keepdim=True).sigmoid()", "{a}.mul_({a}.mean((2, 3), keepdim=True).sigmoid())"],
    # Views, and writes to them
    *["{a}.view({a}.shape)", "{a}[:]", "{a}.contiguous()", "{a}.transpose(2, 3)", "{a}.flatten(1).view({a}.shape)"],
    *["{a}.contiguous(memory_format=torch.channels_last)", "{a}.flip(0)", "{a}.unsqueeze(0).squeeze(0)"],
    *["{a}[:, :4].relu_(); {r} = {a}", "{a}[:, 1] = x[:, 1]; {r} = {a}", "{a}[:, 2:5] *= 0.5; {r} = {a}"],
    *["{a}.view(-1).relu_(); {r} = {a}", "{a}.permute(0, 1, 3, 2).relu_()", "torch.stack([{a}, {a}]).mean(0)"],
    *["torch.cat({a}.chunk(2, 1)[::-1], 1)", "torch.cat([torch.relu({a}[:, :4]), F.silu({a}[:, 4:])], 1)"],
    *["torch.cat([{a}[:, :4].relu_(), {a}[:, 4:]], 1)", "{a}.chunk(2, 1)[0].mul_(2.0); {r} = {a}"],
    *["{a}.split(4, 1)[1].add_(1.0); {r} = {a}", "torch.cat([t.relu() for t in {a}.unbind(0)]).view({a}.shape)"],
    # The same value twice
    *["torch.relu({a}) + F.silu({a})", "F.silu({a}) + {a}.relu_()", "torch.relu({a}) - torch.relu(-{a}) * 0.5"],
    # What a tensor subclass does not see
    *["Doubled.apply({a})", "DoubledInPlace.apply({a})", "Gated.apply({a})", "Passed.apply({a}) * 1.0"],
    *["scripted_gate({a})", "scripted_relu_in_place({a})"],
    # Transforms
    *["torch.func.vmap(torch.sin)({a})", "torch.func.grad(lambda t: (F.relu({a}) * t).sum().sin())({a}.detach() + 1)"],
    # What is not differentiated
    *["seen.append({a}.detach().mean()); {r} = {a}", "{a}.detach()", "{a} + without_grad(lambda: {a}.mean())"],
    *["without_grad(lambda: {a}.mul_(0.9)); {r} = {a}", "without_grad(lambda: {a}.relu_()); {r} = {a}"],
    *["seen.append(float({a}.abs().max())); {r} = {a}", "seen.append(copy.deepcopy({a}.detach())); {r} = {a}"],
    *["{r} = {a}; {r} += 0.3", "{a}.detach().numpy().copy(); {r} = {a}", "without_grad(lambda: F.relu({a})) + {a}"],
    # Questions to the graph
    *["{a}.register_hook(lambda g: g * 1.1); {r} = {a}", "retain({a}); {r} = {a}", "penalised({a}, {c})"],
    *["{a}.requires_grad_() if {a}.requires_grad else {a}", "penalised({a}, {a})"],
    # Changes of parameters between a norm and what follows
    "{n}.requires_grad_(not {n}.training); {r} = {a}",
]
PAIRS = [
    *["{a} + {b}", "{b} + {a}", "{a}.add_({b})", "torch.add({a}, {b})", "{r} = {a}; {r} += {b}", "{a} * {b}.sigmoid()"],
    *["torch.add({a}, {b}, alpha=0.5)", "torch.cat([{a}[:, :4], {b}[:, 4:]], 1)", "{a} - {b}", "({a} + {b}) + {a}"],
    *["torch.relu({a} + {b})", "({a} + {b}).relu_()", "F.relu({a}.add_({b}), True)", "F.silu({a} + {b})", "{a} @ {b}"],
    *["F.leaky_relu({a}.add_({b}), 0.1, True)", "{a}.mul_({b}.tanh())", "torch.maximum({a}, {b})", "{a}.copy_({b})"],
    *["torch.relu({a}) + {b}", "{a}.relu_() + {b}", "F.gelu({b} + {a})", "{a}.add({b}).relu()", "{a} * {b}"],
    *["torch.ops.aten.add.Tensor({a}, {b})", "sum([{a}, {b}])", "({a} + {b}, {b}.relu_())[0]"],
    *["{a} if random.random() < 0.5 else {b}", "{a} if {a}.detach().amax() > 2 else {a} + {b}"],
]
CALLS = [
    *["{n}({a})"] * 3,
    *["{n}({c}({a}))"] * 5,
    *["{act:{n}({c}({a}))}"] * 5,
    "torch.func.functional_call({n}, {{name: p * 1.1 for name, p in {n}.named_parameters()}}, ({a},))",
    "narrow({a}.flatten(2)).view({a}.shape)",
    "deep({a}.unsqueeze(2)).squeeze(2)",
]
REGIONS = [
    *["checkpoint(lambda t: {act:{n}(t * 1.0)}, {a}, use_reentrant=False)"] * 3,
    "checkpoint(lambda t: {act:{n}(t * 1.0)}, {a}, use_reentrant=True)",
    "checkpoint(lambda t: {act:t} * 2, {a}, use_reentrant=False)",
    "checkpoint({n}, {a}, use_reentrant=False)",
    "checkpoint(lambda t: {act:checkpoint({n}, t, use_reentrant=False)}, {a}, use_reentrant=False)",
    "offloaded(lambda: {act:{n}({a})})",
    "offloaded(lambda: {n}({a}))",
    "offloaded(lambda: {act:{a}})",
]
GROUPS = [(CALLS, 32), (ACTIVATIONS, 22), (OTHERS, 22), (PAIRS, 16), (["{c}({a})"], 4), (REGIONS, 6)]


def spread(norm):
    """Gives a norm a bias that is nowhere zero. What is tagged is zero to the last bit, and ties break otherwise."""
    if norm.bias is not None:
        nn.init.normal_(norm.bias)
    return norm


def without_grad(function):
    with torch.no_grad():
        return function()


def offloaded(function):
    """Runs the function while saved tensors are copied to another place, as offloading does."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        return function()


def retain(t):
    if t.requires_grad and not t.is_leaf:
        t.retain_grad()


def penalised(t, source):
    """t, with a gradient of what was computed so far."""
    source = source.weight if isinstance(source, nn.Module) else source
    if not (t.requires_grad and source.requires_grad):
        return t
    (gradient,) = torch.autograd.grad(t.sin().sum(), source, create_graph=True, allow_unused=True)
    return t if gradient is None else t + gradient.square().mean()


NAMES = [BatchNormAct2d, Doubled, DoubledInPlace, Gated, Passed, checkpoint, offloaded, penalised, retain]
NAMES += [spread, without_grad]
NAMESPACE = {f.__name__: f for f in NAMES} | {
    m.__name__.split(".")[-1]: m for m in (copy, nn, parametrize, random, torch)
}
NAMESPACE |= {"F": F, "scripted_gate": scripted_gate, "scripted_relu_in_place": scripted_relu_in_place}


class Program(nn.Module):
    """A model made of source: lines that make its modules, and lines of its forward pass."""

    def __init__(self, setup, body, returned):
        super().__init__()
        self.setup, self.body, self.returned = setup, body, returned
        self.code = compile("\n".join(body), "<program>", "exec")
        self.calls, self.seen = 0, []
        made = dict(NAMESPACE, seen=self.seen)
        exec("\n".join(setup), made)
        for name, value in made.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)

    def forward(self, x):
        values = dict(NAMESPACE, **self._modules, x=x, call=self.calls, seen=self.seen)
        exec(self.code, values)
        self.calls += 1
        return [values[name] for name in self.returned]

    def __str__(self):
        return "\n".join([*self.setup, "", *self.body, f"return {', '.join(self.returned)}"])


CONVOLUTIONS = ["nn.Conv2d(8, 8, 1)", "nn.Conv2d(8, 8, 3, padding=1)"]


def drawn(seed, norms_of=None):
    """The random program of this seed. ``norms_of`` are other modules to draw from, where a program has norms."""
    choose = random.Random(seed)
    norms, convs = [f"n{i}" for i in range(4)], [f"c{i}" for i in range(3)]
    setup = [f"{c} = nn.Conv2d(8, 8, 3, padding=1, bias={choose.random() < 0.5})" for c in convs]
    setup += [f"{n} = spread({choose.choice(norms_of or NORMS)})" for n in norms]
    setup += ["narrow, deep = spread(nn.BatchNorm1d(8)), spread(nn.InstanceNorm3d(8, affine=True))"]
    setup += ["slope = nn.PReLU(8)"]
    setup += [f"shared = nn.{choose.choice(['ReLU(inplace=True)', 'SiLU()', 'LeakyReLU(0.1)', 'Hardswish(True)'])}"]
    changes = [choose.choice(CHANGES) for _ in range(choose.randrange(4))]
    changes = [change.format(n=n, m=m) for change in changes for n, m in [choose.sample(norms, 2)]]
    body, values = ["v0 = c0(x)", "v1 = x * 1.0"], ["v0", "v1"]
    varies = choose.random() < 0.3
    for i in range(2, choose.randint(5, 16)):
        templates = choose.choices([g for g, _ in GROUPS], [weight for _, weight in GROUPS])[0]
        a = values[-1] if choose.random() < 0.8 else choose.choice(values)
        line = _filled(choose, choose.choice(templates), a, choose.choice(values), norms, convs, f"v{i}")
        if varies and choose.random() < 0.3:
            line = f"v{i} = {a}\nif call % {choose.randint(2, 3)}: {line}"
        body.append(line)
        values.append(f"v{i}")
    returned = [values[-1], *(v for v in values[:-1] if choose.random() < 0.3)]
    try:
        return Program(setup + changes, body, returned)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        # Some changes exclude each other, and norms without parameters have none.
        return Program(setup, body, returned)


def _filled(choose, template, a, b, norms, convs, result):
    """The template with names in its places."""

    def activated(match):
        return choose.choice(ACTIVATIONS).replace("{a}", match[1])

    template = re.sub(r"\{act:((?:[^{}]|\{[a-z]\})*)\}", activated, template)
    line = template.format(a=a, b=b, n=choose.choice(norms), c=choose.choice(convs), r=result)
    return line if "{r}" in template else f"{result} = {line}"


def reduced(program, fails):
    """A shorter program that still ``fails``."""
    shorter = True
    while shorter:
        shorter = False
        for setup, body, returned in _without_one(program):
            try:
                other = Program(setup, body, returned)
            except Exception:
                continue
            if fails(other):
                program, shorter = other, True
                break
    return program


def _without_one(program):
    """The parts of programs without one of the lines or results. What used a line's result uses its operand."""
    setup, body, returned = program.setup, program.body, program.returned
    for i in reversed(range(len(body))):
        result = re.match(r"(v\d+) =|.*; (v\d+) =", body[i])
        name = result and (result[1] or result[2])
        operands = [v for v in re.findall(r"\bv\d+\b", body[i]) if v != name]
        if operands:
            later = [re.sub(rf"\b{name}\b", operands[0], line) for line in body[i + 1 :]]
            yield setup, body[:i] + later, [re.sub(rf"\b{name}\b", operands[0], v) for v in returned]
    for i in range(1, len(returned)):
        yield setup, body, returned[:i] + returned[i + 1 :]
    for i in range(len(setup)):
        yield setup[:i] + setup[i + 1 :], body, returned
