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
// Not macros, because launch configurations have members of these names.
inline const struct {
  struct {
    operator unsigned() const { return ::emulation::block_size().x; }
  } x;
} blockDim;
inline const struct {
  struct {
    operator unsigned() const { return ::emulation::grid_size().x; }
  } x;
} gridDim;

#define EMULATION_SITE (::emulation::Site{__FILE__, __LINE__})
#define __syncthreads() ::emulation::synchronise(EMULATION_SITE)
#define __shfl_down_sync(mask, value, lanes) ::emulation::shuffle_down(EMULATION_SITE, mask, value, lanes)

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
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor
};

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
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
  const ::emulation::Properties& device = ::emulation::device_properties(index);
  const int values[] = {device.multiprocessors, device.l2_bytes, device.shared_bytes, 9};
  *value = values[attribute];
  return cudaSuccess;
}

// Blocks are given as much dynamic shared memory as the launch says, up to what the device has.
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  ::emulation::Shape shape{config->gridDim, config->blockDim, config->dynamicSmemBytes};
  if (config->numAttrs > 0) shape.cluster = config->attrs[0].val.clusterDim.x;
  ::emulation::launch(kernel, shape, arguments...);
  return cudaSuccess;
}

// Scratch memory is the host's, and known to the emulator until the op is over.
#define aoti_torch_empty_strided ::emulation::allocate_scratch
#define aoti_torch_get_current_cuda_stream emulation_current_stream

#if defined(EMULATION_TYPE)
// Sources are compiled once for each type of elements, side by side.
#include "inplace_abn/kernels.h"
#undef INPLACE_ABN_FOR_ALL_TYPES
#define INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE) INSTANTIATE(EMULATION_TYPE)
#endif

#if defined(EMULATION_LEAKY_RELU_ONLY)
// Changed kernels are compiled often, and one activation is enough to see the change.
namespace inplace_abn {
template <typename scalar_t, typename F>
decltype(auto) visit_leaky_relu(Activation, double param, F&& f) {
  return f(LeakyRelu<scalar_t>(param));
}
template <typename scalar_t, typename F>
decltype(auto) visit_leaky_relu(Activation, double param, bool, F&& f) {
  return f(LeakyRelu<scalar_t>(param));
}
}  // namespace inplace_abn
#define visit_activation visit_leaky_relu
#define visit_forward visit_leaky_relu
#endif
