// Any (N, C, *) tensor as a batch x channel x space view with strides. The memory order is decided once, here; kernels
// have one loop nest per order and no layout test inside.
#pragma once

#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace inplace_abn {

enum class Order {
  planes,  // the space of one (batch, channel) pair is one contiguous run: NCHW and its batch or channel slices
  rows,    // the channels of one position are one contiguous run: NHWC, (N, C), and channel slices; space is 1
};

// The sizes and strides of a tensor, valid for as long as it lives.
struct Geometry {
  torch::headeronly::IntHeaderOnlyArrayRef sizes, strides;

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t size(int64_t d) const { return sizes[d]; }
  int64_t stride(int64_t d) const { return strides[d]; }
  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t size : sizes) product *= size;
    return product;
  }
};

// What all tensors of one call have in common. `instances` parts of them, one after the other, have statistics of their
// own, and everything else is said of one of these. Statistics are of each channel, or of `shared` neighbours.
struct Extent {
  Order order;
  int64_t batch, channels, space;
  int64_t instances = 1;
  int64_t shared = 1;

  int64_t elements() const { return batch * channels * space; }
};

// Element (n, c, s) of instance i lies at data[i * instance_stride + n * batch_stride + c * channel_stride + s].
template <typename scalar_t>
struct View {
  scalar_t* data = nullptr;
  int64_t batch_stride = 0, channel_stride = 0;
  int64_t instance_stride = 0;
};

namespace layout_detail {

// The stride with which dimensions `first...` (and, if asked, the batch) can be walked as one, if they can.
inline std::optional<int64_t> merged_stride(const Geometry& t, bool with_batch) {
  std::optional<int64_t> innermost;
  int64_t expected = 0;
  for (int64_t d = t.dim() - 1; d >= 0; --d) {
    if (d == 1 || (d == 0 && !with_batch) || t.size(d) == 1) continue;
    if (!innermost) {
      innermost = t.stride(d);
    } else if (t.stride(d) != expected) {
      return std::nullopt;
    }
    expected = t.stride(d) * t.size(d);
  }
  return innermost.value_or(1);
}

}  // namespace layout_detail

// Whether `t` can be walked in this order; if `per_instance`, sample by sample.
inline bool has_order(const Geometry& t, Order order, bool per_instance = false) {
  if (t.numel() == 0) return true;
  if (order == Order::rows) {
    return (t.size(1) == 1 || t.stride(1) == 1) && layout_detail::merged_stride(t, !per_instance).has_value();
  }
  return layout_detail::merged_stride(t, false) == 1;
}

// Whether planes follow one another at one distance, so that a sample's channels can be taken for further channels.
inline bool has_even_planes(const Geometry& t) {
  return t.size(0) <= 1 || t.size(1) <= 1 || t.stride(0) == t.size(1) * t.stride(1);
}

// How statistics are taken of a call's tensors.
struct Division {
  int64_t shared = 0;  // 0: each channel's of the batch; else each sample's, of so many neighbouring channels
  bool even = false;   // whether planes of all samples can be taken for channels of one instance
  int64_t run = 0;     // of how many such channels an instance consists; 0 for all

  bool per_instance() const { return shared > 0; }
};

inline Extent make_extent(const Geometry& t, Order order, const Division& division = {}) {
  const int64_t batch = t.size(0), channels = t.size(1), shared = std::max<int64_t>(1, division.shared);
  const int64_t positions = t.numel() == 0 ? 0 : t.numel() / channels;
  const int64_t space = batch == 0 ? 0 : positions / batch;
  if (!division.per_instance()) {
    return order == Order::rows ? Extent{order, positions, channels, 1} : Extent{order, batch, channels, space};
  }
  if (order == Order::rows) return {order, space, channels, 1, batch, shared};
  if (!division.even) return {order, 1, channels, space, batch, shared};
  const int64_t run = division.run > 0 ? division.run : batch * channels;
  return {order, 1, run, space, run > 0 ? batch * channels / run : 1, shared};
}

// The order in which `t` can be walked without a copy, preferring the one with the longer contiguous runs.
inline std::optional<Order> native_order(const Geometry& t, bool per_instance = false) {
  const bool rows = has_order(t, Order::rows, per_instance), planes = has_order(t, Order::planes);
  const bool single_position_planes = t.numel() == 0 || t.numel() == t.size(0) * t.size(1);
  if (planes && !(rows && single_position_planes)) return Order::planes;
  if (rows) return Order::rows;
  return std::nullopt;
}

template <typename scalar_t>
View<scalar_t> make_view(scalar_t* data, const Geometry& t, Order order, const Division& division = {}) {
  const bool per_instance = division.per_instance();
  if (order == Order::rows) {
    return {data, *layout_detail::merged_stride(t, !per_instance), 1, per_instance ? t.stride(0) : 0};
  }
  if (!per_instance) return {data, t.stride(0), t.stride(1)};
  // Planes of one channel each are even at the distance of samples.
  const int64_t step = t.size(1) == 1 ? t.stride(0) : t.stride(1);
  return {data, 0, step, division.even && division.run > 0 ? division.run * step : t.stride(0)};
}

}  // namespace inplace_abn
