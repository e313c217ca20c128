"""The tables of scripts/zoo.py: what they say about a model, and about a package that is missing."""

import copy
import re
import sys

import generated
import models
import pytest
import torch
import zoo
from benchmark import steps
from cases import needs_compiler
from foreign_nets import conv
from torch import nn
from torch.utils.checkpoint import checkpoint
from trained import as_trained

import inplace_abn
from inplace_abn import convert


def block():
    return nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4))


def row(*rest, trained=as_trained):
    """The row of the block, by the names of its columns."""
    torch.manual_seed(0)
    model = block()
    cells = zoo.row("block", model, trained(copy.deepcopy(model)), torch.randn(4, 3, 32, 32), *rest)
    return dict(zip(zoo.COLUMNS, cells, strict=True))


def test_a_row_tells_that_gradients_are_equal_and_what_is_held():
    cells = row()
    assert cells["model"] == "block, 4x3x32x32"
    assert re.fullmatch(r"equal, \de-1\d", cells["gradients"])
    assert cells["in place"] == "2 of 2"
    # The next convolution keeps the activated tensor, and no norm saves its input.
    assert cells["converted, initialised"] == cells["converted, trained"] == "0.500"
    assert all(float(share) > 0.5 for share in cells["peak, initialised"].split(" / "))
    assert 0.5 <= float(cells["converted in bf16"]) < 1
    assert cells["step"] == "-"
    timed = row(False, 2)
    assert timed["gradients"] == "-"
    assert float(timed["step"]) > 0


def test_a_row_names_a_gradient_that_differs(monkeypatch):
    def spoiled(model):
        model[3].weight.data *= 1 + 1e-6
        return model

    monkeypatch.setattr(zoo, "convert", spoiled)
    assert re.match(r"DIFFER: \d\.\de-\d\d \w+", row()["gradients"])


def test_a_row_tells_how_norms_as_trained_differ():
    """The last norm is dead as trained, so it keeps its input."""

    def died(model):
        nn.init.zeros_(model[4].weight)
        return model

    cells = row(False, trained=died)
    assert cells["in place"] == "2 / 1 of 2"
    assert cells["converted, initialised"] == "0.500"
    assert cells["converted, trained"] == "0.750"


def test_the_largest_peak_is_that_of_any_step_and_parameters_stay():
    """The net takes more memory in its first step, as one that is measured in it."""

    class Measured(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.calls = nn.Parameter(torch.ones(1)), 0

        def forward(self, x):
            self.calls += 1
            kept = x.repeat(8, 1) if self.calls == 1 else x
            return (kept * self.scale).sum()

    net, x = Measured(), torch.randn(64, 64)
    found = zoo.memory(zoo.training(net, x))
    assert found.held < 3 * x.nbytes
    assert found.peak == found.first >= 8 * x.nbytes > found.later
    assert net.scale == 1
    # The measured steps, and the two of the later measurement.
    assert net.calls == zoo.MEASURED_STEPS + 2


@pytest.fixture
def page(monkeypatch, tmp_path):
    """A page with markers, in place of those of the repository."""
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- models -->\nold\n<!-- /models -->\nb", encoding="utf-8")
    for name in ("PAGE", "README"):
        monkeypatch.setattr(zoo, name, path)
    return path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["zoo.py", *arguments])
    zoo.main()


def test_the_page_has_a_row_for_a_package_that_is_missing(monkeypatch, page):
    entry = models.Entry("no_such_package.models", "no-such-package", lambda package: block())
    monkeypatch.setattr(zoo, "ZOO", {"its model": entry})
    run(monkeypatch, "--write")
    before, _, columns, _, row, _, made_by, _, after = page.read_text(encoding="utf-8").splitlines()
    assert (before, after) == ("a", "b")
    assert columns == generated.table_line(zoo.COLUMNS)
    assert row.startswith("| its model | no_such_package.models cannot be imported: No module named 'no_such_package'")
    assert row.count("|") == len(zoo.COLUMNS) + 1
    assert made_by.startswith("Made by `python scripts/zoo.py --write` on 2")
    assert f"torch {torch.__version__}" in made_by


def test_cells_of_the_readme_are_sizes_and_their_changes():
    native, initialised, trained = (zoo.Memory(held << 20, peak << 20, 0) for held, peak in ((4, 8), (1, 6), (2, 6)))
    row = zoo.readme_row("timm resnet50", zoo.Found(native, initialised, trained, 0.98))
    assert generated.table_line(row) == (
        "| CNN | timm resnet50, 8x3x224x224 | 4 | 1, **-75%** | 2, **-50%** | 8 | 6, **-25%** | 6, **-25%** | 0.98 |"
    )
    assert zoo.readme_row("timm resnet50", zoo.Found(native, initialised, native, None))[4:] == (
        *("4, **+0%**", "8", "6, **-25%**", "8, **+0%**", "-"),
    )


