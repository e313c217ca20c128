// What the bodies of all ops need: the backend of a device, the type of elements, and the state that they run in.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include <optional>

#include "inplace_abn/checks.h"
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

// Whether kernels run as launches, which take long to start and have all threads of the device.
inline bool has_launches(const Tensor& t) {
#ifdef INPLACE_ABN_EMULATES_A_DEVICE
  static_cast<void>(t);
  return true;
#else
  return t.is_cuda();
#endif
}

// Calls `run` with the arguments of each instance. On the CPU, many instances are divided among the threads; of few,
// each uses all threads.
template <typename F>
void for_each_instance(const Tensor& x, int64_t instances, const F& run) {
  constexpr int64_t many = 16;
  const auto run_some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i);
  };
  if (instances < many || has_launches(x)) {
    run_some(0, instances);
  } else {
    torch::stable::parallel_for(0, instances, 1, run_some);
  }
}

#define CALL_BACKEND_PER_INSTANCE(tensor, kernel, args) \
  for_each_instance(tensor, (args).extent.instances,    \
                    [&](int64_t i) { CALL_BACKEND(tensor, kernel, of_instance(args, i)); })

inline Tensor empty_statistic(const Tensor& x, int64_t shared = 0) {
  return empty_strided({vector_size(x, shared)}, {1}, stats_type(x.scalar_type()), x);
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
