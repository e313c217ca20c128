"""Synchronised statistics: every rank gets what one process computes from the whole batch."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from distributed import check_same_on_all_ranks, new_process_group, on_each_rank
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from inplace_abn import ABN, InPlaceABN, InPlaceABNSync, active_group, reference, set_active_group
from inplace_abn import inplace_abn_sync as abn_sync

CHANNELS = 5
ACTIVATIONS = {"identity": 0.0, "leaky_relu": 0.01, "elu": 1.3, "relu": 0.0, "silu": 0.0, "hardswish": 0.0}
SHAPES = {
    "equal": [(3, CHANNELS, 4, 6)] * 3,
    "batch sizes differ": [(3, CHANNELS, 4, 6), (1, CHANNELS, 4, 6), (5, CHANNELS, 4, 6)],
    "spatial sizes differ": [(3, CHANNELS, 4, 6), (2, CHANNELS, 7, 3), (1, CHANNELS, 1, 9)],
    "numbers of dimensions differ": [(7, CHANNELS), (2, CHANNELS, 3), (2, CHANNELS, 2, 3, 2)],
    "first rank is empty": [(0, CHANNELS, 4, 6), (3, CHANNELS, 4, 6), (2, CHANNELS, 4, 6)],
    "other ranks are empty": [(2, CHANNELS, 4, 6), (0, CHANNELS, 4, 6), (2, CHANNELS, 0, 6)],
    "one rank has a single value": [(1, CHANNELS, 1, 1), (3, CHANNELS, 4, 6), (2, CHANNELS, 4, 6)],
    "every rank has a single value": [(1, CHANNELS)] * 3,
}


def batches(shapes, dtype=torch.float64):
    """Every rank's x and dz, with statistics that differ between ranks and channels."""
    drawn = []
    for rank, shape in zip(range(dist.get_world_size()), shapes, strict=False):
        draw = torch.Generator().manual_seed(rank)
        noise, dz = torch.randn((2, *shape), generator=draw, dtype=torch.float64)
        offset = reference.per_channel(torch.linspace(-2, 2, shape[1], dtype=torch.float64), noise)
        drawn.append((((1 + rank) * noise + rank + offset).to(dtype), dz.to(dtype)))
    return drawn


def own(drawn):
    x, dz = drawn[dist.get_rank()]
    return x.clone(), dz.clone()


def parameters(dtype=torch.float64):
    weight = torch.tensor([1.0, -0.7, 0.3, 2.0, -0.05], dtype=dtype)
    return weight.requires_grad_(), torch.linspace(-0.5, 0.5, CHANNELS, dtype=dtype).requires_grad_()


def running_statistics(dtype=torch.float64):
    return torch.linspace(-1, 1, CHANNELS, dtype=dtype), torch.linspace(0.5, 2, CHANNELS, dtype=dtype)


def rows(t):
    """(values, channels): what ranks with different sizes can be concatenated as."""
    return t.movedim(1, -1).flatten(0, -2)


def own_share(whole, drawn):
    """What this rank's x contributes to ``whole``, the concatenated rows of all ranks."""
    shapes = [x.movedim(1, -1).shape for x, _ in drawn]
    rank = dist.get_rank()
    return whole.detach().split([shape[:-1].numel() for shape in shapes])[rank].view(shapes[rank]).movedim(-1, 1)


def single_process(drawn, weight, bias, running=(None, None), **options):
    """z, dx of this rank's share, dweight and dbias, computed from the whole batch; ``running`` is updated."""
    x = torch.cat([rows(x.double()) for x, _ in drawn]).requires_grad_()
    weight, bias = (t if t is None else t.detach().clone().requires_grad_() for t in (weight, bias))
    z = reference.forward(x, weight, bias, *running, **options)
    z.backward(torch.cat([rows(dz.double()) for _, dz in drawn]))
    gradients = [t if t is None else t.grad for t in (weight, bias)]
    return own_share(z, drawn), own_share(x.grad, drawn), *gradients


def synchronised(x, dz, weight, bias, running=(None, None), **options):
    """z, this rank's dx, dweight and dbias over all ranks, by `inplace_abn_sync`."""
    leaf = x.requires_grad_()
    buffer = leaf.clone(memory_format=torch.preserve_format)
    z = abn_sync(buffer, weight, bias, *running, **options)
    kept = z.detach().clone()
    z.backward(dz)
    gradients = [t if t is None else over_ranks(t.grad) for t in (weight, bias)]
    return kept, leaf.grad, *gradients


