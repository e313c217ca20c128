#include "autograd.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/extension.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <unordered_map>
#include <vector>

#include "node_checks.h"

namespace inplace_abn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Ops are called through the dispatcher, where modes and profilers see them, below autograd, which has no part in them.
// So the version counters of what they write are the caller's to bump.
#define CALL_OP(op, name, overload, ...)                                                                      \
  [&] {                                                                                                       \
    static const auto handle =                                                                                \
        c10::Dispatcher::singleton().findSchemaOrThrow("inplace_abn::" name, overload).typed<decltype(op)>(); \
    const at::AutoDispatchBelowADInplaceOrView guard;                                                         \
    return handle.call(__VA_ARGS__);                                                                          \
  }()

void bump_versions(std::initializer_list<OptTensor> written) {
  for (const OptTensor& t : written) {
    if (t.has_value() && !t->is_inference()) t->unsafeGetTensorImpl()->bump_version();
  }
}

// Keeps a node's watch.
class WatchHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit WatchHook(const Tensor& output) { watch.start(output); }

  variable_list operator()(const variable_list& gradients) override { return gradients; }
  // Compiled code checks what it saved itself.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  Watch watch;
};

const Watch* watch_of(const Node& node) {
  for (const auto& hook : node.pre_hooks()) {
    if (const auto* const found = dynamic_cast<const WatchHook*>(hook.get())) return &found->watch;
  }
  return nullptr;
}

std::vector<Holders> sole_gradients;
std::optional<int64_t> sole_output;
thread_local Observed observed;

// What backward knows beside tensors. A node keeps it as numbers, which compiled autograd understands.
struct Settings {
  double eps;
  bool signed_weight;
  int64_t activation;
  double activation_param;
  bool training;
  bool hooked;  // z went through saved-tensor hooks, which may keep it or hand it out again

  std::vector<double> packed() const {
    return {eps,
            static_cast<double>(signed_weight),
            static_cast<double>(activation),
            activation_param,
            static_cast<double>(training),
            static_cast<double>(hooked)};
  }
  static Settings unpack(const std::vector<double>& v) {
    return {v[0], v[1] != 0, static_cast<int64_t>(v[2]), v[3], v[4] != 0, v[5] != 0};
  }
};

struct Saved {
  Tensor z;
  OptTensor weight, bias, residual;
  Tensor var;
};

struct Need {
  bool x, weight, bias, residual;
};

struct Gradients {
  Tensor x, weight, bias, residual;
};

int64_t values_per_channel(const Tensor& x) {
  return x.size(0) * c10::multiply_integers(x.sizes().slice(2));
}

// dx, and the residual's gradient if there is one, are written over dz and z where these are backward's own; so is xhat
// where both are, and inverting z a second time would take longer than storing what the first inversion gave.
Gradients local_gradients(const Saved& saved, const Tensor& dz, const Need& need, bool own_z, bool own_dz,
                          const Settings& s) {
  const auto& [z, weight, bias, residual, var] = saved;
  std::vector<Tensor> reusable;
  if (own_z) reusable.push_back(z);
  if (own_dz) reusable.push_back(dz);
  const auto activation_sized = [&](bool needed) -> OptTensor {
    if (!needed) return std::nullopt;
    if (reusable.empty()) return at::empty_like(z);
    const Tensor memory = reusable.back();
    reusable.pop_back();
    return memory;
  };
  const auto per_channel = [](bool needed, const OptTensor& like) -> OptTensor {
    return needed ? OptTensor(at::empty_like(*like)) : std::nullopt;
  };
  const OptTensor dresidual = activation_sized(need.residual), dx = activation_sized(need.x);
  const bool costly_inverse = static_cast<Activation>(s.activation) == Activation::silu;
  const OptTensor xhat = costly_inverse && own_z && own_dz && need.x ? OptTensor(z) : std::nullopt;
  const OptTensor dweight = per_channel(need.weight, weight), dbias = per_channel(need.bias, bias);
  CALL_OP(local_backward, "local_backward", "", z, dz, var, weight, bias, residual, s.eps, s.signed_weight,
          s.activation, s.activation_param, s.training, dx, dweight, dbias, dresidual, xhat);
  bump_versions({dx, dresidual, xhat});
  return {dx.value_or(Tensor()), dweight.value_or(Tensor()), dbias.value_or(Tensor()), dresidual.value_or(Tensor())};
}

