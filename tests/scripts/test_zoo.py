"""The tables of scripts/zoo.py: what they say about a model, and about a package that is missing."""

import re
import sys

import pytest
import torch
import zoo
from foreign_nets import conv
from torch import nn

from inplace_abn.memory import Usage


def block():
    model = nn.Sequential(
        conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4)
    )
    return zoo.trained(model)


def test_a_row_tells_that_gradients_are_equal_and_what_is_held():
    cells = dict(zip(zoo.COLUMNS, zoo.row("block", block(), torch.randn(4, 3, 32, 32)), strict=True))
    assert cells["model"] == "block, 4x3x32x32"
    assert re.fullmatch(r"equal, \de-1\d", cells["gradients"])
    assert cells["in place"] == "2 of 2"
    # The next convolution keeps the activated tensor, and no norm saves its input.
    assert cells["converted"] == "0.500"
    assert cells["step"] == "-"
    timed = dict(zip(zoo.COLUMNS, zoo.row("block", block(), torch.randn(4, 3, 32, 32), False, 2), strict=True))
    assert timed["gradients"] == "-"
    assert float(timed["step"]) > 0


def test_a_row_names_a_gradient_that_differs(monkeypatch):
    def spoiled(model):
        model[3].weight.data *= 1 + 1e-6
        return model

    monkeypatch.setattr(zoo, "convert", spoiled)
    text = zoo.row("block", block(), torch.randn(4, 3, 32, 32))[1]
    assert re.match(r"DIFFER: \d\.\de-\d\d \w+", text)


def test_trained_leaves_no_constant_and_no_zero():
    model = block()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    weight = model[0].weight.clone()
    for p in zoo.trained(model).parameters():
        assert (p != 0).all()
    assert model.scale != 1
    assert 0.5 <= model[1].weight.min() < model[1].weight.max() <= 1.5
    assert torch.equal(model[0].weight, weight)


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
    name, usages = "timm resnet50", (Usage(4 << 20, 8 << 20, (), 0.0), Usage(1 << 20, 6 << 20, (), 0.0))
    assert zoo.line(zoo.readme_row(name, [zoo.Found(*usages, 0.98), zoo.Found(*usages, None)])) == (
        "| CNN | timm resnet50, 8x3x224x224 | 4 → 1 MiB, **-75%** | 4 → 1 MiB, **-75%** "
        "| 8 → 6 MiB, **-25%** | 8 → 6 MiB, **-25%** | 0.98 / - |"
    )


def test_the_table_of_the_readme_is_of_its_models_alone(monkeypatch, tmp_path):
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
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--readme", "its"])
    with pytest.raises(SystemExit):
        zoo.main()


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_entry_of_an_installed_package_can_be_made(name):
    library = zoo.import_torchvision()
    package = pytest.importorskip(zoo.ZOO[name].package)
    assert isinstance(zoo.ZOO[name].make(package), nn.Module)
    del library
