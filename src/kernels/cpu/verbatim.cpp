#include "verbatim.h"

#include "blocks.h"
#include "inplace_abn/kernels.h"
#include "walk.h"

namespace inplace_abn::cpu {
namespace {

// `count` elements, at these distances.
template <typename scalar_t, typename opmath_t, typename Act>
INPLACE_ABN_CLONES void differentiate(const scalar_t* dz, int64_t dz_stride, const scalar_t* xhat, int64_t xhat_stride,
                                      const scalar_t* residual, int64_t residual_stride, scalar_t* dy,
                                      int64_t dy_stride, int64_t count, opmath_t gamma, opmath_t beta, Act act) {
  INPLACE_ABN_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    opmath_t y = gamma * static_cast<opmath_t>(xhat[i * xhat_stride]) + beta;
    if (residual != nullptr) y += static_cast<opmath_t>(residual[i * residual_stride]);
    dy[i * dy_stride] = static_cast<scalar_t>(static_cast<opmath_t>(dz[i * dz_stride]) * act.slope(y));
  }
}

template <typename scalar_t, typename opmath_t, typename Act>
INPLACE_ABN_CLONES void invert(const scalar_t* z, const scalar_t* dz, opmath_t* dy, int64_t length, Act act) {
  constexpr int64_t most = 256;
  for (int64_t first = 0; first < length; first += most) {
    const int64_t count = std::min(most, length - first);
    const Loaded<scalar_t, most> from(z + first, count), gradient(dz + first, count);
    INPLACE_ABN_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      opmath_t y;
      act.inverse(from[i], gradient[i], y, dy[first + i]);
    }
  }
}

}  // namespace

template <typename scalar_t>
void gradient_of_run(const ActivationArgs& activation, const scalar_t* z, const scalar_t* dz, opmath_type<scalar_t>* dy,
                     int64_t count) {
  visit_activation<scalar_t>(activation.kind, activation.param, [&](auto act) {
    if constexpr (!is_curved<decltype(act)>) invert(z, dz, dy, count, act);
  });
}

template <typename scalar_t>
void verbatim_gradient(const VerbatimGradientArgs<scalar_t>& args) {
  const Extent& extent = args.extent;
  // Rows of channels are taken in blocks that stay in cache, planes one by one.
  const bool rows = extent.order == Order::rows;
  const int64_t block = rows ? std::max<int64_t>(1, panel_elements / std::max<int64_t>(1, extent.channels)) : 1;
  const int64_t blocks = (extent.batch + block - 1) / block;
  visit_activation<scalar_t>(args.activation.kind, args.activation.param, [&](auto act) {
    if constexpr (is_curved<decltype(act)>) {
      torch::stable::parallel_for(
          0, blocks, grain(block * extent.channels * extent.space), [&](int64_t begin, int64_t end) {
            for (int64_t b = begin; b < end; ++b) {
              const int64_t n = b * block, count = rows ? std::min(block, extent.batch - n) : extent.space;
              for (int64_t c = 0; c < extent.channels; ++c) {
                const int64_t row = args.verbatim.row(c);
                if (row < 0) continue;
                const auto at = [&](const auto& view, int64_t channel) {
                  return view.data + n * view.batch_stride + channel * view.channel_stride;
                };
                const auto step = [&](const auto& view) { return rows ? view.batch_stride : int64_t{1}; };
                const bool adds = args.residual.data != nullptr;
                differentiate(at(args.dz, c), step(args.dz), at(args.verbatim.xhat, row), step(args.verbatim.xhat),
                              adds ? at(args.residual, c) : nullptr, adds ? step(args.residual) : 0, at(args.dy, row),
                              step(args.dy), count, args.affine.gamma(c), args.affine.beta(c), act);
              }
            }
          });
    }
  });
}

#define INSTANTIATE(scalar_t)                                                                                    \
  template void gradient_of_run(const ActivationArgs&, const scalar_t*, const scalar_t*, opmath_type<scalar_t>*, \
                                int64_t);                                                                        \
  template void verbatim_gradient(const VerbatimGradientArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cpu
