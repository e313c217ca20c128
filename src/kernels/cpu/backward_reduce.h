// The first pass of backward: it inverts z, and sums dy and dy * (y - beta) per channel.
#pragma once

#include "blocks.h"
#include "inplace_abn/kernels.h"
#include "residual.h"
#include "rows.h"
#include "vectors.h"
#include "verbatim.h"

namespace inplace_abn::cpu {

// Sums over dy and dy * (y - beta); xhat = (y - beta) / gamma, and the division can wait until the end.
struct Sums {
  double dy = 0, dy_centred = 0;

  void merge(const Sums& other) {
    dy += other.dy;
    dy_centred += other.dy_centred;
  }
};

// What the pass does beside the sums: nothing, or it stores xhat and dy. It reads before it writes, so xhat may be z's
// memory, and dy that of dz. Methods, `End` and `Block` are as in residual.h.
template <typename scalar_t>
struct DoNotStore {
  struct End {
    INPLACE_ABN_INLINE DoNotStore get() { return {}; }
    INPLACE_ABN_INLINE void store(DoNotStore, int64_t) const {}
  };
  template <int64_t most>
  struct Block {
    INPLACE_ABN_INLINE explicit Block(DoNotStore) {}
    INPLACE_ABN_INLINE void set(int64_t, opmath_type<scalar_t>, opmath_type<scalar_t>) {}
    INPLACE_ABN_INLINE void finish(int64_t = most) {}
  };

  DoNotStore panel(const Panel&, int64_t) const { return {}; }
  DoNotStore rows(int64_t, int64_t) const { return {}; }
  template <typename Xhat, typename Dy>
  void copy(const Xhat&, const Dy&, const Panel&) const {}

  INPLACE_ABN_INLINE DoNotStore at(int64_t, int64_t, int64_t) const { return {}; }
};

template <typename scalar_t>
struct StoreXhatAndDy {
  View<scalar_t> xhat, dy;

  class End {
   public:
    INPLACE_ABN_INLINE StoreXhatAndDy get() { return {{xhat_.data(), 0, 0}, {dy_.data(), 0, 0}}; }
    INPLACE_ABN_INLINE void store(const StoreXhatAndDy& to, int64_t length) const {
      xhat_.store(to.xhat.data, length);
      dy_.store(to.dy.data, length);
    }

   private:
    RunEnd<scalar_t> xhat_, dy_;
  };
  template <int64_t most>
  class Block {
   public:
    INPLACE_ABN_INLINE explicit Block(const StoreXhatAndDy& to) : xhat_(to.xhat.data), dy_(to.dy.data) {}
    INPLACE_ABN_INLINE void set(int64_t i, opmath_type<scalar_t> xhat, opmath_type<scalar_t> dy) {
      xhat_.set(i, xhat);
      dy_.set(i, dy);
    }
    INPLACE_ABN_INLINE void finish(int64_t count = most) {
      xhat_.finish(count);
      dy_.finish(count);
    }

   private:
    Stored<scalar_t, most> xhat_, dy_;
  };

  StoreXhatAndDy panel(const Panel& panel, int64_t channel) const {
    return {panel.view(xhat, channel), panel.view(dy, channel)};
  }
  StoreXhatAndDy rows(int64_t first, int64_t fold) const {
    return {{xhat.data + first * xhat.batch_stride, xhat.batch_stride * fold, 0},
            {dy.data + first * dy.batch_stride, dy.batch_stride * fold, 0}};
  }

  template <typename Xhat, typename Dy>
  void copy(const Xhat& from_xhat, const Dy& from_dy, const Panel& panel) const {
    copy_panel(from_xhat, panel, xhat);
    copy_panel(from_dy, panel, dy);
  }

