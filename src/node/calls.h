// How the node calls the package's ops.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>

#include <cstring>
#include <utility>

#include "node.h"

namespace inplace_abn {

// Ops are called through the dispatcher, where modes and profilers see them, below autograd, which has no part in them.
// Each op has a type `Op` of its own.
template <typename Op, typename... Args>
auto call(const char* name, const char* overload, Args&&... args) {
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Op>();
  const at::AutoDispatchBelowADInplaceOrView guard;
  return handle.call(std::forward<Args>(args)...);
}

using Forward = void(const Tensor& x, const Tensor& mean, const Tensor& var, const OptTensor& weight,
                     const OptTensor& bias, const OptTensor& residual, double eps, bool signed_weight,
                     int64_t activation, double activation_param, bool invertible);

inline void bump_version(const OptTensor& t) {
  if (t.has_value() && t->defined() && !t->is_inference()) t->unsafeGetTensorImpl()->bump_version();
}

// A copy of a vector. On the CPU an op takes longer than the copy.
inline Tensor copy(const OptTensor& t) {
  if (!t.has_value()) return {};
  if (!t->is_cpu() || !t->is_contiguous()) return t->clone();
  Tensor result = at::empty_like(*t);
  std::memcpy(result.data_ptr(), t->const_data_ptr(), t->nbytes());
  return result;
}

inline OptTensor optional(const Tensor& t) {
  return t.defined() ? OptTensor(t) : std::nullopt;
}

}  // namespace inplace_abn
