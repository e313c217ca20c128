// What a channel is reduced to, and how threads' and blocks' shares of it are merged. Threads of a block merge what
// they have summed up in the type of their arithmetic, because many GPUs do 1/64 as many operations on doubles. Blocks
// leave two sums in double, which are merged by adding. The order is fixed by the partition, so results do not vary
// from run to run.
#pragma once

#include <cstdint>

#include "inplace_abn/kernels.h"
#include "launch.cuh"

namespace inplace_abn::cuda {

// There are no default member values, because this lies in shared memory, too. `{}` is an empty sum.
struct Totals {
  double first, second;

  INPLACE_ABN_INLINE void add(const Totals& other) {
    first += other.first;
    second += other.second;
  }
  __device__ Totals shuffled_down(int lanes) const {
    return {__shfl_down_sync(~0u, first, lanes), __shfl_down_sync(~0u, second, lanes)};
  }
};

// The sum of all threads' values, in all threads. `memory` is shared, and may be used again after the next barrier.
template <int threads, typename T>
__device__ T sum_of_block(const T& own, T* memory) {
  const int thread = static_cast<int>(threadIdx.x);
  memory[thread] = own;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) memory[thread].add(memory[thread + half]);
  }
  __syncthreads();
  return memory[0];
}

// A thread's sums for mean and variance: of x - pivot, and of its square. The pivot is a mean of some of the thread's
// own values, so that the variance keeps its digits however far the mean is from zero.
template <typename opmath_t>
struct ShiftedSums {
  opmath_t pivot, sum, square;

  INPLACE_ABN_INLINE void add(opmath_t x) {
    const opmath_t shifted = x - pivot;
    sum += shifted;
    square += shifted * shifted;
  }
  // Of sums about the same pivot.
  INPLACE_ABN_INLINE void add(const ShiftedSums& other) {
    sum += other.sum;
    square += other.square;
  }
  // To another pivot; of `count` values.
  INPLACE_ABN_INLINE void move(opmath_t to, opmath_t count) {
    const opmath_t shift = pivot - to, moved = sum + count * shift;
    square += shift * (sum + moved);
    sum = moved;
    pivot = to;
  }
  // Takes up `others` values, whose pivot is as good as the own one.
  INPLACE_ABN_INLINE void merge(ShiftedSums other, opmath_t count, opmath_t others) {
    if (others == 0) return;
    if (count == 0) {
      *this = other;
      return;
    }
    const opmath_t between = pivot + (other.pivot - pivot) / 2;
    move(between, count);
    other.move(between, others);
    add(other);
  }
  // Gives all lanes of a warp one pivot, so that their sums can be added.
  __device__ void share_pivot(opmath_t count) {
    const unsigned lanes_with_values = __ballot_sync(~0u, count > 0);
    opmath_t pivots = pivot;
    for (int lanes = 16; lanes > 0; lanes /= 2) pivots += __shfl_xor_sync(~0u, pivots, lanes);
    if (lanes_with_values != 0) move(pivots / static_cast<opmath_t>(__popc(lanes_with_values)), count);
  }
  // Of `count` values, about another pivot. That of a channel is one of its values, hence at most sqrt(values) standard
  // deviations from the mean, which costs a variance in double at most the digits of the number of values.
  INPLACE_ABN_INLINE Totals about(double other, double count) const {
    if (count == 0) return {};
    const double shift = static_cast<double>(pivot) - other, moved = static_cast<double>(sum) + count * shift;
    return {moved, static_cast<double>(square) + shift * (static_cast<double>(sum) + moved)};
  }
  __device__ ShiftedSums shuffled_down(int lanes) const {
    return {pivot, __shfl_down_sync(~0u, sum, lanes), __shfl_down_sync(~0u, square, lanes)};
  }
};

struct Moments {
  double mean, var;
};

// Of `count` values, from their totals about a pivot.
INPLACE_ABN_INLINE Moments moments(const Totals& totals, double pivot, double count) {
  if (count == 0) return {};
  const double shift = totals.first / count, var = totals.second / count - shift * shift;
  // A NaN stays one.
  return {pivot + shift, var < 0 ? 0 : var};
}

// Sums over dy and dy * (y - beta); xhat = (y - beta) / gamma, and the division can wait until the end.
template <typename opmath_t>
struct Sums {
  opmath_t dy, dy_centred;

  INPLACE_ABN_INLINE void add(const Sums& other) {
    dy += other.dy;
    dy_centred += other.dy_centred;
  }
  INPLACE_ABN_INLINE void merge(const Sums& other, opmath_t, opmath_t) { add(other); }
  __device__ void share_pivot(opmath_t) {}
  __device__ Sums shuffled_down(int lanes) const {
    return {__shfl_down_sync(~0u, dy, lanes), __shfl_down_sync(~0u, dy_centred, lanes)};
  }
};

struct NoSum {};

// Leaves what a block has summed up of channel c: as its `share`, laid out [shares][channels], or, where the block has
// all of the channel and there is no memory for shares, as the result.
template <typename Op>
__device__ void leave(const Op& op, int64_t c, const Totals& totals, Totals* shares, int64_t share, int64_t channels) {
  if (shares == nullptr) {
    op.finish(c, totals);
  } else {
    shares[share * channels + c] = totals;
  }
}

constexpr int finish_channels = 8;  // neighbours, whose shares lie in one cache line
constexpr int finish_lanes = block_threads / finish_channels;

// Merges the `count` shares of each channel.
template <typename Op>
__global__ void __launch_bounds__(block_threads)
    finish_kernel(const int64_t first_block, const Op op, const Totals* const shares, const int64_t count,
                  const int64_t channels) {
  __shared__ Totals shared[block_threads];
  const int x = threadIdx.x % finish_channels, lane = threadIdx.x / finish_channels;
  const int64_t channel = (first_block + blockIdx.x) * finish_channels + x;
  Totals merged{};
  if (channel < channels) {
#pragma unroll 4
    for (int64_t share = lane; share < count; share += finish_lanes) merged.add(shares[share * channels + channel]);
  }
  shared[threadIdx.x] = merged;
  for (int half = finish_lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
      merged.add(shared[threadIdx.x + half * finish_channels]);
      shared[threadIdx.x] = merged;
    }
  }
  if (lane == 0 && channel < channels) op.finish(channel, merged);
}

template <typename Op>
void finish_channels_of(const Op& op, const Totals* shares, int64_t count, int64_t channels) {
  launch(finish_kernel<Op>, ceil_div(channels, finish_channels), block_threads, op, shares, count, channels);
}

}  // namespace inplace_abn::cuda
