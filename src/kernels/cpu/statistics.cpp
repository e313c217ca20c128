#include "inplace_abn/kernels.h"
#include "moments.h"
#include "rows.h"
#include "walk.h"

namespace inplace_abn::cpu {

template <typename scalar_t>
void statistics(const StatisticsArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const auto store = [&](int64_t c, const Moments& moments) {
    args.mean[c] = static_cast<opmath_t>(moments.mean);
    args.var[c] = static_cast<opmath_t>(moments.var());
    return 0;
  };
  if (args.extent.order == Order::rows) {
    const RowGrid grid(args.extent, {args.x.batch_stride});
    reduce_rows<MergeMoments>(
        args.extent,
        [&](int64_t first, int64_t rows, double* mean, double* m2) {
          row_moments(grid, args.x, first, rows, mean, m2);
        },
        [&](int64_t c, double mean, double m2) {
          store(c, Moments{static_cast<double>(args.extent.batch), mean, m2});
        });
    return;
  }
  reduce_and_apply_planes<Moments>(args.extent, sizeof(scalar_t), panel_moments_of(args.x), store,
                                   [](int64_t, int64_t, const Panel&, const int*) {});
}

template <typename scalar_t>
void combine(const CombineArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const int64_t channels = args.channels, row = 2 * channels + 1;
  double count = 0;
  for (int64_t i = 0; i < args.parts; ++i) count += static_cast<double>(args.gathered[i * row + 2 * channels]);
  *args.count = static_cast<opmath_t>(count);
  for (int64_t c = 0; c < channels; ++c) {
    Moments moments;
    for (int64_t i = 0; i < args.parts; ++i) {
      const opmath_t* part = args.gathered + i * row;
      const auto part_count = static_cast<double>(part[2 * channels]);
      moments.merge({part_count, static_cast<double>(part[c]), static_cast<double>(part[channels + c]) * part_count});
    }
    args.mean[c] = static_cast<opmath_t>(moments.mean);
    args.var[c] = static_cast<opmath_t>(moments.var());
    args.running.apply(c, moments.mean, moments.var(), moments.count);
  }
}

#define INSTANTIATE(scalar_t)                                \
  template void statistics(const StatisticsArgs<scalar_t>&); \
  template void combine(const CombineArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cpu
