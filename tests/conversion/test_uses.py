"""What people do with models is done with converted models. They train as the originals do, or there is an error.
docs/conversion.md has the table."""

import re
from pathlib import Path

import pytest
import torch
from ranks import on_each_rank
from uses.base import EQUAL, ROUNDINGS, USES, Rows, images, made, mixed, rows, train
from uses.processes import ON_RANKS
from uses.quantisation import quantisable

from inplace_abn import convert, report
from inplace_abn.conversion.norms import InPlaceNorm

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"


def results(run, *ways):
    """What ``run`` returns with each of the ways to convert a model."""
    found = []
    for way in ways:
        torch.manual_seed(1)
        found.append([t.detach() for t in run(way)])
    return found


def keep(model):
    return model


def compare(expected, actual, tolerance):
    assert len(actual) == len(expected)
    for ours, others in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, others, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if "rainer" in name else ()) for name in USES if name not in ON_RANKS],
)
def test_a_converted_model_does_what_the_table_says(name, one_thread):
    run, result, _, tolerance = USES[name]
    (expected,) = results(run, keep)
    if result.startswith("error"):
        (words,) = re.findall("`(.*)`", result)
        with pytest.raises((RuntimeError, AssertionError, TypeError), match=re.escape(words)):
            results(run, convert)
    elif result == ROUNDINGS:
        (errors,) = results(run, convert)
        assert all(ours < 2 * others for ours, others in zip(errors, expected, strict=True)), (errors, expected)
    else:
        compare(expected, *results(run, convert), tolerance)


@pytest.mark.parametrize("name", ON_RANKS)
@on_each_rank(2)
def test_a_converted_model_on_two_ranks_does_what_the_table_says(name):
    assert USES[name].result == EQUAL
    compare(*results(USES[name].run, keep, convert), 1e-9)


def test_the_nets_of_the_table_are_in_place():
    """Otherwise equal results would say nothing."""
    for model, data in ((convert(mixed()), images), (convert(made(Rows)), rows)):
        train(model, data=data)
        told = report(model).to_dict()["layers"]
        assert sum(layer["in_place"] for layer in told) >= len(told) - 1
    assert isinstance(convert(quantisable()).bn1, InPlaceNorm)


@pytest.mark.skipif(not PAGE.exists(), reason="needs the documentation")
def test_the_documentation_has_the_table_of_uses():
    rows = [f"| {name} | {use.result} | {use.what_to_do or 'nothing'} |" for name, use in USES.items()]
    table = "\n".join(["| use | result | what to do |", "| --- | --- | --- |", *rows])
    section = PAGE.read_text(encoding="utf-8").partition("\n## What was tried\n")[2].partition("\n## ")[0]
    assert "\n".join(line for line in section.splitlines() if line.startswith("|")) == table, table
