#include <vector>

#include "backward_reduce.h"
#include "blocks.h"
#include "inplace_abn/kernels.h"
#include "inverses.h"
#include "residual.h"
#include "rows.h"
#include "vectors.h"
#include "walk.h"

namespace inplace_abn::cpu {
namespace {

// dx = from_dy * dy + from_xhat * xhat + constant. In place of xhat there may be an affine function of it, such as y.
template <typename opmath_t>
struct Combination {
  opmath_t from_dy, from_xhat, constant;
};

// All ones where dx has a part of xhat, else zero: nothing remains of an infinite xhat, either.
template <typename opmath_t>
using Mask = typename Tag<opmath_t>::mask_t;

template <typename opmath_t>
INPLACE_ABN_INLINE opmath_t masked(opmath_t xhat, Mask<opmath_t> mask) {
  return bits_to<opmath_t>(bits_to<Mask<opmath_t>>(xhat) & mask);
}

// Elements of a run that are combined at a time.
constexpr int64_t most_of_run = 512;

template <typename scalar_t, typename dy_t, typename opmath_t>
INPLACE_ABN_CLONES void combine_panel(View<const scalar_t> xhat, View<const dy_t> dy, View<scalar_t> dx,
                                      int64_t channels, int64_t runs, int64_t length,
                                      const Combination<opmath_t>* combinations, Mask<opmath_t> mask) {
  for (int64_t r = 0; r < runs; ++r) {
    for (int64_t c = 0; c < channels; ++c) {
      const scalar_t* xhat_run = xhat.data + c * xhat.channel_stride + r * xhat.batch_stride;
      const dy_t* dy_run = dy.data + c * dy.channel_stride + r * dy.batch_stride;
      scalar_t* dx_run = dx.data + c * dx.channel_stride + r * dx.batch_stride;
      const Combination<opmath_t> k = combinations[c];
      for (int64_t done = 0; done < length; done += most_of_run) {
        const int64_t count = std::min(most_of_run, length - done);
        const Loaded<scalar_t, most_of_run> xhat_block(xhat_run + done, count);
        const Loaded<dy_t, most_of_run> dy_block(dy_run + done, count);
        Stored<scalar_t, most_of_run> dx_block(dx_run + done);
        INPLACE_ABN_INDEPENDENT
        for (int64_t i = 0; i < count; ++i) {
          dx_block.set(i, k.from_dy * dy_block[i] + k.from_xhat * masked(xhat_block[i], mask) + k.constant);
        }
        dx_block.finish(count);
      }
    }
  }
}

template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void combine_rows(const scalar_t* xhat, int64_t xhat_stride, const scalar_t* dy, int64_t dy_stride,
                                     scalar_t* dx, int64_t dx_stride, int64_t rows, int64_t channels,
                                     const opmath_t* from_dy, const opmath_t* from_xhat, const opmath_t* constant,
                                     Mask<opmath_t> mask) {
  const int64_t xhat_ahead = rows_ahead<scalar_t>(xhat_stride, 2), dy_ahead = rows_ahead<scalar_t>(dy_stride, 2);
  for (int64_t r = 0; r < rows; ++r) {
    const auto walk = [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Loaded<scalar_t, most_channels> xhat_block(xhat + r * xhat_stride + c, count);
      const Loaded<scalar_t, most_channels> dy_block(dy + r * dy_stride + c, count);
      Stored<scalar_t, most_channels> dx_block(dx + r * dx_stride + c);
      INPLACE_ABN_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) {
        dx_block.set(i,
                     from_dy[c + i] * dy_block[i] + from_xhat[c + i] * masked(xhat_block[i], mask) + constant[c + i]);
      }
      dx_block.finish(count);
    };
    for_each_channel(channels, walk, RowsAhead<scalar_t, 1>{xhat + r * xhat_stride + xhat_ahead, xhat_stride},
                     RowsAhead<scalar_t, 1>{dy + r * dy_stride + dy_ahead, dy_stride});
  }
}

// `count` elements of a run, a multiple of a vector.
template <typename scalar_t, typename opmath_t, typename Res, typename Act>
INPLACE_ABN_INLINE void invert_and_combine_block(const scalar_t* z, const scalar_t* dz, scalar_t* dx, int64_t count,
                                                 const Combination<opmath_t>& k, Mask<opmath_t> mask, Res residual,
                                                 Act act) {
  constexpr int64_t lanes = vector_lanes<scalar_t>, most = block_size<scalar_t, lanes, Act>;
  const Inverted<scalar_t, Act, most> inverted(act, z, dz, count);
  typename Res::template Block<most> added(residual, count);
  Stored<scalar_t, most> to(dx);
  for (int64_t first = 0; first < count; first += lanes) {
    INPLACE_ABN_ONE_VECTOR
    for (int64_t l = first; l < first + lanes; ++l) {
      opmath_t y, dy;
      inverted.get(act, l, y, dy);
      dy = added.gradient(dy, l);
      y = added.subtract(y, l);
      added.store_gradient(dy, l);
      to.set(l, k.from_dy * dy + k.from_xhat * masked(y, mask) + k.constant);
    }
  }
  added.finish(count);
  to.finish(count);
}

// dx from z and dz, which are inverted a second time: cheaper than to write xhat and dy and to read them back.
template <typename scalar_t, typename opmath_t, typename Res, typename Act>
INPLACE_ABN_CLONES void invert_and_combine_panel(View<const scalar_t> z, View<const scalar_t> dz, View<scalar_t> dx,
                                                 int64_t channels, int64_t runs, int64_t length,
                                                 const Combination<opmath_t>* combinations, Mask<opmath_t> mask,
                                                 Res residual, Act act) {
  constexpr int64_t width = vector_lanes<scalar_t>;
  const bool ragged = length % width != 0;
  for (int64_t r = 0; r < runs; ++r) {
    for (int64_t c = 0; c < channels; ++c) {
      const scalar_t* z_run = z.data + c * z.channel_stride + r * z.batch_stride;
      const scalar_t* dz_run = dz.data + c * dz.channel_stride + r * dz.batch_stride;
      scalar_t* dx_run = dx.data + c * dx.channel_stride + r * dx.batch_stride;
      const Combination<opmath_t> k = combinations[c];
      const Res here = residual.at(c, r, 0);
      RunEnd<scalar_t> z_end, end;
      typename Res::End residual_end;
      if (ragged) {
        z_end.take(z_run, length, z_run[0]);
        end.take(dz_run, length, scalar_t(0));
        residual_end.take(here, length);
        invert_and_combine_block(z_end.data(), end.data(), end.data(), width, k, mask, residual_end.get(), act);
      }
      for (int64_t i = 0, count; i + width <= length; i += count) {
        count = next_block<block_size<scalar_t, width, Act>, width>(length - i);
        invert_and_combine_block(z_run + i, dz_run + i, dx_run + i, count, k, mask, here.at(0, 0, i), act);
      }
      if (ragged) {
        residual_end.store_gradient(here, length);
        end.store(dx_run, length);
      }
    }
  }
}

template <typename scalar_t, typename opmath_t, typename Res, typename Act>
INPLACE_ABN_CLONES void invert_and_combine_rows(const scalar_t* z, int64_t z_stride, const scalar_t* dz,
                                                int64_t dz_stride, scalar_t* dx, int64_t dx_stride, int64_t rows,
                                                int64_t channels, const opmath_t* from_dy, const opmath_t* from_xhat,
                                                const opmath_t* constant, Mask<opmath_t> mask, Res residual, Act act) {
  const int64_t z_ahead = rows_ahead<scalar_t>(z_stride, 2), dz_ahead = rows_ahead<scalar_t>(dz_stride, 2);
  for (int64_t r = 0; r < rows; ++r) {
    const Res row = residual.row(r);
    const auto walk = [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Inverted<scalar_t, Act, most_channels> inverted(act, z + r * z_stride + c, dz + r * dz_stride + c, count);
      typename Res::template Block<most_channels> added(row.at(0, 0, c), count);
      Stored<scalar_t, most_channels> to(dx + r * dx_stride + c);
      INPLACE_ABN_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) {
        opmath_t y, dy;
        inverted.get(act, i, y, dy);
        dy = added.gradient(dy, i);
        y = added.subtract(y, i);
        added.store_gradient(dy, i);
        to.set(i, from_dy[c + i] * dy + from_xhat[c + i] * masked(y, mask) + constant[c + i]);
      }
      added.finish(count);
      to.finish(count);
    };
    for_each_channel(channels, walk, RowsAhead<scalar_t, 1>{z + r * z_stride + z_ahead, z_stride},
                     RowsAhead<scalar_t, 1>{dz + r * dz_stride + dz_ahead, dz_stride});
  }
}

