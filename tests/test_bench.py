"""The benchmark: that contenders compute the same, that timing is what it says, and a tiny run."""

import contextlib
import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import bench
from benchmark import cuda, nets, report, steps, summary, timing
from benchmark.cases import CORE, GROUPS, QUICK_SHAPES, Case, Setting, make_cases, parse_shape
from benchmark.contenders import (
    CHECKPOINT,
    COMPILE,
    EAGER,
    FLOOR,
    OURS,
    PEER,
    NativeNorm,
    make_contender,
    make_iterations,
)

from inplace_abn import ops

CPU = torch.device("cpu")
FP32 = Setting("fp32", "contiguous")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are tiny here: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def results(name, activation, x, dz):
    """z, dx, dweight, dbias."""
    # What torch.compile is asked for is the same with the backend that needs no C++ compiler.
    module, call = make_contender(name, x.shape[1], activation, CPU, backend="aot_eager")
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1, 2, x.shape[1]))
        module.bias.copy_(torch.linspace(-1, 1, x.shape[1]))
    leaf = x.clone().requires_grad_()
    z = call(leaf.clone())
    value = z.detach().clone()
    return [value, *torch.autograd.grad(z, (leaf, module.weight, module.bias), dz), module.running_mean]


@pytest.mark.parametrize("activation", ["leaky_relu", "relu", "silu"])
def test_contenders_compute_the_same(activation):
    torch._dynamo.reset()
    x, dz = torch.randn(2, 3, 6, 6, 5).unbind(-1)[:2]
    expected = results(EAGER, activation, x, dz)
    for name in (OURS, COMPILE, CHECKPOINT):
        *same, running_mean = zip(results(name, activation, x, dz), expected, strict=True)
        # Checkpointing runs the forward pass twice, and so updates the running statistics.
        for actual, wanted in same if name == CHECKPOINT else [*same, running_mean]:
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_an_iteration_owns_its_gradient_and_leaves_four_marks():
    reused = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is ops.local_backward:
                reused.append(kwargs["dx"].data_ptr() == args[1].data_ptr())
            return func(*args, **(kwargs or {}))

    case = Case(CORE, (2, 4, 5, 5), FP32, "relu")
    iterations, notes = make_iterations([OURS, EAGER, CHECKPOINT, FLOOR], case, CPU)
    assert notes == []
    x, dz = case.random(CPU), case.random(CPU)
    before = x.clone(), dz.clone()
    for iteration in iterations.values():
        clock = timing.HostClock()
        with Spy():
            timing.run(iteration(x.clone, dz.clone, clock))
        assert len(clock.marks) == 4
        assert len(timing.samples(clock)) == 1
    assert reused == [True]
    assert torch.equal(x, before[0])
    assert torch.equal(dz, before[1])


def test_contenders_take_turns():
    case = Case(CORE, (2, 4, 5, 5), FP32, "relu")
    iterations, _ = make_iterations([OURS, EAGER], case, CPU)
    collected = timing.interleaved(iterations, case.random(CPU), case.random(CPU), 0.0, min_rounds=3)
    assert {name: len(got) for name, got in collected.items()} == {OURS: 3, EAGER: 3}
    assert timing.ratio_quartiles(collected[OURS], collected[OURS])["both"] == [1, 1, 1]


