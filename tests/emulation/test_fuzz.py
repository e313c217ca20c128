"""Random calls of the ops on the emulated device, compared with the package's own ops on the CPU."""

import os
import random

import pytest
import torch
from cases import ALL_ACTIVATIONS, DTYPES, needs_kernels, parameters, stats_dtype, tolerance

from emulation import emulated
from inplace_abn.activations import find
from inplace_abn.kernels import ops

pytestmark = [pytest.mark.emulated, *needs_kernels]

EPS = 1e-5
CASES = 100
if os.environ.get("INPLACE_ABN_EMULATED_FEW"):
    # Changed kernels are built for these only (mutate.py).
    _dtype, _activation = os.environ["INPLACE_ABN_EMULATED_FEW"].split()
    ALL_ACTIVATIONS, DTYPES = [(_activation, 0.2)], [getattr(torch, _dtype)]
CHANNELS = [1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 64, 100, 129, 257, 1030, 2500]
BATCHES = [1, 1, 2, 3, 5, 8, 33, 300]
SPACES = [(), (0,), (1,), (2,), (3,), (7,), (31,), (33,), (129,), (3000,)]
SPACES += [(5, 5), (8, 8), (16, 16), (57, 57), (9, 7, 3)]
# If a plane of such a size starts one element before a vector ends, it takes one vector more.
SPACES += [(6,), (14,), (22,), (6, 5)]
# On a device with few blocks, one block takes several tiles of these planes. Few devices have so few.
LONG = [(3000,), (57, 57), (4099,), (2, 2001)]
MOST_ELEMENTS = 1 << 14


class Case:
    """One random call. Its tensors are in memory of random layout, with NaN around them."""

    def __init__(self, seed):
        self.choose = choose = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = choose.choice(DTYPES)
        is_long = seed % 5 == 0
        while True:
            channels, space = (CHANNELS[:3], LONG) if is_long else (CHANNELS, SPACES)
            self.shape = (choose.choice(BATCHES), choose.choice(channels), *choose.choice(space))
            if torch.Size(self.shape).numel() <= MOST_ELEMENTS:
                break
        self.activation, self.param = choose.choice(ALL_ACTIVATIONS)
        self.signed, self.training = choose.random() < 0.5, choose.random() < 0.7
        self.with_residual, self.sliced = choose.random() < 0.4, choose.random() < 0.5
        self.rows = choose.random() < 0.5
        self.narrow = choose.random() < 0.5
        self.aligned = False
        self.affine = choose.choice(["both", "both", "weight", "bias", "none"])
        self.agree = choose.random() < 0.6
        self.place = self._random_place()
        if seed % 5 == 1:
            # Rows start at a vector and consist of whole vectors, but other channels lie between them.
            self.shape = (choose.choice([2, 3, 33]), choose.choice([8, 16, 64]), *choose.choice([(), (3,), (2, 3)]))
            self.rows, self.agree, self.place = True, True, (0, choose.randrange(1, 4), choose.randrange(2), 0)
        if seed % 5 == 2:
            # Planes start at multiples of 16 bytes, also in a slice. Most consist of whole vectors.
            space = choose.choice([(8,), (24,), (31,), (31,), (8, 8), (4, 4, 4), (16, 16), (40, 40), (56, 56)])
            self.shape = (choose.choice([1, 2, 3]), choose.choice([1, 2, 3, 5]), *space)
            if torch.Size(self.shape).numel() > MOST_ELEMENTS:
                self.shape = (1, *self.shape[1:])
            self.rows, self.agree = False, choose.random() < 0.8
            self.place = (choose.randrange(2), choose.randrange(2), choose.randrange(2), 0)
            self.sliced = self.aligned = True
        # There may be a gap behind each plane.
        self.gap = choose.choice([0, 0, 1, 4]) if not self.rows and len(self.shape) == 3 else 0
        self.device, self.seed = 2 if is_long else choose.randrange(4), choose.getrandbits(32)
        self.capability = emulated.CAPABILITIES[seed % len(emulated.CAPABILITIES)]

    def _random_place(self):
        """Returns how many channels lie before and behind, how many batches behind, and how many elements before the
        start."""
        if not self.sliced:
            return 0, 0, 0, self.choose.choice([0, 0, 1, 3, 5, 7, 8])
        late = self.choose.randrange(9)
        return (*(self.choose.randrange(4) for _ in range(3)), 0 if self.aligned else late)

    def __str__(self):
        shown = ("shape", "dtype", "activation", "param", "signed", "training", "with_residual", "affine", "rows")
        return ", ".join(f"{name} {getattr(self, name)}" for name in shown) + f", place {self.place}"

    def memory(self):
        """A tensor of the case's shape. All memory around it is NaN."""
        before, behind, more, late = self.place if self.agree else self._random_place()
        batch, channels, *space = self.shape
        whole = [batch + more, channels + before + behind, *space]
        whole[-1] += self.gap
        order = [0, *range(2, len(whole)), 1] if self.rows else list(range(len(whole)))
        count = torch.Size(whole).numel()
        flat = torch.full((count + late,), torch.nan, dtype=self.dtype)[late:]
        strided = flat.view([whole[d] for d in order])
        inverse = [order.index(d) for d in range(len(whole))]
        t = strided.permute(inverse)[:batch, before : before + channels]
        return t[..., : t.shape[-1] - self.gap] if self.gap else t

    def tensor(self):
        values = torch.randn(self.shape, generator=self.generator, dtype=torch.float64)
        return self.memory().copy_(values + 0.5)

    def empty(self):
        return self.memory()


