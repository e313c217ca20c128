"""What people do with models is done with converted models. They train as the originals do, or there is an error.
docs/conversion.md has the table."""

import copy
import io
import itertools
import re
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import conv, spread
from ranks import on_each_rank
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

from inplace_abn import convert, report, revert
from inplace_abn.conversion.norms import InPlaceNorm

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"
STEPS = 4
EQUAL, ROUNDINGS = "equal", "as exact as torch"


class Mixed(nn.Module):
    """All kinds of norms, with and without activations behind them, activations alone, and a LayerScale."""

    def __init__(self, batch=True):
        super().__init__()
        norm = nn.BatchNorm2d if batch else lambda channels: nn.GroupNorm(2, channels)
        self.stem = nn.Sequential(conv(3, 8), norm(8), nn.ReLU(inplace=True))
        self.conv1, self.bn1 = conv(8, 8), norm(8)
        self.conv2, self.bn2 = conv(8, 8), norm(8)
        self.group = nn.Sequential(conv(8, 8), nn.GroupNorm(4, 8), nn.SiLU())
        self.instance = nn.Sequential(conv(8, 8), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.1))
        self.ln, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.rms, self.head = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(self.bn2(self.conv2(F.gelu(self.bn1(self.conv1(x))))) + x)
        x = self.instance(self.group(x)).flatten(2).transpose(1, 2)
        x = x + self.fc2(F.gelu(self.fc1(self.ln(x)))) * self.gamma
        return self.head(self.rms(x)).mean(1)


class Rows(nn.Module):
    """An MLP with norms of rows."""

    def __init__(self):
        super().__init__()
        self.embed, self.ln = nn.Linear(6, 8), nn.LayerNorm(8)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.rms, self.head = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.fc2(F.silu(self.fc1(self.ln(x))))
        return self.head(self.rms(x))


class Quantisable(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv1, self.bn1, self.relu = conv(3, 8), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2 = conv(8, 8), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(self.quant(x))))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.fc(self.dequant(x).mean((2, 3)))


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.ConvTranspose2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            conv(8, 8),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 3, 3, padding=1),
            nn.Tanh(),
        )


class ChannelsLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


NORMS = {
    "batch": nn.BatchNorm2d,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "group": lambda channels: nn.GroupNorm(1, channels),
    "layer": ChannelsLayerNorm,
}


class Discriminator(nn.Module):
    def __init__(self, norm, spectral=False):
        super().__init__()
        wrap = parametrizations.spectral_norm if spectral else lambda module: module
        self.net = nn.Sequential(
            wrap(conv(3, 8)),
            NORMS[norm](8),
            nn.LeakyReLU(0.2, inplace=True),
            wrap(conv(8, 8)),
            NORMS[norm](8),
            nn.SiLU(inplace=True),
            nn.Conv2d(8, 1, 3),
        )

    def forward(self, x):
        return self.net(x).mean((1, 2, 3))


