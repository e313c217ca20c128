#include <vector>

#include "blocks.h"
#include "inplace_abn/kernels.h"
#include "inverses.h"
#include "moments.h"
#include "residual.h"
#include "rows.h"
#include "saving.h"
#include "vectors.h"
#include "walk.h"

namespace inplace_abn::cpu {
namespace {

// y = (x - mean) * scale + beta. The mean is subtracted first, so that a large mean costs no digits.
template <typename opmath_t>
struct Transform {
  opmath_t mean, scale, beta;
};

template <typename scalar_t>
Transform<opmath_type<scalar_t>> make_transform(const Affine<scalar_t>& affine, int64_t c, opmath_type<scalar_t> mean,
                                                opmath_type<scalar_t> var) {
  return {mean, affine.gamma(c) * affine.inv_std(var), affine.beta(c)};
}

// `count` elements of a run, a multiple of a vector.
template <typename scalar_t, typename opmath_t, typename Res, typename Act>
INPLACE_ABN_INLINE void transform_block(const scalar_t* x, scalar_t* z, int64_t count, const Transform<opmath_t>& t,
                                        Res residual, Act act) {
  constexpr int64_t lanes = vector_lanes<scalar_t>, most = block_size<scalar_t, lanes>;
  const Loaded<scalar_t, most> from(x, count);
  const typename Res::template Block<most> added(residual, count);
  Stored<scalar_t, most> to(z);
  for (int64_t first = 0; first < count; first += lanes) {
    INPLACE_ABN_ONE_VECTOR
    for (int64_t l = first; l < first + lanes; ++l) {
      to.set(l, act.value(added.add((from[l] - t.mean) * t.scale + t.beta, l)));
    }
  }
  to.finish(count);
}

template <typename scalar_t, typename opmath_t, typename Res, typename Act>
INPLACE_ABN_CLONES void transform_panel(View<const scalar_t> x, View<scalar_t> z, int64_t channels, int64_t runs,
                                        int64_t length, const Transform<opmath_t>* transforms, Res residual, Act act) {
  constexpr int64_t width = vector_lanes<scalar_t>;
  const bool ragged = length % width != 0;
  for (int64_t r = 0; r < runs; ++r) {
    for (int64_t c = 0; c < channels; ++c) {
      const scalar_t* from = x.data + c * x.channel_stride + r * x.batch_stride;
      scalar_t* to = z.data + c * z.channel_stride + r * z.batch_stride;
      const Transform<opmath_t> t = transforms[c];
      RunEnd<scalar_t> end;
      typename Res::End residual_end;
      if (ragged) {
        end.take(from, length, from[0]);
        residual_end.take(residual.at(c, r, 0), length);
        transform_block(end.data(), end.data(), width, t, residual_end.get(), act);
      }
      for (int64_t i = 0, count; i + width <= length; i += count) {
        count = next_block<block_size<scalar_t, width>, width>(length - i);
        transform_block(from + i, to + i, count, t, residual.at(c, r, i), act);
      }
      if (ragged) end.store(to, length);
    }
  }
}

template <typename scalar_t, typename opmath_t, typename Res, typename Act>
INPLACE_ABN_CLONES void transform_rows(const scalar_t* x, int64_t x_stride, scalar_t* z, int64_t z_stride, int64_t rows,
                                       int64_t channels, const opmath_t* mean, const opmath_t* scale,
                                       const opmath_t* beta, Res residual, Act act, const SavingRows<scalar_t>& xhat,
                                       int64_t first, int64_t fold) {
  const int64_t ahead = rows_ahead<scalar_t>(x_stride, 1);
  for (int64_t r = 0; r < rows; ++r) {
    const scalar_t* from = x + r * x_stride;
    scalar_t* to = z + r * z_stride;
    const Res row = residual.at(0, r, 0);
    xhat.save(first + r * fold, first, first + rows * fold);
    const auto walk = [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Loaded<scalar_t, most_channels> block(from + c, count);
      const typename Res::template Block<most_channels> added(row.at(0, 0, c), count);
      Stored<scalar_t, most_channels> result(to + c);
      INPLACE_ABN_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) {
        result.set(i, act.value(added.add((block[i] - mean[c + i]) * scale[c + i] + beta[c + i], i)));
      }
      result.finish(count);
    };
    for_each_channel(channels, walk, RowsAhead<scalar_t, 1>{from + ahead, x_stride});
  }
}

template <typename opmath_t>
void set(const ChannelArrays<opmath_t, 3>& arrays, int64_t c, const Transform<opmath_t>& t) {
  arrays.set(0, c, t.mean);
  arrays.set(1, c, t.scale);
  arrays.set(2, c, t.beta);
}

template <typename scalar_t, typename Res, typename Act>
void transform_all_rows(const RowGrid& grid, const View<const scalar_t>& x, const View<scalar_t>& z,
                        const ChannelArrays<opmath_type<scalar_t>, 3>& t, const SavingRows<scalar_t>& xhat,
                        Res residual, Act act) {
  apply_rows(grid, [&](int64_t first, int64_t rows, int64_t fold, int64_t width) {
    transform_rows(x.data + first * x.batch_stride, x.batch_stride * fold, z.data + first * z.batch_stride,
                   z.batch_stride * fold, rows, width, t[0], t[1], t[2], residual.rows(first, fold), act, xhat, first,
                   fold);
  });
}

// transform_panel as reduce_and_apply_planes calls it.
template <typename scalar_t, typename Res, typename Act>
auto panel_transformer(const View<const scalar_t>& x, const View<scalar_t>& z, const SavingPlanes<scalar_t>& xhat,
                       Res residual, Act act) {
  using opmath_t = opmath_type<scalar_t>;
  return [=](int64_t first, int64_t channels, const Panel& panel, const Transform<opmath_t>* transforms) {
    xhat.save(first, channels, panel);
    transform_panel(panel.view(x, first), panel.view(z, first), channels, panel.runs, panel.length, transforms,
                    residual.panel(panel, first), act);
  };
}

// Calls f with the functors of the call's residual and activation.
template <typename scalar_t, typename Args, typename F>
void visit(const Args& args, const F& f) {
  visit_residual<scalar_t>(args.residual, View<scalar_t>{}, [&](auto residual) {
    visit_forward<scalar_t>(args.activation.kind, args.activation.param, args.invertible,
                            [&](auto act) { f(residual, act); });
  });
}

}  // namespace

