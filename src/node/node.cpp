// The graph node of the local in-place op in C++. It does what inplace_abn/autograd/forward.py and nodes.py do in eager
// mode, by the same rules, in less time per call; without it they do everything.
//
// It is made of libtorch alone, without Python, so that one library serves every Python. libtorch's C++ interface has
// no stable ABI, so there is one library for each release of torch. ops.cpp makes torch ops of these functions.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "calls.h"
#include "gradients.h"
#include "graph.h"
#include "plain.h"

namespace inplace_abn {
namespace {

using LocalForward = std::tuple<Tensor, Tensor>(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                                const OptTensor& residual, const OptTensor& running_mean,
                                                const OptTensor& running_var, double momentum,
                                                const OptTensor& momentum_tensor, double eps, int64_t scale,
                                                int64_t activation, double activation_param, bool invertible,
                                                int64_t shared, const OptTensor& rows, const OptTensor& verbatim);
// The counts at which backward is the only holder of a gradient that Python has seen, and of a saved output's storage.
// Until they are known, neither is reused.
bool is_calibrated = false;
Holders sole;
thread_local Holders counted;

// Whether reference counts show all owners of the memory: only if it is plain memory of torch's own allocator. Lazy
// copies, memory of numpy and memory that processes share have other deleters, on a GPU also in the process that has
// sent it.
bool has_one_owner(const Tensor& t) {
  if (t.key_set().has_any(opaque) || !t.has_storage()) return false;
  return t.storage().data_ptr().get_deleter() == c10::GetAllocator(t.device().type())->raw_deleter();
}

// Unpacking made a tensor of its own, so it is the storage that others could hold.
bool owns_output(const Tensor& z) {
  counted.output = static_cast<int64_t>(z.storage().use_count());
  return has_one_owner(z) && counted.output == sole.output && !torch::autograd::get_current_graph_task_keep_graph();
}

using Settings = NodeSettings;
using Values = NodeValues;
using Saved = NodeSaved;

struct Arguments {
  OptTensor running_mean, running_var;
  double momentum;
  OptTensor momentum_tensor;
  OptTensor rows;
};

struct Needed {
  bool x, weight, bias, residual;
};

// Writes z over x, and returns what backward needs. Running statistics are given for each sample.
Values write(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
             const Arguments& given, const Settings& s, bool invertible, int64_t saved) {
  const bool saves = given.rows.has_value() && invertible;
  const OptTensor rows = saves ? given.rows : std::nullopt;
  const OptTensor verbatim = saves ? OptTensor(of_channels(x, saved)) : std::nullopt;
  const auto values = [&](const Tensor& var) -> Values {
    if (!invertible) return {weight, bias, var, {}, {}};
    const at::AutoDispatchBelowADInplaceOrView guard;
    // Training may change the running variance before backward needs what it was.
    return {optional(copy(weight)), optional(copy(bias)), s.training ? var : var.clone(), rows, verbatim};
  };
  if (!s.training) {
    call<Forward>("inplace_abn::forward", "", x, *given.running_mean, *given.running_var, weight, bias, residual, s.eps,
                  s.scale, s.activation, s.activation_param, invertible, rows, verbatim);
    return values(*given.running_var);
  }
  const auto [mean, var] = call<LocalForward>("inplace_abn::local_forward", "", x, of_samples(weight, x, s.shared),
                                              of_samples(bias, x, s.shared), residual, given.running_mean,
                                              given.running_var, given.momentum, given.momentum_tensor, s.eps, s.scale,
                                              s.activation, s.activation_param, invertible, s.shared, rows, verbatim);
  bump_version(given.running_mean);
  bump_version(given.running_var);
  return values(var);
}

// The gradient of an activation alone. All its tensors have z's strides, and are taken for one channel.
Tensor gradient_of_activation(const Saved& saved, const Tensor& dz, bool own_dz, const Settings& s) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor& z = saved.z;
  const Tensor given = z.strides() == dz.strides() ? dz : uninitialised_like(z).copy_(dz);
  const Tensor dx = own_dz ? given : uninitialised_like(z);
  call<LocalBackward>("inplace_abn::local_backward", "", as_channel(z), as_channel(given), saved.values.var,
                      std::nullopt, std::nullopt, std::nullopt, s.eps, s.scale, s.activation, s.activation_param, false,
                      0, std::nullopt, std::nullopt, as_channel(dx), std::nullopt, std::nullopt, std::nullopt,
                      std::nullopt);
  bump_version(dx);
  return dx;
}

// The residual's gradient is written over dz or z, and dx over the other one, as far as backward owns them. If it owns
// both, the op may write xhat over z, so that z is inverted once.
variable_list gradients(const Saved& saved, const Tensor& dz, const Needed& need, bool own_z, bool own_dz,
                        const Settings& s) {
  const auto& [z, residual, values] = saved;
  const auto& [weight, bias, var, rows, verbatim] = values;
  std::vector<Tensor> reusable;
  if (own_z) reusable.push_back(z);
  if (own_dz) reusable.push_back(dz);
  const auto activation_sized = [&](bool needed) -> OptTensor {
    if (!needed) return std::nullopt;
    if (reusable.empty()) return uninitialised_like(z);
    const Tensor memory = reusable.back();
    reusable.pop_back();
    return memory;
  };
  // Those of samples are summed in the statistics' dtype.
  const auto per_channel = [&, var = var](bool needed, const OptTensor& like) -> OptTensor {
    if (!needed) return std::nullopt;
    return s.shared == 0 ? uninitialised_like(*like) : at::empty({z.size(0) * z.size(1)}, var.options());
  };
  const auto summed = [&](const OptTensor& t, const OptTensor& like) -> Tensor {
    if (!t.has_value() || s.shared == 0) return t.value_or(Tensor());
    return t->view({z.size(0), z.size(1)}).sum(0).to(like->scalar_type());
  };
  const OptTensor dresidual = activation_sized(need.residual), dx = activation_sized(need.x);
  const OptTensor dweight = per_channel(need.weight, weight), dbias = per_channel(need.bias, bias);
  const OptTensor xhat = own_z && own_dz && need.x ? OptTensor(z) : std::nullopt;
  call<LocalBackward>("inplace_abn::local_backward", "", z, dz, var, of_samples(weight, z, s.shared),
                      of_samples(bias, z, s.shared), residual, s.eps, s.scale, s.activation, s.activation_param,
                      s.training, s.shared, rows, verbatim, dx, dweight, dbias, dresidual, xhat);
  for (const OptTensor& t : {dx, dresidual, xhat}) bump_version(t);
  return {dx.value_or(Tensor()), summed(dweight, weight), summed(dbias, bias), dresidual.value_or(Tensor())};
}

// For create_graph=True: in plain torch, by an op that autograd/nodes.py defines. `edges` have the places in the graph
// of the call's x, weight and bias. Autograd sees the op.
variable_list differentiable(const Saved& saved, const Tensor& dz, const std::vector<OptTensor>& edges,
                             const Settings& s) {
  using Op = std::vector<Tensor>(
      const Tensor& z, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual, const Tensor& var,
      const OptTensor& rows, const OptTensor& verbatim, const Tensor& dz, const c10::List<OptTensor>& edges, double eps,
      int64_t scale, int64_t activation, double activation_param, bool training, int64_t shared, int64_t norm_of_rows);
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("inplace_abn::differentiable", "").typed<Op>();
  const auto& [weight, bias, var, rows, verbatim] = saved.values;
  auto found = handle.call(saved.z, weight, bias, saved.residual, var, rows, verbatim, dz, c10::List<OptTensor>(edges),
                           s.eps, s.scale, s.activation, s.activation_param, s.training, s.shared, s.rows);
  if (!weight) found.at(1) = Tensor();
  if (!bias) found.at(2) = Tensor();
  if (!saved.residual) found.at(3) = Tensor();
  return found;
}

}  // namespace

