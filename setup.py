"""Builds the libraries; see pyproject.toml for everything else.

``inplace_abn/_kernels.so`` holds the ops. It is built against torch's stable ABI, so that one build serves torch 2.11
and later and every Python. torch loads it. ``inplace_abn._node`` is the graph node in C++. It works with the torch and
the Python that it was built with only. It is optional: if it does not compile, the build says so in one line and goes
on. With ``INPLACE_ABN_NODE_HEADERS``, the include folders of some releases of torch, the build makes instead a library
``inplace_abn/_node_MAJOR_MINOR.so`` for each of them, which serves every Python.

``INPLACE_ABN_FORCE_CPU=1`` leaves CUDA out. ``INPLACE_ABN_FORCE_CUDA=1`` insists on it, for instance to cross-compile
on a machine without a GPU. ``INPLACE_ABN_NODE=0`` leaves the node out. ``INPLACE_ABN_PORTABLE=1`` makes kernels that
need no newer C and C++ runtimes than those of manylinux_2_28. ``TORCH_CUDA_ARCH_LIST`` selects the architectures; by
default those of the visible GPUs, or all usual ones if there is none. ``INPLACE_ABN_NVCC_FLAGS`` adds flags for nvcc.
``MAX_JOBS`` limits the parallel compilations. Without an nvcc that runs and is of torch's CUDA, CUDA is left out.
"""

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import build_backend  # isort: skip. It says what is missing, which the next imports may need.
import torch
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from torch.utils import cpp_extension

ROOT = Path(__file__).parent


def is_gcc() -> bool:
    command = [*cpp_extension.get_cxx_compiler().split(), "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return "__GNUC__" in macros and "__clang__" not in macros


CPU_FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-g0"]
if platform.machine() == "x86_64":
    # Unless they are told, compilers use half of a 512-bit register. This affects only the variants for processors that
    # have such registers.
    CPU_FLAGS.append("-mprefer-vector-width=512")
if is_gcc():
    # GCC would copy the code after a condition into both of its paths, and run both paths when it vectorises them.
    CPU_FLAGS.append("-fno-thread-jumps")
else:
    # Clang warns of loops that it does not vectorise, which are those that call exp and log of a double. It also warns
    # of conditions that are combined without a branch.
    CPU_FLAGS += ["-Wno-pass-failed", "-Wno-bitwise-instead-of-logical"]
CUDA_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "--extended-lambda"]
# Division and square root of floats are exact to 2 ulp, in few instructions and registers. Those of doubles stay exact.
CUDA_FLAGS += ["--prec-div=false", "--prec-sqrt=false", "--compiler-options=-fvisibility=hidden"]
# Major and minor are the two highest bytes.
STABLE_ABI = ("TORCH_TARGET_VERSION", "0x{:02x}{:02x}000000000000".format(*build_backend.NEEDED["torch"]))


def want_cuda() -> tuple[bool, str]:
    """Whether to build the CUDA backend, and the reason in words."""
    force_cpu = os.environ.get("INPLACE_ABN_FORCE_CPU") == "1"
    force_cuda = os.environ.get("INPLACE_ABN_FORCE_CUDA") == "1"
    if force_cpu and force_cuda:
        raise SystemExit("inplace_abn: INPLACE_ABN_FORCE_CPU=1 and INPLACE_ABN_FORCE_CUDA=1 contradict each other")
    if force_cpu:
        return False, "INPLACE_ABN_FORCE_CPU=1"
    missing = "torch was built without CUDA" if torch.version.cuda is None else find_toolkit()
    if force_cuda and missing is not None:
        raise SystemExit(f"inplace_abn: INPLACE_ABN_FORCE_CUDA=1, but {missing}")
    return missing is None, missing or f"torch has CUDA {torch.version.cuda}, toolkit at {cpp_extension.CUDA_HOME}"


