"""What a user's tools see of the public names: mypy in its strictest mode, help(), and what an import brings along."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import fresh
import pytest

import inplace_abn
import inplace_abn.memory

ROOT = Path(inplace_abn.__file__).parents[1]
NAMES = {name: getattr(inplace_abn, name) for name in [*inplace_abn.__all__, "inplace_abn"]}
NAMES |= {f"memory.{name}": getattr(inplace_abn.memory, name) for name in inplace_abn.memory.__all__}

USER = """
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import assert_type

import inplace_abn
from inplace_abn import (
    ABN,
    InPlaceABN,
    InPlaceABNSync,
    InPlaceGroupNorm,
    InPlaceInstanceNorm,
    Report,
    Verification,
    inplace_abn as abn,
    memory,
)


def build(group: ProcessGroup | None) -> nn.Sequential:
    assert_type(inplace_abn.active_group(True), ProcessGroup)
    layers: list[nn.Module] = [
        ABN(8, activation="elu", activation_param=0.5, device="cpu", dtype=torch.float64),
        InPlaceABN(8, 1e-3, momentum=None, signed_weight=True, overwrite_input=False, guard_interval=10),
        InPlaceABNSync(8, group=group),
        InPlaceGroupNorm(2, 8, affine=False),
        InPlaceInstanceNorm(8, affine=True),
    ]
    model = nn.Sequential(*layers)
    assert_type(InPlaceABNSync.convert_sync_abn(model, group), nn.Module)
    inplace_abn.set_active_group(model, group)
    assert_type(inplace_abn.set_guard(model, interval=0, threshold=1e-3, on_untrusted="warn"), nn.Module)
    return model


def functions(x: Tensor, weight: Tensor | None, group: ProcessGroup | None) -> list[Tensor]:
    module = InPlaceABN(8)
    assert_type(module(x, x), Any)
    assert_type(module.forward(x, residual=x), Tensor)
    assert_type(module.weight, nn.Parameter | None)
    assert_type(module.activation, str)
    return [
        abn(x, weight, None, None, None, momentum=0.1, residual=x),
        inplace_abn.inplace_abn_sync(x, weight, None, None, None, group=group),
        inplace_abn.inplace_group_norm(x, 2, weight, overwrite_input=False),
        inplace_abn.inplace_instance_norm(x, weight, None, None, None, training=False),
    ]


def wanted(module: nn.Module, name: str) -> bool:
    return "head" not in name and not isinstance(module, nn.GroupNorm)


def convert(model: nn.Module, x: Tensor, checkpoint: Mapping[str, Any]) -> bool:
    converted = inplace_abn.convert(model, sync=False, filter_fn=wanted)
    report: Report = inplace_abn.report(converted)
    for layer in inplace_abn.analyze(model, x, scale=2).in_place:
        print(layer.name, layer.kind, layer.follows, layer.why, layer.bytes_saved or 0 + report.bytes_saved)
    inplace_abn.register_norm(nn.RMSNorm, "rms", weight="weight", bias="bias", offset=0.0, eps="eps")
    print(report, report.to_dict()["layers"], report.table(80), report.unsupported, report.built)
    found: Verification = inplace_abn.verify(model, converted, x, tolerance=1e-9)
    inplace_abn.load_public_state_dict(converted, checkpoint, strict=False, layers=["1"])
    inplace_abn.revert(converted, nn.BatchNorm3d, nn.InstanceNorm3d)
    return found.ok and bool(found) and found.errors["loss"] <= found.accepted("loss")


def measure(x: Tensor) -> list[float]:
    model = memory.load_model("torchvision.models:resnet18", {"num_classes": 2})
    both: memory.MemoryReport = memory.memory_report(model, torch.zeros(memory.parse_shape("1x3x8x8")), converted=False)
    one: memory.Usage = memory.measure(model, x)
    memory.check_plot("a.png")
    memory.save_plot(both, "a.png", title="a")
    memory.draw_timeline(None, both)
    memory.main(["torchvision.models:resnet18", "--input", "1x3x8x8"])
    assert_type(both.norms, Report | None)
    return [one.held, one.peak, one.backward_start, *(bytes for _, bytes in one.timeline), both.before.held]
"""


@pytest.mark.slow
def test_a_file_that_uses_every_public_name_passes_mypy_in_strict_mode(tmp_path):
    pytest.importorskip("mypy")
    tree = ast.parse(USER)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert used >= {name.rpartition(".")[2] for name in NAMES}
    (tmp_path / "user.py").write_text(USER)
    cache = Path(__file__).parents[2] / ".mypy_cache" / "user"
    options = ["--strict", "--config-file", "", "--follow-imports", "silent", "--cache-dir", str(cache)]
    # mypy finds an editable installation by this variable only, and refuses site-packages there.
    paths = {} if "site-packages" in ROOT.parts else {"MYPYPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "user.py"],
        cwd=tmp_path,
        env=os.environ | paths,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("name", NAMES)
def test_help_tells_what_a_public_name_takes_and_returns(name):
    """Fields of reports were explained where help() does not show it."""
    found = NAMES[name]
    text = inspect.getdoc(found)
    assert text
    assert max(map(len, text.splitlines())) <= 120
    if inspect.isfunction(found) and "Args:" in text:
        assert all(parameter in text for parameter in inspect.signature(found).parameters)
    if inspect.isclass(found):
        members = {key: member for key, member in vars(found).items() if not key.startswith("_")}
        assert all(inspect.getdoc(m) for m in members.values() if callable(m) or isinstance(m, property))
        for field in getattr(found, "__dataclass_fields__", ()):
            assert f"    {field}: " in text


def test_an_import_is_silent_and_brings_no_heavy_modules_along():
    heavy = {
        "sympy",
        "numpy",
        "networkx",
        "torch._dynamo",
        "torch._inductor",
        "torch.onnx",
        "torch.testing",
        "matplotlib",
    }
    code = f"""
import sys, torch, warnings
before = set(sys.modules)
warnings.simplefilter("error")
import inplace_abn
brought = set(sys.modules) - before
print(sorted(brought & {heavy}), sum(not name.startswith("inplace_abn") for name in brought) < 10)
"""
    result = fresh.run_code(code)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["[]", "True"]
