// Kernels with one fault each. The tests of the emulator run them, and what it says of them is what they return. nvcc
// makes a program of them, which proves on a GPU that a checker sees faults: it runs the kernels that it is told.

#include <exception>
#include <string>
#include <utility>
#include <vector>

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#include <cstdio>
#else
#include "launch.cuh"
#endif

// Checkers are told to look at kernels with the name of this package.
namespace inplace_abn::faults {
namespace {

constexpr int count = 64;

// `x` has 2 * count - 2 elements and may be written, `y` has `count`.
struct Operands {
  float* x;
  const float* y;
};

__global__ void none(int64_t first_block, Operands o) {
  o.x[threadIdx.x] = o.y[threadIdx.x];
}

__global__ void reads_before_x(int64_t, Operands o) {
  const int i = threadIdx.x;
  if (i == 0) o.x[count] = o.x[i - 1];
}
__global__ void reads_behind_y(int64_t, Operands o) {
  o.x[threadIdx.x] = o.y[threadIdx.x + 1];
}
__global__ void writes_behind_x(int64_t, Operands o) {
  o.x[threadIdx.x + 1] = 0;
}
__global__ void writes_what_is_read_only(int64_t, Operands o) {
  const_cast<float*>(o.y)[threadIdx.x] = 0;
}
__global__ void reads_the_gap_of_a_slice(int64_t, Operands o) {
  o.x[0] = o.y[count / 2];
}
__global__ void reads_a_null_pointer(int64_t, Operands o) {
  o.x[threadIdx.x] = *static_cast<const float*>(nullptr);
}
__global__ void reads_a_misaligned_vector(int64_t, Operands o) {
  const uint4 v = *reinterpret_cast<const uint4*>(o.y + 1);
  o.x[threadIdx.x] = static_cast<float>(v.x);
}
__global__ void writes_a_misaligned_vector(int64_t, Operands o) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" : : "l"(o.x + 2), "r"(0), "r"(0), "r"(0), "r"(0) : "memory");
}
__global__ void writes_a_vector_over_the_end(int64_t, Operands o) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(o.x + 2 * count - 4), "r"(0), "r"(0), "r"(0), "r"(0)
               : "memory");
}
__global__ void reads_a_misaligned_number(int64_t, Operands o) {
  o.x[threadIdx.x] = static_cast<float>(*reinterpret_cast<const double*>(o.y + 1));
}

__global__ void misses_a_barrier(int64_t, Operands o) {
  __shared__ float values[count];
  values[threadIdx.x] = o.y[threadIdx.x];
  o.x[threadIdx.x] = values[(threadIdx.x + 1) % count];
}
__global__ void races_between_blocks(int64_t, Operands o) {
  o.x[threadIdx.x] = static_cast<float>(blockIdx.x);
}
__global__ void reads_what_another_block_writes(int64_t, Operands o) {
  if (blockIdx.x == 0) {
    o.x[threadIdx.x] = 1;
  } else if (o.x[threadIdx.x] > 2) {
    o.x[threadIdx.x + count] = 1;
  }
}
__global__ void reads_shared_memory_that_was_never_set(int64_t, Operands o) {
  __shared__ float values[count];
  if (threadIdx.x != 5) values[threadIdx.x] = 0;
  __syncthreads();
  o.x[threadIdx.x] = values[threadIdx.x];
}
__global__ void writes_behind_shared_memory(int64_t, Operands o) {
  __shared__ float values[count];
  values[threadIdx.x + 1] = 0;
}
#if !defined(__CUDACC__)  // nvcc refuses these
__global__ void uses_an_unknown_instruction(int64_t, Operands o) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2, %3, %4};" : : "l"(o.x), "r"(0), "r"(0), "r"(0), "r"(0) : "memory");
}
__global__ void has_too_much_shared_memory(int64_t, Operands) {
  __shared__ double values[48 * 128 + 1];
  values[threadIdx.x] = 0;
}
#endif

__global__ void leaves_before_a_barrier(int64_t, Operands) {
  if (threadIdx.x == 7) return;
  __syncthreads();
}
__global__ void has_two_barriers_for_one(int64_t, Operands) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void shuffles_without_a_lane(int64_t, Operands o) {
  if (threadIdx.x != 9) o.x[threadIdx.x] = __shfl_down_sync(~0u, 1.0f, 1);
}
__global__ void shuffles_from_outside_of_the_mask(int64_t, Operands o) {
  if (threadIdx.x % 32 < 16) o.x[threadIdx.x] = __shfl_down_sync(0xffffu, 1.0f, 1);
}
__global__ void shuffles_in_half_a_warp(int64_t, Operands o) {
  o.x[threadIdx.x] = __shfl_down_sync(~0u, 1.0f, 1);
}
__global__ void __launch_bounds__(count / 2) is_launched_beyond_its_bound(int64_t, Operands) {}
__global__ void has_an_endless_block(int64_t, Operands) {}
__global__ void __launch_bounds__(count, 20) has_bounds_for_large_multiprocessors(int64_t, Operands) {}

