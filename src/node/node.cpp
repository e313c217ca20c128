// The graph node of the local in-place op in C++. It does what inplace_abn/functions.py does in eager mode, by the same
// rules, in less time per call; without it functions.py does everything.
//
// It is made of libtorch alone, without Python, so that one library serves every Python. libtorch's C++ interface has
// no stable ABI, so there is one library for each release of torch. ops.cpp makes torch ops of these functions.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/PyInterpreter.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls.h"
#include "usual.h"

namespace inplace_abn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using LocalForward = std::tuple<Tensor, Tensor>(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                                const OptTensor& residual, const OptTensor& running_mean,
                                                const OptTensor& running_var, double momentum,
                                                const OptTensor& momentum_tensor, double eps, bool signed_weight,
                                                int64_t activation, double activation_param, bool invertible,
                                                int64_t shared);
using LocalBackward = void(const Tensor& y_act, const Tensor& dy_act, const Tensor& var, const OptTensor& weight,
                           const OptTensor& bias, const OptTensor& residual, double eps, bool signed_weight,
                           int64_t activation, double activation_param, bool training, int64_t shared,
                           const OptTensor& dx, const OptTensor& dweight, const OptTensor& dbias,
                           const OptTensor& dresidual, const OptTensor& xhat);

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

// Unpacking made a tensor of its own, so it is the storage that others could hold.
bool owns_output(const Tensor& z) {
  counted.output = static_cast<int64_t>(z.storage().use_count());
  return has_one_owner(z) && counted.output == sole.output && !torch::autograd::get_current_graph_task_keep_graph();
}

// The arguments of a call that are no tensors.
struct Settings {
  double eps;
  bool signed_weight;
  int64_t activation;
  double activation_param;
  bool training;
  int64_t shared;

  // One value takes less time than six, and is a constant for autograd's compiler.
  void save(AutogradContext* ctx) const {
    ctx->saved_data["settings"] =
        c10::List<double>({eps, static_cast<double>(signed_weight), static_cast<double>(activation), activation_param,
                           static_cast<double>(training), static_cast<double>(shared)});
  }
  static Settings of(AutogradContext* ctx) {
    const auto data = ctx->saved_data.at("settings").toDoubleList();
    return {data.get(0), data.get(1) != 0, static_cast<int64_t>(data.get(2)),
            data.get(3), data.get(4) != 0, static_cast<int64_t>(data.get(5))};
  }
};

struct Arguments {
  OptTensor running_mean, running_var;
  double momentum;
  OptTensor momentum_tensor;
};

// What backward needs of the call, besides z and the residual. Later writes to the parameters do not matter.
struct Values {
  OptTensor weight, bias;
  Tensor var;
};

// A result that is not in x's memory, optionally a tensor that stands for the result and gets the same place in the
// graph, and the layer's name for messages.
struct Written {
  Tensor z;
  Values values;
  std::string name;
};

struct Saved {
  Tensor z;
  OptTensor weight, bias, residual;
  Tensor var;
};

struct Needed {
  bool x, weight, bias, residual;
};

// The values of a vector for each sample, if samples have their own.
OptTensor of_samples(const OptTensor& t, const Tensor& x, const Settings& s) {
  if (s.shared == 0 || !t.has_value()) return t;
  const at::AutoDispatchBelowADInplaceOrView guard;
  return t->repeat({x.size(0)});
}

// Writes z over x, and returns what backward needs. Running statistics are given for each sample.
Values write(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
             const Arguments& given, const Settings& s, bool invertible) {
  const auto values = [&](const Tensor& var) -> Values {
    if (!invertible) return {weight, bias, var};
    const at::AutoDispatchBelowADInplaceOrView guard;
    // Training may change the running variance before backward needs what it was.
    return {optional(copy(weight)), optional(copy(bias)), s.training ? var : var.clone()};
  };
  if (!s.training) {
    call<Forward>("inplace_abn::forward", "", x, *given.running_mean, *given.running_var, weight, bias, residual, s.eps,
                  s.signed_weight, s.activation, s.activation_param, invertible);
    return values(*given.running_var);
  }
  const auto [mean, var] =
      call<LocalForward>("inplace_abn::local_forward", "", x, of_samples(weight, x, s), of_samples(bias, x, s),
                         residual, given.running_mean, given.running_var, given.momentum, given.momentum_tensor, s.eps,
                         s.signed_weight, s.activation, s.activation_param, invertible, s.shared);
  bump_version(given.running_mean);
  bump_version(given.running_var);
  return values(var);
}

