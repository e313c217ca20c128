"""report tells what each norm did in its last call: in words, as a table, and for programs."""

import copy
import json
import logging
import pickle
import re

import fresh
import pytest
import torch
import torch.nn.functional as F
from convertible_nets import chain
from foreign_nets import BatchNormAct2d, ResNet, conv, spread
from one_norm import OneNorm, activated_twice, images, layer_of, multiplied, plain, without_grad
from torch import nn

from inplace_abn import InPlaceABN, Report, analyze, convert, report, revert, set_guard
from inplace_abn.conversion.recipes import UNREAD
from inplace_abn.conversion.report import Layer
from inplace_abn.memory import memory_report

NOT_KEPT = "what follows does not keep the norm's output for backward"


class Subclass(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + x


def with_own_forward(norm):
    norm.forward = norm.forward
    return norm


def with_weight(value, bias=0.0):
    norm = nn.BatchNorm2d(4)
    nn.init.constant_(norm.weight, value)
    nn.init.constant_(norm.bias, bias)
    return norm


# The forward pass, what follows the norm, and why it is not in place.
TOLD = {
    "relu": (plain, "relu", ""),
    "silu": (lambda m, x: m.last(F.silu(m.bn(m.conv(x)))), "silu", ""),
    "residual": (lambda m, x: m.last(F.relu(m.bn(y := m.conv(x)) + y)), "add, relu", ""),
    "convolution": (lambda m, x: m.last(m.bn(m.conv(x))), "conv2d", ""),
    "tanh": (lambda m, x: m.last(torch.tanh(m.bn(m.conv(x)))), "tanh", NOT_KEPT),
    "relu6 in place": (lambda m, x: m.last(F.relu6(m.bn(m.conv(x)), inplace=True)), "relu6", NOT_KEPT),
    "multiplied": (multiplied, "mul_", NOT_KEPT),
    "used twice": (activated_twice, "relu", ""),
    "nothing": (lambda m, x: m.bn(m.conv(x)), UNREAD.follows, UNREAD.why),
    "without grad": (without_grad, "", "it was not called in training"),
    "not called": (lambda m, x: m.last(m.conv(x)), "", "it was not called in training"),
    "of a part": (
        lambda m, x: m.last(m.act(m.bn(x[:, :1].expand(-1, 4, -1, -1)))),
        "",
        "its input, its parameters or the mode of the call are not supported",
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_layer_tells_what_follows_and_why_it_is_not_in_place(name):
    forward, follows, why = TOLD[name]
    layer = layer_of(forward)
    assert (layer.name, layer.kind) == ("bn", "BatchNorm2d")
    assert (layer.follows, layer.in_place, layer.why) == (follows, not why, why)


NORM_GROUP_ROWS_ACTIVATION = """
import logging, torch, inplace_abn
from torch import nn
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
parts = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GELU(), nn.Conv2d(4, 4, 1)
model = nn.Sequential(*parts, nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(2), nn.LayerNorm(16), nn.Linear(16, 2))
"""
TRAINED = """
for _ in range(2):
    model(torch.randn(2, 3, 4, 4, device=next(model.parameters()).device)).square().mean().backward()
for layer in inplace_abn.report(model).layers:
    print(layer.kind, "|", layer.in_place, "|", layer.why)
"""
KINDS = ["BatchNorm2d", "GELU", "GroupNorm", "SiLU", "LayerNorm"]


def test_report_and_converts_line_say_that_the_package_is_turned_off():
    code = NORM_GROUP_ROWS_ACTIVATION + "inplace_abn.convert(model)" + TRAINED
    result = fresh.run_code(code, INPLACE_ABN_DISABLE="1")
    why = "INPLACE_ABN_DISABLE=1 is set"
    assert result.stdout.splitlines() == [f"{kind} | False | {why}" for kind in KINDS]
    assert f"INFO converted 3 of 3 norms, and 2 activations; {why}" in result.stderr


# The tensors of this process are said to be where there are no kernels.
ELSEWHERE = """
from inplace_abn.kernels import ops
ops.run_on, why = lambda device: False, ops.why_not_on
ops.why_not_on = lambda device: why("cuda:0")
"""


def test_report_converts_line_and_one_warning_say_that_a_build_has_no_kernels_for_a_device():
    for code in (ELSEWHERE + "inplace_abn.convert(model)", "inplace_abn.convert(model)" + ELSEWHERE):
        result = fresh.run_code(NORM_GROUP_ROWS_ACTIVATION + code + TRAINED)
        reasons = {line.split(" | ")[2] for line in result.stdout.splitlines()}
        assert len(reasons) == 1
        assert re.match("no kernels for cuda:0, this build has those for the CPU only: install ", *reasons)
        warned = [line for line in result.stderr.splitlines() if line.startswith("WARNING")]
        assert len(warned) == 1
        assert warned[0].startswith("WARNING inplace_abn: no kernels for cuda:0")
        is_there_before = code.startswith(ELSEWHERE)
        assert (
            "INFO converted 3 of 3 norms, and 2 activations; no kernels for cuda:0" in result.stderr
        ) == is_there_before


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (Subclass(4), "Subclass is a subclass whose forward pass is unknown"),
        (with_own_forward(nn.BatchNorm2d(4)), "it has a forward pass of its own"),
        (BatchNormAct2d(4, nn.Hardtanh), NOT_KEPT),
        (BatchNormAct2d(4, nn.SELU), NOT_KEPT),
        (with_weight(0.0), "its input is not recoverable: "),
        (with_weight(1e-3, 1e3), "its input is not recoverable: "),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_layer_that_is_not_in_place_tells_why_in_words(norm, why):
    layer = layer_of(plain, norm)
    assert not layer.in_place
    assert layer.why.startswith(why)


def test_norms_that_were_left_out_and_norms_of_other_kinds_are_told():
    """A report of norms of other kinds was an empty table, which did not say that they are not supported."""
    others = nn.LocalResponseNorm(2), nn.LocalResponseNorm(2)
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(8), *others)
    found = report(convert(model, filter_fn=lambda *_: False))
    assert [(layer.name, layer.kind, layer.why) for layer in found.layers] == [
        ("1", "BatchNorm2d", "it was not converted"),
        ("2", "GroupNorm", "it was not converted"),
        ("3", "LayerNorm", "it was not converted"),
    ]
    assert found.unsupported == {"LocalResponseNorm": 2}
    assert "not supported: 2 LocalResponseNorm" in str(found)


def test_a_report_is_of_the_last_call_and_reads_only():
    model = convert(spread(OneNorm(plain)))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert "not called in training" in report(model).layers[0].why
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model(images()).sum().backward()
    assert report(model).layers[0].in_place
    assert repr(model.bn).endswith("track_running_stats=True, in place)")
    # Evaluation without grad is no training.
    with torch.no_grad():
        model.eval()(images())
    assert report(model).layers[0].in_place
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    set_guard(model)
    with torch.no_grad():
        model.bn.weight.zero_()
    model.train()(images()).sum().backward()
    optimizer.step()
    assert report(model).layers[0].why.endswith("; 4 of 4 channels are ill")
    assert report(model).layers[0].channels_saved == {"float32": 1.0}
    assert "not in place: its input is not recoverable: " in repr(model.bn)
    assert report(revert(model)).layers[0].why == "it was not converted"


def test_copies_and_pickles_tell_what_the_original_did():
    model = convert(spread(OneNorm(plain)))
    model(images()).sum().backward()
    expected = report(model)
    model.run = None
    assert report(copy.deepcopy(model)) == report(pickle.loads(pickle.dumps(model))) == expected


def test_a_report_prints_a_table_and_totals_and_is_json():
    found = analyze(ResNet(), torch.randn(2, 3, 32, 32))
    text = str(found)
    assert text.splitlines()[0].split()[0] == "name"
    assert "layer[1-2].[0-1].bn1" in text
    assert "10 of 10 norms are in place" in text
    told = json.loads(json.dumps(found.to_dict()))
    assert told["in_place"] == len(found.in_place) == 10
    assert told["bytes_saved"] == found.bytes_saved == sum(layer["bytes_saved"] or 0 for layer in told["layers"])
    assert told["layers"][0]["follows"] == "relu"
    assert told["unsupported"] == {}


def test_modules_that_were_built_in_place_are_no_rows():
    model = nn.Sequential(conv(3, 4), InPlaceABN(4), conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4))
    found = analyze(model, images())
    assert [(layer.name, layer.in_place) for layer in found.layers] == [("3", True)]
    assert str(found).endswith("\n1 norms were built in place")


def test_weights_of_zero_are_told_to_end_with_training():
    """A report of timm's resnet50 as it is made said 19 % where training saves 45 %, and not why."""
    told = str(analyze(spread(OneNorm(plain)), images()))
    assert "zero_init_last" not in told
    told = str(analyze(OneNorm(plain, with_weight(0.0)), images()))
    told = " ".join(told.split())
    assert "norms save channels in float32" in told
    assert "norms whose weights begin with zeros (zero_init_last) save less once these have grown" in told


def test_a_report_says_which_share_of_channels_is_saved_now():
    """The reason of the first measurement was told for ever: a weight of 0 eps, when the smallest was 108."""
    model = convert(spread(OneNorm(plain)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for weight, share in ((0.0, 0.25), (1.0, 0.0)):
        with torch.no_grad():
            model.bn.weight[2] = weight
        for _ in range(2):
            model(images()).sum().backward()
            optimizer.step()
        found = report(model)
        assert found.layers[0].in_place
        assert found.layers[0].channels_saved == {"float32": share}
        assert ("save channels in float32" in str(found)) == (share > 0)


def layer(name, saved=1024, follows="relu", why="", in_place=None):
    return Layer(name, "BatchNorm2d", follows, not why if in_place is None else in_place, why, saved)


def made(*layers, **unsupported):
    return Report(layers, unsupported)


def rows_of(found, width=200):
    """The cells of the rows between the table's rules."""
    lines = found.table(width).splitlines()
    first, last = (i for i, line in enumerate(lines) if line.startswith("---"))
    return [line.split() for line in lines[first + 1 : last] if not line.startswith("    ")]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_of_a_table_is_longer_than_the_terminal_and_nothing_is_cut(width, monkeypatch):
    """Long reasons and long names are broken into lines, whatever their length."""
    monkeypatch.setenv("COLUMNS", str(width))
    why = "somebody reads it again and again, " * 12
    found = made(*(layer(f"{'encoder.' * 9}{name}", why=why) for name in ("bn1", "bn2")), ALongNameOfANorm=7)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= width
    everything = "".join(str(found).split())
    assert "encoder." * 3 in everything
    assert "".join(why.split()) in everything


def test_a_table_is_a_hundred_columns_wide_where_there_is_no_terminal():
    found = made(layer("stem.bn", why="it is read again " * 20))
    code = f"import os, pickle; os.environ.pop('COLUMNS', None); print(pickle.loads({pickle.dumps(found)!r}))"
    done = fresh.run_code(code)
    assert done.returncode == 0, done.stderr
    assert 90 < max(map(len, done.stdout.splitlines())) <= 100


def test_rows_that_differ_in_indices_only_are_one_row_with_their_number_and_sum():
    names = ("layer1.0.bn1", "layer1.0.bn2", "layer1.1.bn1", "layer1.1.bn2", "layer2.10.bn1", "head.1", "head.4")
    rows = rows_of(made(*(layer(name) for name in names)))
    assert rows == [
        ["layer[1-2].[0-10].bn1", "3", "3.0", "KiB", "in", "place", "relu"],
        ["layer1.[0-1].bn2", "2", "2.0", "KiB", "in", "place", "relu"],
        ["head.[1-4]", "2", "2.0", "KiB", "in", "place", "relu"],
    ]


def test_rows_with_another_follower_verdict_or_reason_are_rows_of_their_own():
    found = made(
        layer("a.0.bn", why="3 others read it"),
        layer("a.1.bn", why="somebody reads it"),
        layer("a.2.bn"),
        layer("a.3.bn", follows="silu"),
        layer("a.4.bn", saved=None, follows=""),
        layer("a.5.bn", why="4 others read it"),
    )
    assert [row[:2] for row in rows_of(found)] == [["a.[0-5].bn", "2"], *([f"a.{i}.bn", "1"] for i in range(1, 5))]
    assert "[3-4] others read it" in found.table(100)
    assert found.table(100).count("others read") == 1


def test_bytes_end_in_one_column_and_add_up():
    sizes = (512, 20 * 1024, 3 * 2**20)
    text = made(*(layer(name, size) for name, size in zip("abc", sizes, strict=True))).table(100)
    lines = [line for line in text.splitlines() if re.search(r"\d (B|KiB|MiB)\b", line)][:4]
    assert len({re.search(r"\d (B|KiB|MiB)\b", line).end() for line in lines}) == 1
    assert lines[3].split()[:4] == ["total", "3", "3.0", "MiB"]
    assert "3 of 3 norms are in place and save 3.0 MiB per training step" in text
    report = str(memory_report(chain(2), torch.randn(2, 4, 16, 16))).splitlines()
    assert len({len(line) for line in report}) == 1


def test_a_model_without_norms_says_so():
    """The report of a model without norms was an empty table, and "0 of 0"."""
    assert str(made()) == "the model has no norms or activations that can be converted"
    assert "not supported: 1 LocalResponseNorm" in str(report(nn.LocalResponseNorm(2)))
    net = nn.Sequential(conv(3, 4), nn.LocalResponseNorm(2))
    assert str(memory_report(net, images())).endswith("\nnot supported: 1 LocalResponseNorm")


def test_what_is_told_once_is_told_with_the_norms_name(logged):
    records = logged(logging.INFO)
    model = convert(OneNorm(plain, norm=with_weight(0.0)))
    for _ in range(3):
        model(images()).sum().backward()
    told = [record.getMessage() for record in records if record.getMessage().startswith("bn: ")]
    assert len(told) == 1


def test_before_the_first_step_a_report_says_only_that():
    """It said that no activation without a norm was in place, though each followed a norm."""
    net = convert(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.SiLU()))
    assert "none of 2 norms and activations was called in training yet" in str(report(net))


def test_scripted_parts_are_told():
    """A scripted model had "no norms to convert"."""
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    assert "3 modules are scripted, and stay as they are" in logged_by_converting(scripted)


def logged_by_converting(model):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("inplace_abn")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        convert(model)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return " ".join(records)
