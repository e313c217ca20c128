"""The memory command: its arguments, what it prints, and what it refuses before it measures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foreign_nets import ResNet
from torch import nn

import inplace_abn
from inplace_abn import analyze
from inplace_abn.memory import load_model, main, parse_shape


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


def test_the_command_prints_both_reports_and_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "memory.png"
    main(["foreign_nets:ResNet", "--input", "2x3x32x32", "--convert", "--png", str(png)])
    out = capsys.readouterr().out
    assert "10 of 10 norms are in place" in out
    assert "held for backward" in out
    assert png.exists()
    main(["foreign_nets:ResNet", "--input", "2x3x32x32"])
    assert "in place" not in capsys.readouterr().out
    for wrong in (["nothing", "--input", "2x3"], ["torch.nn:Identity", "--input", "two"]):
        with pytest.raises(SystemExit):
            main(wrong)
        assert "expected" in capsys.readouterr().err


def test_arguments_reach_the_factory_and_each_shape_is_an_input(capsys, tmp_path, monkeypatch):
    main(["foreign_nets:ResNet", "--input", "2x3x16x16", "--kwargs", '{"width": 4}', "--convert"])
    assert capsys.readouterr().out.startswith(f"{analyze(ResNet(width=4), torch.randn(2, 3, 16, 16))}\n\n")
    (tmp_path / "two_inputs.py").write_text(
        "from torch import nn\n"
        "class Named(nn.Sequential):\n"
        "    def forward(self, x, y):\n"
        "        return super().forward(x + y)\n"
        "net = Named(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    main(["two_inputs:net", "--input", "2x3x16x16", "2x3x16x16", "--convert"])
    assert re.search(r"^1 of 1 norms are in place", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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


@pytest.mark.parametrize("options", [[], ["--convert"]])
@pytest.mark.parametrize(
    ("model", "shapes", "message"),
    [
        ("foreign_nets:ResNet", ["2x4x32x32"], "on 2x4x32x32: RuntimeError: .*expected input.* to have 3 channels"),
        ("foreign_nets:ResNet", ["2x3x8x8", "2x3"], r"on 2x3x8x8, 2x3: TypeError: .*takes 2 positional arguments"),
        ("foreign_nets:ResNet", ["1x3x2x2"], "on 1x3x2x2: ValueError: Expected more than 1 value per channel"),
        ("torch.nn:Identity", ["2x3"], "on 2x3: ValueError: .*expected an output that requires grad"),
    ],
)
def test_an_input_that_the_model_cannot_take_is_a_message_of_the_model(model, shapes, message, options, capsys):
    """A wrong shape ended in a traceback."""
    with pytest.raises(SystemExit) as stopped:
        main([model, "--input", *shapes, *options])
    assert stopped.value.code == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert re.search(f"error: {model} cannot train {message}", error), error


def test_an_error_that_the_model_alone_does_not_raise_is_not_told_as_the_models(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("of the package")

    monkeypatch.setattr("inplace_abn.memory.command.memory_report", broken)
    with pytest.raises(RuntimeError, match="of the package"):
        main(["foreign_nets:ResNet", "--input", "2x3x32x32"])


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
