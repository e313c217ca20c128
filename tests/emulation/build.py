"""Builds the emulated device, one library of the translated CUDA sources and of the ops that call them.

``python -m emulation.build`` (in ``tests``) prints the path of the library, which is under ``build/emulation``;
``python -m emulation.build contracted`` that of one whose products and sums are fused. An object there is used again if
everything that it is made of is unchanged.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch.utils import cpp_extension

from emulation.translate import translate

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CUDA = ROOT / "src/kernels/cuda"
OUT = ROOT / "build/emulation"
TYPES = ("double", "float", "c10::BFloat16", "c10::Half")

# The ops are built for the oldest torch that they support. C++ and the ops have another namespace.
FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-g0", "-Wall", "-Wno-unknown-pragmas"]
FLAGS += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-Dinplace_abn=inplace_abn_emulated"]
FLAGS += [f"-I{path}" for path in (ROOT / "include", *cpp_extension.include_paths())]
# Products are not fused with sums, because that would depend on the host's processor. Variables that are never set are
# large negative numbers.
KERNEL_FLAGS = ["-O1", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern"]
KERNEL_FLAGS += [f"-I{HERE / 'headers'}", "-include", str(HERE / "headers/cuda_runtime.h"), "-x", "c++"]
# What fuses them, as nvcc does, if this machine's processor can.
CONTRACTED = ("-ffp-contract=fast", "-fexpensive-optimizations")
if platform.machine() == "x86_64":
    cpu = Path("/proc/cpuinfo")
    CONTRACTED = (*CONTRACTED, "-mfma") if cpu.exists() and " fma " in cpu.read_text() else ()
FUSED_TYPES = ("float", "c10::BFloat16")
"""Those that nets are trained in."""
# The compiler puts a call before every load and store. device/instrumentation.cpp implements these calls.
CALLS = ("-fsanitize=thread",)


def unchanged(_name: str, text: str) -> str:
    return text


@dataclass(frozen=True)
class Object:
    """A source file as text, how to compile it, and what else its object depends on."""

    name: str
    source: str
    flags: tuple[str, ...]
    headers: tuple[tuple[str, str], ...]

    def path(self) -> Path:
        key = repr((_compiler_version(), self)).encode()
        return OUT / "objects" / f"{self.name}-{hashlib.sha256(key).hexdigest()[:16]}.o"


def compiler() -> list[str]:
    return cpp_extension.get_cxx_compiler().split()


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-6000:]}")


def _texts(*patterns: str) -> tuple[tuple[str, str], ...]:
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return tuple((path.name, path.read_text()) for path in paths)


def _kernel_headers(change: Callable[[str, str], str]) -> tuple[tuple[str, str], ...]:
    translated = _texts("src/kernels/cuda/*.h", "src/kernels/cuda/*.cuh")
    return (
        *((name, translate(change(name, text))) for name, text in translated),
        *_texts("include/inplace_abn/*.h", "tests/emulation/headers/*.h"),
        *_texts(*(f"tests/emulation/device/{name}.h" for name in ("access", "grid", "translated"))),
    )


def kernel_objects(
    types: tuple[str, ...] = TYPES,
    change: Callable[[str, str], str] = unchanged,
    flags: tuple[str, ...] = CALLS,
    sources: str = "src/kernels/cuda/*.cu",
) -> list[Object]:
    """An object for each source and type of elements. ``change(name, text)`` gives the text of every file."""
    headers = _kernel_headers(change)
    return [
        Object(
            f"{Path(name).stem}-{type_.split(':')[-1]}",
            translate(change(name, text)),
            (*FLAGS, *KERNEL_FLAGS, *flags, f"-DINPLACE_ABN_TYPE={type_}"),
            headers,
        )
        for name, text in _texts(sources)
        for type_ in types
    ]


def faulty_object(change: Callable[[str, str], str] = unchanged, flags: tuple[str, ...] = CALLS) -> Object:
    """The kernels that the emulator's own tests run."""
    text = translate((HERE / "device/faults.cu").read_text())
    return Object("faults", text, (*FLAGS, *KERNEL_FLAGS, *flags), _kernel_headers(change))


def _host_objects(flags: tuple[str, ...], *patterns: str) -> list[Object]:
    headers = _texts("include/inplace_abn/*.h", "src/kernels/*.h", "tests/emulation/device/*.h")
    all_flags = (*FLAGS, *flags, "-O2", f"-I{HERE / 'device'}", f"-I{ROOT / 'src/kernels'}")
    return [Object(Path(name).stem, text, all_flags, headers) for name, text in _texts(*patterns)]


def device_objects(flags: tuple[str, ...] = ()) -> list[Object]:
    return _host_objects(flags, "tests/emulation/device/*.cpp")


def op_objects() -> list[Object]:
    return _host_objects(("-DINPLACE_ABN_EMULATES_A_DEVICE",), "tests/emulation/ops/*.cpp", "src/kernels/*.cpp")


def _compile(item: Object) -> Path:
    """Compiles an object in a folder of its own, together with those headers that are included from the source's
    folder."""
    path = item.path()
    if not path.exists():
        folder = path.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in item.headers:
            if name.endswith(".cuh") or name == "partition.h":
                (folder / name).write_text(text)
        source = folder / f"{item.name}.cpp"
        source.write_text(item.source)
        # Libraries that are built at the same time may need the same object.
        unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
        _run([*compiler(), *item.flags, "-c", str(source), "-o", str(unfinished)])
        unfinished.rename(path)
    return path


def compiled(objects: list[Object], jobs: int | None = None) -> list[Path]:
    """The objects' files. What takes longest is compiled first."""
    order = sorted(objects, key=lambda item: not item.name.startswith("backward"))
    with ThreadPoolExecutor(jobs or int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        list(pool.map(_compile, order))
    return [item.path() for item in objects]


def link(name: str, objects: list[Object], flags: tuple[str, ...] = (), jobs: int | None = None) -> Path:
    """Links the objects into a library and returns its path.

    If several objects have the same function, the first object's is taken. The emulator's own objects must come first,
    because their functions must not make calls before loads and stores. The kernels must come before the ops, because
    their functions must make these calls.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / f"{name}.lock", "w") as lock:
        # Of several processes that run at the same time, one builds.
        fcntl.flock(lock, fcntl.LOCK_EX)
        paths = [str(path) for path in compiled(objects, jobs)]
        key = hashlib.sha256(repr((paths, flags)).encode()).hexdigest()[:16]
        library = OUT / f"{name}-{key}.so"
        if not library.exists():
            torch_libraries = cpp_extension.library_paths()
            search = [option for path in torch_libraries for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
            unfinished = library.with_suffix(".tmp")
            _run([*compiler(), "-shared", *paths, "-o", str(unfinished), *flags, *search, "-ltorch_cpu"])
            unfinished.rename(library)
        return library


def build(contracted: bool = False) -> Path:
    """The library, whose products and sums are fused if it is ``contracted``, in kernels for `FUSED_TYPES`."""
    fused = kernel_objects(FUSED_TYPES, flags=(*CALLS, *CONTRACTED)) if contracted else []
    rest = kernel_objects(tuple(type_ for type_ in TYPES if not (contracted and type_ in FUSED_TYPES)))
    name = "contracted" if contracted else "device"
    return link(name, [*device_objects(), *fused, *rest, faulty_object(), *op_objects()])


if __name__ == "__main__":
    print(build(contracted="contracted" in sys.argv[1:]))