// The residual's gradient is written over dz or z, and dx over the other one, as far as backward owns them. If it owns
// both, the op may write xhat over z, so that z is inverted once.
variable_list gradients(const Saved& saved, const Tensor& dz, const Needed& need, bool own_z, bool own_dz,
                        const Settings& s) {
  const auto& [z, weight, bias, residual, var] = saved;
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
  call<LocalBackward>("inplace_abn::local_backward", "", z, dz, var, of_samples(weight, z, s), of_samples(bias, z, s),
                      residual, s.eps, s.signed_weight, s.activation, s.activation_param, s.training, s.shared, dx,
                      dweight, dbias, dresidual, xhat);
  for (const OptTensor& t : {dx, dresidual, xhat}) bump_version(t);
  return {dx.value_or(Tensor()), summed(dweight, weight), summed(dbias, bias), dresidual.value_or(Tensor())};
}

// For create_graph=True: in plain torch, by an op that autograd/nodes.py defines. `edges` have the places in the graph
// of the call's x, weight and bias. Autograd sees the op.
variable_list differentiable(const Saved& saved, const Tensor& dz, const std::vector<OptTensor>& edges,
                             const Settings& s) {
  using Op = std::vector<Tensor>(const Tensor& z, const OptTensor& weight, const OptTensor& bias,
                                 const OptTensor& residual, const Tensor& var, const Tensor& dz,
                                 const c10::List<OptTensor>& edges, double eps, bool signed_weight, int64_t activation,
                                 double activation_param, bool training, int64_t shared);
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("inplace_abn::differentiable", "").typed<Op>();
  auto found =
      handle.call(saved.z, saved.weight, saved.bias, saved.residual, saved.var, dz, c10::List<OptTensor>(edges), s.eps,
                  s.signed_weight, s.activation, s.activation_param, s.training, s.shared);
  if (!saved.weight) found.at(1) = Tensor();
  if (!saved.bias) found.at(2) = Tensor();
  if (!saved.residual) found.at(3) = Tensor();
  return found;
}

variable_list saved_variables(AutogradContext* ctx) {
  try {
    return ctx->get_saved_variables();
  } catch (const c10::Error& error) {
    const std::string message = error.what();
    const bool is_output = message.find("InPlaceABNFunction") != std::string::npos;
    const auto name = ctx->saved_data.find("name");
    TORCH_CHECK(message.find("modified by an inplace operation") == std::string::npos, "inplace_abn: the ",
                is_output ? "output" : "residual", " of ",
                name == ctx->saved_data.end() ? "an in-place ABN" : name->second.toStringRef(),
                " has been modified in place, but its backward needs it. Replace that operation by one out of place "
                "(z = z + y for z += y), use ABN, or leave the layer out of the conversion (filter_fn)");
    throw;
  }
}

// Its name is what profiles and messages show.
class InPlaceABNFunction final : public torch::autograd::Function<InPlaceABNFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                               const OptTensor& residual, const std::optional<Written>& written, const Arguments& given,
                               const Settings& settings, AutogradContext** context) {
    const Values values = written ? written->values : write(x, weight, bias, residual, given, settings, true);
    const Tensor z = written ? written->z : x;
    if (!written) ctx->mark_dirty({x});
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(
        {z, values.weight.value_or(Tensor()), values.bias.value_or(Tensor()), residual.value_or(Tensor()), values.var});
    settings.save(ctx);
    if (written && !written->name.empty()) ctx->saved_data["name"] = written->name;
    *context = ctx;
    return {z};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& incoming) {
    variable_list results(8);
    const Tensor& dz = incoming[0];
    if (!dz.defined()) return results;
    TORCH_CHECK(
        !dz.key_set().has(c10::DispatchKey::FuncTorchBatched) && !dz.key_set().has(c10::DispatchKey::Batched),
        "inplace_abn: gradients in batches are not supported. Use ABN, or leave the layer out of the conversion "
        "(filter_fn)");
    const Settings settings = Settings::of(ctx);
    const auto running = torch::autograd::get_current_node();
    const bool sole_gradient_given = running && owns_gradient(dz);
    const variable_list unpacked = saved_variables(ctx);
    // Only the engine gives up what it passes to backward. Other callers hold it, and may call again. In code that
    // autograd's compiler made there is no node: nothing is reused, because it is functional.
    const auto node = unpacked[0].grad_fn();
    const bool by_engine = node && running.get() == node.get();
    const bool own_dz = by_engine && sole_gradient_given;
    Saved saved{unpacked[0], optional(unpacked[1]), optional(unpacked[2]), optional(unpacked[3]), unpacked[4]};

    // Edges exist for the tensors that were given only.
    size_t edge = 0;
    const auto needs = [&](bool given) { return given && ctx->needs_input_grad(edge++); };
    const bool need_x = needs(true), need_weight = needs(saved.weight.has_value());
    const bool need_bias = needs(saved.bias.has_value()), need_residual = needs(saved.residual.has_value());

    variable_list found;
    if (at::GradMode::is_enabled()) {
      auto placed = [&, next = 0U](bool given) mutable -> OptTensor {
        const auto place = node && given ? node->next_edge(next++) : torch::autograd::Edge();
        if (!place.is_valid()) return std::nullopt;
        const Tensor result = at::empty({0}, saved.z.options());
        torch::autograd::impl::set_gradient_edge(result, place);
        return result;
      };
      const OptTensor of_x = placed(true), of_weight = placed(saved.weight.has_value());
      const OptTensor of_bias = placed(saved.bias.has_value());
      found = differentiable(saved, dz, {of_x, of_weight, of_bias}, settings);
    } else {
      const bool reuse_dz = own_dz && saved.z.strides() == dz.strides();
      const bool reuse_z = by_engine && owns_output(unpacked[0]);
      // z itself is part of the graph, its memory as a gradient must not be.
      saved.z = saved.z.detach();
      found = gradients(saved, dz, {need_x, need_weight, need_bias, need_residual}, reuse_z, reuse_dz, settings);
    }
    std::move(found.begin(), found.end(), results.begin());
    return results;
  }
};

