// The reduction of x that forward begins with.
#pragma once

#include "walk.cuh"

namespace inplace_abn::cuda {

// mean and var of x per channel, and the update of the running statistics (null: none). Few instructions per element,
// for these are what bounds it in 16 bits.
template <typename scalar_type>
struct Statistics {
  using scalar_t = scalar_type;
  using opmath_t = opmath_type<scalar_t>;
  static constexpr int inputs = 1, outputs = 0, needed_outputs = 0;
  static constexpr int unroll = 4;
  static constexpr bool at_once = true, reduces = true, much_arithmetic = false;
  using Sum = ShiftedSums<opmath_t>;
  struct Channel {
    opmath_t pivot;
  };

  View<const scalar_t> x;
  opmath_t *mean, *var;
  RunningUpdate<scalar_t> running;
  double count;

  // All blocks of a channel sum about its first element.
  __device__ Channel channel(int64_t c) const { return {static_cast<opmath_t>(x.data[c * x.channel_stride])}; }

  __device__ static Totals totals(const Channel& channel, const Sum& sum, opmath_t elements) {
    return sum.about(static_cast<double>(channel.pivot), static_cast<double>(elements));
  }

  __device__ void finish(int64_t c, const Totals& totals) const {
    const Moments batch = moments(totals, count > 0 ? static_cast<double>(channel(c).pivot) : 0, count);
    mean[c] = static_cast<opmath_t>(batch.mean);
    var[c] = static_cast<opmath_t>(batch.var);
    running.apply(c, batch.mean, batch.var, count);
  }

  template <int items, int width>
  __device__ __forceinline__ void tile(const Channel&, const Elements<scalar_t, inputs, items * width>& in,
                                       Elements<scalar_t, outputs, items * width>&, Sum& sum,
                                       const Tile<items, width>& tile) const {
    if (tile.first) {
      opmath_t total = 0;
#pragma unroll
      for (int e = 0; e < items * width; ++e) total += tile.has(e) ? static_cast<opmath_t>(in[0][e]) : opmath_t(0);
      sum.pivot = total / static_cast<opmath_t>(tile.elements());
    }
    // Few at a time, because a sum is the less precise the more terms it has.
    constexpr int few = width > 1 ? width : items;
#pragma unroll
    for (int first = 0; first < items * width; first += few) {
      Sum part{sum.pivot, 0, 0};
#pragma unroll
      for (int e = first; e < first + few; ++e) {
        if (tile.has(e)) part.add(static_cast<opmath_t>(in[0][e]));
      }
      sum.add(part);
    }
  }
};

// Defined in statistics.cu.
template <typename scalar_t>
void reduce_moments(const Extent& extent, const Statistics<scalar_t>& op);

}  // namespace inplace_abn::cuda
