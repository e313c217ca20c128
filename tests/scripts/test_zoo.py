"""The tables of scripts/zoo.py: what they say about a model, and about a package that is missing."""

import copy
import re
import sys

import pytest
import torch
import zoo
from foreign_nets import conv
from torch import nn
from trained import as_trained


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
    assert float(cells["peak, initialised"]) > 0.5
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
    found = zoo.memory(net, x)
    assert found.held < 3 * x.nbytes
    assert found.peak >= 8 * x.nbytes
    assert net.scale == 1
    # The measured steps, and the two of the later measurement.
    assert net.calls == zoo.MEASURED_STEPS + 2


def test_the_page_has_a_row_for_a_package_that_is_missing(monkeypatch, tmp_path, capsys):
    entry = zoo.Entry("no_such_package.models", "no-such-package", lambda package: block())
    monkeypatch.setattr(zoo, "ZOO", {"its model": entry, "another": entry})
    monkeypatch.setattr(sys, "argv", ["zoo.py", "its", "--write", str(tmp_path / "zoo.md")])
    zoo.main()
    page = (tmp_path / "zoo.md").read_text()
    row = page.splitlines()[-1]
    assert row.startswith("| its model | no_such_package.models cannot be imported: No module named 'no_such_package'")
    assert row.count("|") == len(zoo.COLUMNS) + 1
    assert f"torch {torch.__version__}" in page
    assert "another" not in capsys.readouterr().out


def test_the_models_table_is_written_between_its_markers():
    text = zoo.with_table("a\n<!-- models -->\nold\n<!-- /models -->\nb", "new\n")
    assert text == "a\n<!-- models -->\nnew\n<!-- /models -->\nb"
    with pytest.raises(ValueError, match="expected one"):
        zoo.with_table("a", "new\n")
    native, initialised, trained = (zoo.Memory(held << 20, peak << 20) for held, peak in ((4, 8), (1, 6), (2, 6)))
    assert zoo.line(zoo.readme_row("timm resnet50", zoo.Found(native, initialised, trained, 0.98))) == (
        "| CNN | timm resnet50, 8x3x224x224 | 4 | 1, **-75%** | 2, **-50%** | 8 | 6, **-25%** | 6, **-25%** | 0.98 |"
    )
    assert zoo.readme_row("timm resnet50", zoo.Found(native, initialised, native, None))[4:] == (
        *("4, **+0%**", "8", "6, **-25%**", "8, **+0%**", "-"),
    )


def test_the_table_of_the_readme_is_of_its_models_alone_and_in_float32(monkeypatch, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- models -->\nold\n<!-- /models -->\nb", encoding="utf-8")
    monkeypatch.setattr(zoo, "README", readme)
    monkeypatch.setattr(zoo, "README_MODELS", {"its model": zoo.Shown("CNN", (2, 3, 32, 32))})
    entry = zoo.Entry("torch", "torch", lambda package: block())
    monkeypatch.setattr(zoo, "ZOO", {"its model": entry, "another": entry})
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--readme", "--steps", "0"])
    zoo.main()
    before, _, columns, _, row, _, versions, _, after = readme.read_text(encoding="utf-8").splitlines()
    assert (before, after) == ("a", "b")
    assert columns == zoo.line(zoo.README_COLUMNS)
    assert row.startswith("| CNN | its model, 2x3x32x32 | ")
    assert f"torch {torch.__version__}" in versions
    written = readme.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--readme", "--steps", "0", "--dtype", "bfloat16"])
    zoo.main()
    assert readme.read_text(encoding="utf-8") == written
    printed = capsys.readouterr().out.splitlines()
    of_float32, of_bfloat16 = (line for line in printed if line.startswith("| CNN | its model"))
    assert of_float32 == row
    assert of_bfloat16 != row
    for options in (["--readme", "its"], ["--dtype", "bfloat16"]):
        monkeypatch.setattr(sys, "argv", ["zoo.py", *options])
        with pytest.raises(SystemExit):
            zoo.main()


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_entry_of_an_installed_package_can_be_made(name):
    library = zoo.import_torchvision()
    package = pytest.importorskip(zoo.ZOO[name].package)
    assert isinstance(zoo.ZOO[name].make(package), nn.Module)
    del library