template <typename opmath_t>
void set(const ChannelArrays<opmath_t, 3>& arrays, int64_t c, const Combination<opmath_t>& k) {
  arrays.set(0, c, k.from_dy);
  arrays.set(1, c, k.from_xhat);
  arrays.set(2, c, k.constant);
}

template <typename scalar_t>
void combine_all_rows(const RowGrid& grid, const View<const scalar_t>& xhat, const View<const scalar_t>& dy,
                      const View<scalar_t>& dx, const ChannelArrays<opmath_type<scalar_t>, 3>& k,
                      Mask<opmath_type<scalar_t>> mask) {
  apply_rows(grid, [&](int64_t first, int64_t rows, int64_t fold, int64_t width) {
    combine_rows(xhat.data + first * xhat.batch_stride, xhat.batch_stride * fold, dy.data + first * dy.batch_stride,
                 dy.batch_stride * fold, dx.data + first * dx.batch_stride, dx.batch_stride * fold, rows, width, k[0],
                 k[1], k[2], mask);
  });
}

// combine_panel as reduce_and_apply_planes calls it.
template <typename scalar_t>
auto panel_combiner(const View<const scalar_t>& xhat, const View<const scalar_t>& dy, const View<scalar_t>& dx,
                    Mask<opmath_type<scalar_t>> mask) {
  return
      [=](int64_t first, int64_t channels, const Panel& panel, const Combination<opmath_type<scalar_t>>* combinations) {
        combine_panel(panel.view(xhat, first), panel.view(dy, first), panel.view(dx, first), channels, panel.runs,
                      panel.length, combinations, mask);
      };
}