  INPLACE_ABN_INLINE StoreXhatAndDy at(int64_t channel, int64_t run, int64_t i) const {
    return {{xhat.data + channel * xhat.channel_stride + run * xhat.batch_stride + i, 0, 0},
            {dy.data + channel * dy.channel_stride + run * dy.batch_stride + i, 0, 0}};
  }
};

// Adds `count` elements to lanes, `unit` at a time, without the first `repeated`, which were added before. `residual`
// and `store` are at the block's first element.
template <int64_t unit, typename scalar_t, typename opmath_t, typename Res, typename Act, typename Store>
INPLACE_ABN_INLINE void reduce_block(const scalar_t* z, const scalar_t* dz, int64_t count,
                                     ChannelValues<opmath_t> values, Res residual, Act act, Store store,
                                     int32_t repeated, opmath_t* __restrict__ sum_dy,
                                     opmath_t* __restrict__ sum_dy_centred) {
  constexpr int64_t most = block_size<scalar_t, unit, Act>;
  const Inverted<scalar_t, Act, most> inverted(act, z, dz, count);
  const typename Res::template Block<most> added(residual, count);
  typename Store::template Block<most> stored(store);
  for (int64_t first = 0; first < count; first += unit) {
    INPLACE_ABN_ONE_VECTOR
    for (int32_t l = 0; l < static_cast<int32_t>(unit); ++l) {
      opmath_t y, dy;
      inverted.get(act, first + l, y, dy);
      dy = added.gradient(dy, first + l);
      const opmath_t centred = added.subtract(y, first + l) - values.beta;
      sum_dy[l] += l < repeated ? opmath_t(0) : dy;
      sum_dy_centred[l] += l < repeated ? opmath_t(0) : dy * centred;
      stored.set(first + l, centred * values.inverse_gamma, dy);
    }
  }
  stored.finish(count);
}

// Adds a run to lanes. They are the caller's own memory, hence `__restrict__`. `residual` and `store` are at the run's
// first element.
template <typename scalar_t, typename opmath_t, typename Res, typename Act, typename Store>
INPLACE_ABN_CLONES void reduce_run(const scalar_t* z, const scalar_t* z_ahead, const scalar_t* dz,
                                   const scalar_t* dz_ahead, int64_t length, ChannelValues<opmath_t> values,
                                   Res residual, Act act, Store store, opmath_t* __restrict__ sum_dy,
                                   opmath_t* __restrict__ sum_dy_centred) {
  constexpr int64_t wide = sum_lanes<opmath_t>, narrow = vector_lanes<scalar_t>;
  const bool ragged = length % narrow != 0;
  RunEnd<scalar_t> z_end, dz_end;
  typename Res::End residual_end;
  typename Store::End store_end;
  if (ragged) {
    z_end.take(z, length, z[0]);
    dz_end.take(dz, length, scalar_t(0));  // spare lanes have no gradient, so they add nothing
    residual_end.take(residual, length);
    reduce_block<narrow>(z_end.data(), dz_end.data(), narrow, values, residual_end.get(), act, store_end.get(),
                         z_end.repeated(length), sum_dy, sum_dy_centred);
  }
  int64_t i = 0;
  while (i + wide <= length) {
    const int64_t count = next_block<block_size<scalar_t, wide, Act>, wide>(length - i);
    prefetch(z_ahead + i, count);
    prefetch(dz_ahead + i, count);
    reduce_block<wide>(z + i, dz + i, count, values, residual.at(0, 0, i), act, store.at(0, 0, i), 0, sum_dy,
                       sum_dy_centred);
    i += count;
  }
  for (; i < length; i += narrow) {
    prefetch(z_ahead + i, narrow);
    prefetch(dz_ahead + i, narrow);
    if (i + narrow <= length) {
      reduce_block<narrow>(z + i, dz + i, narrow, values, residual.at(0, 0, i), act, store.at(0, 0, i), 0,
                           sum_dy + i % wide, sum_dy_centred + i % wide);
    }
  }
  if (ragged) store_end.store(store, length);
}

template <typename scalar_t, typename opmath_t, typename Res, typename Act, typename Store>
void reduce_panel(View<const scalar_t> z, View<const scalar_t> dz, int64_t channels, int64_t runs, int64_t length,
                  const ChannelValues<opmath_t>* values, Res residual, Act act, Store store, Sums* sums) {
  constexpr int64_t wide = sum_lanes<opmath_t>;
  alignas(64) opmath_t sum_dy[max_group][wide], sum_dy_centred[max_group][wide];
  for (int64_t c = 0; c < channels; ++c) {
    std::fill_n(sum_dy[c], wide, opmath_t(0));
    std::fill_n(sum_dy_centred[c], wide, opmath_t(0));
  }
  for (int64_t r = 0; r < runs; ++r) {
    for (int64_t c = 0; c < channels; ++c) {
      const scalar_t *z_channel = z.data + c * z.channel_stride, *dz_channel = dz.data + c * dz.channel_stride;
      reduce_run(z_channel + r * z.batch_stride,
                 ahead_of_run(z_channel, z.batch_stride, runs, channels * z.channel_stride, r),
                 dz_channel + r * dz.batch_stride,
                 ahead_of_run(dz_channel, dz.batch_stride, runs, channels * dz.channel_stride, r), length, values[c],
                 residual.at(c, r, 0), act, store.at(c, r, 0), sum_dy[c], sum_dy_centred[c]);
    }
  }
  for (int64_t c = 0; c < channels; ++c) sums[c] = {total(sum_dy[c]), total(sum_dy_centred[c])};
}

template <typename scalar_t, typename opmath_t, typename Res, typename Act, typename Store>
INPLACE_ABN_CLONES void reduce_row_chunk(const scalar_t* z, int64_t z_stride, const scalar_t* dz, int64_t dz_stride,
                                         int64_t rows, int64_t channels, const opmath_t* beta,
                                         const opmath_t* inverse_gamma, opmath_t* sum_dy, opmath_t* sum_dy_centred,
                                         Res residual, Act act, Store store) {
  const int64_t z_ahead = rows_ahead<scalar_t>(z_stride, 2), dz_ahead = rows_ahead<scalar_t>(dz_stride, 2);
  for (int64_t r = 0; r < rows; ++r) {
    const Res residual_row = residual.row(r);
    const Store store_row = store.at(0, r, 0);
    const auto walk = [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Inverted<scalar_t, Act, most_channels> inverted(act, z + r * z_stride + c, dz + r * dz_stride + c, count);
      const typename Res::template Block<most_channels> added(residual_row.at(0, 0, c), count);
      typename Store::template Block<most_channels> stored(store_row.at(0, 0, c));
      INPLACE_ABN_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) {
        opmath_t y, dy;
        inverted.get(act, i, y, dy);
        dy = added.gradient(dy, i);
        const opmath_t centred = added.subtract(y, i) - beta[c + i];
        sum_dy[c + i] += dy;
        sum_dy_centred[c + i] += dy * centred;
        stored.set(i, centred * inverse_gamma[c + i], dy);
      }
      stored.finish(count);
    };
    for_each_channel(channels, walk, RowsAhead<scalar_t, 1>{z + r * z_stride + z_ahead, z_stride},
                     RowsAhead<scalar_t, 1>{dz + r * dz_stride + dz_ahead, dz_stride});
  }
}