// Whether x may be overwritten without functions.py: it is no view (a C++ function would save an overwritten view in a
// reference cycle), and all that functions.py would refuse is excluded.
bool is_simple(const Tensor& x, std::initializer_list<const OptTensor*> others, bool training, bool requires_grad) {
  if (!is_usual(x, others, requires_grad)) return false;
  if (x.dim() < 2 || (x.is_inference() && !c10::InferenceMode::is_enabled())) return false;
  if (training && x.numel() == x.size(1)) return false;
  if (!requires_grad) return true;
  const auto& producer = x.grad_fn();
  const bool ours = producer && dynamic_cast<torch::autograd::CppNode<InPlaceABNFunction>*>(producer.get()) != nullptr;
  return is_calibrated && !x.is_view() && !ours && !(x.is_leaf() && x.requires_grad());
}

}  // namespace

Tensor inplace_abn(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
                   const OptTensor& running_mean, const OptTensor& running_var, bool training, double momentum,
                   const OptTensor& momentum_tensor, double eps, bool signed_weight, int64_t activation,
                   double activation_param, int64_t shared) {
  const auto is_trained = [](const OptTensor& t) { return t.has_value() && t->requires_grad(); };
  const bool requires_grad = at::GradMode::is_enabled() &&
                             (x.requires_grad() || is_trained(weight) || is_trained(bias) || is_trained(residual));
  if (running_mean.has_value() != running_var.has_value() ||
      !is_simple(x, {&weight, &bias, &residual, &running_mean, &running_var}, training, requires_grad)) {
    return {};
  }
  const Settings settings{eps, signed_weight, activation, activation_param, training, shared};
  const Arguments given{running_mean, running_var, momentum, momentum_tensor};
  if (!requires_grad) {
    write(x, weight, bias, residual, given, settings, false);
    bump_version(x);
    return x;
  }
  AutogradContext* context = nullptr;
  const Tensor z = InPlaceABNFunction::apply(x, weight, bias, residual, std::nullopt, given, settings, &context)[0];
  // The graph knows by now that x was overwritten; a context that lists it is refused by autograd's compiler.
  context->mark_dirty({});
  return z;
}

Tensor attached(const Tensor& x, const Tensor& z, const OptTensor& weight, const OptTensor& bias,
                const OptTensor& residual, const OptTensor& weight_value, const OptTensor& bias_value,
                const Tensor& var, bool training, double eps, bool signed_weight, int64_t activation,
                double activation_param, int64_t shared, const std::string& name) {
  if (!is_calibrated || !is_usual(z, {&weight, &bias, &residual}, true) || x.key_set().has_any(opaque)) {
    return {};
  }
  AutogradContext* context = nullptr;
  const Written written{z, {weight_value, bias_value, var}, name};
  return InPlaceABNFunction::apply(x, weight, bias, residual, written, Arguments{},
                                   Settings{eps, signed_weight, activation, activation_param, training, shared},
                                   &context)[0];
}

void set_sole_holders(const Holders& holders) {
  is_calibrated = true;
  sole = holders;
}

Holders last_counts() {
  return counted;
}

}  // namespace inplace_abn
