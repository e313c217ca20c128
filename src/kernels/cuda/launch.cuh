// The host side of a launch: current stream, empty exit, launch check, scratch memory. The device guard is the
// dispatcher's (dispatch.cpp), so the current device is the tensors'. Nothing here waits for the device, and everything
// can be captured into a CUDA graph.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "partition.h"

// Null where torch was built without CUDA: there are no tensors on a device then, so it is never called.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace inplace_abn::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("inplace_abn: CUDA error at ") + what + ": " + cudaGetErrorString(status));
}

inline int current_index() {
  int index = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  return index;
}

inline cudaStream_t current_stream() {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(current_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

// The cache by whose size channels are grouped: of INPLACE_ABN_CUDA_CACHE in the environment, "device" for the device's
// own, a number of bytes, or nothing, since every group costs launches.
inline int64_t cache_bytes(int device) {
  const char* const given = std::getenv("INPLACE_ABN_CUDA_CACHE");
  if (given == nullptr) return 0;
  if (std::string_view(given) != "device") return std::strtoll(given, nullptr, 10);
  return attribute(cudaDevAttrL2CacheSize, device);
}

inline std::vector<Device> all_devices() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  std::vector<Device> devices(count);
  for (int i = 0; i < count; ++i) {
    devices[i] = {attribute(cudaDevAttrMultiProcessorCount, i), cache_bytes(i),
                  attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, i),
                  attribute(cudaDevAttrComputeCapabilityMajor, i) >= 9};
  }
  return devices;
}

inline Device current_device() {
  static const std::vector<Device> devices = all_devices();
  return devices[current_index()];
}

// Starts `blocks` blocks, all in x, where a grid may have 2^31 - 1; a kernel's first parameter is the number of its
// first block.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(int64_t, Parameters...), int64_t blocks, int threads, const Arguments&... arguments) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  const cudaStream_t stream = blocks > 0 ? current_stream() : nullptr;
  for (int64_t first = 0; first < blocks; first += most) {
    const auto grid = static_cast<unsigned>(std::min(most, blocks - first));
    kernel<<<grid, threads, 0, stream>>>(first, arguments...);
    check(cudaGetLastError(), "the launch of a kernel");
  }
}

// Starts clusters of `size` blocks each, which have so much dynamic shared memory.
template <typename... Parameters, typename... Arguments>
void launch_clusters(void (*kernel)(Parameters...), int64_t clusters, int size, int threads, int64_t shared_bytes,
                     const Arguments&... arguments) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute");
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(size);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * size));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = current_stream();
  config.attrs = &cluster;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), "the launch of a kernel's clusters");
}

// Device memory of torch's for the launches of one call: given back in stream order, so it may go out of scope once
// they are enqueued.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count) : memory_(allocate(count * static_cast<int64_t>(sizeof(T)))) {}

  T* data() const { return static_cast<T*>(memory_.mutable_data_ptr()); }

 private:
  static torch::stable::Tensor allocate(int64_t bytes) {
    constexpr int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(),
                                                    aoti_torch_device_type_cuda(), current_index(), &handle));
    return torch::stable::Tensor(handle);
  }

  torch::stable::Tensor memory_;
};

}  // namespace inplace_abn::cuda
