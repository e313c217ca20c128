"""Group norm under autocast on devices that compute it in float32, as CUDA does: the result is kept in 16 bits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import convert, guard, report
from inplace_abn.conversion.offered import Offered
from inplace_abn.memory import measure

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@pytest.fixture(autouse=True)
def list_of_cuda():
    """Puts group norm on the CPU's list of what autocast computes in float32."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")

    def group_norm(x, *args):
        with torch._C._ExcludeDispatchKeyGuard(CPU):
            return torch.ops.aten.group_norm(x.float(), *args)

    library.impl("group_norm", group_norm)
    # The steps of a test are in one interval of the guard.
    guard.generations.current += 100 - guard.generations.current % 100
    yield
    library._destroy()


class Block(nn.Module):
    """Convolution, group norm, SiLU and another convolution, as diffusion models have them."""

    def __init__(self, run=None, norm=None):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.norm = nn.GroupNorm(8, 32) if norm is None else norm
        self.act, self.run = nn.SiLU(), run

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(self.act(self.norm(self.first(x)))) if self.run is None else self.run(self, x)


def images(size=16):
    return torch.randn(2, 3, size, size)


def stepped(model, x):
    model.zero_grad()
    z = model(x)
    z.float().square().sum().backward()
    guard.generations.advance()
    return z.detach()


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def spread(model, seed=0):
    """Weights and biases of norms as training leaves them."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.5, generator=generator)
    return model


def converted_and_watched(model, x):
    """A converted copy, whose first step is done."""
    converted = convert(copy.deepcopy(model))
    stepped(converted, x)
    return converted


def kinds_of_result(model, x):
    """The classes of what the activation returns in a step."""
    found = []
    handle = model.act.register_forward_hook(lambda _, __, z: found.append((type(z), z.dtype)))
    stepped(model, x)
    handle.remove()
    return found


def test_the_result_is_kept_in_16_bits_if_that_is_what_follows_takes():
    model, x = spread(Block()), images(32)
    size = 2 * 32 * 32 * 32 * 2
    native, converted = measure(model, x).held, convert(copy.deepcopy(model))
    # In native mode these are x and y in float32, and z in 16 bits.
    stepped(converted, x)
    assert kinds_of_result(converted, x) == [(Offered, torch.float32)]
    held = measure(converted, x).held
    assert native - held >= 3.9 * size
    assert report(converted).layers[0].in_place


@pytest.mark.parametrize("seed", range(4))
def test_results_and_gradients_are_as_exact_as_torchs(seed):
    torch.manual_seed(seed)
    model, x = spread(Block(), seed), images()
    converted = converted_and_watched(model, x)
    exact = copy.deepcopy(model).double()
    exact.run = lambda m, t: m.last(m.act(m.norm(m.first(t))))
    z = exact.last(exact.act(exact.norm(exact.first(x.double()))))
    # The gradient is correlated with the result.
    z.square().sum().backward()
    own, native = stepped(converted, x), stepped(model, x)
    assert own.dtype == native.dtype
    assert (own - z).norm() <= 1.5 * (native - z).norm()
    for a, b, c in zip(gradients(converted), gradients(model), gradients(exact), strict=True):
        # xhat and dy are rounded to 16 bits, too.
        assert (a - c).norm() <= 6 * (b - c).norm()


def read_in_float32(m, x):
    z = m.act(m.norm(m.first(x)))
    assert z.dtype == torch.float32
    return m.last(z) + z.exp().mean()


def read_by_a_hook(m, x):
    z = m.act(m.norm(m.first(x)))
    z.register_hook(lambda g: g * 2)
    return m.last(z)


def written_to(m, x):
    z = m.act(m.norm(m.first(x)))
    z += 1
    return m.last(z)


def returned(m, x):
    return m.act(m.norm(m.first(x)))


def returned_too(m, x):
    z = m.act(m.norm(m.first(x)))
    return torch.cat([m.last(z), z])


def summed_before(m, x):
    return m.last(m.act(m.norm(m.first(x)) + 1.0))


def without_activation(m, x):
    return m.last(m.norm(m.first(x)))


def another_activation(m, x):
    return m.last(F.gelu(m.norm(m.first(x))))


def activated_in_place(m, x):
    return m.last(F.silu(m.norm(m.first(x)), inplace=True))


def norm_read_twice(m, x):
    y = m.norm(m.first(x))
    return m.last(m.act(y)) + y


def autocast_left(m, x):
    y = m.norm(m.first(x))
    with torch.autocast("cpu", enabled=False):
        return F.conv2d(m.act(y), m.last.weight, m.last.bias)


READERS = [
    read_in_float32,
    read_by_a_hook,
    returned,
    returned_too,
    summed_before,
    without_activation,
]
READERS += [another_activation, activated_in_place, norm_read_twice, autocast_left]
# A first write between two watched steps is an error.
CASES = [(written_to, True), *((run, from_the_beginning) for run in READERS for from_the_beginning in (True, False))]


def _close(own, native, what):
    assert (own.float() - native.float()).norm() <= 0.02 * native.float().norm() + 1e-6, what


@pytest.mark.parametrize(("run", "from_the_beginning"), CASES)
def test_whatever_reads_the_result_gets_float32(run, from_the_beginning):
    """The model does this from the beginning, or after steps in which the result was kept in 16 bits."""
    torch.manual_seed(0)
    model, x = spread(Block(run if from_the_beginning else None)), images()
    converted = converted_and_watched(model, x)
    for m in (model, converted):
        m.run = run
    for step in range(3):
        own, native = stepped(converted, x), stepped(model, x)
        assert own.dtype == native.dtype
        _close(own, native, f"step {step}")
        for a, b in zip(gradients(converted), gradients(model), strict=True):
            _close(a, b, f"step {step}")


def test_a_result_that_several_convolutions_take_is_one_tensor_of_16_bits():
    def run(m, x):
        z = m.act(m.norm(m.first(x)))
        return m.last(z) + m.last(F.dropout(z, 0.0))

    model, x = spread(Block(run)), images()
    converted = converted_and_watched(model, x)
    assert kinds_of_result(converted, x) == [(Offered, torch.float32)]
    stepped(model, x)
    for a, b in zip(gradients(converted), gradients(model), strict=True):
        _close(a, b, "gradients")


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_works_under_checkpoints(reentrant):
    def run(m, x):
        return checkpoint(lambda t: m.last(m.act(m.norm(m.first(t)))), x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model, x = spread(Block(run)), images().requires_grad_()
    converted = convert(copy.deepcopy(model))
    for step in range(3):
        _close(stepped(converted, x), stepped(model, x), step)
        for a, b in zip(gradients(converted), gradients(model), strict=True):
            _close(a, b, step)


def test_gradients_of_gradients_are_those_of_torch():
    torch.manual_seed(0)
    model, x = spread(Block()), images()
    converted = converted_and_watched(model, x)
    found = []
    for m in (model, converted):
        given = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(m(given).float().square().sum(), given, create_graph=True)
        g.square().sum().backward()
        found.append(given.grad)
    _close(found[1], found[0], "gradients")


def test_ill_conditioned_layers_do_as_torch_does():
    model, x = Block(), images()
    with torch.no_grad():
        model.norm.weight.fill_(1e-3)
        model.norm.bias.fill_(1.0)
    converted = converted_and_watched(model, x)
    for _ in range(3):
        stepped(converted, x), stepped(model, x)
        for a, b in zip(gradients(converted), gradients(model), strict=True):
            _close(a, b, "gradients")


@pytest.mark.parametrize("ask", [lambda z: z.retain_grad(), lambda z: z.register_hook(lambda g: g * 2)])
def test_a_gradient_of_the_result_that_is_asked_for_late_is_an_error(ask):
    """The convolution takes another tensor, and the result's gradient would lack a part."""

    def run(m, x):
        m.z = m.act(m.norm(m.first(x)))
        return m.last(m.z)

    converted = convert(spread(Block(run)))
    converted(images())
    with pytest.raises(RuntimeError, match="Ask before"):
        ask(converted.z)


