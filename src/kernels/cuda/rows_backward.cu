// dx of norms of rows. A block has one row at a time, and walks it twice: for its sums, and for dx.
#include "inplace_abn/kernels.h"
#include "launch.cuh"
#include "reduction.cuh"

namespace inplace_abn::cuda {
namespace {

constexpr int row_threads = 128;

template <typename scalar_t>
__global__ void __launch_bounds__(row_threads)
    row_gradient_kernel(const int64_t first_block, const RowsBackwardArgs<scalar_t> args) {
  using opmath_t = opmath_type<scalar_t>;
  __shared__ Sums<opmath_t> memory[row_threads];
  const int64_t row = first_block + blockIdx.x;
  const scalar_t *y = args.y + row * args.columns, *dy = args.dy + row * args.columns;
  const auto xhat = [&](int64_t c) { return (static_cast<opmath_t>(y[c]) - args.beta(c)) * args.inverse_gamma(c); };
  opmath_t sum_g = 0, sum_g_xhat = 0;
  for (int64_t c = threadIdx.x; c < args.columns; c += row_threads) {
    const opmath_t g = static_cast<opmath_t>(dy[c]) * args.gamma(c);
    sum_g += g;
    sum_g_xhat += g * xhat(c);
  }
  const Sums<opmath_t> sums = sum_of_block<row_threads>(Sums<opmath_t>{sum_g, sum_g_xhat}, memory);
  const auto count = static_cast<opmath_t>(args.columns);
  const opmath_t mean_g = args.centred ? sums.dy / count : 0, mean_g_xhat = sums.dy_centred / count;
  for (int64_t c = threadIdx.x; c < args.columns; c += row_threads) {
    const opmath_t g = static_cast<opmath_t>(dy[c]) * args.gamma(c);
    args.dx[row * args.columns + c] = static_cast<scalar_t>(args.rstd[row] * (g - mean_g - xhat(c) * mean_g_xhat));
  }
}

}  // namespace

template <typename scalar_t>
void rows_backward(const RowsBackwardArgs<scalar_t>& args) {
  launch(row_gradient_kernel<scalar_t>, args.rows, row_threads, args);
}

#define INSTANTIATE(scalar_t) template void rows_backward(const RowsBackwardArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
