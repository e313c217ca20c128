"""Several models, and several calls."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from uses.base import STEPS, images, made, mixed, rows, seen, sgd, train, use


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
