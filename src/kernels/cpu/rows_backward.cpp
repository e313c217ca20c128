// dx of norms of rows. A row is walked twice while it is in cache: for its sums, and for dx.
#include <vector>

#include "blocks.h"
#include "inplace_abn/kernels.h"

namespace inplace_abn::cpu {
namespace {

// The elements of a row that are converted at a time.
constexpr int64_t block = 256;
constexpr int64_t lanes = 32;

// The parameters in the type of the arithmetic, and 1 / weight.
template <typename opmath_t>
struct Columns {
  const opmath_t *gamma, *beta, *inverse_gamma;

  INPLACE_ABN_INLINE opmath_t xhat(opmath_t y, int64_t c) const { return (y - beta[c]) * inverse_gamma[c]; }
};

template <typename opmath_t>
struct RowSums {
  opmath_t g, g_xhat;
};

template <typename opmath_t>
INPLACE_ABN_INLINE opmath_t sum_of(opmath_t (&values)[lanes]) {
#pragma GCC unroll 8
  for (int64_t half = lanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) values[l] += values[l + half];
  }
  return values[0];
}

template <typename scalar_t, typename opmath_t>
INPLACE_ABN_INLINE RowSums<opmath_t> sum_row(const scalar_t* y, const scalar_t* dy, const Columns<opmath_t> columns,
                                             int64_t size) {
  opmath_t sum_g[lanes] = {}, sum_g_xhat[lanes] = {};
  for (int64_t first = 0; first < size; first += block) {
    const int64_t count = std::min(block, size - first);
    const Loaded<scalar_t, block> loaded_y(y + first, count), loaded_dy(dy + first, count);
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      INPLACE_ABN_ONE_VECTOR
      for (int64_t l = 0; l < lanes; ++l) {
        const opmath_t g = loaded_dy[i + l] * columns.gamma[first + i + l];
        sum_g[l] += g;
        sum_g_xhat[l] += g * columns.xhat(loaded_y[i + l], first + i + l);
      }
    }
    INPLACE_ABN_ONE_VECTOR
    for (int64_t l = 0; l < count - i; ++l) {
      const opmath_t g = loaded_dy[i + l] * columns.gamma[first + i + l];
      sum_g[l] += g;
      sum_g_xhat[l] += g * columns.xhat(loaded_y[i + l], first + i + l);
    }
  }
  return {sum_of(sum_g), sum_of(sum_g_xhat)};
}

template <typename scalar_t, typename opmath_t>
INPLACE_ABN_INLINE void write_row(const scalar_t* y, const scalar_t* dy, const Columns<opmath_t> columns, int64_t size,
                                  opmath_t rstd, const RowSums<opmath_t> means, scalar_t* dx) {
  for (int64_t first = 0; first < size; first += block) {
    const int64_t count = std::min(block, size - first);
    const Loaded<scalar_t, block> loaded_y(y + first, count), loaded_dy(dy + first, count);
    Stored<scalar_t, block> stored(dx + first);
    INPLACE_ABN_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      const opmath_t g = loaded_dy[i] * columns.gamma[first + i];
      stored.set(i, rstd * (g - means.g - columns.xhat(loaded_y[i], first + i) * means.g_xhat));
    }
    stored.finish(count);
  }
}

template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void walk_rows(const RowsBackwardArgs<scalar_t> args, const Columns<opmath_t> columns, int64_t begin,
                                  int64_t end) {
  const int64_t size = args.columns;
  const auto count = static_cast<opmath_t>(size);
  for (int64_t r = begin; r < end; ++r) {
    const scalar_t *y = args.y + r * size, *dy = args.dy + r * size;
    const auto [g, g_xhat] = sum_row<scalar_t, opmath_t>(y, dy, columns, size);
    const RowSums<opmath_t> means{args.centred ? g / count : opmath_t(0), g_xhat / count};
    write_row(y, dy, columns, size, args.rstd[r], means, args.dx + r * size);
  }
}

}  // namespace

template <typename scalar_t>
void rows_backward(const RowsBackwardArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const int64_t size = args.columns;
  std::vector<opmath_t> values(3 * size);
  for (int64_t c = 0; c < size; ++c) {
    values[c] = args.gamma(c);
    values[size + c] = args.beta(c);
    values[2 * size + c] = args.inverse(args.gamma(c));
  }
  const Columns<opmath_t> columns{values.data(), values.data() + size, values.data() + 2 * size};
  torch::stable::parallel_for(0, args.rows, grain(size),
                              [&](int64_t begin, int64_t end) { walk_rows(args, columns, begin, end); });
}

#define INSTANTIATE(scalar_t) template void rows_backward(const RowsBackwardArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cpu
