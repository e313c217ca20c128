"""What a user sees when the build does not fit."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import check_symbols
import pytest
import torch

import inplace_abn
from inplace_abn import functions

PACKAGE = Path(inplace_abn.__file__).parent
KERNELS = PACKAGE / "_kernels.so"


# Without the finders that an editable installation puts before the path.
IMPORT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path.insert(0, ".")
"""


def import_in(folder, code="import inplace_abn"):
    return subprocess.run(
        [sys.executable, "-c", IMPORT + code], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture
def copy_of_sources(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "inplace_abn", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_a_source_tree_that_was_never_built_names_the_command(copy_of_sources):
    result = import_in(copy_of_sources)
    assert result.returncode != 0
    assert "never built" in result.stderr
    assert "pip install --no-build-isolation -e ." in result.stderr


def test_kernels_that_cannot_be_loaded_name_the_cause_and_the_command(copy_of_sources):
    (copy_of_sources / "inplace_abn" / KERNELS.name).write_bytes(b"\x7fELF of another platform")
    result = import_in(copy_of_sources)
    assert "cannot be loaded under torch" in result.stderr
    assert "again from their source tree: `pip install" in result.stderr


TRAIN = """
import logging
logging.basicConfig(level=logging.INFO)
import inplace_abn
import torch
x = torch.ones(4, 3, 5, requires_grad=True)
z = inplace_abn.InPlaceABN(3)(x * torch.rand(4, 3, 5))
z.square().sum().backward()
print(type(z.grad_fn).__name__, x.grad.isfinite().all().item())
"""


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "cannot be loaded"),
        ({"_node.py": 'torch_version = "1.4.2"\n'}, "was built for torch 1.4.2"),
        ({"_node.py": 'raise ImportError("undefined symbol")\n'}, "undefined symbol"),
    ],
    ids=["none", "another torch", "broken"],
)
def test_without_the_node_there_is_one_line_of_information_and_no_feature_less(files, reason, copy_of_sources):
    shutil.copy(KERNELS, copy_of_sources / "inplace_abn")
    for name, content in files.items():
        (copy_of_sources / "inplace_abn" / name).write_text(content)
    result = import_in(copy_of_sources, TRAIN)
    assert result.stdout.split() == ["InPlaceABNFunctionBackward", "True"]
    told = [line for line in result.stderr.splitlines() if "inplace_abn" in line]
    assert len(told) == 1
    assert reason in told[0]


@pytest.mark.skipif(functions._node is None, reason="built without the node")
def test_the_environment_turns_the_node_off():
    for value, name in (("0", "InPlaceABNFunctionBackward"), ("1", "CppFunction")):
        environment = os.environ | {"INPLACE_ABN_NODE": value}
        result = subprocess.run([sys.executable, "-c", TRAIN], env=environment, capture_output=True, text=True)
        assert result.stdout.split() == [name, "True"]
        assert result.stderr == ""


def test_kernels_need_nothing_of_torch_but_its_stable_abi(capsys):
    if shutil.which("nm") is None or sys.platform != "linux":
        pytest.skip("needs nm and readelf")
    assert check_symbols.main(str(KERNELS)) == 0
    printed = capsys.readouterr().out
    assert "aoti_torch_get_data_ptr" in printed or "torch_get_const_data_ptr" in printed
    assert "torch_parallel_for" in printed


def test_symbols_outside_of_the_stable_abi_are_found(capsys):
    if shutil.which("nm") is None or sys.platform != "linux":
        pytest.skip("needs nm and readelf")
    assert check_symbols.main(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so")) == 1
    printed = capsys.readouterr().out
    assert "Py" in printed
    assert "at::Tensor" in printed or "c10::" in printed
    assert "libc10.so" in printed


def test_source_distribution_holds_all_that_a_build_needs(tmp_path):
    root = PACKAGE.parent
    if not (root / "setup.py").exists():
        pytest.skip("not in a source tree")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    needed = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "inplace_abn/py.typed", "inplace_abn/_node.pyi"}
    for folder, pattern in [
        ("include", "*.h"),
        ("src", "*.cpp"),
        ("src", "*.h"),
        ("src", "*.cu*"),
        ("inplace_abn", "*.py"),
    ]:
        needed |= {str(path.relative_to(root)) for path in (root / folder).rglob(pattern)}
    assert needed <= names


@pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux's list of mapped files")
def test_the_only_pool_of_threads_is_torchs():
    code = "import inplace_abn; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    libraries = {Path(line.split()[-1]).name for line in maps.splitlines() if ".so" in line}
    assert KERNELS.name in libraries
    assert len([name for name in libraries if name.startswith(("libgomp", "libomp", "libiomp"))]) == 1
