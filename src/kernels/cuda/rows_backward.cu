// dx of norms of rows. A team of threads has one row. It sums over the row, and then writes dx. A thread keeps the
// first elements that it has read in registers in between, and reads further ones again, from the cache.
#include <cstdint>

#include "elements.cuh"
#include "inplace_abn/kernels.h"
#include "launch.cuh"

namespace inplace_abn::cuda {
namespace {

constexpr int row_threads = 128;

// What `width` elements of a row add to its sums, and what dx is made of.
template <typename scalar_t, int width>
struct RowTerms {
  using opmath_t = opmath_type<scalar_t>;
  opmath_t g[width], xhat[width];

  __device__ __forceinline__ RowTerms() {}
  __device__ __forceinline__ RowTerms(const RowsBackwardArgs<scalar_t>& args, int64_t first,
                                      const Vector<scalar_t, width>& y, const Vector<scalar_t, width>& dy) {
    opmath_t gamma[width], beta[width];
    channels(args.weight, first, opmath_t(1), gamma);
    channels(args.is_xhat ? ChannelVector<scalar_t>{} : args.bias, first, opmath_t(0), beta);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      g[i] = static_cast<opmath_t>(dy.get(i)) * gamma[i];
      xhat[i] = (static_cast<opmath_t>(y.get(i)) - beta[i]) * args.inverse(gamma[i]);
    }
  }
  __device__ __forceinline__ void add_to(Sums<opmath_t>& sums) const {
#pragma unroll
    for (int i = 0; i < width; ++i) sums.add({g[i], g[i] * xhat[i]});
  }

 private:
  // Of `width` channels, all at once: neighbouring threads would load from 16 or 32 bytes apart else.
  __device__ __forceinline__ static void channels(const ChannelVector<scalar_t>& vector, int64_t first,
                                                  opmath_t missing, opmath_t (&values)[width]) {
    if (!vector) {
#pragma unroll
      for (int i = 0; i < width; ++i) values[i] = missing;
    } else if (vector.narrow) {
      read(static_cast<const scalar_t*>(vector.data) + first, values);
    } else {
      read(static_cast<const opmath_t*>(vector.data) + first, values);
    }
  }
  template <typename T>
  __device__ __forceinline__ static void read(const T* from, opmath_t (&values)[width]) {
    constexpr int at_once = width == 1 ? 1 : vector_width<T>;
#pragma unroll
    for (int start = 0; start < width; start += at_once) {
      Vector<T, at_once> loaded;
      loaded.load(from + start);
#pragma unroll
      for (int i = 0; i < at_once; ++i) values[start + i] = static_cast<opmath_t>(loaded.get(i));
    }
  }
};

// The sums of all threads of a team, in all of them.
template <int team, typename opmath_t>
__device__ __forceinline__ Sums<opmath_t> sum_of_team(Sums<opmath_t> sums) {
#pragma unroll
  for (int lanes = (team < 32 ? team : 32) / 2; lanes > 0; lanes /= 2) {
    sums.add({__shfl_xor_sync(~0u, sums.dy, lanes), __shfl_xor_sync(~0u, sums.dy_centred, lanes)});
  }
  if constexpr (team > 32) {
    static_assert(team == row_threads);
    __shared__ Sums<opmath_t> of_warps[team / 32];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sums;
    __syncthreads();
    sums = of_warps[0];
#pragma unroll
    for (int warp = 1; warp < team / 32; ++warp) sums.add(of_warps[warp]);
  }
  return sums;
}

// `kept` elements of a row stay with each thread of the team.
template <typename scalar_t, int width, int team, int kept_elements>
__global__ void __launch_bounds__(row_threads)
    row_gradient_kernel(const int64_t first_block, const RowsBackwardArgs<scalar_t> args) {
  using opmath_t = opmath_type<scalar_t>;
  // More single elements would not fit in registers.
  constexpr int kept = width == 1 ? kept_elements / 8 : kept_elements / width;
  const int lane = threadIdx.x % team;
  const int64_t row = (first_block + blockIdx.x) * (row_threads / team) + threadIdx.x / team;
  // Teams without a row only take part in the exchange of sums.
  const int64_t vectors = row < args.rows ? args.columns / width : 0, start = row * args.columns;
  const auto load = [&](int64_t v, Vector<scalar_t, width>& y, Vector<scalar_t, width>& dy) {
    y.load(args.y + start + v * width);
    dy.load(args.dy + start + v * width);
  };
  Sums<opmath_t> sums{};
  RowTerms<scalar_t, width> terms[kept];
  {
    Vector<scalar_t, width> y[kept], dy[kept];
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      if (lane + k * team < vectors) load(lane + k * team, y[k], dy[k]);
    }
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      if (lane + k * team >= vectors) continue;
      terms[k] = {args, (lane + k * team) * width, y[k], dy[k]};
      terms[k].add_to(sums);
    }
  }
  for (int64_t v = lane + kept * team; v < vectors; v += team) {
    Vector<scalar_t, width> y, dy;
    load(v, y, dy);
    RowTerms<scalar_t, width>(args, v * width, y, dy).add_to(sums);
  }

  sums = sum_of_team<team>(sums);
  const auto count = static_cast<opmath_t>(args.columns), rstd = vectors > 0 ? args.rstd[row] : opmath_t(0);
  const opmath_t mean_g = args.centred ? sums.dy / count : 0, mean_g_xhat = sums.dy_centred / count;
  const auto store = [&](int64_t v, const RowTerms<scalar_t, width>& of) {
    Vector<scalar_t, width> dx;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      dx.set(i, static_cast<scalar_t>(rstd * (of.g[i] - mean_g - of.xhat[i] * mean_g_xhat)));
    }
    dx.store(args.dx + start + v * width);
  };
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    if (lane + k * team < vectors) store(lane + k * team, terms[k]);
  }
  for (int64_t v = lane + kept * team; v < vectors; v += team) {
    Vector<scalar_t, width> y, dy;
    load(v, y, dy);
    store(v, {args, v * width, y, dy});
  }
}

// As few threads for a row as can keep it, or all of a block.
template <typename scalar_t, int width>
void launch_rows(const RowsBackwardArgs<scalar_t>& args) {
  constexpr int few = 16, many = sizeof(opmath_type<scalar_t>) == sizeof(double) ? 16 : 32;
  const auto by_teams = [&]<int team, int kept>() {
    const int64_t blocks = ceil_div(args.rows, row_threads / team);
    launch(row_gradient_kernel<scalar_t, width, team, kept>, blocks, row_threads, args);
  };
  if (args.columns <= 8 * few) {
    by_teams.template operator()<8, few>();
  } else if (args.columns <= 32 * few) {
    by_teams.template operator()<32, few>();
  } else if (args.columns <= 32 * many) {
    by_teams.template operator()<32, many>();
  } else {
    by_teams.template operator()<row_threads, few>();
  }
}

}  // namespace

template <typename scalar_t>
void rows_backward(const RowsBackwardArgs<scalar_t>& args) {
  constexpr int width = vector_width<scalar_t>;
  bool aligned = args.columns % width == 0;
  for (const void* data :
       {static_cast<const void*>(args.y), static_cast<const void*>(args.dy), static_cast<const void*>(args.dx),
        static_cast<const void*>(args.weight.data), static_cast<const void*>(args.bias.data)}) {
    aligned = aligned && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
  if (aligned) {
    launch_rows<scalar_t, width>(args);
  } else {
    launch_rows<scalar_t, 1>(args);
  }
}

#define INSTANTIATE(scalar_t) template void rows_backward(const RowsBackwardArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
