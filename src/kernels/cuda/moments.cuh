// What a channel is reduced to, and how partial results are merged, in double: over the threads of a block, and over
// the blocks of a channel. Means in float would round away the digits of a variance far from zero. The order of merging
// is fixed by the partition, so results do not vary from run to run.
#pragma once

#include <cstdint>

#include "inplace_abn/kernels.h"
#include "launch.cuh"

namespace inplace_abn::cuda {

// Factors for merging `added` values into `count` values by Chan's formula.
template <typename opmath_t>
struct Shares {
  opmath_t share, cross;

  INPLACE_ABN_INLINE Shares(opmath_t count, opmath_t added) {
    share = added / (count + added);
    cross = count * share;
  }
};

// Mean and sum of squared deviations from it. (No default values: these live in shared memory, too. `{}` is empty.)
template <typename opmath_t>
struct Moments {
  opmath_t mean, m2;

  INPLACE_ABN_INLINE void merge(const Moments& other, const Shares<opmath_t>& shares) {
    const opmath_t delta = other.mean - mean;
    mean += delta * shares.share;
    m2 += other.m2 + delta * delta * shares.cross;
  }
  __device__ Moments shuffled_down(int lanes) const {
    return {__shfl_down_sync(~0u, mean, lanes), __shfl_down_sync(~0u, m2, lanes)};
  }
};

// What a thread has of them: sums of x - pivot and of its square. The pivot is one of its own values, or a mean of
// some, so the digits of the variance survive however far the mean is from zero.
template <typename opmath_t>
struct ShiftedSums {
  opmath_t pivot, sum, square;

  INPLACE_ABN_INLINE void add(opmath_t x) {
    const opmath_t shifted = x - pivot;
    sum += shifted;
    square += shifted * shifted;
  }
  INPLACE_ABN_INLINE Moments<double> result(double count) const {
    if (count == 0) return {};
    const double mean = sum / count, m2 = square - sum * mean;
    return {pivot + mean, m2 < 0 ? 0 : m2};
  }
};

// Sums over dy and dy * (y - beta); xhat = (y - beta) / gamma, and the division can wait until the end.
template <typename opmath_t>
struct Sums {
  opmath_t dy, dy_centred;

  INPLACE_ABN_INLINE Sums<double> result(double) const { return {dy, dy_centred}; }
  INPLACE_ABN_INLINE void merge(const Sums& other, const Shares<opmath_t>&) {
    dy += other.dy;
    dy_centred += other.dy_centred;
  }
  __device__ Sums shuffled_down(int lanes) const {
    return {__shfl_down_sync(~0u, dy, lanes), __shfl_down_sync(~0u, dy_centred, lanes)};
  }
};

// A reduction over `count` values. Counts are whole numbers, rounded only where they no longer matter.
template <template <typename> class Value>
struct Partial {
  double count;
  Value<double> value;

  INPLACE_ABN_INLINE void merge(const Partial& other) {
    if (other.count == 0) return;
    value.merge(other.value, Shares<double>(count, other.count));
    count += other.count;
  }
  __device__ Partial shuffled_down(int lanes) const {
    return {__shfl_down_sync(~0u, count, lanes), value.shuffled_down(lanes)};
  }
};

constexpr int finish_channels = 8;  // neighbours, whose partial results share cache lines
constexpr int finish_lanes = block_threads / finish_channels;

// Merges the partial results of each channel, laid out [parts][channels], and calls `finish(channel, partial)`.
template <template <typename> class Value, typename Finish>
__global__ void __launch_bounds__(block_threads)
    finish_kernel(const int64_t first_block, const Partial<Value>* const partials, const int64_t parts,
                  const int64_t channels, const Finish finish) {
  __shared__ Partial<Value> shared[block_threads];
  const int x = threadIdx.x % finish_channels, lane = threadIdx.x / finish_channels;
  const int64_t channel = (first_block + blockIdx.x) * finish_channels + x;
  Partial<Value> merged{};
  if (channel < channels) {
#pragma unroll 4
    for (int64_t part = lane; part < parts; part += finish_lanes) {
      merged.merge(partials[part * channels + channel]);
    }
  }
  shared[threadIdx.x] = merged;
  for (int half = finish_lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
      merged.merge(shared[threadIdx.x + half * finish_channels]);
      shared[threadIdx.x] = merged;
    }
  }
  if (lane == 0 && channel < channels) finish(channel, merged);
}

template <template <typename> class Value, typename Finish>
void finish_channels_of(const Partial<Value>* partials, int64_t parts, int64_t channels, const Finish& finish) {
  launch(finish_kernel<Value, Finish>, ceil_div(channels, finish_channels), block_threads, partials, parts, channels,
         finish);
}

// mean and var of x per channel, and the update of the running statistics (null: none). Defined in statistics.cu.
template <typename scalar_t>
void reduce_moments(const Extent& extent, const View<const scalar_t>& x, opmath_type<scalar_t>* mean,
                    opmath_type<scalar_t>* var, const RunningUpdate<scalar_t>& running);

}  // namespace inplace_abn::cuda