def test_turns_on_a_device(monkeypatch):
    """Which the host plays: how events, the cold pool and the head start go together."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = time.perf_counter()

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1e3 * (end.time - self.time)

    slept = []
    properties = SimpleNamespace(L2_cache_size=10 * 400)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    case = Case(CORE, (1, 4, 5, 5), FP32, "relu")
    iterations, _ = make_iterations([OURS, EAGER], case, CPU)
    tensor, dz = case.random(CPU), case.random(CPU)
    x = SimpleNamespace(device=torch.device("cuda", 0), nbytes=tensor.nbytes, clone=tensor.clone)
    collected = timing.interleaved(iterations, x, dz, 0.0, min_rounds=2)
    assert {name: len(got) for name, got in collected.items()} == {OURS: 2 * 21, EAGER: 2 * 21}
    # Two to learn how long it takes, then one in each turn.
    assert len(slept) == 2 + 4
    assert all(milliseconds > 0 for sample in collected[OURS] for milliseconds in sample)


def test_failing_compiler_is_a_note(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    iterations, notes = make_iterations([OURS, COMPILE], Case(CORE, (2, 4, 5, 5), FP32, "relu"), CPU)
    assert list(iterations) == [OURS]
    assert notes == ["compile left out: RuntimeError: no compiler"]


def test_arithmetic():
    assert timing.pool_size(1 << 30, 50 << 20) == 2
    assert timing.pool_size(10 << 20, 50 << 20) == 11
    assert timing.pool_size(1, 50 << 20) == timing.MAX_POOL
    assert timing.quartiles([4, 1, 2, 3, 5]) == [2, 3, 4]
    assert cuda.copied_per_second(10**9, [1.0, 2.0, 9.0]) == 1e12
    assert cuda.floor_ms(10**9, 1e12) == (3.0, 5.0)
    assert steps.highest([5, -2, 4, -7, 3]) == 7
    assert summary.geometric_mean([2.0, 8.0]) == pytest.approx(4)
    assert summary.geometric_mean([]) is None


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 100, 1000])
def test_largest_batch(most):
    asked = []

    def fits(batch):
        asked.append(batch)
        return batch <= most

    found = steps.largest(fits, 2, 500)
    assert found == (0 if most < 2 else pytest.approx(min(most, 500), rel=1 / 8))
    assert found <= min(most, 500)
    assert max(asked) <= 500


def test_cpu_memory_is_the_allocators():
    def run():
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first, second
        return torch.zeros(250)

    changes, _ = steps.allocator_changes(run)
    assert (steps.highest(changes), sum(changes)) == (6000, 1000)


def test_batch_search_on_cpu():
    recipe = nets.Recipe(lambda norm, classes: nets.UNet(norm, classes, (4, 8)), 2, True, (2, 16), (2, 16), (2, 16))
    found = steps.measure_net(recipe, FP32, 2, 16, CPU, steps=1, budget=400_000)
    assert found[OURS]["held"] < found[EAGER]["held"]
    assert found[OURS]["largest_batch"] > found[EAGER]["largest_batch"] > 0


@pytest.mark.parametrize("message", ["CUDA out of memory", "GET was unable to find an engine", "another error"])
def test_batches_that_do_not_fit_a_device(message, monkeypatch):
    """A device that the host plays, with 1000 bytes."""
    fractions = []
    properties = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    kind = torch.cuda.OutOfMemoryError if "memory" in message else RuntimeError

    def step():
        raise kind(message)

    def fits(step):
        return steps.fits_budget(lambda: SimpleNamespace(step=step), torch.device("cuda", 0), 400)

    assert fits(lambda: None)
    if message == "another error":
        with pytest.raises(RuntimeError, match=message):
            fits(step)
    else:
        assert not fits(step)
    assert fractions == [0.4, 1.0, 0.4, 1.0]


def test_nets_have_the_parameters_of_the_nets_they_are_named_after():
    with torch.device("meta"):
        made = {name: recipe.make(NativeNorm, recipe.classes) for name, recipe in nets.NETS.items()}
        for name, net in made.items():
            assert net(torch.empty(2, 3, 64, 64)).shape[-2:] == ((64, 64) if nets.NETS[name].per_pixel else (2, 1000))
    counts = {name: sum(p.numel() for p in net.parameters()) for name, net in made.items()}
    assert counts["resnet50"] == 25_557_032
    assert counts["efficientnet"] == 5_288_548


@pytest.mark.parametrize("name", ["efficientnet", "unet"])
def test_nets_compute_the_same_with_either_norm(name):
    losses = []
    for norm in steps.NORMS:
        training = steps.make_training(nets.NETS[name], norm, FP32, 2, 32, CPU)
        losses.append(training.forward())
    # EfficientNet's last layers normalise two values per channel here, which amplifies rounding.
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)


def test_cases():
    assert str(Setting.parse("bf16:channels_last")) == "bf16:channels_last"
    assert parse_shape("16x64x112x112") in GROUPS[CORE].shapes
    for bad in ("bf16", "fp8:contiguous"):
        with pytest.raises(ValueError, match="expected one of"):
            Setting.parse(bad)
    with pytest.raises(ValueError, match="four sizes"):
        parse_shape("1x2")
    settings = [FP32, Setting("bf16", "channels_last")]
    cases = make_cases([CORE], settings, quick=True)
    assert len(cases) == 3 * len(QUICK_SHAPES[CORE])
    assert len(make_cases([CORE], settings, cuda=True, quick=True)) == 5 * len(QUICK_SHAPES[CORE])
    assert all(case == Case.from_record(json.loads(json.dumps(case.record()))) for case in cases)
    x = Case(CORE, (2, 4, 5, 5), settings[1], "relu").random(CPU)
    assert x.dtype == torch.bfloat16
    assert x.is_contiguous(memory_format=torch.channels_last)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A run's folder, JSON and output."""
    out = tmp_path_factory.mktemp("bench")
    options = "--quick --threads 1 --malloc warmed --shapes 2x4x8x8 --groups core --activations relu silu --seconds 0"
    options += " --settings fp32:contiguous --min-rounds 3 --scaling --overhead 2 --nets efficientnet --net-batch 2"
    options += " --net-size 32 --steps 2 --contenders in-place eager checkpoint peer floor --time-limit 1000"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        bench.main([*options.split(), "--peer-python", sys.executable, "--out", str(out)])
    return out, json.loads((out / "bench.json").read_text()), printed.getvalue()


