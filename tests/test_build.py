"""What a user sees when the build does not fit."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from torch.utils.cpp_extension import get_cxx_compiler

import inplace_abn
from inplace_abn import _backend

PACKAGE = Path(inplace_abn.__file__).parent


# Without the finders that an editable installation puts before the path.
IMPORT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path.insert(0, ".")
import inplace_abn
"""


def import_in(folder):
    return subprocess.run([sys.executable, "-c", IMPORT], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def copy_of_sources(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "inplace_abn", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_a_source_tree_that_was_never_built_names_the_command(copy_of_sources):
    result = import_in(copy_of_sources)
    assert result.returncode != 0
    assert "never built" in result.stderr
    assert "pip install --no-build-isolation -e ." in result.stderr


def test_a_module_that_cannot_be_loaded_names_the_cause_and_the_command(copy_of_sources):
    name = Path(_backend.__file__).name
    (copy_of_sources / "inplace_abn" / name).write_bytes(b"\x7fELF of another torch")
    result = import_in(copy_of_sources)
    assert "for another torch or Python" in result.stderr
    assert "Build it again: `pip install" in result.stderr


def test_a_build_for_another_torch_names_both_versions(copy_of_sources):
    (copy_of_sources / "inplace_abn" / "_backend.py").write_text('torch_version = "1.4.2"\n')
    result = import_in(copy_of_sources)
    assert "ImportError" in result.stderr
    assert "built for torch 1.4.2 but torch" in result.stderr


def test_source_distribution_holds_all_that_a_build_needs(tmp_path):
    root = PACKAGE.parent
    if not (root / "setup.py").exists():
        pytest.skip("not in a source tree")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    needed = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "inplace_abn/py.typed", "inplace_abn/_backend.pyi"}
    for folder, pattern in [
        ("include", "*.h"),
        ("src", "*.cpp"),
        ("src", "*.h"),
        ("src", "*.cu*"),
        ("inplace_abn", "*.py"),
    ]:
        needed |= {str(path.relative_to(root)) for path in (root / folder).rglob(pattern)}
    assert needed <= names


def compiler_is_gcc():
    command = [*get_cxx_compiler().split(), "--version"]
    return "clang" not in subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.skipif(sys.platform != "linux" or not compiler_is_gcc(), reason="threads are used with GCC on Linux only")
def test_cpu_kernels_use_torchs_threads():
    assert _backend.with_openmp
    code = "import inplace_abn; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    libraries = {Path(line.split()[-1]).name for line in maps.splitlines() if ".so" in line}
    assert len([name for name in libraries if name.startswith(("libgomp", "libomp", "libiomp"))]) == 1