def copy(t):
    """A copy in memory of its own. The memory around the tensor is copied, too."""
    if t is None:
        return None
    size = t.untyped_storage().nbytes() // t.element_size()
    whole = torch.as_strided(t, (size,), (1,), 0).clone()
    # Storages start at multiples of 64 bytes.
    return torch.as_strided(whole, t.shape, t.stride(), t.storage_offset())


def around(t):
    """Whether all memory around the tensor is still NaN."""
    size = t.untyped_storage().nbytes() // t.element_size()
    whole = torch.as_strided(t, (size,), (1,), 0).clone()
    torch.as_strided(whole, t.shape, t.stride(), t.storage_offset()).fill_(torch.nan)
    return bool(whole.isnan().all())


def bits(t):
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def run(case, run_ops, tensors, reuse):
    """Calls every op once, and returns their results by name."""
    x, dz, residual, weight, bias, mean, var = (copy(t) for t in tensors)
    arithmetic = (EPS, case.signed, find(case.activation).code, case.param)
    results = {}
    results["mean"], results["var"] = run_ops["statistics"](x)
    z = copy(x)
    run_ops["forward"](z, results["mean"], results["var"], weight, bias, residual, *arithmetic, False)
    results["plain forward"] = z
    if not reuse:
        # These ops write z beside x, and x stays as it is.
        z, place = copy(x), case.empty()
        run_ops["local_forward_out"](z, weight, bias, residual, None, None, 0.3, None, *arithmetic, True, z=place)
        results |= {"kept x": z, "z beside x": place}
        place = case.empty()
        run_ops["forward_out"](z, results["mean"], results["var"], weight, bias, residual, *arithmetic, True, z=place)
        results["z beside x, by steps"] = place
    z = x
    running = (mean, var) if case.training else (None, None)
    batch_mean, batch_var = run_ops["local_forward"](z, weight, bias, residual, *running, 0.3, None, *arithmetic, True)
    results["z"] = copy(z)
    results |= {"running_mean": mean, "running_var": var, "local mean": batch_mean, "local var": batch_var}
    # The shares are those of ranks whose means are far apart.
    shares = [torch.cat([batch_mean + count, batch_var, batch_var.new_full((1,), count)]) for count in (3, 0, 5)]
    running = (torch.zeros_like(batch_mean), torch.ones_like(batch_var)) if case.training else (None, None)
    combined = run_ops["combine"](torch.stack(shares), *running, 0.3, None)
    results |= dict(zip(("combined mean", "combined var", "count"), combined, strict=True))
    results |= {
        f"combined {name}": t for name, t in zip(("running mean", "running var"), running, strict=True) if t is not None
    }

    xhat, dy = (copy(z), copy(dz)) if reuse else (case.empty(), case.empty())
    if reuse:
        sums = run_ops["backward_reduce"](xhat, dy, weight, bias, residual, *arithmetic)
    else:
        sums = run_ops["backward_reduce_out"](z, dz, weight, bias, residual, *arithmetic, xhat=xhat, dy=dy)
    results |= {"xhat": copy(xhat), "dy": copy(dy), "sum_dy": sums[0], "sum_xhat_dy": sums[1]}
    count = max(1, x.numel() // x.shape[1])
    means = (sums[0] / count, sums[1] / count) if case.training else (None, None)
    over = case.choose.choice(["dy", "xhat", "fresh"]) if reuse else "fresh"
    dx = {"dy": dy, "xhat": xhat, "fresh": case.empty()}[over]
    run_ops["backward_out"](xhat, dy, batch_var, weight, EPS, case.signed, *means, dx=dx)
    results["dx by steps"] = dx

    outputs = {"dx": z if reuse else case.empty()}
    if residual is not None:
        outputs["dresidual"] = dz if reuse else case.empty()
    if weight is not None:
        outputs["dweight"] = torch.full_like(weight, torch.nan)
    if bias is not None:
        outputs["dbias"] = torch.full_like(bias, torch.nan)
    # A caller does not always want all of them.
    outputs = {name: t for name, t in outputs.items() if case.choose.random() < 0.8}
    room = {}
    if "dx" in outputs and case.choose.random() < 0.6:
        # xhat may take z's memory, if dx is not written there, or if dy has room elsewhere.
        if not reuse:
            room["xhat"] = case.empty()
        elif "dresidual" not in outputs:
            room["xhat"], outputs["dx"] = z, dz
        else:
            room["xhat"] = z
    run_ops["local_backward"](z, dz, batch_var, weight, bias, residual, *arithmetic, case.training, **outputs, **room)
    return results | outputs


def run_per_instance(case, run_ops, tensors, reuse):
    """Calls every op that treats each sample by itself, and returns their results by name. Some channels share
    statistics."""
    x, dz, residual, weight, bias, mean, var = (copy(t) for t in tensors)
    weight, bias, mean, var = (None if t is None else t.repeat(len(x)) for t in (weight, bias, mean, var))
    channels = case.shape[1]
    shared = case.choose.choice([1, *(k for k in range(1, channels + 1) if channels % k == 0)])
    arithmetic = (EPS, case.signed, find(case.activation).code, case.param)
    results = dict(zip(("mean", "var"), run_ops["statistics"](x, shared), strict=True))
    running = (mean, var) if case.training and shared == 1 else (None, None)
    given = (weight, bias, residual, *running, 0.3, None, *arithmetic, True, shared)
    if reuse:
        _, batch_var = run_ops["local_forward"](x, *given)
        z = x
    else:
        z = case.empty()
        _, batch_var = run_ops["local_forward_out"](x, *given, z=z)
    results |= {"z": copy(z), "running_mean": mean, "running_var": var, "local var": batch_var}
    outputs = {"dx": z if reuse else case.empty()}
    if residual is not None:
        outputs["dresidual"] = dz if reuse else case.empty()
    if weight is not None:
        outputs["dweight"] = torch.full_like(weight, torch.nan)
    if bias is not None:
        outputs["dbias"] = torch.full_like(bias, torch.nan)
    outputs = {name: t for name, t in outputs.items() if case.choose.random() < 0.8}
    given = (weight, bias, residual, *arithmetic, case.training, shared)
    run_ops["local_backward"](z, dz, batch_var, *given, **outputs)
    return results | outputs


def run_of_rows(case, run_ops, tensors, reuse):
    """Calls the op that treats each row of a matrix by itself."""
    x, dz, _, weight, bias, *_ = (copy(t) for t in tensors)
    rows = case.choose.choice([1, len(x), x.numel() // x.shape[1]])
    y, dy = (t.reshape(rows, -1).contiguous() for t in (x, dz))
    wide = stats_dtype(case.dtype)
    times = y.shape[1] // case.shape[1] + 1
    weight, bias = (None if t is None else t.repeat(times)[: y.shape[1]] for t in (weight, bias))
    if weight is not None:
        weight[0] = 0.0
    rstd = (torch.arange(rows) % 5 + 0.5).to(wide)
    dx = case.choose.choice([y, dy]) if reuse else torch.full_like(y, torch.nan)
    options = case.training, case.choose.random() < 0.3
    parameters_of = {"dweight": weight, "dbias": bias}
    outputs = {name: torch.full_like(t, torch.nan) for name, t in parameters_of.items() if t is not None}
    run_ops["rows_backward"](y, dy, rstd, weight, bias, 0.1, *options, dx=dx, **outputs)
    return {"z": dx.flatten(), **outputs}


def inputs(case):
    wide = stats_dtype(case.dtype)
    weight, bias, mean, var = parameters(case.shape[1], case.dtype if case.narrow else wide, affine=case.affine)
    residual = case.tensor() if case.with_residual else None
    return case.tensor(), case.tensor(), residual, weight, bias, mean, var


@pytest.fixture
def emulator():
    loaded = emulated.load()
    yield loaded
    loaded.set()


def check(case, emulator, reuse, run=run):
    tensors = inputs(case)
    own = {name: getattr(ops, name) for name in emulator.ops}
    state = case.choose.getstate()
    expected = run(case, own, tensors, reuse)
    results = []
    for seed in (case.seed, case.seed + 1):
        case.choose.setstate(state)
        emulator.set(seed=seed, device=case.device, capability=case.capability)
        results.append(run(case, emulator.ops, tensors, reuse))
    wide = {torch.bfloat16: 8, torch.float16: 8}.get(case.dtype, 1)
    allowed = wide * tolerance(case.dtype, case.activation)
    for name, value in expected.items():
        actual, again = (result[name] for result in results)
        assert torch.equal(bits(actual), bits(again)), (str(case), name)
        # The terms of sums are about one each, and may cancel.
        terms = value.numel() if value.dim() > 1 else expected["z"].numel()
        scale = value.double().norm().clamp_min(max(1, terms) ** 0.5)
        assert (actual.double() - value.double()).norm() <= allowed * scale, (str(case), name)
        if value.dim() > 1:
            assert around(actual), (str(case), name)


@pytest.mark.parametrize("chunk", range(10))
def test_random_calls_agree_with_the_cpu(chunk, emulator, pytestconfig):
    cases = CASES // 10 * pytestconfig.getoption("fuzz")
    for seed in range(chunk * cases, (chunk + 1) * cases):
        case = Case(seed)
        check(case, emulator, seed % 2 == 0)


@pytest.mark.parametrize("chunk", range(5))
def test_random_calls_per_instance_agree_with_the_cpu(chunk, emulator, pytestconfig):
    cases = CASES // 10 * pytestconfig.getoption("fuzz")
    for seed in range(chunk * cases, (chunk + 1) * cases):
        check(Case(seed), emulator, seed % 2 == 0, run_per_instance)


@pytest.mark.parametrize("chunk", range(5))
def test_random_calls_on_rows_agree_with_the_cpu(chunk, emulator, pytestconfig):
    cases = CASES // 10 * pytestconfig.getoption("fuzz")
    for seed in range(chunk * cases, (chunk + 1) * cases):
        check(Case(seed), emulator, seed % 2 == 0, run_of_rows)
