"""The benchmark: its contenders compute the same, its timing is right, and a tiny run makes all reports."""

import contextlib
import io
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("matplotlib")

import bench
from benchmark import machine, overhead, report, steps, timing
from benchmark.cases import CORE, GROUPS, Case, Setting, make_cases, shape_of
from benchmark.contenders import CHECKPOINT, COMPILE, EAGER, FLOOR, OURS, PEER, make_contender, make_iterations

import inplace_abn
from inplace_abn.kernels import ops

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
FP32 = Setting("fp32", "contiguous")
TINY = Case(CORE, (2, 4, 5, 5), *FP32, "relu")


def results(name, activation, x, dz):
    """Returns z, dx, dweight, dbias and the running mean."""
    # torch.compile gets the same module with every backend. This one needs no C++ compiler.
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
        # Checkpointing runs the forward pass twice, so it updates the running statistics twice.
        for actual, wanted in same if name == CHECKPOINT else [*same, running_mean]:
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_an_iteration_owns_its_gradient_and_leaves_four_marks():
    reused = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is ops.local_backward:
                reused.append(kwargs["dx"].data_ptr() == args[1].data_ptr())
            return func(*args, **(kwargs or {}))

    iterations, notes = make_iterations([OURS, EAGER, CHECKPOINT, FLOOR], TINY, CPU)
    assert notes == []
    iterations[COMPILE] = timing.module_iteration(*make_contender(COMPILE, 4, "relu", CPU, backend="eager"))
    x, dz = TINY.random(CPU), TINY.random(CPU)
    before = x.clone(), dz.clone()
    for iteration in iterations.values():
        clock = timing.Clock(CPU)
        with Spy():
            timing.finish(iteration(x.clone, dz.clone, clock))
        assert len(clock.marks) == 4
    assert reused == [True]
    assert torch.equal(x, before[0])
    assert torch.equal(dz, before[1])


def test_contenders_take_turns():
    iterations, _ = make_iterations([OURS, EAGER], TINY, CPU)
    collected = timing.interleaved(iterations, TINY.random(CPU), TINY.random(CPU), 0.0, min_rounds=3)
    assert {name: got.shape for name, got in collected.items()} == {OURS: (3, 3), EAGER: (3, 3)}
    assert timing.by_phase(collected[OURS] / collected[OURS])["both"] == [1, 1, 1]


@pytest.fixture
def played_events(monkeypatch):
    """Replaces the events of a device by points in time on the host."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = time.perf_counter()

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1e3 * (end.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)


def test_turns_on_a_device(monkeypatch, played_events):
    """Tests how events, the cold pool and the head start of the host work together."""
    slept = []
    properties = SimpleNamespace(L2_cache_size=10 * 400)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    case = Case(CORE, (1, 4, 5, 5), *FP32, "relu")
    iterations, _ = make_iterations([OURS, EAGER], case, CPU)
    tensor, dz = case.random(CPU), case.random(CPU)
    x = SimpleNamespace(device=torch.device("cuda", 0), nbytes=tensor.nbytes, clone=tensor.clone)
    collected = timing.interleaved(iterations, x, dz, 0.0, min_rounds=2)
    assert {name: len(got) for name, got in collected.items()} == {OURS: 2 * 21, EAGER: 2 * 21}
    # The device sleeps twice to learn how long that takes, and then once in each turn.
    assert len(slept) == 2 + 4
    assert (collected[OURS] > 0).all()


def test_bandwidth_counts_the_bytes_read_and_written(monkeypatch, played_events):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 30))
    monkeypatch.setattr(timing.Clock, "durations", lambda clock: [9.0] * 3 + [2.0] * (len(clock.marks) // 2 - 3))
    # A quarter of the free bytes is read and written in two milliseconds.
    assert machine.copy_bandwidth(CPU) == 2 * (1 << 18) / 2e-3


def test_failing_compiler_is_a_note(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    iterations, notes = make_iterations([OURS, COMPILE], TINY, CPU)
    assert list(iterations) == [OURS]
    assert notes == ["compile left out: RuntimeError: no compiler"]


def test_arithmetic():
    assert timing.pool_size(1 << 30, 50 << 20) == 2
    assert timing.pool_size(10 << 20, 50 << 20) == 11
    assert timing.pool_size(1, 50 << 20) == timing.MAX_POOL
    assert timing.quartiles([4, 1, 2, 3, 5]) == [2, 3, 4]


def test_cases():
    assert shape_of("16x64x112x112") in GROUPS[CORE]
    with pytest.raises(ValueError, match="four sizes"):
        shape_of("1x2")
    settings = [FP32, Setting("bf16", "channels_last")]
    activations = ["leaky_relu", "silu"]
    assert len(make_cases([CORE], settings, activations, quick=True)) == 4
    assert len(make_cases([CORE], settings, activations)) == 4 * len(GROUPS[CORE])
    assert make_cases([CORE], settings, activations, cuda=True)[0].shape == (128, 64, 112, 112)
    assert [case.shape for case in make_cases(GROUPS, [FP32], ["relu"], shapes=[(1, 2, 3, 4)])] == [(1, 2, 3, 4)]
    x = Case(CORE, (2, 4, 5, 5), *settings[1], "relu").random(CPU)
    assert x.dtype == torch.bfloat16
    assert x.is_contiguous(memory_format=torch.channels_last)


PUBLIC_PACKAGE = """
import torch

