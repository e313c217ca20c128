// How the node calls the package's ops.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/movedim.h>

#include <cstring>
#include <utility>
#include <vector>

#include "node.h"
#include "plain.h"

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
                     const OptTensor& bias, const OptTensor& residual, double eps, int64_t scale, int64_t activation,
                     double activation_param, bool invertible, const OptTensor& rows, const OptTensor& verbatim);

using ForwardOut = void(const Tensor& x, const Tensor& mean, const Tensor& var, const OptTensor& weight,
                        const OptTensor& bias, const OptTensor& residual, double eps, int64_t scale, int64_t activation,
                        double activation_param, bool invertible, const OptTensor& rows, const OptTensor& verbatim,
                        const Tensor& z);

using LocalBackward = void(const Tensor& y_act, const Tensor& dy_act, const Tensor& var, const OptTensor& weight,
                           const OptTensor& bias, const OptTensor& residual, double eps, int64_t scale,
                           int64_t activation, double activation_param, bool training, int64_t shared,
                           const OptTensor& rows, const OptTensor& verbatim, const OptTensor& dx,
                           const OptTensor& dweight, const OptTensor& dbias, const OptTensor& dresidual,
                           const OptTensor& xhat);

inline void bump_version(const OptTensor& t) {
  if (t.has_value() && t->defined() && !t->is_inference()) t->unsafeGetTensorImpl()->bump_version();
}

// An uninitialised tensor like t. On the CPU an op takes longer than the allocation. Modes and tensors that stand for
// others see the op.
inline Tensor uninitialised_like(const Tensor& t) {
  if (!t.is_cpu() || t.key_set().has_any(opaque) || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
      !t.is_non_overlapping_and_dense()) {
    return at::empty_like(t);
  }
  return at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type(), false);
}

// An uninitialised tensor of x's shape and memory format but with another number of channels.
inline Tensor of_channels(const Tensor& x, int64_t channels) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<int64_t> sizes = x.sizes().vec();
  if (x.is_contiguous() || x.stride(1) != 1) {
    sizes[1] = channels;
    return at::empty(sizes, x.options());
  }
  sizes.erase(sizes.begin() + 1);
  sizes.push_back(channels);
  return at::empty(sizes, x.options()).movedim(-1, 1);
}

// A copy of a vector.
inline Tensor copy(const OptTensor& t) {
  if (!t.has_value()) return {};
  if (!t->is_cpu() || !t->is_contiguous()) return t->clone();
  Tensor result = uninitialised_like(*t);
  std::memcpy(result.data_ptr(), t->const_data_ptr(), t->nbytes());
  return result;
}

// The values of a vector for each sample, if samples have their own.
inline OptTensor of_samples(const OptTensor& t, const Tensor& x, int64_t shared) {
  if (shared == 0 || !t.has_value()) return t;
  const at::AutoDispatchBelowADInplaceOrView guard;
  return t->repeat({x.size(0)});
}

// A dense tensor as one channel, in the order of its memory.
inline Tensor as_channel(const Tensor& t) {
  const int64_t count = t.numel();
  return t.as_strided({1, 1, count}, {count, count, 1});
}

// The dtype of statistics and sums.
inline at::ScalarType wide_type(const Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline OptTensor optional(const Tensor& t) {
  return t.defined() ? OptTensor(t) : std::nullopt;
}

}  // namespace inplace_abn