bool owns_gradient(const Tensor& dz) {
  counted.gradient = std::nullopt;
  if (!has_one_owner(dz) || dz.storage().use_count() != 1) return false;
  // The list that the engine hands over holds one reference. Another node's input, a consumer's saved tensor, and the
  // object of a Python variable would each hold another.
  const auto from_cpp = static_cast<int64_t>(dz.use_count());
  if (from_cpp == 1) return true;
  // Without a Python object it is C++ that holds it.
  PyObject* const object = dz.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  const auto* const interpreter = c10::impl::getGlobalPyInterpreter();
  if (object == nullptr || interpreter == nullptr) return false;
  counted.gradient = {static_cast<int64_t>((*interpreter)->refcnt(object)), from_cpp};
  return counted.gradient == sole.gradient;
}

void raise_modified(const char* what, const std::string& layer) {
  call<void(std::string_view what, std::string_view name)>("inplace_abn::was_written_to", "", what, layer);
  TORCH_CHECK(false, "inplace_abn: the ", what, " of ", layer.empty() ? "an in-place ABN" : layer,
              " has been modified in place, but its backward needs it. Replace that operation by one out of place "
              "(z = z + y for z += y), use ABN, or leave the layer out of the conversion (filter_fn)");
}

Tensor unpacked(const SavedVariable& t, const char* what, const std::string& layer, const NodePtr& node) {
  try {
    return t.unpack(node);
  } catch (const c10::Error& error) {
    if (std::string(error.what()).find("modified by an inplace operation") == std::string::npos) throw;
    raise_modified(what, layer);
  }
}

