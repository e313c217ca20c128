"""What a user sees when the build does not fit."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import inplace_abn
from inplace_abn import _backend

PACKAGE = Path(inplace_abn.__file__).parent


def import_in(folder):
    command = [sys.executable, "-c", "import inplace_abn"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(folder)}, check=False
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
