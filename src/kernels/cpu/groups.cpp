#include <algorithm>

#include "inplace_abn/kernels.h"
#include "moments.h"

namespace inplace_abn::cpu {

namespace {

// Planes that lie one behind the other are one long plane.
template <typename scalar_t>
void statistics_of_dense_groups(const StatisticsArgs<scalar_t>& args) {
  const int64_t shared = args.extent.shared, groups = args.extent.channels / shared;
  const View<const scalar_t> x{args.x.data, 0, shared * args.extent.space};
  statistics(StatisticsArgs<scalar_t>{{Order::planes, 1, groups, shared * args.extent.space}, x, args.mean, args.var});
  // From the last group on, because a group's statistics stand before those of its channels.
  for (int64_t g = groups - 1; g >= 0; --g) {
    const auto mean = args.mean[g], var = args.var[g];
    std::fill_n(args.mean + g * shared, shared, mean);
    std::fill_n(args.var + g * shared, shared, var);
  }
}

}  // namespace

template <typename scalar_t>
void group_statistics(const StatisticsArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const int64_t shared = args.extent.shared;
  if (args.extent.order == Order::planes && args.extent.batch == 1 && args.x.channel_stride == args.extent.space) {
    statistics_of_dense_groups(args);
    return;
  }
  statistics(args);
  for (int64_t first = 0; first < args.extent.channels; first += shared) {
    Moments moments;
    for (int64_t c = first; c < first + shared; ++c) {
      moments.merge({1, static_cast<double>(args.mean[c]), static_cast<double>(args.var[c])});
    }
    for (int64_t c = first; c < first + shared; ++c) {
      args.mean[c] = static_cast<opmath_t>(moments.mean);
      args.var[c] = static_cast<opmath_t>(moments.var());
    }
  }
}

template <typename scalar_t>
void share_sums(const ShareArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const int64_t shared = args.extent.shared;
  const auto count = static_cast<double>(shared * args.extent.batch * args.extent.space);
  for (int64_t first = 0; first < args.extent.channels; first += shared) {
    double mean_dy = 0, mean_xhat_dy = 0;
    for (int64_t c = first; c < first + shared; ++c) {
      const auto sum_dy = static_cast<double>(args.sum_dy[c]), sum_xhat_dy = static_cast<double>(args.sum_xhat_dy[c]);
      const auto gamma = static_cast<double>(args.affine.gamma(c));
      mean_dy += gamma * sum_dy;
      mean_xhat_dy += gamma * sum_xhat_dy;
      if (args.dweight) args.dweight.store(c, sum_xhat_dy * static_cast<double>(args.affine.dgamma(c)));
      if (args.dbias) args.dbias.store(c, sum_dy);
    }
    for (int64_t c = first; c < first + shared; ++c) {
      args.sum_dy[c] = static_cast<opmath_t>(mean_dy / count);
      args.sum_xhat_dy[c] = static_cast<opmath_t>(mean_xhat_dy / count);
    }
  }
}

#define INSTANTIATE(scalar_t)                                      \
  template void group_statistics(const StatisticsArgs<scalar_t>&); \
  template void share_sums(const ShareArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cpu
