"""GANs, optimizers and other ways to make steps."""

import copy
import tempfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from uses.base import (
    NORMS,
    ROUNDINGS,
    STEPS,
    Discriminator,
    Generator,
    Mixed,
    images,
    made,
    mixed,
    seen,
    sgd,
    single_images,
    train,
    use,
)

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