// Calls f with the functors of the call's residual, with what is saved beside z, and activation.
template <typename scalar_t, typename Args, typename F>
void visit(const Args& args, const View<scalar_t>& dresidual, const F& f) {
  visit_residual<scalar_t>(args.residual, dresidual, [&](auto residual) {
    using Res = decltype(residual);
    visit_inverse<scalar_t>(args.activation, [&](auto act) {
      constexpr bool with_dy = is_curved_inverse<decltype(act)>;
      if (!args.verbatim || args.extent.order == Order::planes) {
        f(residual, act);
      } else {
        const SavedOfRow saved(args.verbatim, args.extent.channels);
        f(RowVerbatim<scalar_t, Res, with_dy>(residual, args.verbatim, saved, args.extent), act);
      }
    });
  });
}

// Calls one of two functions with the functor: for rows or for planes. That of saved rows is for rows only.
template <typename Res, typename Rows, typename Planes>
void in_order(Order order, const Res& residual, const Rows& rows, const Planes& planes) {
  if constexpr (requires { residual.saved; }) {
    rows(residual);
  } else if (order == Order::rows) {
    rows(residual);
  } else {
    planes(residual);
  }
}

// Stores the gradients of channel c's parameters. Returns dx as a combination of dy and xhat if `of_xhat`, else of dy
// and y.
template <typename scalar_t>
auto finish_channel(const LocalBackwardArgs<scalar_t>& args, int64_t c, const Sums& sums, bool of_xhat) {
  using opmath_t = opmath_type<scalar_t>;
  const auto& affine = args.affine;
  const auto count = static_cast<double>(args.extent.batch * args.extent.space);
  const bool is_saved = args.verbatim.row(c) >= 0;
  const auto gamma = static_cast<double>(affine.gamma(c)), beta = static_cast<double>(affine.beta(c));
  const double divisor = is_saved ? 1 : static_cast<double>(affine.divisor(c));
  const auto inv_std = static_cast<double>(affine.inv_std(args.var.load(c)));
  const double sum_xhat_dy = sums.dy_centred / divisor;
  of_xhat = of_xhat || is_saved;
  if (args.dweight) args.dweight.store(c, sum_xhat_dy * static_cast<double>(affine.dgamma(c)));
  if (args.dbias) args.dbias.store(c, sums.dy);
  if (args.dx.data == nullptr) return Combination<opmath_t>{1, 0, 0};
  if (!args.training) return Combination<opmath_t>{static_cast<opmath_t>(gamma * inv_std), 0, 0};
  const double from_xhat = -gamma * inv_std * sum_xhat_dy / count, from_y = from_xhat / divisor;
  return Combination<opmath_t>{
      static_cast<opmath_t>(gamma * inv_std), static_cast<opmath_t>(of_xhat ? from_xhat : from_y),
      static_cast<opmath_t>(-gamma * inv_std * sums.dy / count - (of_xhat ? 0 : from_y * beta))};
}

