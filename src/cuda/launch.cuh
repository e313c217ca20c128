// The host side of a launch: current stream, empty exit, launch check, scratch memory. The device guard is the
// dispatcher's (dispatch.cpp), so the current device is the tensors'. Nothing here waits for the device, and everything
// can be captured into a CUDA graph.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "partition.h"

namespace inplace_abn::cuda {

inline Device current_device() {
  const cudaDeviceProp* properties = at::cuda::getCurrentDeviceProperties();
  return {properties->multiProcessorCount, properties->l2CacheSize};
}

// Starts `blocks` blocks, all in x, where a grid may have 2^31 - 1; a kernel's first parameter is the number of its
// first block.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(int64_t, Parameters...), int64_t blocks, int threads, const Arguments&... arguments) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  for (int64_t first = 0; first < blocks; first += most) {
    const auto grid = static_cast<unsigned>(std::min(most, blocks - first));
    kernel<<<grid, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(first, arguments...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// Device memory for the launches of one call: given back in stream order, so it may go out of scope once they are
// enqueued.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : memory_(c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(count) * sizeof(T))) {}

  T* data() const { return static_cast<T*>(memory_.get()); }

 private:
  c10::DataPtr memory_;
};

}  // namespace inplace_abn::cuda