variable_list gradients_of(const Tensor& dz, Saved saved, const std::vector<bool>& needed, const Settings& settings,
                           bool by_engine, bool own_dz, const Node* node) {
  TORCH_CHECK(!dz.key_set().has(c10::DispatchKey::FuncTorchBatched) && !dz.key_set().has(c10::DispatchKey::Batched),
              "inplace_abn: gradients in batches are not supported. Use ABN, or leave the layer out of the conversion "
              "(filter_fn)");
  if (at::GradMode::is_enabled()) {
    const auto placed = [&](size_t edge) -> OptTensor {
      const auto place = node != nullptr ? node->next_edge(edge) : torch::autograd::Edge();
      if (!place.is_valid()) return std::nullopt;
      const Tensor result = at::empty({0}, saved.z.options());
      torch::autograd::impl::set_gradient_edge(result, place);
      return result;
    };
    return differentiable(saved, dz, {placed(0), placed(1), placed(2)}, settings);
  }
  const bool reuse_dz = own_dz && saved.z.strides() == dz.strides();
  if (settings.rows != 0) return gradients_of_rows(saved, dz, needed, settings, reuse_dz);
  if (settings.shared == whole) return {gradient_of_activation(saved, dz, reuse_dz, settings), {}, {}, {}};
  const bool reuse_z = by_engine && owns_output(saved.z);
  // z itself is part of the graph, its memory as a gradient must not be.
  saved.z = saved.z.detach();
  const Needed need{needed.at(0), needed.at(1), needed.at(2), needed.at(3)};
  return gradients(saved, dz, need, reuse_z, reuse_dz, settings);
}

