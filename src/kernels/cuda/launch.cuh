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
#include <limits>
#include <stdexcept>
#include <string>
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

inline std::vector<int> multiprocessors_of_devices() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  std::vector<int> multiprocessors(count);
  for (int i = 0; i < count; ++i) {
    check(cudaDeviceGetAttribute(&multiprocessors[i], cudaDevAttrMultiProcessorCount, i), "cudaDeviceGetAttribute");
  }
  return multiprocessors;
}

// Of the current device.
inline int64_t multiprocessors() {
  static const std::vector<int> of_devices = multiprocessors_of_devices();
  return of_devices[current_index()];
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