def find_toolkit() -> str | None:
    """Tells torch where the toolkit is that nvcc belongs to. Returns what is wrong with it, in words, or None."""
    if not cpp_extension.CUDA_HOME:
        return "no CUDA toolkit found (set CUDA_HOME)"
    nvcc = Path(cpp_extension.CUDA_HOME, "bin", "nvcc")
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    except OSError:
        told = ""
    found = re.search(r"^#\$ TOP=(.+?)$.*__CUDACC_VER_MAJOR__=(\d+)", told, re.MULTILINE | re.DOTALL)
    if found is None:
        return f"{nvcc} does not run (set CUDA_HOME to a toolkit that does)"
    home, release = found.groups()
    if release != torch.version.cuda.split(".")[0]:
        # torch would refuse it, with a traceback.
        return f"{nvcc} is of CUDA {release}, and torch of {torch.version.cuda} (set CUDA_HOME to one like torch's)"
    # The nvcc on the path may be a wrapper. Beside it there are neither headers nor libraries.
    cpp_extension.CUDA_HOME = str(Path(home).resolve())
    return None


def set_architectures() -> str:
    """Names the architectures where torch would find no GPU to take them from, and fail. Returns what was chosen."""
    given = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if given not in ("", "native"):
        return given
    if torch.cuda.is_available():
        return "those of the visible GPUs"
    command = [str(Path(cpp_extension.CUDA_HOME, "bin", "nvcc")), "--list-gpu-code"]
    known = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    usual = ["7.5", "8.0", "9.0", "10.0", "12.0"]
    chosen = [arch for arch in usual if f"sm_{arch.replace('.', '')}" in known] or ["9.0"]
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{' '.join(chosen)}+PTX"
    return (
        f"{' '.join(chosen)}+PTX, as no GPU is visible; set TORCH_CUDA_ARCH_LIST to those you need, which is faster, "
        "or INPLACE_ABN_FORCE_CPU=1 for no CUDA kernels"
    )


