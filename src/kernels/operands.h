// Makes the views of an op's tensors that kernels are given, and copies back what they wrote to stand-ins.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "backends.h"
#include "inplace_abn/kernels.h"
#include "inplace_abn/layout.h"
#include "inplace_abn/tensors.h"

namespace inplace_abn {

// The tensors of one call. Activations are seen in one memory order; those that kernels cannot walk in it get a dense
// stand-in. `finish` copies the stand-ins of outputs back.
class Operands {
 public:
  explicit Operands(const Tensor& like, int64_t shared = 0) : division_{shared} {
    const Geometry g = geometry(like);
    const bool per_instance = division_.per_instance();
    order_ = native_order(g, per_instance).value_or(channels_are_innermost(g) ? Order::rows : Order::planes);
    division_.even = per_instance && order_ == Order::planes && has_even_planes(g);
    if (shared > 1 && division_.even && !has_launches(like)) division_.run = channels_in_cache(like);
    extent_ = make_extent(g, order_, division_);
  }

  const Extent& extent() const { return extent_; }

  template <typename scalar_t>
  View<const scalar_t> input(const Tensor& t) {
    const Tensor& walked = walkable(t);
    return make_view(static_cast<const scalar_t*>(walked.const_data_ptr()), geometry(walked), order_, division_);
  }

  template <typename scalar_t>
  View<scalar_t> output(const Tensor& t) {
    const Tensor& walked = walkable(t);
    if (&walked != &t) copied_back_.emplace_back(t, walked);
    return make_view(static_cast<scalar_t*>(walked.mutable_data_ptr()), geometry(walked), order_, division_);
  }

  template <typename scalar_t>
  View<const scalar_t> optional_input(const OptTensor& t) {
    return t.has_value() ? input<scalar_t>(*t) : View<const scalar_t>{};
  }

  template <typename scalar_t>
  View<scalar_t> optional_output(const OptTensor& t) {
    return t.has_value() ? output<scalar_t>(*t) : View<scalar_t>{};
  }

  template <typename scalar_t>
  ChannelVector<scalar_t> channels(const OptTensor& t) {
    if (!t.has_value()) return {nullptr, false};
    const Tensor& dense = is_dense_vector(*t) ? *t : held_.emplace_back(torch::stable::contiguous(*t));
    // Nothing is written through it.
    return {const_cast<void*>(dense.const_data_ptr()), is_narrow<scalar_t>(dense)};
  }

  template <typename scalar_t>
  ChannelVector<scalar_t> written_channels(const OptTensor& t) {
    if (!t.has_value()) return {nullptr, false};
    const Tensor& dense =
        is_dense_vector(*t) ? *t : copied_back_.emplace_back(*t, torch::stable::contiguous(*t)).second;
    return {dense.mutable_data_ptr(), is_narrow<scalar_t>(dense)};
  }

  template <typename scalar_t>
  Affine<scalar_t> affine(const OptTensor& weight, const OptTensor& bias, double eps, int64_t scale) {
    return {channels<scalar_t>(weight), channels<scalar_t>(bias), eps, static_cast<Scale>(scale)};
  }

  // xhat of some channels, as an input or an output.
  template <typename scalar_t>
  Verbatim<const scalar_t> verbatim(const OptTensor& rows, const OptTensor& xhat) {
    if (!rows.has_value()) return {};
    // Samples at no distance would be taken for channels of one instance, which count on.
    const bool repeats = division_.per_instance() && !division_.even && xhat->size(0) > 1 && xhat->stride(0) == 0;
    const Tensor& apart = repeats ? held_.emplace_back(torch::stable::contiguous(*xhat)) : *xhat;
    return seen(*rows, apart, input<scalar_t>(apart));
  }

  template <typename scalar_t>
  Verbatim<scalar_t> written_verbatim(const OptTensor& rows, const OptTensor& xhat) {
    if (!rows.has_value()) return {};
    return seen(*rows, *xhat, output<scalar_t>(*xhat));
  }

  template <typename scalar_t>
  RunningUpdate<scalar_t> running(const OptTensor& mean, const OptTensor& var, double momentum,
                                  const OptTensor& momentum_tensor) {
    return {written_channels<scalar_t>(mean), written_channels<scalar_t>(var), momentum,
            momentum_tensor.has_value() ? static_cast<const double*>(momentum_tensor->const_data_ptr()) : nullptr};
  }

  void finish() const {
    for (const auto& [original, walked] : copied_back_) copy(original, walked);
  }

 private:
  template <typename scalar_t>
  Verbatim<scalar_t> seen(const Tensor& rows, const Tensor& xhat, View<scalar_t> view) {
    const Tensor& dense = is_dense_vector(rows) ? rows : held_.emplace_back(torch::stable::contiguous(rows));
    if (division_.even) view.instance_stride = 0;
    return {static_cast<const int64_t*>(dense.const_data_ptr()), rows.size(0), xhat.size(1), view};
  }

  // So many channels that their values stay in a processor's cache from one step of a call to the next. They are whole
  // groups, and divide those of all samples.
  int64_t channels_in_cache(const Tensor& like) const {
    constexpr int64_t elements = 64 * 1024;
    const int64_t groups = like.size(0) * like.size(1) / division_.shared;
    const int64_t group_elements = groups == 0 ? 0 : like.numel() / groups;
    int64_t together =
        std::clamp<int64_t>(elements / std::max<int64_t>(1, group_elements), 1, std::max<int64_t>(1, groups));
    while (together > 1 && groups % together != 0) --together;
    return together * division_.shared;
  }

  static bool is_dense_vector(const Tensor& t) { return t.size(0) <= 1 || t.stride(0) == 1; }

  static bool channels_are_innermost(const Geometry& g) {
    for (int64_t d = 2; d < g.dim(); ++d) {
      if (g.size(d) > 1 && g.stride(d) < g.stride(1)) return false;
    }
    return true;
  }

  // A vector has x's dtype or that of the statistics, which is never smaller.
  template <typename scalar_t>
  static bool is_narrow(const Tensor& t) {
    return t.element_size() == sizeof(scalar_t);
  }

  // The tensor itself or its stand-in: one per tensor, so that an output that is also an input stays so.
  const Tensor& walkable(const Tensor& t) {
    const Geometry g = geometry(t);
    if (has_order(g, order_, division_.per_instance()) && (!division_.even || has_even_planes(g))) return t;
    for (const auto& [original, stand_in] : stand_ins_) {
      if (is_same(original, t)) return stand_in;
    }
    std::vector<int64_t> strides(g.dim());
    int64_t step = order_ == Order::rows ? g.size(1) : 1;
    for (int64_t d = g.dim() - 1; d >= 0; --d) {
      if (d == 1 && order_ == Order::rows) {
        strides[d] = 1;
      } else {
        strides[d] = step;
        step *= g.size(d);
      }
    }
    const Tensor dense = empty_strided(g.sizes, strides, t.scalar_type(), t);
    copy(dense, t);
    return stand_ins_.emplace_back(t, dense).second;
  }

  Division division_;
  Order order_;
  Extent extent_;
  std::deque<std::pair<Tensor, Tensor>> stand_ins_, copied_back_;  // deques, because references to elements stay valid
  std::deque<Tensor> held_;
};

}  // namespace inplace_abn