namespace {

// Its name is what profiles and messages show.
class InPlaceABNFunction final : public Node {
 public:
  // Makes z, which was written over x or elsewhere, the output of a node. `name` is the layer's, for messages.
  static void attach(const Tensor& z, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                     const OptTensor& residual, const Values& values, const Settings& settings,
                     const std::string& name) {
    const auto node = make_node<InPlaceABNFunction>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias, residual));
    if (z.is_same(x)) {
      bump_version(z);
      torch::autograd::impl::rebase_history(z, {node, node->add_input_metadata(z)});
    } else {
      place_output(node, z);
    }
    node->z_ = {z, true};
    node->residual_ = {residual, false};
    node->values_ = values;
    node->settings_ = settings;
    node->layer_ = name;
  }

  std::string name() const override { return "InPlaceABNFunction"; }

  variable_list apply(variable_list&& incoming) override {
    std::unique_lock lock(mutex_);
    if (!incoming.at(0).defined()) return variable_list(inputs);
    // Only the engine gives up what it passes to backward. Other callers hold it, and may call again.
    const bool by_engine = torch::autograd::get_current_node().get() == this;
    const bool own_dz = by_engine && owns_gradient(incoming[0]);
    Saved values = saved();
    // Gradients with a graph overwrite nothing. Under the hooks of a checkpoint their computation may come back here.
    if (at::GradMode::is_enabled()) lock.unlock();
    return gradients_of(incoming[0], std::move(values), needed_by_edges(*this, inputs), settings_, by_engine, own_dz,
                        this);
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    z_.reset_data();
    residual_.reset_data();
    values_ = {};
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(z_, true);
    args.collect(residual_, false);
    for (const OptTensor* t : optional_values()) args.collect(*t);
    args.collect(values_.var);
    args.collect(settings_.eps);
    args.collect(settings_.scale);
    args.collect(settings_.activation);
    args.collect(settings_.activation_param);
    args.collect(settings_.training);
    args.collect(settings_.shared);
  }

  variable_list apply_with_saved(const variable_list& incoming, SwapSavedVariables& saved_variables) override {
    saved_variables.before(z_);
    saved_variables.before(residual_);
    for (OptTensor* t : optional_values()) saved_variables.before(*t);
    saved_variables.before(values_.var);
    PackedArgs packed;
    const auto [z, residual, values] = saved();
    const auto given = [](const OptTensor& t) { return t.value_or(Tensor()); };
    packed.pack(variable_list{z, given(residual), given(values.weight), given(values.bias), values.var,
                              given(values.rows), given(values.verbatim)});
    packed.pack(needed_by_edges(*this, inputs));
    packed.pack(settings_.eps);
    packed.pack(settings_.scale);
    packed.pack(settings_.activation);
    packed.pack(settings_.activation_param);
    packed.pack(settings_.training);
    packed.pack(settings_.shared);
    variable_list results = call_when_compiled(*this, saved_variables, incoming, packed, &of_packed);
    saved_variables.after(z_);
    saved_variables.after(residual_);
    for (OptTensor* t : optional_values()) saved_variables.after(*t);
    saved_variables.after(values_.var);
    return results;
  }

 private:
  // The number of tensors that may need a gradient: x, weight, bias and residual.
  static constexpr size_t inputs = 4;

  Saved saved() {
    const Tensor z = unpacked(z_, "output", layer_, getptr());
    return {z, optional(unpacked(residual_, "residual", layer_, getptr())), values_};
  }

  // The same, of what compiled code passes.
  static variable_list of_packed(const variable_list& incoming, const std::vector<at::IValue>& args) {
    if (!incoming.at(0).defined()) return variable_list(inputs);
    PackedArgs packed(args);
    const auto tensors = packed.unpack<variable_list>();
    const auto needed = packed.unpack<std::vector<bool>>();
    const auto eps = packed.unpack<double>();
    const auto scale = packed.unpack<int64_t>();
    const auto activation = packed.unpack<int64_t>();
    const auto activation_param = packed.unpack<double>();
    const auto training = packed.unpack<bool>();
    const Settings settings{eps, scale, activation, activation_param, training, packed.unpack<int64_t>()};
    const Values values{optional(tensors.at(2)), optional(tensors.at(3)), tensors.at(4), optional(tensors.at(5)),
                        optional(tensors.at(6))};
    const Saved saved{tensors.at(0), optional(tensors.at(1)), values};
    return gradients_of(incoming[0], saved, needed, settings, false, false, nullptr);
  }

  std::array<OptTensor*, 4> optional_values() {
    return {&values_.weight, &values_.bias, &values_.rows, &values_.verbatim};
  }
  std::array<const OptTensor*, 4> optional_values() const {
    return {&values_.weight, &values_.bias, &values_.rows, &values_.verbatim};
  }

  SavedVariable z_, residual_;
  Values values_;
  Settings settings_{};
  std::string layer_;
};

