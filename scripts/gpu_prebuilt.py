"""What `gpu_prebuilt.sh` compiled for a GPU that is elsewhere: whether it is of these sources, and whether it loads.

``python scripts/gpu_prebuilt.py`` puts its libraries into the package, unpacks its wheels, and runs an op on the GPU.
It fails, and leaves no library in the package, if there is nothing, if it is of other sources, or if it does not run.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/prebuilt"
SITE = FOLDER / "site"
"""Where wheels are unpacked to."""
MOST_BYTES = 60 << 20
"""More does not travel together with the working tree."""
SOURCES = ("setup.py", "build_backend.py", "include/**/*", "src/**/*", "tests/emulation/device/faults.cu")
PROBE = """
import torch
from inplace_abn import InPlaceABN
from inplace_abn.autograd import nodes
from inplace_abn.kernels import ops

assert ops.with_cuda, "the kernels are without CUDA"
assert nodes.cpp is not None, "the C++ node does not load"
x = torch.randn(4, 8, 6, 6, device="cuda", requires_grad=True)
InPlaceABN(8).cuda()(x * 1).square().sum().backward()
assert x.grad.isfinite().all().item()
print("prebuilt: the kernels run on", torch.cuda.get_device_name())
"""


def fingerprint() -> str:
    """Of all sources that are compiled."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()}):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def unpack_wheels(folder: Path) -> None:
    for wheel in sorted((folder / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")


def why_not(folder: Path) -> str:
    """Why the libraries of the folder cannot be used. Empty if they can."""
    if not (folder / "fingerprint").exists():
        return f"there is nothing in {folder}"
    if (folder / "fingerprint").read_text().strip() != fingerprint():
        return "it is of other sources"
    return ""


def install(folder: Path, package: Path, probe: str = PROBE) -> str:
    """Puts the libraries into the package. Returns why they cannot be used, or an empty string."""
    reason = why_not(folder)
    if reason:
        return reason
    placed = [shutil.copy2(library, package) for library in sorted((folder / "inplace_abn").glob("*.so"))]
    done = subprocess.run([sys.executable, "-c", probe], cwd=package.parent, capture_output=True, text=True)
    print(done.stdout, end="")
    if done.returncode == 0:
        return ""
    for library in placed:
        Path(library).unlink()
    return f"it does not run here: {done.stderr.strip().splitlines()[-1:]}"


def seal(folder: Path) -> str:
    """Notes of which sources the libraries are. Returns why they cannot travel, or an empty string."""
    (folder / "fingerprint").write_text(fingerprint() + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"gpu_prebuilt: {size / 2**20:.1f} MiB in {folder}")
    return "" if size <= MOST_BYTES else f"more than {MOST_BYTES >> 20} MiB, which is too much to send"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seal", action="store_true", help="note of which sources the libraries are")
    args = parser.parse_args()
    if args.seal:
        reason = seal(args.folder)
    else:
        unpack_wheels(args.folder)
        reason = install(args.folder, ROOT / "inplace_abn")
    if reason:
        print(f"prebuilt: {reason}")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
