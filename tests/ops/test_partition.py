"""How the blocks of a CUDA launch share a tensor is plain arithmetic, which needs no device."""

import os
import subprocess
from pathlib import Path

import pytest
from cases import needs_compiler
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]


@needs_compiler
@pytest.mark.skipif(os.name != "posix", reason="needs a compiler that takes Unix options")
def test_every_element_is_visited_once(tmp_path):
    program = tmp_path / "partition_walk"
    source = Path(__file__).with_name("partition_walk.cpp")
    includes = [ROOT / "include", *cpp_extension.include_paths()]
    compiler = [*cpp_extension.get_cxx_compiler().split(), "-std=c++20", "-O2", *(f"-I{path}" for path in includes)]
    subprocess.run([*compiler, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
