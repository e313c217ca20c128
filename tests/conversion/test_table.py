"""The table of a plan: its rows, its width and its columns."""

import pickle
import re
from dataclasses import replace

import fresh
import pytest
import torch
from convertible_nets import chain
from foreign_nets import ResNet

from inplace_abn import Plan, analyze
from inplace_abn.conversion.plan import Layer
from inplace_abn.memory import memory_report


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
    code = f"import os, pickle; os.environ.pop('COLUMNS', None); print(pickle.loads({pickle.dumps(plan)!r}))"
    done = fresh.run_code(code)
    assert done.returncode == 0, done.stderr
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
