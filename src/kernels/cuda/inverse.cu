#include "inplace_abn/kernels.h"
#include "launch.cuh"

namespace inplace_abn::cuda {
namespace {

constexpr int threads = 256;
// Elements of a thread, all of them loaded before any is worked on: 32 bytes.
template <typename scalar_t>
constexpr int unroll = 32 / sizeof(scalar_t);

template <typename scalar_t, typename opmath_t, typename Act>
__global__ void __launch_bounds__(threads)
    invert(int64_t first_block, const scalar_t* z, opmath_t* y, int64_t count, Act act) {
  constexpr int count_of_thread = unroll<scalar_t>;
  const int64_t first = (first_block + blockIdx.x) * int64_t(threads * count_of_thread) + threadIdx.x;
  scalar_t loaded[count_of_thread];
#pragma unroll
  for (int k = 0; k < count_of_thread; ++k) {
    const int64_t i = first + k * threads;
    loaded[k] = i < count ? z[i] : scalar_t(0);
  }
#pragma unroll
  for (int k = 0; k < count_of_thread; ++k) {
    const int64_t i = first + k * threads;
    opmath_t value, slope;
    act.inverse(loaded[k], opmath_t(0), value, slope);
    if (i < count) y[i] = value;
  }
}

}  // namespace

template <typename scalar_t>
void inverse(const InverseArgs<scalar_t>& args) {
  constexpr int64_t per_block = threads * unroll<scalar_t>;
  visit_activation<scalar_t>(args.activation.kind, args.activation.param, [&](auto act) {
    launch(invert<scalar_t, opmath_type<scalar_t>, decltype(act)>, (args.count + per_block - 1) / per_block, threads,
           args.z, args.y, args.count, act);
  });
}

#define INSTANTIATE(scalar_t) template void inverse(const InverseArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
