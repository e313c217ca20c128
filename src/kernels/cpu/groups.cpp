#include "inplace_abn/kernels.h"
#include "moments.h"

namespace inplace_abn::cpu {

template <typename scalar_t>
void merge_groups(const MergeArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const int64_t shared = args.extent.shared;
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
      const double size = static_cast<double>(args.affine.gamma(c)) * count;
      args.sum_dy[c] = static_cast<opmath_t>(mean_dy / size);
      args.sum_xhat_dy[c] = static_cast<opmath_t>(mean_xhat_dy / size);
    }
  }
}

#define INSTANTIATE(scalar_t)                             \
  template void merge_groups(const MergeArgs<scalar_t>&); \
  template void share_sums(const ShareArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cpu