// One grid in two launches: each writes its element of x.
__global__ void numbers_more_blocks_than_a_grid_has(int64_t first_block, Operands o) {
  const int64_t block = first_block + blockIdx.x, last = int64_t{1} << 31;
  if (threadIdx.x == 0 && (block == 0 || block == last)) o.x[block >> 31] = 1;
}

struct Fault {
  const char* name;
  void (*kernel)(int64_t, Operands);
  int64_t blocks = 1;
  int threads = count;
};

#define FAULT(kernel, ...) {#kernel, kernel __VA_OPT__(, ) __VA_ARGS__}
const Fault faults[] = {
    FAULT(none),
    FAULT(reads_before_x),
    FAULT(reads_behind_y),
    FAULT(writes_behind_x, 1, 2 * count),
    FAULT(writes_what_is_read_only),
    FAULT(reads_the_gap_of_a_slice),
    FAULT(reads_a_null_pointer),
    FAULT(reads_a_misaligned_vector),
    FAULT(writes_a_misaligned_vector),
    FAULT(writes_a_vector_over_the_end, 1, 1),
    FAULT(reads_a_misaligned_number),
    FAULT(misses_a_barrier),
    FAULT(races_between_blocks, 2),
    FAULT(reads_what_another_block_writes, 2),
    FAULT(reads_shared_memory_that_was_never_set),
    FAULT(writes_behind_shared_memory),
#if !defined(__CUDACC__)
    FAULT(uses_an_unknown_instruction),
    FAULT(has_too_much_shared_memory),
#endif
    FAULT(leaves_before_a_barrier),
    FAULT(has_two_barriers_for_one),
    FAULT(shuffles_without_a_lane),
    FAULT(shuffles_from_outside_of_the_mask),
    FAULT(shuffles_in_half_a_warp, 1, 48),
    FAULT(is_launched_beyond_its_bound),
    FAULT(has_an_endless_block, 1, 1025),
    FAULT(has_bounds_for_large_multiprocessors),
    FAULT(numbers_more_blocks_than_a_grid_has, (int64_t{1} << 31) + 1),
};

#if defined(__CUDACC__)

std::string run(const Fault& fault) {
  Operands operands{};
  void* y = nullptr;
  // Memory of its own for each operand, and no byte more, so that a checker knows where it ends.
  cudaMalloc(reinterpret_cast<void**>(&operands.x), (2 * count - 2) * sizeof(float));
  cudaMalloc(&y, count * sizeof(float));
  operands.y = static_cast<const float*>(y);
  cudaMemset(operands.x, 0, (2 * count - 2) * sizeof(float));
  cudaMemset(y, 0, count * sizeof(float));
  fault.kernel<<<static_cast<unsigned>(fault.blocks), fault.threads>>>(0, operands);
  const cudaError_t launched = cudaGetLastError(), ended = cudaDeviceSynchronize();
  return cudaGetErrorString(launched == cudaSuccess ? ended : launched);
}

#else

std::string run(const Fault& fault) {
  alignas(16) static float x[2 * count], y[2 * count];
  emulation::begin_call();
  emulation::add_area({"x", x, sizeof(float), {{2 * count - 2, 1}}, emulation::use_both});
  // Two rows of half of `count`, with a gap between; all of it where the kernel is to find no gap.
  const bool sliced = std::string(fault.name) == "reads_the_gap_of_a_slice";
  if (sliced) {
    emulation::add_area({"y", y, sizeof(float), {{2, count}, {count / 2, 1}}, emulation::use_read});
  } else {
    emulation::add_area({"y", y, sizeof(float), {{count, 1}}, emulation::use_read});
  }
  std::string message;
  try {
    cuda::launch(fault.kernel, fault.blocks, fault.threads, Operands{x, y});
  } catch (const std::exception& error) {
    message = error.what();
  }
  emulation::end_call();
  return message;
}

#endif

}  // namespace

// What is said of the kernel of this name.
std::string told(const std::string& name) {
  for (const Fault& fault : faults) {
    if (name == fault.name) return run(fault);
  }
  return "there is no kernel " + name;
}

}  // namespace inplace_abn::faults

#if defined(__CUDACC__)

int main(int count, char** names) {
  for (int i = 1; i < count; ++i) std::printf("%s: %s\n", names[i], inplace_abn::faults::told(names[i]).c_str());
  return 0;
}

#else

extern "C" __attribute__((visibility("default"))) const char* emulation_fault(const char* name) {
  static std::string message;
  message = inplace_abn::faults::told(name);
  return message.c_str();
}

#endif