// Inverts z once. The first pass stores xhat, and dy in the memory of dresidual, which may be that of dx.
template <typename scalar_t, typename Res, typename Act>
void invert_once(const LocalBackwardArgs<scalar_t>& args, const View<scalar_t>& dresidual, Res residual, Act act) {
  const StoreXhatAndDy<scalar_t> store{args.xhat, dresidual};
  const View<const scalar_t> xhat{args.xhat.data, args.xhat.batch_stride, args.xhat.channel_stride};
  const View<const scalar_t> dy{dresidual.data, dresidual.batch_stride, dresidual.channel_stride};
  const auto finish = [&](int64_t c, const Sums& sums) { return finish_channel(args, c, sums, true); };
  const Mask<opmath_type<scalar_t>> mask = args.training ? -1 : 0;
  const auto rows = [&](auto residual) {
    const RowGrid grid(args.extent, {args.z.batch_stride, args.dz.batch_stride, args.dx.batch_stride,
                                     args.xhat.batch_stride, residual.row_stride(args.z)});
    const ChannelArrays<opmath_type<scalar_t>, 3> k(grid);
    reduce_all_rows(args.extent, grid, args.z, args.dz, args.affine, args.verbatim, residual, act, store,
                    [&](int64_t c, const Sums& sums) { set(k, c, finish(c, sums)); });
    combine_all_rows(grid, xhat, dy, args.dx, k, mask);
  };
  const auto planes = [&](auto residual) {
    reduce_and_apply_planes<Sums>(
        args.extent, sizeof(scalar_t),
        panel_sums_of(args.z, args.dz, args.affine, SavedPlanes<scalar_t>(args), residual, act, store), finish,
        panel_combiner(xhat, dy, args.dx, mask));
  };
  in_order(args.extent.order, residual, rows, planes);
}

// Inverts z for the sums, if any are wanted, and again for dx, if it is: dy where only dresidual is wanted.
template <typename scalar_t, typename Res, typename Act>
void invert_twice(const LocalBackwardArgs<scalar_t>& args, bool reduce, const View<scalar_t>& dx, Res residual,
                  Act act) {
  const DoNotStore<scalar_t> store;
  const auto finish = [&](int64_t c, const Sums& sums) { return finish_channel(args, c, sums, false); };
  const Mask<opmath_type<scalar_t>> mask = args.training && args.dx.data != nullptr ? -1 : 0;
  const auto rows = [&](auto residual) {
    const int64_t like = args.z.batch_stride;
    const RowGrid grid(args.extent, {like, args.dz.batch_stride, dx.data == nullptr ? like : dx.batch_stride,
                                     residual.row_stride(args.z)});
    const ChannelArrays<opmath_type<scalar_t>, 3> k(grid);
    const auto set_finished = [&](int64_t c, const Sums& sums) { set(k, c, finish(c, sums)); };
    if (reduce) {
      reduce_all_rows(args.extent, grid, args.z, args.dz, args.affine, args.verbatim, residual, act, store,
                      set_finished);
    } else {
      for (int64_t c = 0; c < grid.channels; ++c) set_finished(c, Sums{});
    }
    if (dx.data == nullptr) return;
    apply_rows(grid, [&](int64_t first, int64_t rows, int64_t fold, int64_t width) {
      invert_and_combine_rows(args.z.data + first * args.z.batch_stride, args.z.batch_stride * fold,
                              args.dz.data + first * args.dz.batch_stride, args.dz.batch_stride * fold,
                              dx.data + first * dx.batch_stride, dx.batch_stride * fold, rows, width, k[0], k[1], k[2],
                              mask, residual.rows(first, fold), act);
    });
  };
  const auto planes = [&](auto residual) {
    const SavedPlanes<scalar_t> saved(args);
    const auto reduction = panel_sums_of(args.z, args.dz, args.affine, saved, residual, act, store);
    reduce_and_apply_planes<Sums>(
        args.extent, sizeof(scalar_t),
        [&](int64_t first, int64_t channels, const Panel& panel, Sums* sums) {
          if (reduce) reduction(first, channels, panel, sums);
        },
        finish,
        [&](int64_t group, int64_t channels, const Panel& panel, const Combination<opmath_type<scalar_t>>* k) {
          if (dx.data == nullptr) return;
          for_each_part(args.verbatim, group, channels, [&](int64_t first, int64_t count, bool is_saved) {
            const int64_t c = group + first;
            if (!is_saved) {
              return invert_and_combine_panel(panel.view(args.z, c), panel.view(args.dz, c), panel.view(dx, c), count,
                                              panel.runs, panel.length, k + first, mask, residual.panel(panel, c), act);
            }
            saved.visit_dy(panel, c, [&](auto dy) {
              residual.panel(panel, c).store_gradient(dy, panel);
              combine_panel(saved.xhat(panel, c), dy, panel.view(dx, c), 1, panel.runs, panel.length, k + first, mask);
            });
          });
        });
  };
  in_order(args.extent.order, residual, rows, planes);
}

}  // namespace