def made(kind, *args, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return spread(kind(*args)).to(dtype)


def mixed(seed=0):
    return made(Mixed, seed=seed)


def images(seed, n=4, size=6, dtype=torch.float64):
    return torch.randn(n, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small_images(seed):
    return images(seed, n=2, size=4)


def single_images(seed):
    return images(seed, dtype=torch.float32)


def rows(seed, *shape):
    return torch.randn(shape or (5, 6), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seen(*models):
    """Copies of all parameters, gradients and buffers."""
    found = []
    for model in models:
        found += [p.detach().clone() for p in model.parameters()]
        found += [p.detach().new_zeros(p.shape) if p.grad is None else p.grad.clone() for p in model.parameters()]
        found += [b.clone() for b in model.buffers()]
    return found


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(model, loss=None, steps=STEPS, optimizer=None, data=images, first=0):
    """Trains with ``loss``, a function of the step. Returns what can be seen after each step."""
    loss = loss or (lambda step: model(data(step)).square().mean())
    optimizer, found = optimizer or sgd(model), []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        optimizer.step()
        found += [value.detach(), *seen(model)]
    return found


class Use(NamedTuple):
    run: object
    result: str
    what_to_do: str
    tolerance: float


USES = {}


def use(name, result=EQUAL, what_to_do="", tolerance=1e-9):
    def register(run):
        assert name not in USES
        USES[name] = Use(run, result, what_to_do, tolerance)
        return run

    return register


REVERT_FIRST = "`revert` before, `convert` after"


# --- quantisation


def prepared(model):
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model.train())


def quantisable():
    return made(Quantisable, dtype=torch.float32).train()


PAIRS = [["conv1", "bn1"], ["conv2", "bn2"]]


@use("`prepare_qat`, converted after it", tolerance=1e-4)
def qat_before(convert):
    found = train(convert(prepared(quantisable())), data=single_images)
    fused = torch.ao.quantization.fuse_modules_qat(quantisable(), PAIRS)
    found += train(convert(prepared(fused)), data=single_images)
    model = convert(quantisable())
    train(model, data=single_images)
    return found + train(convert(prepared(revert(model))), data=single_images)


@use("`prepare_qat` of a converted model", "error `torch.ao.quantization knows torch's own modules only`", REVERT_FIRST)
def qat(convert):
    return train(prepared(convert(quantisable())), data=single_images)


@use("`fuse_modules_qat`", "error `did not find fuser method`", REVERT_FIRST)
def qat_fused(convert):
    return train(prepared(torch.ao.quantization.fuse_modules_qat(convert(quantisable()), PAIRS)), data=single_images)


@use("`fuse_modules` in eval", "error `did not find fuser method`", REVERT_FIRST)
def fused(convert):
    return [torch.ao.quantization.fuse_modules(convert(quantisable()).eval(), PAIRS)(single_images(0))]


@use("`prepare_qat_fx`", "error `torch.ao.quantization knows torch's own modules only`", REVERT_FIRST)
def qat_fx(convert):
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    mapping = torch.ao.quantization.get_default_qat_qconfig_mapping("fbgemm")
    return train(prepare_qat_fx(convert(quantisable()), mapping, (single_images(0),)), data=single_images)


# --- torch.func


def split(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return parameters, {name: b.clone() for name, b in model.named_buffers()}


def loss_of(model):
    return lambda p, b, x: functional_call(model, (p, b), (x,)).square().mean()


def stepped(parameters, gradients):
    return {name: (p - 0.05 * gradients[name]).detach() for name, p in parameters.items()}


def functional_training(gradients_of, model, data):
    """Trains a dict of parameters with a function that computes gradients of (loss, parameters, buffers, x)."""
    (parameters, buffers), found = split(model), []
    for step in range(STEPS):
        gradients, *more = gradients_of(loss_of(model), parameters, buffers, data(step))
        parameters = stepped(parameters, gradients)
        found += [*more, *gradients.values(), *(b.clone() for b in buffers.values())]
    return found


def by_autograd(loss, parameters, buffers, x):
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    gradients = torch.autograd.grad(loss(leaves, buffers, x), [*leaves.values()])
    return (dict(zip(leaves, gradients, strict=True)),)


def by_vjp(loss, parameters, buffers, x):
    value, back = vjp(lambda p, x: loss(p, buffers, x), parameters, x)
    return back(torch.ones_like(value))


@use("`functional_call` with `torch.autograd.grad`, `grad`, `grad_and_value`, `vjp`")
def functional(convert):
    found = []
    for ways in (
        by_autograd,
        lambda loss, *args: (grad(loss)(*args),),
        lambda loss, *args: grad_and_value(loss)(*args),
    ):
        found += functional_training(ways, convert(mixed()), images)
        found += functional_training(ways, convert(made(Rows)), rows)
    return found + functional_training(by_vjp, convert(made(Rows)), rows)


@use("an ensemble: `stack_module_state` and `vmap(grad)`")
def ensemble(convert):
    found = []
    for kind, data in ((lambda: made(Rows), rows), (lambda: made(Mixed, False), images), (mixed, images)):
        models = [convert(kind()) for _ in range(2)]
        for model in models:
            nn.init.normal_(model.head.weight)
        parameters, buffers = stack_module_state(models)
        for step in range(STEPS):
            gradients = vmap(grad(loss_of(models[0])), in_dims=(0, 0, None))(parameters, buffers, data(step))
            parameters = stepped(parameters, gradients)
            found += [*gradients.values(), *(b.clone() for b in buffers.values())]
    return found


@use("gradients of each sample: `vmap(grad)`, also with `randomness` and `in_dims`")
def per_sample(convert):
    found = []
    with_dropout = nn.Sequential(made(Rows), nn.Dropout(0.0), nn.GELU())
    for model, data in (
        (made(Rows), rows),
        (made(Mixed, False), images),
        (mixed().eval(), images),
        (with_dropout, rows),
    ):
        model = convert(model)
        (parameters, buffers), loss = split(model), loss_of(model)
        each = vmap(
            grad(lambda p, b, x, loss=loss: loss(p, b, x[None])), in_dims=(None, None, 0), randomness="different"
        )
        for step in range(STEPS):
            gradients = each(parameters, buffers, data(step))
            parameters = stepped(parameters, {name: g.mean(0) for name, g in gradients.items()})
            found += gradients.values()
    model = convert(made(Rows))
    return [*found, *train(model, data=rows), vmap(model, in_dims=1, out_dims=1)(rows(9, 5, 3, 6))]


@use("forward mode: `jvp`, dual numbers, `jvp(grad)`, `hessian`, `jacrev`")
def forward_mode(convert):
    model = convert(mixed())
    found = train(model)
    (parameters, buffers), loss = split(model.eval()), loss_of(model)
    tangents = {name: p.cos() for name, p in parameters.items()}
    found += jvp(lambda p: loss(p, buffers, images(0)), (parameters,), (tangents,))
    found += jvp(grad(lambda p: loss(p, buffers, images(0))), (parameters,), (tangents,))[1].values()
    with forward_ad.dual_level():
        found += forward_ad.unpack_dual(model.train()(forward_ad.make_dual(images(1), images(2))))
    model = convert(made(Rows))
    found += train(model, data=rows)
    return [
        *found,
        hessian(lambda x: model(x).square().mean())(rows(0)),
        jacrev(model)(rows(0)),
        *train(model, data=rows),
    ]


@use("second order: `torch.autograd.functional.jacobian`, `hessian`, `vjp`, `jvp`, `hvp`, `vhp`")
def autograd_functional(convert):
    model = convert(mixed())
    found, x = train(model, steps=2), small_images(0)

    def loss(x):
        return model(x).square().mean()

    of = torch.autograd.functional
    found += [of.jacobian(model, x), of.hessian(loss, images(0, n=1, size=3))]
    found += [*of.vjp(loss, x), *of.jvp(loss, x, x.cos()), *of.hvp(loss, x, x.cos()), *of.vhp(loss, x, x.cos())]
    return found


def batched(model, x):
    y = model(x.requires_grad_())
    return [*torch.autograd.grad(y, x, torch.stack([y.detach(), y.detach().cos()]), is_grads_batched=True)]


LEAVE_OUT = "leave the layers out (`filter_fn`)"


@use("`is_grads_batched`, `vectorize=True`", "error `gradients in batches are not supported`", LEAVE_OUT)
def gradients_in_batches(convert):
    return batched(convert(nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 2)).double()), images(0))


@use("the same with a layer norm or an RMS norm", "error `gradients in batches are not supported`", LEAVE_OUT)
def gradients_in_batches_of_rows(convert):
    return batched(convert(made(Rows)), rows(0))


@use("MAML: steps with `create_graph=True` within a step")
def maml(convert):
    found = []
    for model, data in ((convert(mixed()), images), (convert(made(Rows)), rows)):

        def loss(step, model=model, data=data):
            fast = dict(model.named_parameters())
            for inner in range(2):
                value = functional_call(model, fast, (data(10 * step + inner),)).square().mean()
                gradients = torch.autograd.grad(value, [*fast.values()], create_graph=True)
                fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
            return functional_call(model, fast, (data(10 * step + 5),)).square().mean()

        found += train(model, loss)
    return found


@use("forces: a loss of gradients of the input")
def forces(convert):
    model, deep = convert(mixed()), convert(made(Rows))

    def loss(step):
        x = images(step).requires_grad_()
        (force,) = torch.autograd.grad(model.train(step % 2 == 0)(x).sum(), x, create_graph=True)
        return (force - 1).square().mean()

    def third_order(step):
        x = rows(step).requires_grad_()
        (first,) = torch.autograd.grad(deep(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return first.square().mean() + second.square().mean()

    return train(model, loss, optimizer=sgd(model, 1e-3)) + train(deep, third_order, optimizer=sgd(deep, 1e-3))


# --- nested tensors

PADDING = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1]]).bool()


