// What the node in C++ leaves to Python: tensors that stand for others, and modes, tracers and hooks that see ops.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/TracerMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <initializer_list>

#include "node.h"

namespace inplace_abn {

// The dispatch keys of tensors that stand for others.
constexpr c10::DispatchKeySet opaque{
    c10::DispatchKey::Python,    c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::Negative,  c10::DispatchKey::Conjugate,        c10::DispatchKey::Functionalize,
    c10::DispatchKey::ZeroTensor};

// Whether these are plain tensors, and no mode, tracer or hook is active that Python would have to know of.
inline bool is_plain(const Tensor& x, std::initializer_list<const OptTensor*> others, bool requires_grad) {
  const auto is_plain_tensor = [&](const Tensor& t) {
    return !t.key_set().has_any(opaque) && t.layout() == at::kStrided && t.device() == x.device() &&
           !t._fw_grad(0).defined() && !(requires_grad && t.is_inference());
  };
  if (!is_plain_tensor(x)) return false;
  for (const OptTensor* t : others) {
    if (t->has_value() && !is_plain_tensor(**t)) return false;
  }
  return !(c10::impl::TorchDispatchModeTLS::any_modes_set() || at::tracer::impl::is_dispatch_enabled() ||
           c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PreDispatch) ||
           at::SavedTensorDefaultHooks::get_hooks().has_value());
}

}  // namespace inplace_abn
