"""A converted model trains as the original, whatever a random program does with the outputs of its norms."""

import copy

import pytest
import torch
from random_programs import CONVOLUTIONS, SHAPE, drawn, reduced
from training import differences, trained

from inplace_abn import convert, revert, verify
from inplace_abn.memory import measure

SEEDS = 240
SHARES = 12
STEPS = 3


def results(net):
    """What `trained` gives, and what the program has seen. Layouts belong to it."""
    found = trained(net, torch.empty(SHAPE), STEPS)
    found |= {f"seen {i}": torch.as_tensor(value) for i, value in enumerate(net.seen)}
    return found | {f"layout of {name}": torch.tensor(t.stride()) for name, t in found.items() if "output" in name}


def sensitivity(net, expected):
    """How far the results move if the parameters move by a rounding."""
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1 + 1e-15 * torch.randn_like(p))
    return max(differences(results(net), expected).values())


def fault(program):
    """What is wrong with the converted program, in words; None if torch itself has an error."""
    torch.manual_seed(0)
    net = copy.deepcopy(program).double()
    ours, moved = convert(copy.deepcopy(net)), copy.deepcopy(net)
    try:
        expected = results(net)
    except Exception:
        return None
    try:
        actual = results(ours)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if actual.keys() != expected.keys():
        return "it sees other values"
    errors = differences(actual, expected)
    name = max(errors, key=errors.get)
    if errors[name] < 1e-7 or errors[name] < 1e3 * sensitivity(moved, expected):
        return ""
    return f"{name} is different"


@pytest.mark.parametrize("share", range(SHARES))
def test_a_converted_program_trains_as_the_original(share):
    check(range(share, SEEDS, SHARES), None)


@pytest.mark.parametrize("share", range(4))
def test_a_converted_program_of_convolutions_trains_as_the_original(share):
    """Functions activate what convolutions return."""
    check(range(1000 + 30 * share, 1030 + 30 * share), CONVOLUTIONS)


def check(seeds, norms_of):
    faults = {seed: fault(drawn(seed, norms_of)) for seed in seeds}
    for seed, found in faults.items():
        if found:
            program = reduced(drawn(seed, norms_of), lambda other: bool(fault(other)))
            pytest.fail(f"the program of seed {seed}: {found}\n\n{program}\n\n{fault(program)}")
    assert sum(found is not None for found in faults.values()) >= len(seeds) // 3


@pytest.mark.parametrize("seed", range(0, SEEDS, 8))
def test_a_converted_program_can_be_verified_and_reverted_and_holds_no_more(seed):
    program, x = drawn(seed), torch.randn(SHAPE)
    if fault(program) is None:
        pytest.skip("an error of torch")
    converted = convert(copy.deepcopy(program))
    assert verify(program, converted, x, tolerance=1e-5)
    assert verify(program, revert(copy.deepcopy(converted)), x, tolerance=1e-9)
    assert measure(converted, x).held <= 1.01 * measure(program, x).held