@use("`nn.TransformerEncoder` with `src_key_padding_mask`, and its fast path in evaluation")
def encoder(convert):
    found = []
    for norm_first in (False, True):
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", norm_first=norm_first, batch_first=True)
        torch.manual_seed(0)
        model = convert(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).double())
        for p in model.parameters():
            nn.init.normal_(p, std=0.5)

        def loss(step, model=model):
            y = model(rows(step, 3, 4, 8), src_key_padding_mask=PADDING)
            return y.masked_fill(PADDING[..., None], 0).square().mean()

        found += train(model, loss)
        model.eval()
        found += train(model, loss)
        with torch.no_grad():
            y = model(rows(9, 3, 4, 8), src_key_padding_mask=PADDING)
        # Nested tensors have no padding.
        assert norm_first or (y[PADDING] == 0).all()
        found += [y.masked_fill(PADDING[..., None], 0), *train(model.train(), loss)]
    return found


@use("nested tensors of `torch.jagged`")
def jagged(convert):
    model = convert(made(Rows))

    def loss(step):
        x = torch.nested.nested_tensor([rows(step, 3, 6), rows(step + 10, 2, 6)], layout=torch.jagged)
        return model(x).values().square().mean()

    return train(model, loss) + train(model, data=rows) + train(model, loss)