def relative(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


cuda, reason = want_cuda()
portable = os.environ.get("INPLACE_ABN_PORTABLE") == "1"
headers = [Path(path) for path in os.environ.get("INPLACE_ABN_NODE_HEADERS", "").split(os.pathsep) if path]
with_module = os.environ.get("INPLACE_ABN_NODE") != "0" and not headers
archs = set_architectures() if cuda else "none"
print(f"inplace_abn: building for {'CPU and CUDA' if cuda else 'CPU'} ({reason})")
print(f"inplace_abn: torch {torch.__version__}, CUDA archs: {archs}")
print(f"inplace_abn: kernels for {'manylinux_2_28' if portable else 'the runtimes of this machine'}")
nodes_told = f"C++ nodes for {len(headers)} releases of torch" if headers else "no C++ node (INPLACE_ABN_NODE=0)"
print(f"inplace_abn: {'with the C++ node if it compiles' if with_module else nodes_told}")

kernel_sources = relative("src/kernels/cpu/*.cpp") + relative("src/kernels/*.cpp")
# The wheel takes a third of the space. Drivers of CUDA 13 decompress it.
compressed = ["--compress-mode=size"] * (int((torch.version.cuda or "0").split(".")[0]) >= 13)
nvcc_flags = CUDA_FLAGS + compressed + os.environ.get("INPLACE_ABN_NVCC_FLAGS", "").split()
# In some releases libtorch_cpu exports some of the C++ runtime's symbols. They must come from the runtime in all
# releases, so stdc++ is the first library.
macros, libraries, link_flags = [STABLE_ABI], ["stdc++", "torch_cpu"], []
if cuda:
    # What takes longest is compiled for each type by itself, so that no long compilation runs alone at the end. Others
    # would only grow by that, because nvcc compresses each source by itself.
    by_type = relative("src/kernels/cuda/by_type/*.cu")
    split = {Path(source).stem.rpartition("_")[0] for source in by_type}
    whole = [source for source in relative("src/kernels/cuda/*.cu") if Path(source).stem not in split]
    kernel_sources = by_type + whole + kernel_sources
    macros += [("INPLACE_ABN_WITH_CUDA", None)]
    # CUDA's runtime is linked statically, so that torch may have another release of it, or none. libtorch is empty
    # itself, and brings libtorch_cuda where there is one.
    libraries += ["cudart_static", "dl", "pthread", "rt"]
    link_flags += ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-Wl,--exclude-libs,ALL"]
portable_sources = relative("src/portable/*.cpp") if portable else []
portable_flags = [f"-Wl,--version-script={ROOT / 'src/portable/exports.map'}"] if portable else []
kernels = Extension(
    "inplace_abn._kernels",
    sources=kernel_sources + portable_sources,
    include_dirs=[str(ROOT / "include"), *cpp_extension.include_paths("cuda" if cuda else "cpu")],
    library_dirs=cpp_extension.library_paths("cuda" if cuda else "cpu"),
    libraries=libraries,
    extra_link_args=link_flags + portable_flags,
    depends=relative("include/inplace_abn/*.h") + relative("src/kernels/**/*.h") + relative("src/kernels/cuda/*.cuh"),
    define_macros=macros,
    extra_compile_args={"cxx": CPU_FLAGS, "nvcc": nvcc_flags},
    language="c++",
)
NODE_FLAGS = ["-std=c++20", "-O2", "-fvisibility=hidden", "-Wall", "-g0"]
node = cpp_extension.CppExtension(
    "inplace_abn._node",
    sources=["src/node/bindings.cpp", "src/node/node.cpp", "src/node/norm.cpp", "src/node/rows.cpp"],
    depends=relative("src/node/*.h"),
    extra_compile_args=NODE_FLAGS,
    optional=True,
)
STUBS = ROOT / "build" / "stubs"
"""Libraries with nothing but the names of torch's, which nodes are linked with: headers come without libraries."""


def node_of(include: Path) -> Extension:
    """The node for the torch whose headers are in the folder ``include``."""
    version = (include / "torch/headeronly/version.h").read_text()
    release = re.findall(r"#define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", version)
    return Extension(
        f"inplace_abn._node_{'_'.join(release)}",
        sources=["src/node/library.cpp", *portable_sources],
        depends=relative("src/node/*.h") + relative("src/node/*.cpp"),
        include_dirs=[str(include), str(include / "torch/csrc/api/include")],
        library_dirs=[str(STUBS)],
        libraries=["stdc++"],
        extra_link_args=[*portable_flags, "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"],
        extra_compile_args=NODE_FLAGS,
        language="c++",
    )


nodes = [node] if with_module else [node_of(include) for include in headers]


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Sends what this process and its child processes print to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(path, "w") as file:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, number in zip(kept, (1, 2), strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)


def make_stubs() -> None:
    STUBS.mkdir(parents=True, exist_ok=True)
    for name in ("libtorch_cpu.so", "libc10.so"):
        command = [*cpp_extension.get_cxx_compiler().split(), "-shared", f"-Wl,-soname,{name}", "-x", "c++", os.devnull]
        subprocess.run([*command, "-o", str(STUBS / name)], check=True)


class Build(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        """Keeps objects in the source tree, so that a build finds those of the build before."""
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / ("cuda" if cuda else "cpu"))

    def get_ext_filename(self, ext_name: str) -> str:
        """The file name. That of the kernels has no tag of a Python ABI, because they do not use Python."""
        name = Path(super().get_ext_filename(ext_name))
        plain = name.with_name(name.name.split(".", 1)[0] + name.suffix)
        return str(name if plain.stem == "_node" else plain)

    def build_extension(self, ext: Extension) -> None:
        # Each extension has a folder. In a shared folder ninja would forget what another build file made, and make it
        # again.
        folder = Path(self.build_temp)
        self.build_temp = str(folder / ext.name.rpartition(".")[2])
        print(f"inplace_abn: compiling {ext.name}, {len(ext.sources)} source{'s' if len(ext.sources) > 1 else ''}")
        try:
            self._build_in_own_folder(ext)
        finally:
            self.build_temp = str(folder)

    def _build_in_own_folder(self, ext: Extension) -> None:
        if not ext.optional:
            if str(STUBS) in ext.library_dirs:
                make_stubs()
            return super().build_extension(ext)
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        log = Path(self.build_temp) / f"{ext.name}.log"
        try:
            with output_to(log):
                super().build_extension(ext)
        except Exception as error:
            lines = [*log.read_text(errors="replace").splitlines(), str(error)]
            cause = next((line for line in lines if "error" in line.lower()), lines[-1])
            print(
                f"inplace_abn: the optional C++ node was not built for torch {torch.__version__}; nodes are made in "
                f"Python, at some microseconds per call. The first error: {cause.strip()}"
            )


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """The wheel's tag. A wheel without the module is for any Python."""
        *python, system = super().get_tag()
        return (*(python if with_module else ("py3", "none")), system)


setup(ext_modules=[kernels, *nodes], cmdclass={"build_ext": Build, "bdist_wheel": Wheel})
