"""Calibration: the first graph shows the reference counts of a sole holder, wherever that graph is built."""

import sys
import threading
from contextlib import contextmanager, nullcontext

import fresh
import pytest
import torch
import torch._dynamo.compiled_autograd
from buffers import after, identity_hooks, keep_gradient, kept_gradients, leaf, used_by
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from inplace_abn import inplace_abn
from inplace_abn.autograd import nodes, ownership


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class PassOn(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PassOnFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def traced():
    """A debugger that looks at all local variables."""

    def look(frame, event, argument):
        frame.f_locals  # noqa: B018
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(None)


SURROUNDINGS = {
    "nothing": nullcontext,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta device": lambda: torch.device("meta"),
    "identity hooks": identity_hooks,
    "save_on_cpu": save_on_cpu,
    "hooks disabled": lambda: torch.autograd.graph.disable_saved_tensors_hooks("disabled"),
    "fake tensors": FakeTensorMode,
    "dispatch mode": PassOn,
    "function mode": PassOnFunctions,
    "default dtype half": lambda: default_dtype(torch.half),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype double": lambda: default_dtype(torch.double),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu"),
    "debugger": traced,
    "compiled autograd": lambda: torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
}


def forget():
    ownership.set_sole_holders(None, None)
    if nodes.cpp is not None:
        nodes.cpp.set_sole_holders(None, None)
    ownership._calibrated = False


def calibrate():
    ownership.calibrate(nodes.count_sole_holders)


def sole():
    return ownership._sole_gradient, ownership._sole_output


@pytest.fixture
def uncalibrated(monkeypatch):
    calibrate()
    before = sole()
    forget()
    ownership._calibrated = True
    assert used_by(after(lambda z: z * 2)("cpu")) == ["fresh"]
    assert used_by(after(lambda z: z)("cpu")) == ["fresh"]
    forget()
    yield
    monkeypatch.undo()
    forget()
    calibrate()
    assert sole() == before


def check_reuse():
    assert all(sole())
    assert used_by(after(lambda z: z * 2)("cpu")) == ["dz"]
    assert used_by(after(lambda z: z)("cpu")) == ["z"]
    assert used_by(after(lambda z: z * 2, watch=keep_gradient)("cpu")) == ["z"]
    assert used_by(after(lambda z: z * 2, lambda z: z, keep_gradient)("cpu")) == ["fresh"]
    kept_gradients.clear()


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_calibration_does_not_depend_on_where_it_happens(surroundings, uncalibrated):
    with SURROUNDINGS[surroundings]():
        calibrate()
    check_reuse()


def test_calibration_in_a_thread_in_a_backward_and_in_transforms(uncalibrated, monkeypatch):
    def again(*_):
        forget()
        calibrate()

    thread = threading.Thread(target=again)
    thread.start()
    thread.join()
    check_reuse()
    y = leaf() * 2
    y.register_hook(again)
    y.sum().backward()
    check_reuse()
    torch.func.grad(lambda x: (again(), x.sum())[1])(torch.ones(3))
    check_reuse()
    torch.func.vmap(lambda x: (again(), x)[1])(torch.ones(3))
    check_reuse()


def test_a_calibration_that_cannot_tell_leaves_reuse_off(uncalibrated, monkeypatch):
    monkeypatch.setattr(nodes, "cpp", None)
    monkeypatch.setattr(ownership, "last_counts", lambda: ((1, 1, 1), 1))
    calibrate()
    assert ownership._sole_gradient is None
    assert ownership._sole_output is None
    assert used_by(after(lambda z: z * 2)("cpu")) == ["fresh"]
    assert used_by(after(lambda z: z)("cpu")) == ["fresh"]


def held_gradients_keep_their_content():
    for times in (1, 2, 3):
        for hook in (lambda held, n: lambda g: held.extend([g] * n), lambda held, n: [held.append][0]):
            held = []
            a = leaf("cpu", (4, 3))
            z = inplace_abn(a * 1.0, None, None, None, None)
            z.register_hook(hook(held, times))
            loss = z.sin().sum()
            expected = z.detach().cos()
            del z
            loss.backward()
            assert held
            for gradient in held:
                assert torch.equal(gradient, expected)


def node_of_this_test():
    """The environment of a process whose graph nodes are of the kind that this test is run with."""
    return {"INPLACE_ABN_NODE": "0" if nodes.cpp is None else "1"}


def after_a_compilation_that_failed():
    """After this, Python calls have one reference more in some releases, because the compiler goes on evaluating
    frames."""

    def refused(x):
        return inplace_abn(x, None, None, None, None)

    with pytest.raises(RuntimeError, match="leaf"):
        torch.compile(refused, backend="eager", fullgraph=True)(leaf())
    held_gradients_keep_their_content()
    assert used_by(after(lambda z: z)("cpu")) == ["z"]


