"""Builds two libraries; see pyproject.toml for everything else.

``inplace_abn/_kernels.so`` holds the ops. It is made against torch's stable ABI, so that one build serves torch 2.11
and later and every Python; torch loads it. ``inplace_abn._node``, the graph node in C++, is optional, and for the torch
and the Python that it was built with.

``INPLACE_ABN_FORCE_CPU=1`` leaves CUDA out, ``INPLACE_ABN_FORCE_CUDA=1`` insists on it (for instance to cross-compile
on a machine without a GPU), ``TORCH_CUDA_ARCH_LIST`` selects the architectures, ``INPLACE_ABN_NVCC_FLAGS`` adds flags
for nvcc and ``MAX_JOBS`` limits the parallel compilations.
"""

import os
import platform
import subprocess
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import (
    CUDA_HOME,
    BuildExtension,
    CppExtension,
    get_cxx_compiler,
    include_paths,
    library_paths,
)

ROOT = Path(__file__).parent


def is_gcc() -> bool:
    command = [*get_cxx_compiler().split(), "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return "__GNUC__" in macros and "__clang__" not in macros


CPU_FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-g0"]
if platform.machine() == "x86_64":
    # Only where the loader picks a variant with 512-bit registers: compilers use half of them unless told.
    CPU_FLAGS.append("-mprefer-vector-width=512")
if is_gcc():
    # GCC would make two paths of a condition, each with all that follows, and walk both when it vectorises them.
    CPU_FLAGS.append("-fno-thread-jumps")
else:
    # Clang tells of loops that it does not vectorise, those that call exp and log of a double, and of conditions that
    # are combined without a branch.
    CPU_FLAGS += ["-Wno-pass-failed", "-Wno-bitwise-instead-of-logical"]
CUDA_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "--extended-lambda", "-lineinfo"]
# Division and square root of floats to 2 ulp, in few instructions and registers. Doubles stay exact.
CUDA_FLAGS += ["--prec-div=false", "--prec-sqrt=false", "--compiler-options=-fvisibility=hidden"]
# The oldest torch whose stable ABI has all that is called: major and minor in the two highest bytes.
STABLE_ABI = ("TORCH_TARGET_VERSION", "0x020b000000000000")


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

kernel_sources = relative("src/kernels/*.cpp") + relative("src/kernels/cpu/*.cpp")
nvcc_flags = CUDA_FLAGS + os.environ.get("INPLACE_ABN_NVCC_FLAGS", "").split()
# libtorch_cpu exports some of the C++ runtime's symbols in some releases: they are to come from the runtime in all.
macros, libraries, link_flags = [STABLE_ABI], ["stdc++", "torch_cpu"], []
if cuda:
    kernel_sources += relative("src/kernels/cuda/*.cu")
    macros += [("INPLACE_ABN_WITH_CUDA", None)]
    # CUDA's runtime becomes part of the library, so that torch may have another release of it, or none. libtorch, which
    # is empty itself, brings libtorch_cuda where there is one.
    libraries += ["cudart_static", "dl", "pthread", "rt"]
    link_flags += ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-Wl,--exclude-libs,ALL"]
kernels = Extension(
    "inplace_abn._kernels",
    sources=kernel_sources,
    include_dirs=[str(ROOT / "include"), *include_paths("cuda" if cuda else "cpu")],
    library_dirs=library_paths("cuda" if cuda else "cpu"),
    libraries=libraries,
    extra_link_args=link_flags,
    depends=relative("include/inplace_abn/*.h") + relative("src/kernels/**/*.h") + relative("src/kernels/cuda/*.cuh"),
    define_macros=macros,
    extra_compile_args={"cxx": CPU_FLAGS, "nvcc": nvcc_flags},
    language="c++",
)
node = CppExtension(
    "inplace_abn._node",
    sources=relative("src/node/*.cpp"),
    extra_compile_args=["-std=c++20", "-O2", "-fvisibility=hidden", "-Wall", "-g0"],
)


class Build(BuildExtension):
    def get_ext_filename(self, ext_name: str) -> str:
        """Without the tag of a Python ABI where Python has no part in it."""
        name = Path(super().get_ext_filename(ext_name))
        plain = name.with_name(name.name.split(".", 1)[0] + name.suffix)
        return str(plain if plain.stem == "_kernels" else name)


setup(
    ext_modules=[kernels, node],
    cmdclass={"build_ext": Build},
    data_files=[("include/inplace_abn", relative("include/inplace_abn/*.h"))],
)