def test_the_table_of_the_readme_is_of_its_models_alone_and_in_float32(monkeypatch, page, capsys):
    monkeypatch.setattr(zoo, "README_MODELS", {"its model": zoo.Shown("CNN", (2, 3, 32, 32))})
    entry = models.Entry("torch", "torch", lambda package: block())
    monkeypatch.setattr(zoo, "ZOO", {"its model": entry, "another": entry})
    run(monkeypatch, "--readme", "--steps", "0")
    written = page.read_text(encoding="utf-8")
    row, _, made_by = written.splitlines()[4:7]
    assert row.startswith("| CNN | its model, 2x3x32x32 | ")
    assert generated.LINE.match(made_by) or "unknown" in made_by
    run(monkeypatch, "--readme", "--steps", "0", "--dtype", "bfloat16")
    run(monkeypatch, "--readme", "--steps", "0", "its")
    run(monkeypatch, "--no-verify", "--steps", "0", "--write", "another")
    # What is not of all models, or in another dtype, is printed only.
    assert page.read_text(encoding="utf-8") == written
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| CNN | its model")]
    assert printed[0] == printed[2] == row
    assert printed[1] != row
    for options in (["--readme", "--write"], ["--dtype", "bfloat16"]):
        with pytest.raises(SystemExit):
            run(monkeypatch, *options)


class Checkpointable(nn.Module):
    """Blocks that are checkpointed one by one, in the way of timm."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.is_checkpointed = conv(3, 4), nn.ModuleList(), False
        for _ in range(2):
            layers = [[nn.BatchNorm2d(4), nn.SiLU(), conv(4, 4)] for _ in range(2)]
            self.blocks.append(nn.Sequential(*layers[0], *layers[1]))

    def set_grad_checkpointing(self):
        self.is_checkpointed = True

    def forward(self, x):
        x = self.stem(x)
        for each in self.blocks:
            x = checkpoint(each, x, use_reentrant=False) if self.is_checkpointed else each(x)
        return x


def test_the_comparison_tells_what_checkpointed_and_converted_nets_hold_and_how_long_they_take():
    entry = models.Entry("torch", "torch", lambda package: Checkpointable())
    cells = zoo.compared(entry, (8, 3, 128, 128), steps.CHECKPOINTED, 2)
    found = [re.fullmatch(r"(\d+) / (\d+)(, \d\.\d\d)?", cell) for cell in cells]
    native, converted, checkpointed, both = (int(each[1]) for each in found)
    assert both <= checkpointed < converted < native
    assert [each[3] is None for each in found] == [True, False, False, False]
    # The same net and input as README's.
    torch.manual_seed(0)
    net = as_trained(Checkpointable())
    of_readme = zoo.memory(zoo.training(convert(net), torch.randn(8, 3, 128, 128)))
    assert cells[1].startswith(f"{zoo.mebibytes(of_readme.held)} / {zoo.mebibytes(of_readme.peak)}, ")


@pytest.mark.slow
@needs_compiler
def test_the_comparison_tells_what_compiled_nets_hold():
    entry = models.Entry("torch", "torch", lambda package: block())
    contenders = {name: steps.CONTENDERS[name] for name in (steps.EAGER_NATIVE, "compiled converted")}
    native, compiled = zoo.compared(entry, (16, 3, 128, 128), contenders, 0)
    assert 0 < int(compiled.split(" / ")[0]) < 0.8 * int(native.split(" / ")[0])


def test_a_table_is_written_between_the_markers_of_its_name(page):
    page.write_text("<!-- a -->\n<!-- /a -->\n<!-- b -->\nold\n<!-- /b -->\nend", encoding="utf-8")
    generated.write(page, "b", ["x", "y"], "Made.")
    assert page.read_text(encoding="utf-8") == ("<!-- a -->\n<!-- /a -->\n<!-- b -->\nx\ny\n\nMade.\n<!-- /b -->\nend")
    with pytest.raises(ValueError, match="expected one <!-- c -->"):
        generated.write(page, "c", [], "")


def test_the_line_about_a_run_says_what_it_depends_on(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/scripts/zoo.py", "--readme"])
    monkeypatch.setattr(generated, "commit", lambda: "0123abc+")
    line = generated.made_by(["pytest", "no-such-package", "pytest"], torch.bfloat16)
    assert generated.LINE.fullmatch(line)["version"] == ".".join(inplace_abn.__version__.split(".")[:2])
    assert line.startswith("Made by `python scripts/zoo.py --readme` on ")
    assert ", commit 0123abc+, " in line
    assert f"torch {torch.__version__}, pytest {pytest.__version__}, " in line
    assert line.endswith("bfloat16, CPU.")


@pytest.mark.parametrize("name", models.ZOO)
def test_every_entry_of_an_installed_package_can_be_made(name):
    library = models.import_torchvision()
    package = pytest.importorskip(models.ZOO[name].package)
    assert isinstance(models.ZOO[name].make(package), nn.Module)
    del library
