"""Builds the extension ``inplace_abn._backend``; see pyproject.toml for everything else.

``INPLACE_ABN_FORCE_CPU=1`` leaves CUDA out, ``INPLACE_ABN_FORCE_CUDA=1`` insists on it (for instance to cross-compile
on a machine without a GPU), ``TORCH_CUDA_ARCH_LIST`` selects the architectures, ``INPLACE_ABN_NVCC_FLAGS`` adds flags
for nvcc and ``MAX_JOBS`` limits the parallel compilations.
"""

import os
import platform
import subprocess
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import (
    CUDA_HOME,
    BuildExtension,
    CppExtension,
    CUDAExtension,
    get_cxx_compiler,
)

ROOT = Path(__file__).parent


def is_gcc() -> bool:
    command = [*get_cxx_compiler().split(), "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return "__GNUC__" in macros and "__clang__" not in macros


CPU_FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-g0"]
gcc = is_gcc()
threads = gcc and platform.system() == "Linux"
if threads:
    # at::parallel_for is a template with OpenMP pragmas. The runtime is the one that torch has loaded, so nothing is
    # linked: a second one would bring a second pool of threads. It is GCC's, which code made by clang cannot use.
    CPU_FLAGS.append("-fopenmp")
if platform.machine() == "x86_64":
    # Only where the loader picks a variant with 512-bit registers: compilers use half of them unless told.
    CPU_FLAGS.append("-mprefer-vector-width=512")
if gcc:
    # GCC would make two paths of a condition, each with all that follows, and walk both when it vectorises them.
    CPU_FLAGS.append("-fno-thread-jumps")
else:
    # Clang tells of loops that it does not vectorise, those that call exp and log of a double, and of conditions that
    # are combined without a branch.
    CPU_FLAGS += ["-Wno-pass-failed", "-Wno-bitwise-instead-of-logical"]
CUDA_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "--extended-lambda", "-lineinfo"]
# Division and square root of floats to 2 ulp, in few instructions and registers. Doubles stay exact.
CUDA_FLAGS += ["--prec-div=false", "--prec-sqrt=false"]


def want_cuda() -> tuple[bool, str]:
    """Whether to build the CUDA backend, and the reason in words."""
    force_cpu = os.environ.get("INPLACE_ABN_FORCE_CPU") == "1"
    force_cuda = os.environ.get("INPLACE_ABN_FORCE_CUDA") == "1"
    if force_cpu and force_cuda:
        raise SystemExit("inplace_abn: INPLACE_ABN_FORCE_CPU=1 and INPLACE_ABN_FORCE_CUDA=1 contradict each other")
    if force_cpu:
        return False, "INPLACE_ABN_FORCE_CPU=1"
    missing = "torch was built without CUDA" if torch.version.cuda is None else None
    if missing is None and CUDA_HOME is None:
        missing = "no CUDA toolkit found (set CUDA_HOME)"
    if force_cuda and missing is not None:
        raise SystemExit(f"inplace_abn: INPLACE_ABN_FORCE_CUDA=1, but {missing}")
    return missing is None, missing or f"torch has CUDA {torch.version.cuda}, toolkit at {CUDA_HOME}"


def relative(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


cuda, reason = want_cuda()
archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "those of the visible GPUs") if cuda else "none"
print(f"inplace_abn: building for {'CPU and CUDA' if cuda else 'CPU'} ({reason})")
print(f"inplace_abn: torch {torch.__version__}, CUDA archs: {archs}")
print(f"inplace_abn: CPU kernels use {'several threads' if threads else 'one thread, for want of GCC on Linux'}")

sources = relative("src/*.cpp") + relative("src/cpu/*.cpp")
nvcc_flags = CUDA_FLAGS + os.environ.get("INPLACE_ABN_NVCC_FLAGS", "").split()
extension = (CUDAExtension if cuda else CppExtension)(
    "inplace_abn._backend",
    sources=sources + (relative("src/cuda/*.cu") if cuda else []),
    include_dirs=[str(ROOT / "include")],
    depends=relative("include/inplace_abn/*.h") + relative("src/*/*.h") + relative("src/*/*.cuh"),
    define_macros=[("INPLACE_ABN_WITH_CUDA", None)] if cuda else [],
    extra_compile_args={"cxx": CPU_FLAGS, "nvcc": nvcc_flags} if cuda else CPU_FLAGS,
)

node = CppExtension(
    "inplace_abn._node",
    sources=["src/node/node.cpp"],
    extra_compile_args=["-std=c++20", "-O2", "-fvisibility=hidden", "-Wall", "-g0"],
)

setup(
    ext_modules=[extension, node],
    cmdclass={"build_ext": BuildExtension},
    data_files=[("include/inplace_abn", relative("include/inplace_abn/*.h"))],
)