from .version import __version__


class InPlaceABN(torch.nn.BatchNorm2d):
    def __init__(self, channels, activation):
        super().__init__(channels)
        assert activation == "leaky_relu"

    def forward(self, x):
        if x.dtype != torch.float32:
            raise RuntimeError("wrong dtype")
        return torch.nn.functional.leaky_relu_(super().forward(x))
"""


def test_a_tiny_run_makes_all_reports(tmp_path):
    out = tmp_path
    package = out / "peer/inplace_abn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PUBLIC_PACKAGE)
    (package / "version.py").write_text("__version__ = '0.1'")
    options = "--quick --threads 1 --malloc warmed --shapes 2x4x8x8 --groups core --activations relu silu --seconds 0"
    options += " --settings fp32:contiguous bf16:contiguous --overhead 1 --nets demo:silu timm:none --net-batch 2 3"
    options += " --net-size 32 --steps 2 --contenders in-place eager checkpoint peer floor --time-limit 1000"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        bench.main([*options.split(), "--peer", str(out / "peer"), "--out", str(out)])
    result = json.loads((out / "bench.json").read_text())
    assert (out / "bench.png").stat().st_size > 1000
    (run,) = result["runs"]
    assert [what.partition(": ")[0] for what in run["skipped"]] == [
        "net timm:none fp32:contiguous trained",
        "net timm:none bf16:contiguous trained",
    ]
    assert run["malloc"]["mode"] == "warmed"
    assert run["malloc"]["page_faults_64MiB"] < 100
    relu, relu_bf16, silu, _ = run["ops"]
    assert list(relu["timings"]) == [OURS, EAGER, CHECKPOINT, PEER, FLOOR]
    assert relu["notes"] == []
    assert list(silu["timings"]) == list(relu_bf16["timings"]) == [OURS, EAGER, CHECKPOINT, FLOOR]
    assert silu["notes"] == ["peer left out: ValueError: it has no silu"]
    assert relu_bf16["notes"] == ["peer left out: RuntimeError: wrong dtype"]
    for timed in relu["timings"].values():
        for phase in timing.PHASES:
            lower, median, upper = timed["ms"][phase]
            assert 0 < lower <= median <= upper
        assert set(timed) >= {"ms", "speedup", "of_floor"}
    assert list(run["overhead"]["calls"]) == list(overhead.STATEMENTS)
    assert {OURS, "converted", EAGER, "neither"} <= overhead.STATEMENTS.keys()
    assert [(net["dtype"], net["batch"]) for net in run["nets"]] == [("fp32", 2), ("fp32", 3), ("bf16", 2), ("bf16", 3)]
    for net in run["nets"]:
        assert list(net["contenders"]) == [steps.EAGER_NATIVE, steps.EAGER_CONVERTED]
        for got in net["contenders"].values():
            assert set(got) == {"ms", "ratio", "held", "peak"}
    assert (out / "bench.md").read_text() == printed.getvalue()
    assert "- peer: the public package, 0.1" in printed.getvalue()
    # What only a run on CUDA reports.
    run["machine"] |= {"gpu": "a GPU", "gpu_memory": 1 << 36, "l2": 50 << 20, "cuda": "13.0", "cudnn": 91000}
    run["copy_bandwidth"] = 4e12
    assert "4.00 TB/s" in report.full_report({"runs": [run]})


def test_the_chart_has_geometric_means_over_shapes_and_layouts_relative_to_eager(tmp_path):
    def record(times, group=CORE, layout="contiguous"):
        timings = {name: {"ms": {"both": [0.0, ms, 9.0]}} for name, ms in times.items()}
        return TINY._asdict() | {"group": group, "layout": layout, "timings": timings}

    run = {
        "ops": [
            record({OURS: 1.0, EAGER: 2.0, COMPILE: 8.0}),
            record({OURS: 1.0, EAGER: 8.0, COMPILE: 2.0}, layout="channels_last"),
            record({OURS: 1.0, EAGER: 100.0}, group="small"),
        ]
    }
    assert report.bars(run) == {"relu\nfp32": pytest.approx({EAGER: 1, COMPILE: 1, OURS: 0.25})}
    report.save_chart(tmp_path / "chart.png", run)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    report.save_chart(tmp_path / "none.png", {"ops": []})
    assert not (tmp_path / "none.png").exists()


def test_tables_tell_means_and_net_overhead():
    quartiles = {phase: [1.0, 2.0, 3.0] for phase in timing.PHASES}
    timings = {
        OURS: {"ms": quartiles, "of_floor": quartiles},
        EAGER: {"ms": {phase: [7.0, 8.0, 9.0] for phase in timing.PHASES}},
    }
    case = TINY._asdict() | {"timings": timings, "notes": []}
    of_floor = {phase: [7.0, 8.0, 9.0] for phase in timing.PHASES}
    other = case | {"timings": timings | {OURS: timings[OURS] | {"of_floor": of_floor}}}
    runs = [{"malloc": {"mode": mode}, "ops": ops} for mode, ops in (("default", [case, other]), ("warmed", [other]))]
    text = report.means_table(runs)
    assert text.startswith("Means over the shapes, malloc default / warmed:")
    assert text.endswith("| core | relu | fp32 | contiguous | 4.00 / 8.00 | 4.00 / 4.00 | 4.00 / 4.00 |")
    calls = {OURS: 70, EAGER: 50, "neither": 10, "converted, sum": 90, "eager, sum": 60}
    calls = {n: {"us": [t - 1, t, t + 1], "instructions": 100 * t, "unmeasured": 100 * t} for n, t in calls.items()}
    calls[OURS]["unmeasured"] = 6000
    text = report.overhead_table({"overhead": {"shape": [2, 8, 4, 4], "calls": calls}})
    assert "| in-place | 70.0 (69.0-71.0) | 7000 | 1.50 | 1.50 | 1.25 |" in text
    assert "| neither | 10.0 (9.00-11.0) | 1000 | - | - | - |" in text
    assert "| converted, sum | 90.0 (89.0-91.0) | 9000 | 1.60 | 1.60 | 1.60 |" in text


def test_a_new_process_finds_the_package_of_the_one_that_starts_it(monkeypatch):
    """Where the package was not installed, the process that measures did not find it."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    folders = machine.environment("warmed")["PYTHONPATH"].split(os.pathsep)
    assert folders == [str(Path(inplace_abn.__file__).parents[1]), "elsewhere"]


def test_floor_of_a_device_follows_from_its_bandwidth(monkeypatch):
    args = bench.parse_arguments(
        ["--settings", "fp32:contiguous", "--contenders", "in-place", "floor", "--seconds", "0"]
    )
    args.min_rounds = 1
    worker = bench.Worker(args)
    worker.bandwidth = 1e6
    timings = worker.time_op(TINY)["timings"]
    assert list(timings) == [OURS, FLOOR]
    # 200 values of four bytes are moved three, five and eight times.
    assert [timings[FLOOR]["ms"][phase][1] for phase in timing.PHASES] == pytest.approx([2.4, 4.0, 6.4])


@pytest.mark.parametrize(
    "option",
    [
        ["--settings", "fp32"],
        ["--shapes", "1x2"],
        ["--nets", "alexnet"],
        ["--nets", "keras:vgg"],
        ["--peer", "nowhere"],
        ["--activations", "x"],
    ],
)
def test_wrong_options_are_told(option, capsys):
    with pytest.raises(SystemExit):
        bench.parse_arguments(option)
    assert "error" in capsys.readouterr().err
