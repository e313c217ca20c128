"""What setup.py decides about CUDA, by a stand-in for nvcc, and how the CUDA sources are divided."""

import os
import re

import fresh
import pytest

NVCC = """#!/bin/sh
case "$*" in
  --list-gpu-code) echo sm_75; echo sm_80; echo sm_90;;
  --dryrun*) echo '#$ TOP={home}/bin/..' >&2; echo '#$ gcc -D__CUDACC_VER_MAJOR__={major} -E' >&2;;
esac
"""
BROKEN_NVCC = "#!/no/such/shell\n"
FAILING_NVCC = "#!/bin/sh\necho nvcc: not found >&2; exit 127\n"
SETUP = """
import os, runpy, sys, torch
for name in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "INPLACE_ABN_FORCE_CPU", "INPLACE_ABN_FORCE_CUDA"):
    os.environ.pop(name, None)
os.environ.update({environment})
os.chdir({root!r})
torch.version.cuda = "13.0"
from torch.utils import cpp_extension
cpp_extension.CUDA_HOME = cpp_extension._find_cuda_home()
sys.argv = ["setup.py", "--version"]
sys.path.insert(0, ".")
runpy.run_path("setup.py")
if "TORCH_CUDA_ARCH_LIST" in os.environ:
    print("flags:", len(cpp_extension._get_cuda_arch_flags()))
"""


@pytest.fixture
def setup_with(source_tree, tmp_path):
    """A function of an nvcc, as a shell script. It runs setup.py with that one on the path, a torch for CUDA 13.0, and
    no visible GPU. The toolkit is the folder ``toolkit``, and the nvcc on the path is in another one."""

    def run_setup(nvcc, **environment):
        for path in (tmp_path / "bin/nvcc", tmp_path / "toolkit/bin/nvcc"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(nvcc.format(home=tmp_path / "toolkit", major=13))
            path.chmod(0o755)
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": path} | environment
        return fresh.run_code(SETUP.format(root=str(source_tree), environment=environment))

    return run_setup


def told_of(result):
    return [line.removeprefix("inplace_abn: ") for line in result.stdout.splitlines() if line.startswith("inplace_abn")]


def test_where_nvcc_exists_and_no_gpu_is_visible_one_line_says_what_is_compiled_and_what_to_set(setup_with):
    """torch's list of architectures is empty there, and the installation died with an IndexError after 80 s."""
    for nothing in ({}, {"TORCH_CUDA_ARCH_LIST": ""}, {"TORCH_CUDA_ARCH_LIST": "native"}):
        result = setup_with(NVCC, **nothing)
        (line,) = [line for line in told_of(result) if "CUDA archs" in line]
        assert "CUDA archs: 7.5 8.0 9.0+PTX, as no GPU is visible; set TORCH_CUDA_ARCH_LIST to" in line
        assert line.endswith("or INPLACE_ABN_FORCE_CPU=1 for no CUDA kernels")
        assert "flags: 4\n" in result.stdout
    result = setup_with(NVCC, TORCH_CUDA_ARCH_LIST="8.6")
    assert told_of(result)[1].endswith("CUDA archs: 8.6")
    assert "flags: 1\n" in result.stdout
    result = setup_with(NVCC, INPLACE_ABN_FORCE_CPU="1")
    assert told_of(result)[0] == "building for CPU (INPLACE_ABN_FORCE_CPU=1)"
    assert told_of(result)[1].endswith("CUDA archs: none")


def test_headers_and_libraries_are_those_of_the_toolkit_that_nvcc_names(setup_with, tmp_path):
    """Where the nvcc on the path was a wrapper, the linker did not find CUDA's runtime, after minutes."""
    assert (
        told_of(setup_with(NVCC))[0]
        == f"building for CPU and CUDA (torch has CUDA 13.0, toolkit at {tmp_path / 'toolkit'})"
    )


@pytest.mark.parametrize(
    ("nvcc", "reason"),
    [
        (
            NVCC.replace("{major}", "12"),
            "nvcc is of CUDA 12, and torch of 13.0 (set CUDA_HOME to one like torch's)",
        ),
        (BROKEN_NVCC, "nvcc does not run (set CUDA_HOME to a toolkit that does)"),
        (FAILING_NVCC, "nvcc does not run (set CUDA_HOME to a toolkit that does)"),
    ],
    ids=["of another CUDA", "cannot start", "fails"],
)
def test_with_an_nvcc_that_torch_cannot_use_the_build_is_for_the_cpu_and_one_line_says_why(nvcc, reason, setup_with):
    """torch raised an error with a traceback."""
    result = setup_with(nvcc)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(rf"building for CPU \(/\S+/{re.escape(reason)}\)", told_of(result)[0])
    result = setup_with(nvcc, INPLACE_ABN_FORCE_CUDA="1")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    (line,) = re.findall("inplace_abn: .*", result.stderr)
    assert line.startswith("inplace_abn: INPLACE_ABN_FORCE_CUDA=1, but /")
    assert line.endswith(reason)


def test_what_is_compiled_for_each_type_by_itself_is_compiled_for_all_types(source_tree):
    header = (source_tree / "include/inplace_abn/kernels.h").read_text()
    types = set(re.findall(r"INSTANTIATE\(([\w:]+)\) *\\?\n", header.split("#else")[1]))
    assert len(types) == 4
    kernels = source_tree / "src/kernels/cuda"
    compiled = {}
    for path in kernels.glob("by_type/*.cu"):
        type_, source = re.search(r'#define INPLACE_ABN_TYPE (\S+)\n#include "../(\w+).cu"', path.read_text()).groups()
        assert path.stem.startswith(f"{source}_")
        compiled.setdefault(source, []).append(type_)
    assert all((kernels / f"{source}.cu").exists() for source in compiled)
    assert all(set(found) == types and len(found) == 4 for found in compiled.values())