class ReturnsBoth(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(lambda m, x: m.act(m.norm(m.first(x))))

    def forward(self, x):
        z = self.block(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.block.last(z), {"features": z}


def test_a_result_that_the_model_returns_is_exact_in_float32():
    """It had the values of 16 bits after watched steps."""
    torch.manual_seed(0)
    model, x = ReturnsBoth(), images()
    spread(model)
    converted = convert(copy.deepcopy(model))
    for _ in range(3):
        z, exact = converted(x)[1]["features"], model(x)[1]["features"]
        assert type(z) is torch.Tensor
        assert (z - exact).abs().max() <= 1e-5
        converted(x)[0].float().sum().backward()
        guard.generations.advance()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("act", [nn.SiLU(), nn.ReLU(), nn.GELU(), nn.Identity()])
def test_compiled_it_is_kept_in_16_bits_too(act, backend, fresh_compiler):
    """The result in float32 would be held besides the copy of 16 bits."""
    torch.manual_seed(0)
    native, x = Block(), images()
    native.act = act
    spread(native)
    exact = [p.double() for p in exact_gradients(native, x)]
    found = []
    for model in (native, convert(copy.deepcopy(native))):
        function = torch.compile(model, backend=backend, fullgraph=True)
        stepped_twice = [function(x).float().square().sum() for _ in range(2)]
        model.zero_grad()
        stepped_twice[-1].backward()
        found.append((gradients(model), held(function, x)))
    for ours, torchs, t in zip(found[1][0], found[0][0], exact, strict=True):
        assert (ours.double() - t).norm() <= 6 * (torchs.double() - t).norm() + 1e-3 * t.norm()
    plane = 2 * 2 * 32 * 16 * 16
    assert found[1][1] <= found[0][1] - plane


def exact_gradients(model, x):
    exact = copy.deepcopy(model).double()
    y = exact.last(exact.act(exact.norm(exact.first(x.double()))))
    y.square().sum().backward()
    return gradients(exact)


def held(function, x):
    """Bytes of activations that autograd keeps."""
    sizes = {}

    def pack(t):
        if t.numel() >= 32 * 16 * 16:
            sizes[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function(x)
    del y
    return sum(sizes.values())