def test_references_of_a_compiler_that_evaluates_frames_are_no_holders():
    # The compiler goes on until the process ends, so this needs a process of its own.
    result = fresh.run(after_a_compilation_that_failed, **node_of_this_test())
    assert result.returncode == 0, result.stderr


class KeepsLocals:
    """A debugger that holds the variables of the last call that it saw, of any function or of ``function`` alone."""

    def __init__(self, function=None):
        self.function, self.last = function, None

    def __call__(self, frame, event, argument):
        if event == "call" and self.function in (None, frame.f_code.co_name):
            self.last = frame.f_locals, dict(frame.f_locals)
        return self


WATCHED = [None, "backward", "apply", "_references", "owns_gradient", "<lambda>", "look"]


@pytest.mark.parametrize("function", WATCHED)
@pytest.mark.parametrize("kind", ["settrace", "setprofile"])
def test_a_calibration_that_a_debugger_watched_takes_no_held_gradient_for_unheld(kind, function, uncalibrated):
    tracer = KeepsLocals(function)
    getattr(threading, kind)(tracer)
    try:
        calibrate()
    finally:
        getattr(threading, kind)(None)
    tracer.last = None
    held_gradients_keep_their_content()


@pytest.mark.parametrize("function", WATCHED)
@pytest.mark.parametrize("kind", ["settrace", "setprofile"])
def test_under_a_debugger_held_gradients_keep_their_content(kind, function):
    getattr(sys, kind)(KeepsLocals(function))
    try:
        held_gradients_keep_their_content()
    finally:
        getattr(sys, kind)(None)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of Python 3.12")
def test_calibration_waits_until_no_tool_monitors_the_interpreter(uncalibrated):
    sys.monitoring.use_tool_id(3, "holder")
    try:
        calibrate()
        assert sole() == (None, None)
        held_gradients_keep_their_content()
    finally:
        sys.monitoring.free_tool_id(3)
    calibrate()
    check_reuse()


def test_a_node_that_is_called_directly_leaves_what_it_was_given_and_its_output_alone():
    for call in (lambda node, held: node.apply(*held), lambda node, held: node(*held)):
        a = leaf("cpu", (4, 3))
        z = inplace_abn(a * 1.0, None, None, None, None)
        node = z.grad_fn
        held = (torch.randn(4, 3, dtype=torch.float64),)
        before = held[0].clone()
        del z
        try:
            with torch.no_grad():
                first = call(node, held)
                second = call(node, held)
            torch.testing.assert_close(first[0], second[0])
        except (AttributeError, TypeError):  # A node in Python cannot be called, and a node in C++ has no apply.
            pass
        except RuntimeError as error:
            assert "a second time" in str(error)
        assert torch.equal(held[0], before)


IMPORT_IN_INFERENCE_MODE = """
import torch
with torch.inference_mode(), torch.device("meta"):
    import inplace_abn
a = torch.randn(4, 3, 5, requires_grad=True)
z = inplace_abn.InPlaceABN(3)(a * 2)
z.square().sum().backward()
from inplace_abn.autograd import ownership
assert ownership._sole_gradient and ownership._sole_output
assert a.grad.isfinite().all()
"""

FORK_AFTER_IMPORT = """
import os, threading
import inplace_abn
import torch
assert threading.active_count() == 1
with torch.no_grad():
    inplace_abn.InPlaceABN(3)(torch.ones(2, 3))
child = os.fork()
if child == 0:
    a = torch.randn(4, 3, 5, requires_grad=True)
    inplace_abn.InPlaceABN(3)(a * 2).square().sum().backward()
    os._exit(0 if a.grad.isfinite().all() else 1)
assert os.waitpid(child, 0)[1] == 0
from inplace_abn.autograd import ownership
assert not ownership._calibrated
"""

DISABLED = """
import torch
from inplace_abn import ABN, InPlaceABN, InPlaceABNSync
torch.manual_seed(0)
a = torch.randn(4, 3, 5, dtype=torch.float64)
for module in (InPlaceABN, InPlaceABNSync):
    results = []
    for norm in (module(3, signed_weight=True), ABN(3)):
        x = torch.sigmoid(a.clone().requires_grad_())
        x.retain_grad()
        before = x.detach().clone()
        z = norm.double()(x)
        assert torch.equal(x.detach(), before) and z is not x
        z.pow(2).sum().backward()
        results.append([z, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)
"""


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        (IMPORT_IN_INFERENCE_MODE, {}),
        (IMPORT_IN_INFERENCE_MODE, {"INPLACE_ABN_NODE": "0"}),
        (FORK_AFTER_IMPORT, {}),
        (DISABLED, {"INPLACE_ABN_DISABLE": "1"}),
    ],
)
def test_in_a_process_of_its_own(code, environment):
    result = fresh.run_code(code, **node_of_this_test() | environment)
    assert result.returncode == 0, result.stderr
