"""The memory report, as a function and on the command line."""

import builtins
import copy
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from foreign_nets import ResNet, conv, spread
from torch import nn

import inplace_abn
from inplace_abn import Example, Plan, analyze, convert, verify
from inplace_abn.conversion.norms import InPlaceNorm
from inplace_abn.conversion.plan import Layer
from inplace_abn.memory import Usage, load_model, main, measure, memory_report, parse_shape, save_plot
from inplace_abn.memory.plot import _places


def chain(blocks):
    return nn.Sequential(
        *[m for _ in range(blocks) for m in (conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(inplace=True))], conv(4, 4)
    )


def test_held_bytes_are_those_of_the_saved_activations():
    x = torch.randn(2, 4, 32, 32)
    short, long = (measure(chain(n), x) for n in (1, 4))
    assert (long.held - short.held) / 3 == pytest.approx(2 * x.nbytes, rel=0.01)
    assert long.peak >= long.held
    assert max(size for _, size in long.timeline) == long.peak
    times = [time for time, _ in long.timeline]
    assert times == sorted(times)
    assert 0 < long.backward_start < times[-1]


def test_weights_that_autocast_has_copied_are_held():
    model = nn.Linear(64, 32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        usage = measure(model, torch.randn(2, 64))
    assert usage.held >= 64 * 32 * 2


def test_a_report_compares_and_predicts():
    x = torch.randn(2, 3, 64, 64)
    model = ResNet()
    model.eval()
    report = memory_report(model, x, residual=True)
    saved = report.before.held - report.after.held
    predicted = report.plan.bytes_saved + report.plan.residual_bytes_saved
    assert 0.95 * predicted <= saved <= 1.05 * predicted
    assert report.after.peak < report.before.peak
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines] == ["held", "native", "converted", "saved"]
    assert not model.training
    assert not any(isinstance(m, InPlaceNorm) for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    alone = memory_report(model, Example(x), converted=False)
    assert alone.after is None
    assert len(str(alone).splitlines()) == 2


def test_each_call_of_a_submodule_ticks():
    ticks = []
    measure(chain(2), torch.randn(2, 4, 8, 8), tick=lambda: ticks.append(1))
    # One step warms up, and one is measured.
    assert len(ticks) == 2 * 7


def test_a_model_without_training_step_is_refused():
    with pytest.raises(ValueError, match="no output of the model requires grad"):
        measure(nn.ReLU(), torch.randn(2, 3))


def test_a_plot_shows_both_timelines(tmp_path):
    pytest.importorskip("matplotlib")
    report = memory_report(chain(2), torch.randn(2, 4, 16, 16))
    save_plot(report, str(tmp_path / "out.png"), "chain")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_forward_and_backward_take_half_of_a_plot_each_whatever_their_times():
    times = [(0.0, 1), (1.0, 2), (90.0, 3), (91.0, 2), (91.5, 1), (99.0, 0)]
    assert _places(Usage(3, 3, tuple(times), 90.0)) == pytest.approx([0, 1 / 3, 2 / 3, 1, 4 / 3, 5 / 3])
    assert _places(Usage(0, 0, (), 0.0)) == []


@pytest.mark.parametrize("package", ["matplotlib", "tqdm"])
def test_what_is_missing_is_named(monkeypatch, package, tmp_path):
    original = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return original(name, *rest)

    model, x = chain(1), torch.randn(2, 4, 8, 8)
    report = memory_report(model, x)
    monkeypatch.setattr(builtins, "__import__", without)
    uses = {
        "tqdm": lambda: memory_report(model, x, progress=True),
        "matplotlib": lambda: save_plot(report, str(tmp_path / "out.png")),
    }
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'inplace-abn\[demo\]'"):
        uses[package]()


def test_shapes_and_factories_are_read_or_refused():
    assert parse_shape("8x3x512x512") == (8, 3, 512, 512)
    for text in ("", "8x", "8x-3", "axb", "0x3"):
        with pytest.raises(ValueError, match="expected a shape"):
            parse_shape(text)
    assert isinstance(load_model("foreign_nets:ResNet"), ResNet)
    assert isinstance(load_model("torch.nn:Identity"), nn.Identity)
    for text, message in (
        ("torch.nn", "expected MODULE:FACTORY"),
        ("torch.nn:Nothing", "torch.nn has no Nothing"),
        ("builtins:dict", r"to give a torch\.nn\.Module, got dict"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(text)
    with pytest.raises(ImportError):
        load_model("no_such_module:f")


def test_the_command_prints_plan_and_report_and_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "memory.png"
    main(["foreign_nets:ResNet", "--input", "2x3x32x32", "--convert", "--png", str(png)])
    out = capsys.readouterr().out
    assert "norms go in place" in out
    assert "held for backward" in out
    assert png.exists()
    main(["foreign_nets:ResNet", "--input", "2x3x32x32"])
    assert "in place" not in capsys.readouterr().out
    for wrong in (["nothing", "--input", "2x3"], ["torch.nn:Identity", "--input", "two"]):
        with pytest.raises(SystemExit):
            main(wrong)
        assert "expected" in capsys.readouterr().err


def test_all_functions_take_the_arguments_of_a_call_alike():
    """Hugging Face's models need keyword arguments."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = chain(1)

        def forward(self, model, *, mask=None, tolerance=1.0):
            return self.body(model) * (2.0 if mask is None else mask) * tolerance

    net, x, mask = spread(Masked()), torch.randn(2, 4, 8, 8), torch.rand(2, 1, 8, 8)
    for args, kwargs in (
        ((x,), {"mask": mask}),
        ((), {"model": x, "mask": mask}),
        ((Example(x, mask=mask, tolerance=2.0),), {}),
        ((Example(x), Example(model=x, mask=mask)), {}),
    ):
        plan = analyze(net, *args, **kwargs)
        assert len(plan.convertible) == 1
        converted = convert(copy.deepcopy(net), plan)
        assert verify(net, converted, *args, **kwargs)
        assert memory_report(net, *args, **kwargs).plan.to_dict() == plan.to_dict()
        if len(args) < 2:
            assert measure(net, *args, **kwargs).held > measure(converted, *args, **kwargs).held
    for call in (
        lambda *a, **k: analyze(net, *a, **k),
        lambda *a, **k: verify(net, net, *a, **k),
        lambda *a, **k: measure(net, *a, **k),
        lambda *a, **k: memory_report(net, *a, **k),
    ):
        with pytest.raises(TypeError, match="either Example objects or the arguments of one call, got both"):
            call(Example(x), mask=mask)
        with pytest.raises(TypeError, match="either Example objects or the arguments of one call, got both"):
            call(Example(x), x)
    with pytest.raises(TypeError, match="expected the arguments of one call, got 2 Examples"):
        measure(net, Example(x), Example(x))


def test_verify_looks_at_every_example():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = chain(1), chain(1)

        def forward(self, x, second=False):
            return self.b(x) if second else self.a(x)

    net, x = spread(Branching()), torch.randn(2, 4, 8, 8)
    wrong = copy.deepcopy(net)
    with torch.no_grad():
        wrong.b[0].weight += 0.1
    assert verify(net, wrong, x)
    assert not verify(net, wrong, Example(x), Example(x, second=True))


def test_a_report_of_residual_blocks_tells_what_was_done():
    """The table must not call a converted norm "refused"."""
    x = torch.randn(2, 3, 32, 32)
    plan = memory_report(ResNet(), x).plan
    rows = {line.split()[0]: line.split()[1:4] for line in str(plan).splitlines() if line.strip()}
    assert rows["layer[1-2].[0-1].bn2"] == ["4", "relu", "residual"]
    assert rows["layer2.0.downsample.1"] == ["1", "identity", "residual"]
    assert "refused" not in str(plan)
    assert "residual=True converts 4 residual blocks and saves" in str(plan)
    assert "refused" in str(memory_report(ResNet(), x, residual=False).plan)
    converted = convert(ResNet(), plan)
    assert sum(isinstance(m, InPlaceNorm) for m in converted.modules()) == 10


class BeginsAtZero(nn.Module):
    """A residual block as public models initialise it. Its last norm has a weight of zero, so that it is torch's at
    first."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(3, 8), conv(3, 8)
        self.last, self.shortcut = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        h = self.last(self.a(x))
        h += self.shortcut(self.b(x))
        return h.relu()


def test_a_step_is_measured_of_a_block_that_begins_as_its_shortcut():
    """The shortcut's norm has nothing to measure in the first step. The next step must run all the same."""
    report = memory_report(BeginsAtZero(), torch.randn(2, 3, 8, 8))
    assert report.after.held <= report.before.held


def test_the_bar_does_not_go_beyond_its_end(monkeypatch):
    """A module that is called twice must not count twice against a total in which it counts once."""
    seen = []

    class Bar:
        total, n = None, 0

        def __enter__(self):
            seen.append(self)
            return self

        def __exit__(self, *_):
            pass

        def update(self):
            self.n += 1
            assert self.total is None or self.n <= self.total

        def refresh(self):
            assert self.n * 2 == self.total

    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm, "tqdm", lambda **_: Bar())
    memory_report(ResNet(), torch.randn(2, 3, 32, 32), progress=True, residual=True)
    (bar,) = seen
    # The converted model may call its modules another number of times.
    assert bar.total * 0.9 < bar.n <= bar.total


def layer(name, saved=1024, **options):
    return Layer(name, "BatchNorm2d", f"convolution in {name}", "relu", 0.01, (), bytes_saved=saved, **options)


def rows_of(plan, width=200):
    """The cells of the rows between the table's rules."""
    lines = plan.table(width).splitlines()
    first, last = (i for i, line in enumerate(lines) if line.startswith("---"))
    return [line.split() for line in lines[first + 1 : last] if not line.startswith("    ")]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_of_a_table_is_longer_than_the_terminal_and_nothing_is_cut(width, monkeypatch):
    """Long reasons and long names are broken into lines, whatever their length."""
    monkeypatch.setenv("COLUMNS", str(width))
    plan = replace(analyze(ResNet(), torch.randn(2, 3, 32, 32)), residual=False)
    named = [replace(x, name=f"{'encoder.' * 9}{x.name}") for x in plan.layers]
    plan = replace(plan, layers=tuple(named))
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= width
    everything = "".join(str(plan).split())
    assert "encoder." * 3 in everything
    for one in plan.layers:
        assert all("".join(re.split(r"[\d\s]+", reason)[0]) in everything for reason in one.reasons)


def test_a_table_is_a_hundred_columns_wide_where_there_is_no_terminal():
    plan = Plan((layer("stem.bn", kept=("it is read again " * 20,)),))
    code = f"import pickle; print(pickle.loads({pickle.dumps(plan)!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert 90 < max(map(len, done.stdout.splitlines())) <= 100


def test_rows_that_differ_in_indices_only_are_one_row_with_their_number_and_sum():
    names = ("layer1.0.bn1", "layer1.0.bn2", "layer1.1.bn1", "layer1.1.bn2", "layer2.10.bn1", "head.1", "head.4")
    rows = rows_of(Plan(tuple(layer(name) for name in names)))
    assert [row[:6] for row in rows] == [
        ["layer[1-2].[0-10].bn1", "3", "relu", "in", "place", "3.0"],
        ["layer1.[0-1].bn2", "2", "relu", "in", "place", "2.0"],
        ["head.[1-4]", "2", "relu", "in", "place", "2.0"],
    ]


def test_rows_with_another_activation_verdict_or_reason_are_rows_of_their_own():
    same = layer("a.0.bn", kept=("3 others read its input",))
    others = (
        layer("a.1.bn", kept=("somebody reads its input",)),
        layer("a.2.bn"),
        replace(layer("a.3.bn"), activation="silu"),
        replace(layer("a.4.bn"), reasons=("nothing would be gained",)),
        layer("a.5.bn", kept=("4 others read its input",)),
    )
    plan = Plan((same, *others))
    assert [row[:2] for row in rows_of(plan)] == [
        ["a.[0-5].bn", "2"],
        *([f"a.{i}.bn", "1"] for i in range(1, 5)),
    ]
    assert "[3-4] others read its input" in plan.table(100)
    assert plan.table(100).count("others read") == 1


def test_bytes_end_in_one_column_and_add_up():
    sizes = (512, 20 * 1024, 3 * 2**20)
    text = Plan(tuple(layer(name, size) for name, size in zip("abc", sizes, strict=True))).table(100)
    lines = [line for line in text.splitlines() if re.search(r"\d (B|KiB|MiB)\b", line)][:4]
    assert len({re.search(r"\d (B|KiB|MiB)\b", line).end() for line in lines}) == 1
    assert lines[3].split()[:4] == ["total", "3", "3.0", "MiB"]
    report = str(memory_report(chain(2), torch.randn(2, 4, 16, 16))).splitlines()
    assert len({len(line) for line in report}) == 1


def test_a_model_without_norms_has_a_table_of_none():
    assert rows_of(Plan(())) == []
    assert "0 of 0 norms go in place" in str(Plan(()))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("foreign_nets:ResNet", ["--kwargs", '{"width": 4}']),
        ("foreign_nets:ResNet", ["--no-residual"]),
        ("two_inputs:net", ["2x3x16x16"]),
    ],
)
def test_the_command_says_what_was_converted_and_ends_with_two_lines_that_do_the_same(
    model, options, capsys, tmp_path, monkeypatch
):
    (tmp_path / "two_inputs.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def forward(self, x, y):\n"
        "        return super().forward(x + y)\n"
        "net = Net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    main([model, "--input", "2x3x16x16", *options, "--convert"])
    out = capsys.readouterr().out
    *_, first, second = out.splitlines()
    done = {}
    exec(f"{first}\n{second}", done)
    count = sum(isinstance(m, InPlaceNorm) for m in done["model"].modules())
    assert count > 0
    assert re.search(rf"^{count} of \d+ norms were converted", out, re.MULTILINE)
    if "--kwargs" in options:
        assert done["model"].fc.in_features == 8


@pytest.mark.parametrize("installed", [True, False])
def test_the_command_prints_the_same_with_and_without_rich(installed, capsys, monkeypatch):
    if installed:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    main(["foreign_nets:ResNet", "--input", "2x3x32x32", "--convert"])
    plan = analyze(ResNet(), torch.randn(2, 3, 32, 32))
    assert capsys.readouterr().out.startswith(f"{plan}\n\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-residual"], "add --convert"),
        (["--png", "no/such/folder/out.png"], "No such file or directory"),
        (["--png", "."], "Is a directory"),
        (["--png", "out.txt"], "expected a picture in one of the formats"),
        (["--kwargs", "{"], "expected JSON"),
        (["--kwargs", "3"], "expected a JSON object"),
        (["--kwargs", '{"width": []}'], r"ResNet\(width=\[\]\) failed: TypeError"),
        (["--kwargs", '{"depth": 3}'], r"ResNet\(depth=3\) failed: TypeError"),
    ],
)
def test_the_command_refuses_before_it_measures(arguments, message, capsys, monkeypatch, tmp_path):
    """Errors must come before minutes of measuring, and as messages without a traceback."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("inplace_abn.memory.memory_report", None)
    with pytest.raises(SystemExit) as stopped:
        main(["foreign_nets:ResNet", "--input", "2x3x32x32", *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert list(tmp_path.iterdir()) == []


def test_the_command_gives_the_factory_its_arguments(capsys):
    main(["foreign_nets:ResNet", "--kwargs", '{"width": 4}', "--input", "2x3x32x32", "--convert"])
    assert "layer[1-2].[0-1].bn2" in capsys.readouterr().out
    assert load_model("foreign_nets:ResNet", {"width": 4}).fc.in_features == 8
    for text in ("torch.nn:init.math.pi", "foreign_nets:BasicBlock"):
        with pytest.raises(ValueError, match=r"failed: TypeError|to be a module or to make one, got float"):
            load_model(text)


def test_the_command_finds_models_in_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 1))\n"
    )
    command = [sys.executable, "-m", "inplace_abn.memory", "mine:make", "--input", "2x3x16x16", "--convert"]
    environment = os.environ | {"PYTHONPATH": str(Path(inplace_abn.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "silu" in done.stdout
    assert "saved" in done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_caching_allocator_is_asked():
    x = torch.randn(4, 4, 64, 64, device="cuda")
    report = memory_report(chain(4).cuda(), x)
    assert report.before.held - report.after.held >= 0.95 * report.plan.bytes_saved
    assert report.after.peak < report.before.peak
