#!/usr/bin/env bash
# Compiles, on a machine with nvcc, what gpu_check.sh needs on a machine with a GPU: the kernels, the node, a program of
# faulty kernels, and wheels of packages that are often missing there. All of it is in build/prebuilt, which git ignores,
# and which gpu_check.sh finds there. It takes no more than 60 MiB.
#
#   TORCH_CUDA_ARCH_LIST  the GPU's architecture; by default 9.0
#   CUDA_HOME, CUDA_VENV  see cuda_venv.sh. The torch there must be of the GPU machine's release, which is 2.11 unless
#                         CUDA_VENV says otherwise. Its Python need not.
#   WHEELS                by default segmentation-models-pytorch diffusers, for the nets of the benchmark
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/cuda_venv.sh

out=build/prebuilt
rm -rf "$out"
mkdir -p "$out/wheels"
arch=${TORCH_CUDA_ARCH_LIST:-9.0}
INPLACE_ABN_NODE_HEADERS=$(python -c "from torch.utils import cpp_extension; print(cpp_extension.include_paths()[0])")
export INPLACE_ABN_NODE_HEADERS INPLACE_ABN_FORCE_CUDA=1 INPLACE_ABN_PORTABLE=1 TORCH_CUDA_ARCH_LIST=$arch
export MAX_JOBS="${MAX_JOBS:-$(nproc)}" INPLACE_ABN_NVCC_FLAGS="-Xptxas=-v"
unset INPLACE_ABN_FORCE_CPU
# ptxas reports the registers of a kernel only when it compiles it, so everything is compiled again.
rm -rf build/cuda/_kernels/src/kernels/cuda
waiting "compiling the kernels and the node for $arch, which takes some minutes" \
  build "$out/build.log" python -u setup.py build_ext --build-lib "$out"
number=${arch%%[ +;]*}
waiting "compiling the faulty kernels" "$CUDA_HOME/bin/nvcc" -std=c++20 -arch="sm_${number/./}" -lineinfo -o "$out/faults" \
  tests/emulation/device/faults.cu 2>"$out/faults.log" || { cat "$out/faults.log"; exit 1; }
for wheel in ${WHEELS-segmentation-models-pytorch diffusers}; do
  waiting "downloading $wheel" pip download --quiet --no-deps --dest "$out/wheels" "$wheel" || say "$wheel cannot be had here"
done
python scripts/gpu_prebuilt.py --seal
echo "gpu_prebuilt: done in $SECONDS s"
