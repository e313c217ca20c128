"""What is hung on models."""

import copy
import io
import itertools
import tempfile
import threading

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad
from torch.nn.utils import parametrizations, prune

from uses.base import STEPS, Mixed, Rows, images, made, mixed, rows, small_images, train, use
from uses.functions import loss_of, split
from uses.steps import gan


@use("hooks: Grad-CAM, `retain_grad`, full backward hooks on all modules, gradient reversal")
def hooks(convert):
    model, kept = convert(mixed()), []

    def keep(module, args, y):
        y.register_hook(lambda g: kept.append(g.clone()))

    for part in (model.stem, model.bn1, model.conv2, model.group, model.instance, model.fc1, model.ln):
        part.register_forward_hook(keep)
    found = train(model)
    plain = mixed()
    plain.stem[2] = nn.ReLU()
    convert(plain)
    for module in plain.modules():
        module.register_full_backward_hook(lambda module, inputs, outputs: kept.extend(g.clone() for g in outputs))
    plain.ln.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * -0.5,))
    return found + train(plain, lambda step: plain(small_images(step)).square().mean()) + kept


@use("`prune`, `weight_norm`, `orthogonal`, `spectral_norm`, on a model that was trained")
def reparametrized(convert):
    model = convert(mixed())
    found = train(model, steps=2)
    pruned = model.bn1, model.group[1], model.ln, model.conv2, model.fc1, model.stem[1]
    for module in pruned:
        prune.random_unstructured(module, "weight", 0.4)
    found += train(model)
    for module in pruned:
        prune.remove(module, "weight")
    parametrizations.orthogonal(model.fc1)
    parametrizations.weight_norm(model.fc2)
    parametrizations.spectral_norm(model.conv1)
    return found + train(model)


@use("norms, activations and linear layers replaced after `convert` (LoRA among them)")
def replaced(convert):
    model = convert(mixed())
    found = train(model, steps=2)
    torch.manual_seed(2)
    model.bn1, model.ln = nn.BatchNorm2d(8).double(), nn.LayerNorm(8).double()
    model.stem[2], model.group[2] = nn.Softplus(), nn.ReLU6()
    found += train(model)
    down, up, base = nn.Linear(8, 2).double(), nn.Linear(2, 16).double(), model.requires_grad_(False).fc1
    model.fc1 = nn.Sequential(nn.Sequential(down, up))
    model.fc1.register_forward_hook(lambda module, args, y: y + base(*args))
    return found + train(model)


@use("`deepcopy`, `torch.save`, `load_state_dict` (with `assign`), `meta` and `to_empty` between steps")
def moved(convert):
    model, stream = convert(mixed()), io.BytesIO()
    found, before = train(model, steps=2), copy.deepcopy(model)
    found += train(model) + train(before)
    torch.save(model, stream)
    stream.seek(0)
    model = torch.load(stream, weights_only=False)
    found += train(model)
    model.load_state_dict(copy.deepcopy(before.state_dict()))
    found += train(model)
    with torch.device("meta"):
        model = convert(Mixed().double())
    model.load_state_dict(copy.deepcopy(before.state_dict()), assign=True)
    return found + train(model.requires_grad_(True))


@use("`torch.fx.symbolic_trace`, `torch.jit.trace`, `torch.export`, trained")
def traced(convert):
    found = train(torch.fx.symbolic_trace(convert(mixed())))
    found += train(torch.jit.trace(convert(mixed()), images(0), check_trace=False))
    return found + train(torch.export.export(convert(mixed()), (images(0),)).module())


@use("`torch.jit.script`", "error `cannot be scripted; call inplace_abn.revert on the model before`", "`revert` before")
def scripted(convert):
    return train(torch.jit.script(convert(mixed())))


@use("a GAN, `functional_call` and `grad` under `torch.compile`")
def compiled(convert):
    torch._dynamo.reset()
    found = gan(lambda model: torch.compile(convert(model), backend="aot_eager"), "batch")
    model = convert(made(Rows))
    step = torch.compile(lambda p, x: grad(lambda p: loss_of(model)(p, {}, x))(p), backend="aot_eager")
    found += step(split(model)[0], rows(0)).values()
    torch._dynamo.reset()
    return found


@use("anomaly mode, deterministic algorithms, channels-last")
def modes(convert):
    model = convert(mixed()).to(memory_format=torch.channels_last)

    def loss(step):
        with torch.autograd.detect_anomaly():
            return model(images(step).to(memory_format=torch.channels_last)).square().mean()

    torch.use_deterministic_algorithms(True)
    try:
        return train(model, loss)
    finally:
        torch.use_deterministic_algorithms(False)


def train_under(hooks, model, data=images):
    def loss(step):
        with hooks:
            return model(data(step)).square().mean()

    return train(model, loss)


def in_files(folder, prepare):
    """Saved-tensor hooks that write to files."""
    names = (f"{folder}/{i}" for i in itertools.count())

    def saved(t):
        name = next(names)
        torch.save(prepare(t), name)
        return name

    return saved_tensors_hooks(saved, torch.load)


@use("saved-tensor hooks that copy: `t.clone()`, `t.detach().numpy()`, `torch.save(t.detach(), …)`")
def copying(convert):
    numpy = saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy)
    found = train_under(numpy, convert(mixed()))
    found += train_under(saved_tensors_hooks(lambda t: t.clone(), lambda t: t), convert(mixed()))
    with tempfile.TemporaryDirectory() as folder:
        return found + train_under(in_files(folder, lambda t: t.detach()), convert(mixed()))


@use("saved-tensor hooks that pickle: `torch.save(t, …)`")
def pickling(convert):
    with tempfile.TemporaryDirectory() as folder:
        return train_under(in_files(folder, lambda t: t), convert(made(Rows)), rows)


@use("`save_on_cpu`")
def on_cpu(convert):
    return train_under(torch.autograd.graph.save_on_cpu(), convert(mixed()))


@use("saved-tensor hooks that cast", "error `hooks must give back every bit`", "leave the hooks out, or the layers")
def lossy(convert):
    hooks = saved_tensors_hooks(lambda t: (t.dtype, t.bfloat16()), lambda packed: packed[1].to(packed[0]))
    return train_under(hooks, convert(mixed()))


@use("batches of changing sizes, parts left out at random (stochastic depth)")
def sizes(convert):
    model = convert(mixed())
    group = model.group

    def loss(step):
        model.group = group if step % 3 else nn.Identity()
        value = model(images(step, n=1 + step % 3, size=4 + step)).square().mean()
        model.group = group
        return value

    return train(model, loss, steps=2 * STEPS)


@use("several threads, shared memory")
def threads(convert):
    models, found = [convert(mixed(seed)).share_memory() for seed in range(2)], [None, None]

    def run(i):
        found[i] = train(models[i])

    started = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return found[0] + found[1]
