// Torch's stable tensors, and what their ABI lacks: geometry, overlap of memory, and text for messages.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "inplace_abn/layout.h"

namespace inplace_abn {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

inline Geometry geometry(const Tensor& t) {
  return {t.sizes(), t.strides()};
}

inline bool equal(IntHeaderOnlyArrayRef a, IntHeaderOnlyArrayRef b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Compares torch's own numbers. scalar_type() and device() would translate them first, which takes longer.
inline bool same_dtype(const Tensor& a, const Tensor& b) {
  int32_t of_a = 0, of_b = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(a.get(), &of_a));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(b.get(), &of_b));
  return of_a == of_b;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  int32_t of_a = 0, of_b = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(a.get(), &of_a));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(b.get(), &of_b));
  return of_a == of_b && a.get_device_index() == b.get_device_index();
}

// The dtype of the statistics of activations of this dtype, and of the arithmetic on them.
inline ScalarType stats_type(ScalarType type) {
  return type == ScalarType::Half || type == ScalarType::BFloat16 ? ScalarType::Float : type;
}

// A new, uninitialised tensor on the device of `like`.
inline Tensor empty_strided(IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides, ScalarType type,
                            const Tensor& like) {
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype, device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

inline void copy(const Tensor& to, const Tensor& from) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(to.get(), from.get(), 0));
}

// Whether no two indices share memory: sorted by stride, each dimension steps over the whole extent of the smaller
// ones. If `dense`, there may be no gaps either.
inline bool non_overlapping(const Geometry& t, bool dense = false) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent || (dense && stride != extent)) return false;
    extent += stride * (size - 1);
  }
  return true;
}

// From a tensor's first byte to one past its last, gaps included.
inline std::pair<const char*, const char*> memory_range(const Tensor& t) {
  const Geometry g = geometry(t);
  const auto* first = static_cast<const char*>(t.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < g.dim(); ++d) last += (g.size(d) - 1) * g.stride(d);
  return {first, first + (last + 1) * static_cast<int64_t>(t.element_size())};
}

inline bool ranges_meet(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto [a_begin, a_end] = memory_range(a);
  const auto [b_begin, b_end] = memory_range(b);
  return a_begin < b_end && b_begin < a_end;
}

// Whether both are the same memory, seen with the same sizes and strides.
inline bool is_same(const Tensor& a, const Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && equal(a.sizes(), b.sizes()) && equal(a.strides(), b.strides());
}

// Whether tensors share memory without being the same. Where one has gaps, ranges that meet do not prove it: slices of
// one tensor lie between each other. Such tensors are taken to be apart.
inline bool partly_overlap(const Tensor& a, const Tensor& b) {
  return !is_same(a, b) && ranges_meet(a, b) && non_overlapping(geometry(a), true) &&
         non_overlapping(geometry(b), true);
}

inline std::string text(IntHeaderOnlyArrayRef sizes) {
  std::string list;
  for (const int64_t size : sizes) list += (list.empty() ? "" : ", ") + std::to_string(size);
  return "[" + list + "]";
}

inline std::string text(const torch::stable::Device& device) {
  using torch::headeronly::DeviceType;
  const std::string index = device.has_index() ? ":" + std::to_string(device.index()) : "";
  switch (device.type()) {
    case DeviceType::CPU:
      return "cpu";
    case DeviceType::CUDA:
      return "cuda" + index;
    case DeviceType::Meta:
      return "meta";
    default:
      return "device type " + std::to_string(static_cast<int>(device.type())) + index;
  }
}

}  // namespace inplace_abn