// Sums over dy and dy * xhat.
template <typename scalar_t, typename dy_t, typename opmath_t = opmath_type<scalar_t>>
INPLACE_ABN_CLONES Sums sums_of_saved(const View<const scalar_t> xhat, const View<const dy_t> dy, int64_t runs,
                                      int64_t length) {
  constexpr int64_t lanes = sum_lanes<opmath_t>, most = std::max<int64_t>(256, lanes);
  alignas(64) opmath_t sum_dy[lanes] = {}, sum_xhat_dy[lanes] = {};
  for (int64_t r = 0; r < runs; ++r) {
    for (int64_t first = 0; first < length; first += most) {
      const int64_t count = std::min(most, length - first);
      const Loaded<scalar_t, most> xhat_block(xhat.data + r * xhat.batch_stride + first, count);
      const Loaded<dy_t, most> dy_block(dy.data + r * dy.batch_stride + first, count);
      for (int64_t i = 0; i < count; i += lanes) {
        const int64_t some = std::min(lanes, count - i);
        INPLACE_ABN_INDEPENDENT
        for (int64_t l = 0; l < some; ++l) {
          sum_dy[l] += dy_block[i + l];
          sum_xhat_dy[l] += dy_block[i + l] * xhat_block[i + l];
        }
      }
    }
  }
  return {total(sum_dy), total(sum_xhat_dy)};
}