// Whether x may be overwritten without Python: it is no view (a C++ function would save an overwritten view in a
// reference cycle), and all that autograd/checks.py would refuse, and the ops would not, is excluded.
bool is_simple(const Tensor& x, std::initializer_list<const OptTensor*> others, bool training, int64_t shared,
               bool requires_grad) {
  if (!is_plain(x, others, requires_grad)) return false;
  if (x.dim() < 2 || (x.is_inference() && !c10::InferenceMode::is_enabled())) return false;
  if (training && x.numel() == (shared == 1 ? x.size(0) : 1) * x.size(1)) return false;
  if (!requires_grad) return true;
  const auto& producer = x.grad_fn();
  const bool ours = producer && dynamic_cast<InPlaceABNFunction*>(producer.get()) != nullptr;
  return is_calibrated && !x.is_view() && !ours && !(x.is_leaf() && x.requires_grad());
}

}  // namespace

Tensor inplace_abn(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
                   const OptTensor& running_mean, const OptTensor& running_var, bool training, double momentum,
                   const OptTensor& momentum_tensor, double eps, int64_t scale, int64_t activation,
                   double activation_param, int64_t shared, const OptTensor& rows, int64_t saved,
                   const std::string& name) {
  const bool requires_grad = torch::autograd::compute_requires_grad(x, weight, bias, residual);
  const auto is_vector = [](const OptTensor& t) { return !t.has_value() || t->dim() == 1; };
  if (running_mean.has_value() != running_var.has_value() || !std::isfinite(momentum) || !is_vector(weight) ||
      !is_vector(bias) ||
      !is_simple(x, {&weight, &bias, &residual, &running_mean, &running_var}, training, shared, requires_grad)) {
    return {};
  }
  const Settings settings{eps, scale, activation, activation_param, training, shared};
  const Arguments given{running_mean, running_var, momentum, momentum_tensor, rows};
  const Values values = write(x, weight, bias, residual, given, settings, requires_grad, saved);
  if (!requires_grad) {
    bump_version(x);
    return x;
  }
  InPlaceABNFunction::attach(x, x, weight, bias, residual, values, settings, name);
  return x;
}

Tensor attached(const Tensor& x, const Tensor& z, const OptTensor& weight, const OptTensor& bias,
                const OptTensor& residual, const OptTensor& weight_value, const OptTensor& bias_value,
                const Tensor& var, const OptTensor& rows, const OptTensor& verbatim, bool training, double eps,
                int64_t scale, int64_t activation, double activation_param, int64_t shared, const std::string& name) {
  if (!may_attach(x, z, weight, bias, residual)) return {};
  if (!torch::autograd::compute_requires_grad(x, weight, bias, residual)) return z;
  InPlaceABNFunction::attach(z, x, weight, bias, residual, {weight_value, bias_value, var, rows, verbatim},
                             {eps, scale, activation, activation_param, training, shared}, name);
  return z;
}

Tensor activation_alone(const Tensor& x, const Tensor& mean, const Tensor& var, double eps, int64_t scale,
                        int64_t activation, double activation_param, const std::string& name) {
  if (!is_calibrated || c10::InferenceMode::is_enabled() || !at::GradMode::is_enabled() || !x.requires_grad() ||
      x.dim() < 2 || x.numel() == 0 || !x.is_non_overlapping_and_dense() || !is_plain(x, {}, true)) {
    return {};
  }
  Tensor z;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    z = uninitialised_like(x);
    call<ForwardOut>("inplace_abn::forward", "out", as_channel(x), mean, var, std::nullopt, std::nullopt, std::nullopt,
                     eps, scale, activation, activation_param, true, std::nullopt, std::nullopt, as_channel(z));
  }
  const Settings settings{eps, scale, activation, activation_param, false, whole};
  InPlaceABNFunction::attach(z, x, std::nullopt, std::nullopt, std::nullopt, {{}, {}, var, {}, {}}, settings, name);
  return z;
}

bool may_attach(const Tensor& x, const Tensor& z, const OptTensor& weight, const OptTensor& bias,
                const OptTensor& residual) {
  return is_calibrated && is_plain(z, {&weight, &bias, &residual}, true) && !x.key_set().has_any(opaque);
}

void set_sole_holders(const Holders& holders) {
  is_calibrated = true;
  sole = holders;
}

Holders last_counts() {
  return counted;
}

}  // namespace inplace_abn