template <typename scalar_t>
void backward_reduce(const BackwardReduceArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const auto finish = [&args](int64_t c, const Sums& sums) {
    const double divisor = args.verbatim.row(c) >= 0 ? 1 : static_cast<double>(args.affine.divisor(c));
    args.sum_dy[c] = static_cast<opmath_t>(sums.dy);
    args.sum_xhat_dy[c] = static_cast<opmath_t>(sums.dy_centred / divisor);
    return 0;
  };
  const StoreXhatAndDy<scalar_t> store{args.xhat, args.dy};
  visit<scalar_t>(args, View<scalar_t>{}, [&](auto residual, auto act) {
    const auto rows = [&](auto residual) {
      const RowGrid grid(args.extent, {args.z.batch_stride, args.dz.batch_stride, args.xhat.batch_stride,
                                       args.dy.batch_stride, residual.row_stride(args.z)});
      reduce_all_rows(args.extent, grid, args.z, args.dz, args.affine, args.verbatim, residual, act, store, finish);
    };
    const auto planes = [&](auto residual) {
      reduce_and_apply_planes<Sums>(
          args.extent, sizeof(scalar_t),
          panel_sums_of(args.z, args.dz, args.affine, SavedPlanes<scalar_t>(args), residual, act, store), finish,
          [](int64_t, int64_t, const Panel&, const int*) {});
    };
    in_order(args.extent.order, residual, rows, planes);
  });
}

template <typename scalar_t>
void backward(const BackwardArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const auto combination = [&](int64_t c) {
    const opmath_t of_dy = args.of_dy(c), of_means = args.of_means(c);
    if (args.mean_dy == nullptr) return Combination<opmath_t>{of_dy, 0, 0};
    return Combination<opmath_t>{of_dy, -of_means * args.mean_xhat_dy[c], -of_means * args.mean_dy[c]};
  };
  const Mask<opmath_t> mask = args.mean_dy == nullptr ? 0 : -1;
  if (args.extent.order == Order::rows) {
    const RowGrid grid(args.extent, {args.xhat.batch_stride, args.dy.batch_stride, args.dx.batch_stride});
    const ChannelArrays<opmath_t, 3> k(grid);
    for (int64_t c = 0; c < grid.channels; ++c) set(k, c, combination(c));
    combine_all_rows(grid, args.xhat, args.dy, args.dx, k, mask);
    return;
  }
  reduce_and_apply_planes<NoPartial>(
      args.extent, sizeof(scalar_t), [](int64_t, int64_t, const Panel&, NoPartial*) {},
      [&](int64_t c, NoPartial) { return combination(c); }, panel_combiner(args.xhat, args.dy, args.dx, mask));
}

template <typename scalar_t>
void local_backward(const LocalBackwardArgs<scalar_t>& args) {
  // If only one of dx and dresidual is wanted, both views alias it. dx is written last; if it is not wanted, it is dy.
  const View<scalar_t> dx = args.dx.data != nullptr ? args.dx : args.dresidual;
  const View<scalar_t> dresidual = args.dresidual.data != nullptr ? args.dresidual : args.dx;
  const bool reduce = args.training || args.dweight || args.dbias;
  const bool may_store = reduce && args.xhat.data != nullptr && args.dx.data != nullptr;
  visit<scalar_t>(args, dresidual, [&](auto residual, auto act) {
    if constexpr (is_curved_inverse<decltype(act)>) {
      if (may_store) return invert_once(args, dresidual, residual, act);
    }
    invert_twice(args, reduce, dx, residual, act);
  });
}

#define INSTANTIATE(scalar_t)                                         \
  template void backward_reduce(const BackwardReduceArgs<scalar_t>&); \
  template void backward(const BackwardArgs<scalar_t>&);              \
  template void local_backward(const LocalBackwardArgs<scalar_t>&);
// This file takes longest to compile, so backward_16_bits.cpp compiles half of its instances in parallel.
#if defined(INPLACE_ABN_16_BITS)
INSTANTIATE(c10::BFloat16)
INSTANTIATE(c10::Half)
#else
INSTANTIATE(double)
INSTANTIATE(float)
#endif

}  // namespace inplace_abn::cpu