// For create_graph=True: in plain torch, by autograd.py.
Gradients differentiable_gradients(const Saved& saved, const Tensor& dz, const Settings& s) {
  const pybind11::gil_scoped_acquire gil;
  const pybind11::object gradients =
      pybind11::module_::import("inplace_abn.autograd")
          .attr("differentiable")(saved.z, saved.weight, saved.bias, saved.residual, saved.var, dz, s.activation,
                                  s.activation_param, s.eps, s.signed_weight, s.training);
  const auto [x, weight, bias, residual] = gradients.cast<std::tuple<OptTensor, OptTensor, OptTensor, OptTensor>>();
  return {x.value_or(Tensor()), weight.value_or(Tensor()), bias.value_or(Tensor()), residual.value_or(Tensor())};
}

bool is_sole_gradient(const Tensor& dz) {
  observed.first = holders(dz);
  return observed.first &&
         std::find(sole_gradients.begin(), sole_gradients.end(), *observed.first) != sole_gradients.end();
}

// Unpacking made a tensor of its own, so it is the storage that others could hold.
bool is_sole_output(const Tensor& z) {
  const auto held = holders(z);
  observed.second = held ? std::optional(std::get<2>(*held)) : std::nullopt;
  return held && observed.second == sole_output && !torch::autograd::get_current_graph_task_keep_graph();
}

}  // namespace

// The backward pass. Its name is what profiles and messages show.
class InPlaceABNFunction final : public torch::autograd::Function<InPlaceABNFunction> {
 public:
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    variable_list results(5);
    const Tensor& dz = gradients[0];
    if (!dz.defined()) return results;
    const auto settings = Settings::unpack(ctx->saved_data.at("settings").toDoubleVector());
    // Without a node, this is code that autograd's compiler made, which is functional: nothing is reused.
    const auto node = torch::autograd::get_current_node();
    const Watch* const watch = node ? watch_of(*node) : nullptr;
    const bool own_dz = watch != nullptr && is_sole_gradient(dz);
    if (watch != nullptr && !settings.hooked) watch->check_unmodified(std::nullopt);
    const variable_list unpacked = ctx->get_saved_variables();
    const auto optional = [](const Tensor& t) { return t.defined() ? OptTensor(t) : std::nullopt; };
    Saved saved{unpacked[0], optional(unpacked[1]), optional(unpacked[2]), optional(unpacked[3]), unpacked[4]};
    if (watch != nullptr && settings.hooked) watch->check_unmodified(saved.z);

    // Edges exist for the tensors that were given only.
    size_t edge = 0;
    const auto needs = [&](bool given) { return given && ctx->needs_input_grad(edge++); };
    const bool need_x = needs(true), need_weight = needs(saved.weight.has_value());
    const bool need_bias = needs(saved.bias.has_value()), need_residual = needs(saved.residual.has_value());
    const Need need{need_x, need_weight, need_bias, need_residual};

    Gradients g;
    if (at::GradMode::is_enabled()) {
      g = differentiable_gradients(saved, dz, settings);
    } else {
      const bool reuse_dz = own_dz && saved.z.strides() == dz.strides();
      const bool reuse_z = watch != nullptr && !settings.hooked && is_sole_output(unpacked[0]);
      // z itself is part of the graph, its memory as a gradient must not be.
      saved.z = saved.z.detach();
      g = local_gradients(saved, dz, need, reuse_z, reuse_dz, settings);
    }
    results[0] = g.x;
    results[1] = g.weight;
    results[2] = g.bias;
    results[3] = g.residual;
    return results;
  }
};

