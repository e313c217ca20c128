// Stands in for CUDA's runtime and built-ins, as far as src/kernels/cuda uses them. The build includes it before
// everything else (build.py).
#pragma once

// torch's headers are read as a host compiler reads them: their 16-bit types round as the device's do.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>
#include <torch/headeronly/util/shim_utils.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "../device/access.h"
#include "../device/grid.h"

// From here on sources take the device's paths.
#define __CUDA_ARCH__ 900
#define __host__
// Into the kernel: what a function stores through its result is not among the stores that compilers instrument.
#define __device__ inline __attribute__((always_inline))
#define __global__
#define __forceinline__
// The translated kernel hands the bounds to the emulator (translate.py).
#define __launch_bounds__(...)

#define threadIdx (::emulation::thread_index())
#define blockIdx (::emulation::block_index())
#define blockDim (::emulation::block_size())
#define gridDim (::emulation::grid_size())

#define EMULATION_SITE (::emulation::Site{__FILE__, __LINE__})
#define __syncthreads() ::emulation::synchronise(EMULATION_SITE)
#define __shfl_down_sync(mask, value, lanes) ::emulation::shuffle_down(EMULATION_SITE, mask, value, lanes)
#define __shfl_xor_sync(mask, value, lanes) ::emulation::shuffle_xor(EMULATION_SITE, mask, value, lanes)
#define __ballot_sync(mask, value) ::emulation::ballot(EMULATION_SITE, mask, value)

inline int __popc(unsigned v) {
  return std::popcount(v);
}

// A vector in one access of 16 bytes.
struct alignas(16) uint4 {
  unsigned x, y, z, w;

  uint4() = default;
  uint4(const uint4& other) {
    ::emulation::require_aligned(&other, sizeof(uint4));
    x = other.x, y = other.y, z = other.z, w = other.w;
  }
  uint4& operator=(const uint4& other) {
    ::emulation::require_aligned(&other, sizeof(uint4));
    ::emulation::require_aligned(this, sizeof(uint4));
    x = other.x, y = other.y, z = other.z, w = other.w;
    return *this;
  }
};

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

inline const char* cudaGetErrorString(cudaError_t) {
  return "no error";
}
// A launch that fails throws at once.
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* index) {
  *index = ::emulation::current_device();
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = ::emulation::device_count();
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int index) {
  *value = ::emulation::device_properties(index).multiprocessors;
  return cudaSuccess;
}

// Scratch memory is the host's, and known to the emulator until the op is over.
#define aoti_torch_empty_strided ::emulation::allocate_scratch
#define aoti_torch_get_current_cuda_stream emulation_current_stream

#if defined(EMULATION_ACTIVATION)
#include "inplace_abn/kernels.h"

// Changed kernels are compiled often, and one activation is enough to see the change. Norms of rows have none: their
// sums are those of the identity.
namespace inplace_abn {
template <typename scalar_t, typename F>
decltype(auto) visit_one(Activation activation, double param, F&& f) {
  if (activation == Activation::identity) return f(Identity<scalar_t>{});
  return f(EMULATION_ACTIVATION<scalar_t>(param));
}
template <typename scalar_t, typename F>
decltype(auto) visit_one(Activation activation, double param, bool, F&& f) {
  return visit_one<scalar_t>(activation, param, f);
}
}  // namespace inplace_abn
#define visit_activation visit_one
#define visit_forward visit_one
#endif
