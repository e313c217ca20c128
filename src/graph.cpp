#include "graph.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/COW.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <utility>

#include "node_checks.h"

namespace inplace_abn {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

struct Observation {
  const c10::TensorImpl* gradient = nullptr;
  std::optional<Holders> holders;
};

// Of the node that this thread runs: hooks and the node follow each other without another node of ours in between,
// unless a hook starts a backward of its own, whose gradients are other tensors.
thread_local Observation last_observed;

// Observes a node's incoming gradient where the engine's list is its one sure holder.
class GradientProbe final : public torch::autograd::FunctionPreHook {
 public:
  explicit GradientProbe(const torch::autograd::Node& node) : node_(node) {}

  variable_list operator()(const variable_list& gradients) override {
    last_observed = {};
    const bool is_last_hook = node_.pre_hooks().back().get() == this && node_.post_hooks().empty();
    if (is_last_hook && gradients.size() == 1 && gradients[0].defined()) {
      last_observed = {gradients[0].unsafeGetTensorImpl(), holders(gradients[0])};
    }
    return gradients;
  }

  // Nothing is reused in graphs that are compiled.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  const torch::autograd::Node& node_;  // owns this hook
};

// Raises if x cannot be written in place, before anything is written.
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

}  // namespace

std::optional<Holders> holders(const Tensor& t) {
  constexpr c10::DispatchKeySet opaque{c10::DispatchKey::Python,    c10::DispatchKey::FuncTorchBatched,
                                       c10::DispatchKey::Conjugate, c10::DispatchKey::FuncTorchGradWrapper,
                                       c10::DispatchKey::Negative,  c10::DispatchKey::Functionalize,
                                       c10::DispatchKey::ZeroTensor};
  if (t.key_set().has_any(opaque) || !t.has_storage() || !t.is_non_overlapping_and_dense()) return std::nullopt;
  const c10::StorageImpl* storage = t.storage().unsafeGetStorageImpl();
  if (!storage->resizable() || c10::impl::cow::is_cow_data_ptr(storage->data_ptr())) return std::nullopt;
  const auto* slot = t.unsafeGetTensorImpl()->pyobj_slot();
  PyObject* const object = slot->load_pyobj();
  if (object != nullptr && !THPVariable_CheckTypeExact(Py_TYPE(object))) return std::nullopt;
  const int64_t python = object == nullptr ? 0 : slot->has_unique_reference() ? 1 : 2;
  return Holders{python, static_cast<int64_t>(t.use_count()), static_cast<int64_t>(t.storage().use_count())};
}

void Watch::start(const Tensor& output) {
  counter_ = torch::autograd::impl::version_counter(output);
  version_ = counter_.current_version();
}

void Watch::check_unmodified(const std::optional<Tensor>& unpacked) const {
  if (counter_.current_version() == version_ || (unpacked.has_value() && unpacked->_version() <= version_)) return;
  TORCH_CHECK(false,
              "inplace_abn: the output of an in-place ABN has been modified in place, but its backward needs it. "
              "Replace that operation by one out of place (z = z + y for z += y), or use ABN");
}

void observe_gradient(const Tensor& output) {
  if (const auto& node = output.grad_fn()) node->add_pre_hook(std::make_unique<GradientProbe>(*node));
}

std::optional<Holders> gradient_holders(const Tensor& gradient) {
  const auto observed = std::exchange(last_observed, {});
  return observed.gradient == gradient.unsafeGetTensorImpl() ? observed.holders : std::nullopt;
}

void check_transforms(const std::optional<Tensor>& t) {
  if (!t.has_value()) return;
  TORCH_CHECK_VALUE(!t->key_set().has(c10::DispatchKey::FuncTorchBatched),
                    "inplace_abn: vmap is not supported: batch statistics mix the samples it separates. Use ABN, "
                    "which works out of place");
  TORCH_CHECK_VALUE(!t->_fw_grad(0).defined(),
                    "inplace_abn: forward-mode differentiation is not supported. Use ABN, which works out of place");
}

void check_call(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& residual, const std::optional<Tensor>& running_mean,
                const std::optional<Tensor>& running_var, bool requires_grad) {
  constexpr auto op = "inplace_abn";
  check_transforms(x);
  for (const auto* t : {&weight, &bias, &residual}) check_transforms(*t);
  check_activations(op, "x", x);
  check_written(op, "x", x);
  check_channels(op, "weight", weight, x);
  check_channels(op, "bias", bias, x);
  check_residual(op, residual, x);
  check_running(op, running_mean, running_var, x);
  check_inplace(x, requires_grad);
}

void set_input_edge(const Tensor& t, const Tensor& output) {
  TORCH_CHECK(output.grad_fn(), "inplace_abn: expected an output with a graph node");
  torch::autograd::impl::set_gradient_edge(t, output.grad_fn()->next_edge(0));
}

}  // namespace inplace_abn