template <typename scalar_t>
void forward(const ForwardArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const auto transform = [&](int64_t c) { return make_transform(args.affine, c, args.mean.load(c), args.var.load(c)); };
  visit<scalar_t>(args, [&](auto residual, auto act) {
    if (args.extent.order == Order::rows) {
      const RowGrid grid(args.extent, {args.x.batch_stride, args.z.batch_stride, residual.row_stride(args.x)});
      const ChannelArrays<opmath_t, 3> transforms(grid);
      for (int64_t c = 0; c < grid.channels; ++c) set(transforms, c, transform(c));
      const SavingRows<scalar_t> xhat(args.x, args.verbatim, args.mean, args.var, args.affine, args.extent.channels,
                                      grid.fold);
      transform_all_rows(grid, args.x, args.z, transforms, xhat, residual, act);
      return;
    }
    const SavingPlanes<scalar_t> xhat(args.x, args.verbatim, args.mean, args.var, args.affine);
    reduce_and_apply_planes<NoPartial>(
        args.extent, sizeof(scalar_t), [](int64_t, int64_t, const Panel&, NoPartial*) {},
        [&](int64_t c, NoPartial) { return transform(c); }, panel_transformer(args.x, args.z, xhat, residual, act));
  });
}

template <typename scalar_t>
void local_forward(const LocalForwardArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const ChannelVector<scalar_t> mean{args.mean, false}, var{args.var, false};
  // Stores the statistics, and returns what to apply.
  const auto finish = [&](int64_t c, const Moments& moments) {
    args.mean[c] = static_cast<opmath_t>(moments.mean);
    args.var[c] = static_cast<opmath_t>(moments.var());
    args.running.apply(c, moments.mean, moments.var(), moments.count);
    return make_transform(args.affine, c, args.mean[c], args.var[c]);
  };
  visit<scalar_t>(args, [&](auto residual, auto act) {
    if (args.extent.order == Order::rows) {
      const RowGrid grid(args.extent, {args.x.batch_stride, args.z.batch_stride, residual.row_stride(args.x)});
      const ChannelArrays<opmath_t, 3> transforms(grid);
      reduce_rows<MergeMoments>(
          args.extent,
          [&](int64_t first, int64_t rows, double* means, double* m2) {
            row_moments(grid, args.x, first, rows, means, m2);
          },
          [&](int64_t c, double chunk_mean, double m2) {
            set(transforms, c, finish(c, Moments{static_cast<double>(args.extent.batch), chunk_mean, m2}));
          });
      const SavingRows<scalar_t> xhat(args.x, args.verbatim, mean, var, args.affine, args.extent.channels, grid.fold);
      transform_all_rows(grid, args.x, args.z, transforms, xhat, residual, act);
      return;
    }
    const SavingPlanes<scalar_t> xhat(args.x, args.verbatim, mean, var, args.affine);
    reduce_and_apply_planes<Moments>(args.extent, sizeof(scalar_t), panel_moments_of(args.x), finish,
                                     panel_transformer(args.x, args.z, xhat, residual, act));
  });
}

#define INSTANTIATE(scalar_t)                          \
  template void forward(const ForwardArgs<scalar_t>&); \
  template void local_forward(const LocalForwardArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cpu