# --- GANs


def penalty(discriminator, real, fake):
    t = torch.linspace(0.1, 0.9, len(real), dtype=real.dtype)[:, None, None, None]
    between = (t * real + (1 - t) * fake).requires_grad_()
    (dx,) = torch.autograd.grad(discriminator(between).sum(), between, create_graph=True)
    return 10 * (dx.flatten(1).norm(dim=1) - 1).square().mean()


def gan(convert, norm, spectral=False, freeze=True, penalised=False, averaged=False, clip=0.0):
    g, d = convert(made(Generator)), convert(made(Discriminator, norm, spectral))
    g_optimizer, d_optimizer, found = sgd(g, 0.02), sgd(d, 0.02), []
    average = AveragedModel(g, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for step in range(STEPS):
        real, fake = images(step).tanh(), g(images(100 + step))
        d_optimizer.zero_grad()
        loss = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        (loss + penalty(d, real, fake.detach()) if penalised else loss).backward()
        d_optimizer.step()
        if clip:
            for p in d.parameters():
                p.data.clamp_(-clip, clip)
        d.requires_grad_(not freeze)
        g_optimizer.zero_grad()
        F.softplus(-d(fake)).mean().backward()
        g_optimizer.step()
        d.requires_grad_(True)
        found += [loss.detach(), *seen(g, d)]
        if averaged:
            average.update_parameters(g)
            found.append(copy.deepcopy(g).eval().requires_grad_(False)(images(99)))
    if averaged:
        update_bn([images(50), images(51)], average)
        found += [average.eval()(images(99)).detach(), *seen(average)]
    return found


@use("a GAN: D(real), D(fake.detach()) and D(fake) in one step, `spectral_norm`, D frozen for G")
def adversarial(convert):
    ways = [(norm, spectral, freeze) for norm in NORMS for spectral in (False, True) for freeze in (False, True)]
    return [t for way in ways for t in gan(convert, *way)]


@use("WGAN: a gradient penalty with `create_graph=True`, weights clipped through `.data`")
def wasserstein(convert):
    found = gan(convert, "batch", clip=0.01) + gan(convert, "layer", clip=0.01)
    return found + [t for norm in NORMS for s in (False, True) for t in gan(convert, norm, s, penalised=True)]


@use("averages of a GAN's generator: `deepcopy`, `AveragedModel`, `update_bn`")
def averages(convert):
    return gan(convert, "batch", averaged=True)


# --- transformers


def trained_by_trainer(convert, **options):
    pytest.importorskip("accelerate")
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 16}
    found, tokens = [], torch.randint(0, 20, (16, 6), generator=torch.Generator().manual_seed(0))
    bert = hf.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    makers = {hf.BertForMaskedLM: bert, hf.LlamaForCausalLM: hf.LlamaConfig(**sizes)}
    for maker, config in makers.items():
        torch.manual_seed(0)
        model = convert(maker(config))
        with tempfile.TemporaryDirectory() as folder:
            arguments = hf.TrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=4,
                learning_rate=1e-2,
                optim="sgd",
                save_strategy="no",
                report_to="none",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                **options,
            )
            data = [{"input_ids": t, "labels": t} for t in tokens]
            hf.Trainer(model=model, args=arguments, train_dataset=data).train()
        found += model.state_dict().values()
    return found


