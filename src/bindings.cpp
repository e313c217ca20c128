// The Python module _backend. Importing it registers the ops; beside them it holds what only C++ can see of a tensor:
// who shares its memory, whether autograd lets it be written, and the graph edge it had before it was.

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/COW.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/extension.h>
#include <torch/version.h>

#include <tuple>

#include "inplace_abn/activation.h"
#include "inplace_abn/checks.h"

namespace inplace_abn {
namespace {

using at::Tensor;

// References to a tensor from Python, from C++, and from C++ to its storage. Zeros where nothing may be concluded from
// the numbers: wrapped or lazy tensors, and memory that torch did not allocate itself.
using Holders = std::tuple<int64_t, int64_t, int64_t>;

Holders holders(const pybind11::object& tensor) {
  constexpr c10::DispatchKeySet opaque{c10::DispatchKey::Python,    c10::DispatchKey::FuncTorchBatched,
                                       c10::DispatchKey::Conjugate, c10::DispatchKey::FuncTorchGradWrapper,
                                       c10::DispatchKey::Negative,  c10::DispatchKey::Functionalize,
                                       c10::DispatchKey::ZeroTensor};
  if (!THPVariable_CheckExact(tensor.ptr())) return {0, 0, 0};
  const Tensor& t = THPVariable_Unpack(tensor.ptr());
  if (t.key_set().has_any(opaque) || !t.has_storage()) return {0, 0, 0};
  const c10::StorageImpl* storage = t.storage().unsafeGetStorageImpl();
  if (!storage->resizable() || c10::impl::cow::is_cow_data_ptr(storage->data_ptr())) return {0, 0, 0};
  return {static_cast<int64_t>(Py_REFCNT(tensor.ptr())), static_cast<int64_t>(t.use_count()),
          static_cast<int64_t>(t.storage().use_count())};
}

// Whether the tensor is dense and its memory has no more holders than that of a tensor known to have one only.
bool is_sole_owner(const pybind11::object& tensor, const std::optional<Holders>& sole) {
  return sole.has_value() && holders(tensor) == *sole &&
         THPVariable_Unpack(tensor.ptr()).is_non_overlapping_and_dense();
}

// Notices every later write to a tensor, also where saved-tensor hooks keep autograd from noticing it.
class Version {
 public:
  explicit Version(const Tensor& t)
      : counter_(torch::autograd::impl::version_counter(t)), then_(counter_.current_version()) {}

  uint32_t then() const { return then_; }
  bool changed() const { return counter_.current_version() != then_; }

 private:
  c10::VariableVersion counter_;
  uint32_t then_;
};

// Raises for transforms that the ops do not take part in, at the outermost level of torch.func's.
void check_transforms(const std::optional<Tensor>& t) {
  if (!t.has_value()) return;
  TORCH_CHECK_VALUE(!t->key_set().has(c10::DispatchKey::FuncTorchBatched),
                    "inplace_abn: vmap is not supported: batch statistics mix the samples it separates. Use ABN, "
                    "which works out of place");
  TORCH_CHECK_VALUE(!t->_fw_grad(0).defined(),
                    "inplace_abn: forward-mode differentiation is not supported. Use ABN, which works out of place");
}

// Raises if x cannot be written in place, before anything is written. `requires_grad`: whether the result will.
void check_inplace(const Tensor& x, bool requires_grad) {
  using torch::autograd::can_mutate_inplace_result;
  constexpr auto remedy = ". Pass x.clone(), or use ABN, which works out of place";
  TORCH_CHECK_VALUE(!x.is_inference() || c10::InferenceMode::is_enabled(),
                    "inplace_abn: x was made under torch.inference_mode() and cannot be overwritten outside it",
                    remedy);
  switch (torch::autograd::can_mutate_inplace(x, requires_grad)) {
    case can_mutate_inplace_result::success:
      return;
    case can_mutate_inplace_result::is_leaf:
      TORCH_CHECK_VALUE(false, "inplace_abn: x is a leaf that requires grad and cannot be overwritten", remedy);
    case can_mutate_inplace_result::view_of_leaf:
      TORCH_CHECK_VALUE(false, "inplace_abn: x is a view of a leaf that requires grad and cannot be overwritten",
                        remedy);
    case can_mutate_inplace_result::non_default_backward_view:
      TORCH_CHECK_VALUE(false,
                        "inplace_abn: autograd does not let x be overwritten, because it is one of several views made "
                        "by one call (chunk, split, unbind), a view made by a custom autograd function or a module's "
                        "backward hook, or a view made under no_grad",
                        remedy);
  }
}

// Everything a call expects of its tensors: what the ops check themselves, but before a collective or a first op, and
// for tensors on whichever device.
void check_call(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& residual, const std::optional<Tensor>& running_mean,
                const std::optional<Tensor>& running_var, bool requires_grad) {
  constexpr auto op = "inplace_abn";
  for (const auto& t : {std::optional<Tensor>(x), weight, bias, residual}) check_transforms(t);
  check_activations(op, "x", x);
  check_written(op, "x", x);
  check_channels(op, "weight", weight, x);
  check_channels(op, "bias", bias, x);
  check_residual(op, residual, x);
  check_running(op, running_mean, running_var, x);
  check_inplace(x, requires_grad);
}

// Makes `t` a stand-in, for differentiation, of what the node that made `output` got as its first input.
void set_input_edge(const Tensor& t, const Tensor& output) {
  TORCH_CHECK(output.grad_fn(), "inplace_abn: expected an output with a graph node");
  torch::autograd::impl::set_gradient_edge(t, output.grad_fn()->next_edge(0));
}

}  // namespace
}  // namespace inplace_abn

PYBIND11_MODULE(_backend, m) {
  using inplace_abn::Activation;
  pybind11::enum_<Activation>(m, "Activation")
      .value("identity", Activation::identity)
      .value("leaky_relu", Activation::leaky_relu)
      .value("elu", Activation::elu)
      .value("relu", Activation::relu)
      .value("silu", Activation::silu)
      .value("hardswish", Activation::hardswish);
  pybind11::class_<inplace_abn::Version>(m, "Version")
      .def(pybind11::init<const at::Tensor&>())
      .def_property_readonly("then", &inplace_abn::Version::then)
      .def("changed", &inplace_abn::Version::changed);
  m.def("holders", &inplace_abn::holders, pybind11::arg("tensor"));
  m.def("is_sole_owner", &inplace_abn::is_sole_owner, pybind11::arg("tensor"), pybind11::arg("sole"));
  m.def("check_call", &inplace_abn::check_call, pybind11::arg("x"), pybind11::arg("weight"), pybind11::arg("bias"),
        pybind11::arg("residual"), pybind11::arg("running_mean"), pybind11::arg("running_var"),
        pybind11::arg("requires_grad"));
  m.def("check_transforms", &inplace_abn::check_transforms, pybind11::arg("tensor"));
  m.def("set_input_edge", &inplace_abn::set_input_edge, pybind11::arg("tensor"), pybind11::arg("output"));
  m.attr("torch_version") = TORCH_VERSION;
#if defined(INPLACE_ABN_WITH_CUDA)
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
}
