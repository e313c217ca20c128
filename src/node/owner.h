// Objects that tensors own, so that torch ops can take and return them. Torch takes ten times as long to pass an object
// of a class.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>

namespace inplace_abn {

template <typename Kind>
void destroy(void* owned) {
  std::default_delete<Kind>()(static_cast<Kind*>(owned));
}

// A tensor without elements, whose storage owns the object.
template <typename Kind>
at::Tensor owner_of(std::unique_ptr<Kind> object) {
  c10::DataPtr pointer(nullptr, object.release(), &destroy<Kind>, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, std::move(pointer), nullptr, false);
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                  caffe2::TypeMeta::Make<float>());
}

template <typename Kind>
Kind& owned_by(const at::Tensor& owner) {
  TORCH_CHECK_TYPE(owner.has_storage() && owner.storage().data_ptr().get_deleter() == &destroy<Kind>,
                   "inplace_abn: the node expected a tensor that it had made for this, and got another one");
  return *static_cast<Kind*>(owner.storage().data_ptr().get_context());
}

}  // namespace inplace_abn