@use("transformers' `Trainer`: gradient checkpointing, accumulation", tolerance=1e-5)
def trainer(convert):
    found = trained_by_trainer(convert, gradient_checkpointing=True)
    return found + trained_by_trainer(convert, gradient_accumulation_steps=2)


@use("`Trainer` with `torch_compile=True`", tolerance=1e-5)
def compiled_trainer(convert):
    return trained_by_trainer(convert, torch_compile=True, torch_compile_backend="aot_eager")


# --- optimizers and steps


@use("LBFGS, whose closure is called several times")
def lbfgs(convert):
    model = convert(mixed())
    optimizer, found = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe"), []
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(images(step)).square().mean()
            loss.backward()
            return loss

        found += [optimizer.step(closure).detach(), *seen(model)]
    return found


@use("SAM: two passes, weights moved by hand between them")
def sam(convert):
    model = convert(mixed())

    def loss(step):
        model(images(step)).square().mean().backward()
        moves = [0.05 * p.grad / (p.grad.norm() + 1e-3) for p in model.parameters()]
        model.zero_grad()
        with torch.no_grad():
            torch._foreach_add_([*model.parameters()], moves)
        model(images(step)).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_([*model.parameters()], moves)
        return sum(p.sum() for p in model.parameters()) * 0

    return train(model, loss)


@use("an optimizer that steps in backward (`register_post_accumulate_grad_hook`)")
def step_in_backward(convert):
    model, gradients, found = convert(mixed()), {}, []
    optimizers = {p: torch.optim.SGD([p], 0.05, momentum=0.9) for p in model.parameters()}

    def step_of(p):
        gradients[p] = p.grad.clone()
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_of)
    for step in range(STEPS):
        model(images(step)).square().mean().backward()
        found += [*(gradients[p] for p in model.parameters()), *seen(model)]
    return found


@use("steps written by hand, also through `.data`, and norm weights set to zero")
def by_hand(convert):
    model, found = convert(mixed()), []
    norms = model.stem[1], model.bn2, model.group[1], model.instance[1], model.ln, model.rms
    for step in range(2 * STEPS):
        model.zero_grad()
        model(images(step)).square().mean().backward()
        for p in model.parameters():
            p.data.sub_(0.05 * p.grad)
        for norm in norms if step in (2, 5) else ():
            if step == 2:
                norm.weight.data[::2] = 0
            else:
                nn.init.zeros_(norm.weight)
        found += seen(model)
    return found


@use("gradient accumulation over micro-batches, with one backward or several")
def accumulation(convert):
    model, found = convert(mixed()), []
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            (model(images(10 * step + micro)).square().mean() / 3).backward()
        optimizer.step()
        found += seen(model)
    return found + train(
        model, lambda step: sum(model(images(10 * step + micro)).square().mean() for micro in range(3))
    )


