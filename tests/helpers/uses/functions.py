"""torch.func, and nested tensors."""

import torch
from foreign_nets import conv
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, stack_module_state, vjp, vmap

from uses.base import STEPS, Mixed, Rows, images, made, mixed, rows, sgd, small_images, train, use

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
