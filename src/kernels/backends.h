// What the bodies of all ops need: the backend of a device, the type of elements, and the state that they run in.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include <optional>

#include "inplace_abn/kernels.h"
#include "inplace_abn/tensors.h"

#if defined(INPLACE_ABN_WITH_CUDA)
#define CALL_BACKEND(tensor, kernel, args) ((tensor).is_cuda() ? cuda::kernel(args) : cpu::kernel(args))
#else
#define CALL_BACKEND(tensor, kernel, args) cpu::kernel(args)
#endif

namespace inplace_abn {

// Calls f with the type of the elements as its template argument.
template <typename F>
void dispatch_types(ScalarType type, const F& f) {
  THO_DISPATCH_V2(
      type, "inplace_abn", [&] { f.template operator()<scalar_t>(); }, ScalarType::Double, ScalarType::Float,
      ScalarType::BFloat16, ScalarType::Half);
}

// The state that the body of an op needs: x's device is current, and grad mode is off, so that autograd does not record
// the torch ops that it calls.
class Scope {
 public:
  explicit Scope(const Tensor& x) {
    if (x.is_cuda()) device_.emplace(x.get_device_index());
    grad_mode_ = aoti_torch_grad_mode_is_enabled();
    aoti_torch_grad_mode_set_enabled(false);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope() { aoti_torch_grad_mode_set_enabled(grad_mode_); }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> device_;
  bool grad_mode_ = false;
};

template <typename scalar_t>
opmath_type<scalar_t>* statistic_ptr(const Tensor& t) {
  return static_cast<opmath_type<scalar_t>*>(t.mutable_data_ptr());
}

// Makes these functions the ops of all devices.
#if defined(INPLACE_ABN_WITH_CUDA)
#define IMPLEMENT_OPS(register_ops)                 \
  STABLE_TORCH_LIBRARY_IMPL(inplace_abn, CPU, m) {  \
    register_ops(m);                                \
  }                                                 \
  STABLE_TORCH_LIBRARY_IMPL(inplace_abn, CUDA, m) { \
    register_ops(m);                                \
  }
#else
#define IMPLEMENT_OPS(register_ops)                \
  STABLE_TORCH_LIBRARY_IMPL(inplace_abn, CPU, m) { \
    register_ops(m);                               \
  }
#endif

}  // namespace inplace_abn