@use("gradients of several tasks (`retain_graph=True`), `backward(inputs=…)`")
def tasks(convert):
    model, found = convert(mixed()), []
    optimizer, parameters = sgd(model), [*model.parameters()]
    for step in range(STEPS):
        y = model(images(step))
        each = [torch.autograd.grad(y[:, i].square().mean(), parameters, retain_graph=True) for i in range(4)]
        for p, *gradients in zip(parameters, *each, strict=True):
            p.grad = sum(gradients)
        optimizer.step()
        found += seen(model)
        optimizer.zero_grad()
        inputs = [model.stem[1].weight, model.fc1.weight, model.gamma, model.bn2.bias]
        model(images(step)).square().mean().backward(inputs=inputs)
        found += seen(model)
    return found


def low_precision(convert, dtype, autocast=False):
    """Gradients of single steps in ``dtype``, of a model that was trained in float64 before."""
    model, found = mixed(), []
    train(model, steps=2)
    convert(model)
    train(model, steps=2)
    optimizer, scaler = sgd(model, 0.0), torch.amp.GradScaler("cpu", init_scale=16.0, enabled=autocast)
    model.to(dtype or torch.float64)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(images(step, dtype=dtype or torch.float64)).double().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found += [p.grad.double() for p in model.parameters()]
    return found


def low_precisions(convert, dtypes, autocast=False):
    """For each dtype the typical relative error of gradients against float64."""
    exact, errors = low_precision(lambda model: model, None), []
    for dtype in dtypes:
        pairs = zip(low_precision(convert, dtype, autocast), exact, strict=True)
        errors.append(torch.stack([(t - true).norm() / (true.norm() + 1e-6) for t, true in pairs]).median())
    return errors


@use("autocast to bfloat16 with a `GradScaler`", ROUNDINGS)
def autocast(convert):
    return low_precisions(convert, [torch.float32], True)


@use("`model.half()`, `bfloat16()` or `float()` in the middle of training", ROUNDINGS)
def halves(convert):
    return low_precisions(convert, [torch.float32, torch.bfloat16, torch.float16])