def test_tiny_run(tiny):
    out, result, printed = tiny
    assert (out / "bench.png").stat().st_size > 1000
    (run,) = result["runs"]
    assert run["skipped"] == []
    assert run["malloc"]["mode"] == "warmed"
    if sys.platform.startswith("linux"):
        assert run["malloc"]["page_faults_64MiB"] < 100
    relu, silu = run["ops"]
    assert list(relu["timings"]) == [OURS, EAGER, CHECKPOINT, FLOOR, PEER]
    assert set(silu["timings"]) == {OURS, EAGER, CHECKPOINT, FLOOR}
    assert "peer left out: has no silu" in silu["notes"]
    for timed in relu["timings"].values():
        for phase in timing.PHASES:
            lower, median, upper = timed["ms"][phase]
            assert 0 < lower <= median <= upper
        assert set(timed) >= {"ms", "speedup", "of_floor"}
    assert run["peer"]["separate_process"] is True
    assert set(run["overhead"]["calls"]) == {OURS, f"{OURS}, Python", "keep_input", "converted", EAGER, "neither"}
    assert set(run["scaling"][0]["speedup"]) == {OURS, FLOOR}
    (net,) = run["nets"]
    for norm in net["norms"].values():
        assert set(norm) == {"ms", "images_per_s", "held", "peak"}
    assert net["norms"][OURS]["held"] < net["norms"][EAGER]["held"]
    for row in result["summary"]:
        assert row["name"] in printed
        assert set(row) == {"name", "malloc", "value", "cases", "target"}
    assert "separate process" in printed


def test_cuda_report_without_cuda(tiny):
    """What a run on CUDA has more, in the tables."""
    run = tiny[1]["runs"][0]
    for record in run["ops"]:
        record |= {"dtype": "bf16", "layout": "channels_last", "nbytes": 1 << 27, "replay_ms": {OURS: [1.0, 2.0, 3.0]}}
    run["machine"] |= {"gpu": "a GPU", "gpu_memory": 1 << 36, "l2": 50 << 20, "cuda": "13.0", "cudnn": 91000}
    run["copy_bandwidth"] = 4e12
    rows = {row["name"]: row for row in summary.summarise([run])}
    assert rows["eager / in-place, relu, bf16 channels_last"]["target"] == "≥ 2"
    assert rows["share of copy bandwidth, ≥ 64 MiB, forward, bf16 channels_last"]["cases"] == 2
    assert rows["activations of efficientnet fp32 contiguous, in-place / eager"]["value"] < 1
    text = report.full_report({"runs": [run], "summary": list(rows.values())})
    assert "4.00 TB/s" in text
    assert "2000 (1000-3000)" in text


@pytest.mark.parametrize("option", [["--settings", "fp32"], ["--shapes", "1x2"], ["--nets", "alexnet"]])
def test_wrong_options_are_told(option, capsys):
    with pytest.raises(SystemExit):
        bench.parse_arguments(option)
    assert "error" in capsys.readouterr().err
