// The checks of include/inplace_abn/checks.h for torch's own tensors. Every message names the op, the argument, what
// was expected and what was got.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "inplace_abn/activation.h"

namespace inplace_abn {

inline c10::ScalarType stats_type(c10::ScalarType type) {
  return at::toOpMathType(type);
}

// Dimensions sorted by stride, each stepping over the whole extent of the smaller ones: no two indices share memory.
inline bool non_overlapping(const at::Tensor& t) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) return false;
    extent += stride * (size - 1);
  }
  return true;
}

inline void check_activations(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, op, ": expected a strided ", name, ", got layout ", t.layout());
  TORCH_CHECK_VALUE(t.dim() >= 2, op, ": expected ", name, " of shape (batch, channel, *), got ", t.dim(),
                    "-dimensional ", t.sizes());
  const auto type = t.scalar_type();
  TORCH_CHECK_TYPE(type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, op,
                   ": expected ", name, " of dtype float64, float32, bfloat16 or float16, got ", type);
}

inline void check_written(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.numel() == 0 || non_overlapping(t), op, ": expected ", name,
                    " without internal overlap, because it is written in place; got shape ", t.sizes(),
                    " with strides ", t.strides(), ". Pass ", name, ".clone() instead");
}

// `t` has one value per channel of x, on x's device, in x's dtype or in the dtype of its statistics.
inline void check_channels(const char* op, const char* name, const at::Tensor& t, const at::Tensor& x) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.size(0) == x.size(1), op, ": expected ", name, " of shape (", x.size(1),
                    ",) for x of shape ", x.sizes(), ", got ", t.sizes());
  TORCH_CHECK_VALUE(t.device() == x.device(), op, ": expected ", name, " on ", x.device(), " like x, got ", t.device());
  TORCH_CHECK_TYPE(t.scalar_type() == x.scalar_type() || t.scalar_type() == stats_type(x.scalar_type()), op,
                   ": expected ", name, " of dtype ", stats_type(x.scalar_type()), " or of x's dtype ", x.scalar_type(),
                   ", got ", t.scalar_type());
}

inline void check_channels(const char* op, const char* name, const std::optional<at::Tensor>& t, const at::Tensor& x) {
  if (t.has_value()) check_channels(op, name, *t, x);
}

inline void check_like(const char* op, const char* name, const at::Tensor& t, const at::Tensor& x) {
  TORCH_CHECK_VALUE(t.sizes() == x.sizes(), op, ": expected ", name, " of shape ", x.sizes(), ", got ", t.sizes());
  TORCH_CHECK_TYPE(t.scalar_type() == x.scalar_type(), op, ": expected ", name, " of dtype ", x.scalar_type(), ", got ",
                   t.scalar_type());
  TORCH_CHECK_VALUE(t.device() == x.device(), op, ": expected ", name, " on ", x.device(), ", got ", t.device());
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, op, ": expected a strided ", name, ", got layout ", t.layout());
}

// From a tensor's first byte to behind its last one, wherever its elements lie in between.
inline std::pair<const char*, const char*> memory_range(const at::Tensor& t) {
  const auto* first = static_cast<const char*>(t.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {first, first + (last + 1) * t.element_size()};
}

inline void check_residual(const char* op, const std::optional<at::Tensor>& residual, const at::Tensor& x) {
  if (!residual.has_value()) return;
  check_like(op, "residual", *residual, x);
  // Tensors that transforms wrap have no storage; the op meets the ones within.
  if (x.numel() == 0 || !x.has_storage() || !residual->has_storage() || !x.is_alias_of(*residual)) return;
  const auto [x_begin, x_end] = memory_range(x);
  const auto [begin, end] = memory_range(*residual);
  TORCH_CHECK_VALUE(end <= x_begin || x_end <= begin, op,
                    ": expected residual in memory of its own, because x is written in place; it shares x's. Pass "
                    "residual.clone() instead");
}

inline void check_running(const char* op, const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& var,
                          const at::Tensor& x) {
  TORCH_CHECK_VALUE(mean.has_value() == var.has_value(), op,
                    ": expected running_mean and running_var both or neither, got only ",
                    mean.has_value() ? "running_mean" : "running_var");
  check_channels(op, "running_mean", mean, x);
  check_channels(op, "running_var", var, x);
  TORCH_CHECK_TYPE(!mean.has_value() || mean->scalar_type() == var->scalar_type(), op,
                   ": expected running_mean and running_var of one dtype, got ", mean->scalar_type(), " and ",
                   var->scalar_type());
}

inline void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(eps > 0 && std::isfinite(eps), op, ": expected a finite eps > 0, got ", eps);
}

inline void check_activation(const char* op, int64_t activation, double param) {
  const auto kind = static_cast<Activation>(activation);
  TORCH_CHECK_VALUE(activation >= 0 && activation < activation_count, op, ": unknown activation ", activation);
  TORCH_CHECK_VALUE(kind != Activation::leaky_relu || (param >= 0 && std::isfinite(param)), op,
                    ": expected a finite leaky_relu slope >= 0, got ", param);
  TORCH_CHECK_VALUE(kind != Activation::elu || (param > 0 && std::isfinite(param)), op,
                    ": expected a finite elu alpha > 0, got ", param);
}

inline void check_momentum(const char* op, double momentum, const std::optional<at::Tensor>& momentum_tensor,
                           const at::Tensor& x) {
  if (!momentum_tensor.has_value()) {
    TORCH_CHECK_VALUE(std::isfinite(momentum), op, ": expected a finite momentum, got ", momentum);
    return;
  }
  TORCH_CHECK_TYPE(momentum_tensor->scalar_type() == at::kDouble && momentum_tensor->numel() == 1, op,
                   ": expected momentum as one float64 value, got ", momentum_tensor->scalar_type(), " of shape ",
                   momentum_tensor->sizes());
  TORCH_CHECK_VALUE(momentum_tensor->device() == x.device(), op, ": expected momentum on ", x.device(), ", got ",
                    momentum_tensor->device());
}

}  // namespace inplace_abn
