// How an op's tensors are handed to kernels, and what is to be done once they have run.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "inplace_abn/kernels.h"
#include "inplace_abn/layout.h"
#include "inplace_abn/ops.h"

namespace inplace_abn {

using at::Tensor;

inline void bump_version(const Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// The tensors of one call. Activations are seen in one memory order; those that kernels cannot walk in it get a dense
// stand-in. `finish` copies the stand-ins of outputs back and bumps the version counters of everything written.
class Operands {
 public:
  explicit Operands(const Tensor& like) {
    const auto native = native_order(like);
    const bool channels_last = like.dim() == 2 || like.suggest_memory_format() != at::MemoryFormat::Contiguous;
    order_ = native.value_or(channels_last ? Order::rows : Order::planes);
    extent_ = make_extent(like, order_);
  }

  const Extent& extent() const { return extent_; }

  template <typename scalar_t>
  View<const scalar_t> input(const Tensor& t) {
    return make_view<const scalar_t>(walkable(t), order_);
  }

  template <typename scalar_t>
  View<scalar_t> output(const Tensor& t) {
    written_.emplace_back(t, walkable(t));
    return make_view<scalar_t>(written_.back().second, order_);
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
    return vector<scalar_t>(held_.emplace_back(t->contiguous()));
  }

  template <typename scalar_t>
  ChannelVector<scalar_t> written_channels(const OptTensor& t) {
    if (!t.has_value()) return {nullptr, false};
    return vector<scalar_t>(written_.emplace_back(*t, t->contiguous()).second);
  }

  template <typename scalar_t>
  Affine<scalar_t> affine(const OptTensor& weight, const OptTensor& bias, double eps, bool signed_weight) {
    return {channels<scalar_t>(weight), channels<scalar_t>(bias), eps, signed_weight};
  }

  template <typename scalar_t>
  RunningUpdate<scalar_t> running(const OptTensor& mean, const OptTensor& var, double momentum,
                                  const OptTensor& momentum_tensor) {
    return {written_channels<scalar_t>(mean), written_channels<scalar_t>(var), momentum,
            momentum_tensor.has_value() ? momentum_tensor->const_data_ptr<double>() : nullptr};
  }

  void finish() const {
    for (const auto& [original, walked] : written_) {
      if (!walked.is_same(original)) original.copy_(walked);
      bump_version(original);
    }
  }

 private:
  template <typename scalar_t>
  static ChannelVector<scalar_t> vector(const Tensor& t) {
    return {t.data_ptr(), t.scalar_type() == c10::CppTypeToScalarType<scalar_t>::value};
  }

  // One stand-in per tensor, so that an output that is also an input stays so.
  Tensor walkable(const Tensor& t) {
    if (has_order(t, order_)) return t;
    for (const auto& [original, stand_in] : stand_ins_) {
      if (original.is_same(t)) return stand_in;
    }
    const Tensor dense = order_ == Order::planes ? t.clone(at::MemoryFormat::Contiguous)
                                                 : t.movedim(1, -1).clone(at::MemoryFormat::Contiguous).movedim(-1, 1);
    return stand_ins_.emplace_back(t, dense).second;
  }

  Order order_;
  Extent extent_;
  std::vector<std::pair<Tensor, Tensor>> stand_ins_, written_;
  std::vector<Tensor> held_;
};

}  // namespace inplace_abn