// reduce_panel as reduce_and_apply_planes calls it. Channels whose xhat is saved are taken from there.
template <typename scalar_t, typename Res, typename Act, typename Store>
auto panel_sums_of(const View<const scalar_t>& z, const View<const scalar_t>& dz, const Affine<scalar_t>& affine,
                   const SavedPlanes<scalar_t>& saved, Res residual, Act act, Store store) {
  return [=](int64_t group, int64_t channels, const Panel& panel, Sums* sums) {
    for_each_part(saved.verbatim(), group, channels, [&](int64_t first, int64_t count, bool is_saved) {
      const int64_t c = group + first;
      if (is_saved) {
        const View<const scalar_t> xhat = saved.xhat(panel, c);
        return saved.visit_dy(panel, c, [&](auto dy) {
          sums[first] = sums_of_saved(xhat, dy, panel.runs, panel.length);
          store.panel(panel, c).copy(xhat, dy, panel);
        });
      }
      ChannelValues<opmath_type<scalar_t>> values[max_group];
      for (int64_t i = 0; i < count; ++i) values[i] = recovering(affine, saved.verbatim(), c + i);
      reduce_panel(panel.view(z, c), panel.view(dz, c), count, panel.runs, panel.length, values,
                   residual.panel(panel, c), act, store.panel(panel, c), sums + first);
    });
  };
}

// Row order: reduces all chunks to one Sums per channel, and calls finish(channel, sums).
template <typename scalar_t, typename Res, typename Act, typename Store, typename Finish>
void reduce_all_rows(const Extent& extent, const RowGrid& grid, const View<const scalar_t>& z,
                     const View<const scalar_t>& dz, const Affine<scalar_t>& affine,
                     const Verbatim<const scalar_t>& verbatim, Res residual, Act act, Store store,
                     const Finish& finish) {
  using opmath_t = opmath_type<scalar_t>;
  const ChannelArrays<opmath_t, 2> values(grid);
  for (int64_t c = 0; c < grid.channels; ++c) {
    const auto [beta, inverse_gamma] = recovering(affine, verbatim, c);
    values.set(0, c, beta);
    values.set(1, c, inverse_gamma);
  }
  reduce_rows<MergeSums>(
      extent,
      [&](int64_t first, int64_t rows, double* dy, double* dy_centred) {
        const ChannelArrays<opmath_t, 2> sums(grid);
        grid.for_each_block(
            first, rows,
            [&](int64_t row, int64_t count, int64_t fold, int64_t width) {
              reduce_row_chunk(z.data + row * z.batch_stride, z.batch_stride * fold, dz.data + row * dz.batch_stride,
                               dz.batch_stride * fold, count, width, values[0], values[1], sums[0], sums[1],
                               residual.rows(row, fold), act, store.rows(row, fold));
            },
            [&] {
              move_sums(grid.fold, grid.channels, sums[0], dy);
              move_sums(grid.fold, grid.channels, sums[1], dy_centred);
            });
      },
      [&](int64_t c, double dy, double dy_centred) { finish(c, Sums{dy, dy_centred}); });
}

}  // namespace inplace_abn::cpu