@use("an overflow that a `GradScaler` skips", tolerance=0)
def overflow(convert):
    model, scaler, found = (
        convert(made(Mixed, dtype=torch.float32)),
        torch.amp.GradScaler("cpu", init_scale=2.0**126),
        [],
    )
    optimizer = sgd(model, 1e-6)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        scaler.scale(model(single_images(step)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(torch.tensor(scaler.get_scale()))
    return found


# --- several models, several calls


def keeper(kept, key):
    return lambda module, args, y: kept.update({key: y})


@use("distillation: a converted teacher in eval, `no_grad` or `inference_mode`, losses of features, too")
def distillation(convert):
    found = []
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for training in (False, True):
            teacher, student, kept = convert(mixed(3)).train(training), convert(mixed()), {}
            for model in (teacher, student):
                for part in ("stem", "group"):
                    getattr(model, part).register_forward_hook(keeper(kept, (model, part)))

            def loss(step, teacher=teacher, student=student, kept=kept, context=context):
                with context():
                    kept["target"] = teacher(images(step))
                value = F.mse_loss(student(images(step)), kept["target"].detach().clone())
                pairs = [(kept[student, part], kept[teacher, part].detach().clone()) for part in ("stem", "group")]
                return value + sum(F.l1_loss(y, target) for y, target in pairs)

            found += train(student, loss) + seen(teacher)
    return found


@use("siamese networks: one model called twice, one backward or two")
def siamese(convert):
    model = convert(mixed())

    def loss(step, twice=False):
        a, b = model(images(step)), model(images(step + 10))
        if twice:
            a.square().mean().backward()
            return (b - 1).square().mean()
        return F.mse_loss(a, b) + a.square().mean() - F.cosine_similarity(a, b.detach()).mean()

    return train(model, loss) + train(model, lambda step: loss(step, True))


@use("Mean Teacher: weights averaged in place or through `.data`")
def mean_teacher(convert):
    found = []
    for in_place in (True, False):
        student = convert(mixed())
        teacher = copy.deepcopy(student)
        optimizer = sgd(student)
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.set_grad_enabled(not in_place):
                target = teacher(images(step) + 0.1)
            F.mse_loss(student(images(step)), target).backward()
            optimizer.step()
            for t, p in zip(teacher.parameters(), student.parameters(), strict=True):
                if in_place:
                    t.detach().lerp_(p.detach(), 0.1)
                else:
                    t.data = 0.9 * t.data + 0.1 * p.data
            found += seen(student, teacher)
    return found


@use("averaged weights swapped in for evaluation, and out again")
def swapped(convert):
    model, found = convert(mixed()), []
    optimizer, averages = sgd(model), [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        found += train(model, steps=1, first=step, optimizer=optimizer)
        torch._foreach_lerp_(averages, [p.detach() for p in model.parameters()], 0.3)
        weights = [p.data for p in model.parameters()]
        for p, average in zip(model.parameters(), averages, strict=True):
            p.data = average
        with torch.no_grad():
            found.append(model.eval()(images(step)))
        for p, weight in zip(model.train().parameters(), weights, strict=True):
            p.data = weight
    return found


@use("adversarial examples (PGD) in evaluation, then a training step")
def attack(convert):
    model = convert(mixed())

    def loss(step):
        moved = images(step)
        model.eval()
        for _ in range(3):
            x = moved.requires_grad_()
            (g,) = torch.autograd.grad(model(x).square().mean(), x)
            moved = (x + 0.1 * g.sign()).detach()
        return model.train()(moved).square().mean()

    return train(model, loss)


@use("freezing and unfreezing between steps, norms in eval among others in training")
def freezing(convert):
    model = convert(mixed())
    optimizer, found = sgd(model), []
    parts = model.stem, model.bn1, model.group, model.ln, model.fc1, model.rms
    for step in range(2 * STEPS):
        parts[step % 6].requires_grad_(step % 2 == 0)
        model.bn2.train(step % 3 > 0)
        found += train(model, steps=1, first=step, optimizer=optimizer)
    model.requires_grad_(False).head.requires_grad_(True)
    found += train(model)
    return found + train(model.requires_grad_(True))


@use("test-time adaptation (TENT): only norms are trained, on statistics of the batch")
def tent(convert):
    model = convert(mixed()).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)):
            module.requires_grad_(True)
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None

    def loss(step):
        y = model(images(step)).log_softmax(1)
        return -(y.exp() * y).sum(1).mean()

    return train(model, loss)


@use("`torch.utils.checkpoint` around parts, both kinds")
def checkpointed(convert):
    found = []
    for reentrant in (False, True):
        model = convert(mixed())
        for part in (model.stem, model.group, model.instance):
            run = part.forward
            part.forward = lambda x, run=run, reentrant=reentrant: checkpoint(run, x, use_reentrant=reentrant)
        steps = train(model, lambda step, model=model: model(images(step).requires_grad_()).square().mean())
        # A checkpoint counts its batches twice.
        found += [t for t in steps if t.dtype == torch.float64]
    return found


@use("one norm many times: recurrent networks, backpropagation through time, tied weights")
def recurrent(convert):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.input, self.hidden = nn.Linear(6, 8), nn.Linear(8, 8, bias=False)
            self.ln, self.bn = nn.LayerNorm(8), nn.BatchNorm1d(8)

        def forward(self, x, h):
            for _ in range(4):
                h = F.relu(self.bn(self.hidden(self.ln(h + self.input(x)))))
            return h

    model, state = convert(made(Recurrent)), [torch.zeros(5, 8, dtype=torch.float64)]

    def loss(step):
        state[0] = model(rows(step), state[0].detach())
        return (state[0] - 1).square().mean()

    tied = mixed()
    tied.bn2, tied.stem[1], tied.rms.weight = tied.bn1, tied.bn1, tied.ln.weight
    return train(model, loss) + train(convert(tied))


# --- what is hung on models


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


# --- several processes


def train_on_ranks(wrap, kind=mixed, data=images):
    from torch.distributed.tensor import DTensor

    def whole(tensors):
        return [t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for t in tensors]

    model, found = wrap(kind()), []
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        found += whole(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()
        found += whole(p.detach() for p in model.parameters()) + whole(model.buffers())
    return found


def of_this_rank(step):
    return images(10 * step + torch.distributed.get_rank())


def fsdp1(convert, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    norms = {nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.Linear}
    found, options = [], {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    for kinds in (set(), {nn.Sequential}, norms):

        def wrap(model, kinds=kinds):
            return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(kinds), **options)

        found += train_on_ranks(lambda model, wrap=wrap: wrap(convert(model)), data=of_this_rank)
        found += train_on_ranks(lambda model, wrap=wrap: convert(wrap(model)), data=of_this_rank)
    return found


def fsdp2(convert):
    from torch.distributed.fsdp import fully_shard

    def wrap(model):
        for child in convert(model).children():
            fully_shard(child)
        return fully_shard(model)

    return train_on_ranks(wrap, data=of_this_rank)


def tensor_parallel(convert):
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
        "4": SequenceParallel(),
        "5": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    layers = nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 4)
    mesh = init_device_mesh("cpu", (2,))
    return train_on_ranks(
        lambda model: parallelize_module(convert(model), mesh, plan),
        lambda: made(nn.Sequential, *copy.deepcopy(layers)),
        lambda step: rows(step, 3, 4, 6),
    )


use("FSDP1 with `use_orig_params=False`")(lambda convert: fsdp1(convert, False))
use("FSDP1 with `use_orig_params=True`")(lambda convert: fsdp1(convert, True))
use("FSDP2 (`fully_shard`)")(fsdp2)
use("tensor and sequence parallel (`parallelize_module`)")(tensor_parallel)
ON_RANKS = [name for name in USES if "FSDP" in name or "parallelize" in name]


# --- the tests


def results(run, *ways):
    """What ``run`` returns with each of the ways to convert a model."""
    found = []
    for way in ways:
        torch.manual_seed(1)
        found.append([t.detach() for t in run(way)])
    return found


def keep(model):
    return model


def compare(expected, actual, tolerance):
    assert len(actual) == len(expected)
    for ours, others in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, others, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if "rainer" in name else ()) for name in USES if name not in ON_RANKS],
)
def test_a_converted_model_does_what_the_table_says(name, one_thread):
    run, result, _, tolerance = USES[name]
    (expected,) = results(run, keep)
    if result.startswith("error"):
        (words,) = re.findall("`(.*)`", result)
        with pytest.raises((RuntimeError, AssertionError, TypeError), match=re.escape(words)):
            results(run, convert)
    elif result == ROUNDINGS:
        (errors,) = results(run, convert)
        assert all(ours < 2 * others for ours, others in zip(errors, expected, strict=True)), (errors, expected)
    else:
        compare(expected, *results(run, convert), tolerance)


@pytest.mark.parametrize("name", ON_RANKS)
@on_each_rank(2)
def test_a_converted_model_on_two_ranks_does_what_the_table_says(name):
    assert USES[name].result == EQUAL
    compare(*results(USES[name].run, keep, convert), 1e-9)


def test_the_nets_of_the_table_are_in_place():
    """Otherwise equal results would say nothing."""
    for model, data in ((convert(mixed()), images), (convert(made(Rows)), rows)):
        train(model, data=data)
        told = report(model).to_dict()["layers"]
        assert sum(layer["in_place"] for layer in told) >= len(told) - 1
    assert isinstance(convert(quantisable()).bn1, InPlaceNorm)


@pytest.mark.skipif(not PAGE.exists(), reason="needs the documentation")
def test_the_documentation_has_the_table_of_uses():
    rows = [f"| {name} | {use.result} | {use.what_to_do or 'nothing'} |" for name, use in USES.items()]
    table = "\n".join(["| use | result | what to do |", "| --- | --- | --- |", *rows])
    section = PAGE.read_text(encoding="utf-8").partition("\n## What was tried\n")[2].partition("\n## ")[0]
    assert "\n".join(line for line in section.splitlines() if line.startswith("|")) == table, table