namespace {

using NodePtr = decltype(torch::autograd::get_current_node());
using OurNode = torch::autograd::CppNode<InPlaceABNFunction>;

// Nodes are held by std::shared_ptr or, since torch 2.13, by c10::intrusive_ptr.
template <typename Ptr, typename OurNodeType>
auto make_node() {
  if constexpr (std::is_same_v<Ptr, std::shared_ptr<Node>>) {
    return std::shared_ptr<OurNodeType>(new OurNodeType(), [](OurNodeType* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<OurNodeType>();
  }
}

// x, whose content is z by now, with its place in the graph. The op has run before autograd is told, so that an op that
// fails leaves no trace in the graph. `Function::apply` would do, but a context that was told of overwritten inputs is
// refused by autograd's compiler.
Tensor overwritten(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
                   const Tensor& var, const Settings& settings) {
  const auto node = make_node<NodePtr, OurNode>();
  variable_list inputs, saved;
  for (const OptTensor& t : {OptTensor(x), weight, bias, residual, OptTensor(var)}) {
    node->is_variable_input_.push_back(t.has_value());
    saved.push_back(t.value_or(Tensor()));
    if (t.has_value()) inputs.push_back(*t);
  }
  node->set_ctx_grad_fn(node);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  node->clear_input_metadata();
  for (const Tensor& t : inputs) node->input_info_.emplace_back(t);
  node->ctx_.set_materialize_grads(false);
  node->ctx_.saved_data["settings"] = settings.packed();
  node->ctx_.save_for_backward(std::move(saved));

  const auto no_jvp = [](const variable_list&, const variable_list&) -> variable_list {
    TORCH_CHECK(false, "inplace_abn: forward-mode differentiation is not supported");
  };
  const auto view_as_self = [](const Tensor& t) { return t.view_as(t); };
  const std::optional<Tensor> outputs[] = {x};
  const Tensor z = *torch::autograd::_wrap_outputs(inputs, {}, {x.unsafeGetTensorImpl()}, outputs, node, no_jvp, {},
                                                   view_as_self, false)[0];
  node->output_info_.emplace_back(z);
  node->save_variables_to_ctx();
  node->add_pre_hook(std::make_unique<WatchHook>(z));
  return z;
}

bool is_ours(const Node& node) {
  return dynamic_cast<const OurNode*>(&node) != nullptr;
}

// Asked of the node's Python type: the node itself would unpack what it saved.
template <typename NodePtr>
bool saves_result(const NodePtr& node) {
  if (is_ours(*node)) return true;
  static std::mutex mutex;
  static std::unordered_map<std::type_index, bool> known;
  const Node& n = *node;
  const std::type_index type(typeid(n));
  // Functions written in Python are all of one type.
  if (std::string_view(type.name()).find("PyNode") != std::string_view::npos) {
    return node->name() == "InPlaceABNFunctionBackward";
  }
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(type); found != known.end()) return found->second;
  }
  bool saves = false;
  {
    const pybind11::gil_scoped_acquire gil;
    const auto object = pybind11::reinterpret_steal<pybind11::object>(torch::autograd::functionToPyObject(node));
    saves = pybind11::hasattr(pybind11::type::of(object), "_saved_result");
  }
  const std::lock_guard lock(mutex);
  known.emplace(type, saves);
  return saves;
}

}  // namespace

void check_producer(const Tensor& x) {
  const auto check = [](const auto& node) {
    if (node && saves_result(node)) {
      TORCH_CHECK(false, "inplace_abn: x is the output of ", is_ours(*node) ? "InPlaceABNFunction" : node->name(),
                  ", which needs it for its own backward, so it cannot be overwritten. Pass x.clone(), or use ABN, "
                  "which works out of place");
    }
  };
  check(x.grad_fn());
  if (x.is_view()) check(x._base().grad_fn());
}

Tensor inplace_abn(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
                   const OptTensor& running_mean, const OptTensor& running_var, bool training, double momentum,
                   const OptTensor& momentum_tensor, double eps, bool signed_weight, int64_t activation,
                   double activation_param) {
  constexpr auto op = "inplace_abn";
  const auto is_trained = [](const OptTensor& t) { return t.has_value() && t->requires_grad(); };
  const bool requires_grad = at::GradMode::is_enabled() &&
                             (x.requires_grad() || is_trained(weight) || is_trained(bias) || is_trained(residual));
  check_call(x, weight, bias, residual, running_mean, running_var, requires_grad);
  check_eps(op, eps);
  check_activation(op, activation, activation_param);
  check_momentum(op, momentum, momentum_tensor, x);
  if (requires_grad) check_producer(x);
  Tensor var;
  if (training) {
    TORCH_CHECK_VALUE(values_per_channel(x) >= 2,
                      "Expected more than 1 value per channel when training, got input size ", x.sizes());
    var = std::get<1>(CALL_OP(local_forward, "local_forward", "", x, weight, bias, residual, running_mean, running_var,
                              momentum, momentum_tensor, eps, signed_weight, activation, activation_param,
                              requires_grad));
    bump_versions({x, running_mean, running_var});
  } else {
    var = *running_var;
    CALL_OP(forward, "forward", "", x, *running_mean, var, weight, bias, residual, eps, signed_weight, activation,
            activation_param, requires_grad);
    bump_versions({x});
  }
  if (!requires_grad) return x;
  const bool hooked = at::SavedTensorDefaultHooks::get_hooks().has_value();
  const Settings settings{eps, signed_weight, activation, activation_param, training, hooked};
  return overwritten(x, weight, bias, residual, var, settings);
}

void set_sole_holders(std::vector<Holders> gradients, std::optional<int64_t> output_storage) {
  sole_gradients = std::move(gradients);
  sole_output = output_storage;
}

Observed last_observed() {
  return observed;
}

}  // namespace inplace_abn