def over_ranks(t):
    total = t.clone()
    dist.all_reduce(total)
    return total


def check(actual, expected, tolerance=1e-12):
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, check_dtype=False)


class Collectives(TorchDispatchMode):
    """Collects the names of the collectives that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@on_each_rank(2, 3)
def test_equals_one_process_on_the_whole_batch(shapes, activation):
    drawn, affine, running, expected_running = batches(shapes), parameters(), running_statistics(), running_statistics()
    options = {"activation": activation, "activation_param": ACTIVATIONS[activation], "eps": 1e-3, "momentum": 0.3}
    actual = synchronised(*own(drawn), *affine, running, **options)
    check(actual, single_process(drawn, *affine, expected_running, **options))
    check(running, expected_running)
    check_same_on_all_ranks(*running)


def check_residual(shapes, activation, tolerance=1e-12):
    drawn = batches(shapes)
    options = {"activation": activation, "activation_param": ACTIVATIONS[activation]}
    x, dz = own(drawn)
    residual = x.cos().requires_grad_()
    whole = torch.cat([rows(x.cos()) for x, _ in drawn]).requires_grad_()
    actual = synchronised(x, dz, *parameters(), residual=residual, **options)
    check(actual, single_process(drawn, *parameters(), residual=whole, **options), tolerance)
    check((residual.grad,), (own_share(whole.grad, drawn),), tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shapes", ["equal", "spatial sizes differ", "other ranks are empty"])
@on_each_rank(2)
def test_residual_is_added_before_the_activation(shapes, activation):
    check_residual(SHAPES[shapes], activation)


@pytest.mark.parametrize("signed_weight", [False, True])
@pytest.mark.parametrize("affine", [(True, False), (False, True), (False, False)], ids=["weight", "bias", "neither"])
@on_each_rank(2)
def test_weight_and_bias_are_optional(affine, signed_weight):
    drawn = batches(SHAPES["batch sizes differ"])
    affine = [t if present else None for t, present in zip(parameters(), affine, strict=True)]
    actual = synchronised(*own(drawn), *affine, signed_weight=signed_weight)
    check(actual, single_process(drawn, *affine, signed_weight=signed_weight))


@on_each_rank(2)
def test_signed_weight_keeps_its_sign():
    drawn = batches(SHAPES["batch sizes differ"])
    actual = synchronised(*own(drawn), *parameters(), signed_weight=True)
    check(actual, single_process(drawn, *parameters(), signed_weight=True))


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one rank", "both ranks"])
@on_each_rank(2)
def test_channels_last_is_kept(ranks):
    drawn = batches(SHAPES["spatial sizes differ"])
    x, dz = own(drawn)
    if dist.get_rank() in ranks:
        x, dz = x.to(memory_format=torch.channels_last), dz.to(memory_format=torch.channels_last)
    strides = x.stride()
    z, dx, *gradients = synchronised(x, dz, *parameters())
    assert z.stride() == dx.stride() == strides
    check((z, dx, *gradients), single_process(drawn, *parameters()))


@on_each_rank(2)
def test_strided_input_and_gradient():
    drawn = batches([(3, CHANNELS, 4, 8), (2, CHANNELS, 6, 2)])
    x, dz = own(drawn)
    wide = torch.zeros(x.shape[0], CHANNELS, *(2 * s for s in x.shape[2:]), dtype=torch.float64)
    wide[:, :, ::2, ::2] = x
    leaf = wide.requires_grad_()
    weight, bias = parameters()
    z = abn_sync(leaf.clone()[:, :, ::2, ::2], weight, bias, None, None)
    kept = z.detach().clone()
    z.backward(dz.transpose(2, 3).contiguous().transpose(2, 3))
    expected = single_process(drawn, *parameters())
    check((kept, leaf.grad[:, :, ::2, ::2], over_ranks(weight.grad), over_ranks(bias.grad)), expected)
    assert leaf.grad.count_nonzero() == leaf.grad[:, :, ::2, ::2].count_nonzero()


@on_each_rank(2)
def test_result_is_written_over_the_input():
    x, _ = own(batches(SHAPES["equal"]))
    for data in (x.clone(), x.requires_grad_().clone()):
        z = abn_sync(data, *parameters(), *running_statistics())
        assert z.data_ptr() == data.data_ptr()
        check((data,), (z,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_each_rank(2)
def test_lower_precision(dtype):
    drawn = batches(SHAPES["spatial sizes differ"], dtype)
    affine, running = parameters(torch.float32), running_statistics(torch.float32)
    expected_running = running_statistics()
    z, dx, dweight, dbias = synchronised(*own(drawn), *affine, running)
    expected = single_process(drawn, *(t.double() for t in affine), expected_running)
    assert z.dtype == dx.dtype == dtype
    assert dweight.dtype == dbias.dtype == torch.float32
    check((z, dx, dweight, dbias), expected, 1e-5 if dtype == torch.float32 else 5 * torch.finfo(dtype).eps)
    check(running, expected_running, 1e-5)
    check_same_on_all_ranks(*running)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_each_rank(2)
def test_module_in_lower_precision(dtype):
    drawn = batches(SHAPES["equal"], dtype)
    module = InPlaceABNSync(CHANNELS, dtype=dtype)
    x, dz = own(drawn)
    z = module(x.requires_grad_().clone())
    kept = z.detach().clone()
    z.backward(dz)
    ones, zeros = torch.ones(CHANNELS).double(), torch.zeros(CHANNELS).double()
    running = zeros.clone(), ones.clone()
    expected = single_process(drawn, ones, zeros, running)
    gradients = over_ranks(module.weight.grad.float()), over_ranks(module.bias.grad.float())
    check((kept, x.grad, *gradients), expected, 8 * torch.finfo(dtype).eps)
    check((module.running_mean, module.running_var), running, 2 * torch.finfo(dtype).eps)


@on_each_rank(2, 3)
def test_large_offset_loses_no_precision():
    drawn = [(x + 1e8, dz) for x, dz in batches(SHAPES["batch sizes differ"])]
    actual = synchronised(*own(drawn), *parameters())
    check(actual, single_process(drawn, *parameters()), 1e-7)


@pytest.mark.parametrize("momentum", [0.25, None])
@on_each_rank(2)
def test_module_equals_one_process_over_several_steps(momentum):
    options = {"momentum": momentum, "activation": "elu", "activation_param": 0.8, "dtype": torch.float64}
    module, twin = InPlaceABNSync(CHANNELS, **options), InPlaceABN(CHANNELS, **options)
    for step in range(3):
        drawn = [(x * (step + 1) + step, dz) for x, dz in batches(SHAPES["batch sizes differ"])]
        module(own(drawn)[0])
        twin(torch.cat([rows(x) for x, _ in drawn]))
    check(module.state_dict().values(), twin.state_dict().values())
    assert module.num_batches_tracked == 3


@on_each_rank(2)
def test_module_without_running_statistics_synchronises_in_evaluation_too():
    drawn = batches(SHAPES["batch sizes differ"])
    module = InPlaceABNSync(CHANNELS, track_running_stats=False, dtype=torch.float64).eval()
    check((module(own(drawn)[0]),), single_process(drawn, module.weight, module.bias)[:1])


@on_each_rank(2)
def test_training_has_one_all_gather_and_one_all_reduce():
    x, dz = own(batches(SHAPES["equal"]))
    with Collectives() as forward:
        z = abn_sync(x.requires_grad_().clone(), *parameters(), *running_statistics())
    with Collectives() as backward:
        z.backward(dz)
    assert forward.names == ["all_gather_into_tensor"]
    assert backward.names == ["all_reduce"]


@on_each_rank(2)
def test_frozen_input_needs_no_collective_in_backward():
    drawn, affine = batches(SHAPES["batch sizes differ"]), parameters()
    x, dz = own(drawn)
    z = abn_sync(x, *affine, None, None)
    with Collectives() as backward:
        z.backward(dz)
    assert backward.names == []
    check([over_ranks(t.grad) for t in affine], single_process(drawn, *affine)[2:])


@on_each_rank(2)
def test_evaluation_has_no_collectives():
    x, dz = own(batches(SHAPES["batch sizes differ"]))
    leaf, twin_leaf = x.requires_grad_(), x.detach().clone().requires_grad_()
    affine, twin_affine = parameters(), parameters()
    with Collectives() as mode:
        z = abn_sync(leaf.clone(), *affine, *running_statistics(), training=False)
        kept = z.detach().clone()
        z.backward(dz)
    assert mode.names == []
    twin = reference.forward(twin_leaf, *twin_affine, *running_statistics(), training=False)
    twin.backward(dz)
    check((kept, leaf.grad, *(t.grad for t in affine)), (twin, twin_leaf.grad, *(t.grad for t in twin_affine)))


@on_each_rank(2)
def test_evaluation_on_one_rank_waits_for_no_other():
    if dist.get_rank() == 0:
        module = InPlaceABNSync(CHANNELS, dtype=torch.float64).eval()
        for shape in [(2, CHANNELS, 3, 3), (1, CHANNELS), (0, CHANNELS, 3)]:
            x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            module(x.clone()).sum().backward()
            assert x.grad.shape == x.shape
        with torch.no_grad():
            module(x.detach())


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, CHANNELS), (0, CHANNELS), (0, CHANNELS)],
        [(0, CHANNELS, 3), (1, CHANNELS, 1), (2, CHANNELS, 0)],
        [(0, CHANNELS, 2), (0, CHANNELS, 2), (0, CHANNELS, 2)],
    ],
)
@on_each_rank(2, 3)
def test_all_ranks_raise_together_and_nothing_is_modified(shapes):
    module = InPlaceABNSync(CHANNELS, momentum=None, dtype=torch.float64)
    module(own(batches(SHAPES["batch sizes differ"]))[0])
    before = copy.deepcopy(module.state_dict())
    x, _ = own(batches(shapes))
    data = x.requires_grad_().clone()
    with pytest.raises(ValueError, match="more than 1 value per channel when training, got input size"):
        module(data)
    assert torch.equal(data, x)
    assert data._version == 0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    drawn = [(x + 1, dz) for x, dz in batches(SHAPES["spatial sizes differ"])]
    check(synchronised(*own(drawn), *parameters()), single_process(drawn, *parameters()))


@on_each_rank(3)
def test_subgroup_synchronises_its_ranks_only():
    drawn = batches(SHAPES["batch sizes differ"])
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    running, expected_running = running_statistics(), running_statistics()
    x, dz = own(drawn)
    x.requires_grad_()
    z = abn_sync(x.clone(), *parameters(), *running, group=group)
    kept = z.detach().clone()
    z.backward(dz)
    zero = [(x[:0], dz[:0]) for x, dz in drawn]
    members = [drawn[r] if (r == 1) == (rank == 1) else zero[r] for r in range(3)]
    check((kept, x.grad), single_process(members, *parameters(), expected_running)[:2])
    check(running, expected_running)


@on_each_rank(2)
def test_group_of_one_rank_keeps_local_statistics():
    drawn = batches(SHAPES["batch sizes differ"])
    rank = dist.get_rank()
    group = [dist.new_group([r]) for r in range(2)][rank]
    with Collectives() as mode:
        z = abn_sync(own(drawn)[0], *parameters(), None, None, group=group).detach()
    assert mode.names == []
    check((z,), (reference.forward(drawn[rank][0], *parameters(), None, None),))


@on_each_rank(3)
def test_active_group_leaves_inactive_ranks_with_local_statistics():
    drawn = batches(SHAPES["batch sizes differ"])
    active = dist.get_rank() != 1
    module = InPlaceABNSync(CHANNELS, group=active_group(active), dtype=torch.float64)
    zero = [(x[:0], dz[:0]) for x, dz in drawn]
    members = [drawn[r] if (r != 1) == active else zero[r] for r in range(3)]
    with Collectives() as mode:
        z = module(own(drawn)[0]).detach()
    assert mode.names == (["all_gather_into_tensor"] if active else [])
    check((z,), single_process(members, module.weight, module.bias)[:1])


@on_each_rank(3)
def test_active_group_is_made_once_per_set_of_ranks():
    rank = dist.get_rank()
    everyone, pair = active_group(True), active_group(rank < 2)
    assert active_group(True) is everyone
    assert active_group(rank < 2) is pair
    assert dist.get_process_group_ranks(everyone) == [0, 1, 2]
    if rank < 2:
        assert pair is not everyone
        assert dist.get_process_group_ranks(pair) == [0, 1]
    else:
        assert dist.get_rank(pair) == -1


@on_each_rank(2)
def test_active_group_without_any_active_rank():
    module = InPlaceABNSync(CHANNELS, group=active_group(False), dtype=torch.float64)
    x, _ = own(batches(SHAPES["equal"]))
    expected = reference.forward(x.clone(), module.weight, module.bias, None, None)
    check((module(x),), (expected,))


@on_each_rank(3)
def test_active_group_is_forgotten_with_its_process_group():
    drawn = batches(SHAPES["batch sizes differ"])
    old = active_group(True)
    new_process_group()
    new = active_group(True)
    assert new is not old
    check(synchronised(*own(drawn), *parameters(), group=new), single_process(drawn, *parameters()))


@on_each_rank(2)
def test_set_active_group_reaches_every_synchronised_module_of_a_network():
    network = nn.Sequential(
        InPlaceABNSync(2), InPlaceABN(2), ABN(2), nn.ModuleDict({"deep": nn.Sequential(InPlaceABNSync(2))})
    )
    group = active_group(True)
    set_active_group(network, group)
    synchronised_modules = [m for m in network.modules() if isinstance(m, InPlaceABNSync)]
    assert len(synchronised_modules) == 2
    assert all(m.group is group for m in synchronised_modules)
    assert not any(hasattr(m, "group") for m in network.modules() if not isinstance(m, InPlaceABNSync))
    set_active_group(network, None)
    assert all(m.group is None for m in synchronised_modules)


@on_each_rank(2)
def test_several_layers_share_a_process_group():
    torch.manual_seed(0)
    layers = [nn.Conv2d(CHANNELS, CHANNELS, 1, dtype=torch.float64) for _ in range(3)]
    norms = [InPlaceABNSync(CHANNELS, activation=a, dtype=torch.float64) for a in ("leaky_relu", "elu", "identity")]
    twins = [InPlaceABN(CHANNELS, activation=a, dtype=torch.float64) for a in ("leaky_relu", "elu", "identity")]

    def residual(x, norms):
        first = norms[0](layers[0](x))
        second = norms[1](layers[1](first)) + first
        return norms[2](layers[2](second) + x), first

    drawn = batches(SHAPES["equal"])
    rank = dist.get_rank()
    whole = torch.cat([x for x, _ in drawn]).requires_grad_()
    expected, expected_kept = residual(whole, twins)
    expected.backward(torch.cat([dz for _, dz in drawn]))
    x, dz = own(drawn)
    z, kept = residual(x.requires_grad_(), norms)
    dz_before = dz.clone()
    z.backward(dz)
    assert torch.equal(dz, dz_before)
    check((z, kept, x.grad), [t.chunk(2)[rank] for t in (expected, expected_kept, whole.grad)])
    for norm, twin in zip(norms, twins, strict=True):
        check([over_ranks(p.grad) for p in norm.parameters()], [p.grad for p in twin.parameters()])
        check(norm.buffers(), twin.buffers())


@on_each_rank(2)
def test_backward_twice_with_retained_graph():
    drawn, affine = batches(SHAPES["batch sizes differ"]), parameters()
    x, dz = own(drawn)
    x.requires_grad_()
    z = abn_sync(x.clone(), *affine, None, None)
    z.backward(dz, retain_graph=True)
    z.backward(dz)
    z_expected, *expected = single_process(drawn, *affine)
    actual = x.grad, *(over_ranks(t.grad) for t in affine)
    check((z, *actual), (z_expected, *(2 * t for t in expected)))


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_each_rank(2)
def test_checkpoint_recomputes_with_all_ranks(use_reentrant):
    drawn, affine = batches(SHAPES["batch sizes differ"]), parameters()
    x, dz = own(drawn)
    x.requires_grad_()
    z = checkpoint(lambda x: abn_sync(x.clone(), *affine, None, None), x, use_reentrant=use_reentrant)
    kept = z.detach().clone()
    z.backward(dz)
    check((kept, x.grad, *(over_ranks(t.grad) for t in affine)), single_process(drawn, *affine))


@on_each_rank(2)
def test_create_graph_is_refused_and_the_graph_stays_usable():
    drawn, affine = batches(SHAPES["batch sizes differ"]), parameters()
    x, dz = own(drawn)
    x.requires_grad_()
    z = abn_sync(x.clone(), *affine, None, None)
    with pytest.raises(RuntimeError, match="inplace_abn: create_graph=True is not supported by synchronised statist"):
        torch.autograd.grad(z, x, dz, create_graph=True)
    kept = z.detach().clone()
    z.backward(dz)
    check((kept, x.grad, *(over_ranks(t.grad) for t in affine)), single_process(drawn, *affine))


@on_each_rank(2)
def test_without_a_process_group_statistics_are_local_with_one_warning():
    dist.destroy_process_group()
    x = torch.randn(4, CHANNELS, 3, 3, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x.grad = None
            abn_sync(x.clone(), *parameters(), None, None).square().sum().backward()
    reference.forward(twin, *parameters(), None, None).square().sum().backward()
    check((x.grad,), (twin.grad,))
    assert len(caught) == 1
    assert "torch.distributed is not initialised" in str(caught[0].message)


def test_active_group_without_a_process_group_says_so():
    with pytest.raises(RuntimeError, match=r"inplace_abn: active_group needs .*init_process_group"):
        active_group(True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@on_each_rank(2)
def test_compiled_with_fullgraph_equals_eager(backend):
    torch.compiler.reset()
    eager = InPlaceABNSync(CHANNELS, activation="elu", dtype=torch.float64)
    module = copy.deepcopy(eager)
    compiled = torch.compile(lambda x: module(2 * x) + 1, backend=backend, fullgraph=True, dynamic=True)
    for shapes in ([(3, CHANNELS, 4, 6)] * 2, [(2, CHANNELS, 3, 5), (4, CHANNELS, 2, 3)]):
        results = []
        for call in (lambda x: eager(2 * x) + 1, compiled):
            x, dz = own(batches(shapes))
            z = call(x.requires_grad_())
            z.backward(dz)
            results.append((z.detach(), x.grad))
        check(*results)
    check([p.grad for p in module.parameters()], [p.grad for p in eager.parameters()])
    check(module.buffers(), eager.buffers())
    check_same_on_all_ranks(module.running_mean, module.running_var)


@on_each_rank(2)
def test_compiled_without_a_process_group_keeps_local_statistics():
    dist.destroy_process_group()
    torch.compiler.reset()
    module = InPlaceABNSync(CHANNELS, dtype=torch.float64)
    x = torch.randn(4, CHANNELS, 3, 3, dtype=torch.float64)
    z = torch.compile(lambda x: module(1 * x), backend="aot_eager", fullgraph=True)(x)
    check((z.detach(),), (reference.forward(x, module.weight, module.bias, None, None).detach(),))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_equals_one_process_on_the_whole_batch(shapes, activation):
    drawn, affine, running, expected_running = batches(shapes), parameters(), running_statistics(), running_statistics()
    options = {"activation": activation, "activation_param": ACTIVATIONS[activation], "momentum": 0.3}
    actual = synchronised(*own(drawn), *affine, running, **options)
    check(actual, single_process(drawn, *affine, expected_running, **options), 1e-10)
    check(running, expected_running, 1e-10)
    check_same_on_all_ranks(*running)


@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_residual():
    check_residual(SHAPES["batch sizes differ"], "elu", 1e-10)


@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_leaves_the_input_alone():
    for shapes in (SHAPES["equal"], SHAPES["one rank has a single value"]):
        x, _ = own(batches(shapes))
        before = x.clone()
        z = abn_sync(x, *parameters(), *running_statistics())
        assert z.data_ptr() != x.data_ptr()
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_module_with_cumulative_average(dtype):
    drawn = batches(SHAPES["batch sizes differ"], dtype)
    module = InPlaceABNSync(CHANNELS, momentum=None, dtype=torch.promote_types(dtype, torch.float32))
    running = torch.zeros(CHANNELS).double(), torch.ones(CHANNELS).double()
    for step in range(2):
        module(own(drawn)[0])
        single_process(drawn, None, None, running, momentum=1 / (step + 1))
    check((module.running_mean, module.running_var), running, 1e-10 if dtype == torch.float64 else 1e-5)


@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_raises_on_all_ranks_together():
    x, _ = own(batches([(1, CHANNELS), (0, CHANNELS)]))
    running = running_statistics()
    with pytest.raises(ValueError, match="more than 1 value per channel when training"):
        abn_sync(x, *parameters(), *running)
    check(running, running_statistics(), 0)


@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_has_second_derivatives():
    drawn, affine, twin_affine = batches(SHAPES["equal"]), parameters(), parameters()
    whole = torch.cat([x for x, _ in drawn]).requires_grad_()
    z = reference.forward(whole, *twin_affine, None, None, activation="elu", activation_param=1.0)
    (dx,) = torch.autograd.grad(z, whole, torch.cat([dz for _, dz in drawn]), create_graph=True)
    dx.square().sum().backward()
    x, dz = own(drawn)
    x.requires_grad_()
    z = abn_sync(x, *affine, None, None, activation="elu", activation_param=1.0)
    (dx,) = torch.autograd.grad(z, x, dz, create_graph=True)
    dx.square().sum().backward()
    check((x.grad, over_ranks(affine[0].grad)), (whole.grad.chunk(2)[dist.get_rank()], twin_affine[0].grad), 1e-10)
