// The graph node of the tensor that stands for a norm's output, and what becomes of it.

#include "waiting.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls.h"
#include "owner.h"
#include "usual.h"

namespace inplace_abn {
namespace {

using LocalForwardOut = std::tuple<Tensor, Tensor>(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                                   const OptTensor& residual, const OptTensor& running_mean,
                                                   const OptTensor& running_var, double momentum,
                                                   const OptTensor& momentum_tensor, double eps, int64_t scale,
                                                   int64_t activation, double activation_param, bool invertible,
                                                   int64_t shared, const OptTensor& rows, const OptTensor& verbatim,
                                                   const Tensor& z);
using HasLost = bool(const Tensor& weight, double eps, const OptTensor& rows);

// The norm without activation. It saves what torch's norm saves, when torch's norm saves it. Its gradient is computed
// by an op that conversion/waiting.py defines, which autograd sees.
class WaitingFunction final : public Node {
 public:
  static NodePtr of(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& residual,
                    const OptTensor& mean, const Tensor& var, double eps, bool training, int64_t shared) {
    auto node = make_node<WaitingFunction>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias, residual));
    node->x_ = {x, false};
    node->weight_ = {weight, false};
    node->mean_ = mean.value_or(Tensor());
    node->var_ = var;
    // The value of the bias does not matter, so torch's norm does not save it either.
    const auto bias_dtype = bias.has_value() ? static_cast<int64_t>(bias->scalar_type()) : no_bias;
    node->settings_ = {bias_dtype, eps, training, shared};
    return node;
  }

  std::string name() const override { return "WaitingFunction"; }

  variable_list apply(variable_list&& incoming) override {
    if (!incoming.at(0).defined()) return variable_list(inputs);
    variable_list saved;
    {
      // Under the hooks of a checkpoint the gradients' computation may come back here.
      const std::lock_guard lock(mutex_);
      saved = tensors();
    }
    return gradients(incoming[0], saved, needed_by_edges(*this, inputs), settings_);
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(x_, false);
    args.collect(weight_, false);
    args.collect(mean_);
    args.collect(var_);
    args.collect(settings_.bias_dtype);
    args.collect(settings_.eps);
    args.collect(settings_.training);
    args.collect(settings_.shared);
  }

  variable_list apply_with_saved(const variable_list& incoming, SwapSavedVariables& saved) override {
    saved.before(x_);
    saved.before(weight_);
    saved.before(mean_);
    saved.before(var_);
    PackedArgs packed;
    packed.pack(tensors());
    packed.pack(needed_by_edges(*this, inputs));
    packed.pack(settings_.bias_dtype);
    packed.pack(settings_.eps);
    packed.pack(settings_.training);
    packed.pack(settings_.shared);
    variable_list results = call_when_compiled(*this, saved, incoming, packed, &of_packed);
    saved.after(x_);
    saved.after(weight_);
    saved.after(mean_);
    saved.after(var_);
    return results;
  }

 private:
  // The number of tensors that may need a gradient: x, weight, bias and residual.
  static constexpr size_t inputs = 4;
  // What stands for the dtype of a bias that there is not.
  static constexpr int64_t no_bias = -1;

  struct Settings {
    int64_t bias_dtype = no_bias;
    double eps = 0;
    bool training = true;
    int64_t shared = 0;
  };

  // x, weight, mean and var. Those that there are not are undefined.
  variable_list tensors() const { return {x_.unpack(), weight_.unpack(), mean_, var_}; }

  static variable_list gradients(const Tensor& g, const variable_list& tensors, const std::vector<bool>& needed,
                                 const Settings& s) {
    using Op = std::vector<Tensor>(const Tensor& g, const Tensor& x, const OptTensor& weight,
                                   std::optional<at::ScalarType> bias_dtype, const OptTensor& mean, const Tensor& var,
                                   const std::vector<bool>& needed, double eps, bool training, int64_t shared);
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow("inplace_abn::waiting_backward", "").typed<Op>();
    std::optional<at::ScalarType> bias_dtype;
    if (s.bias_dtype != no_bias) bias_dtype = static_cast<at::ScalarType>(s.bias_dtype);
    const std::vector<bool> of_norm(needed.begin(), needed.begin() + 3);
    const std::vector<Tensor> found =
        handle.call(g, tensors.at(0), optional(tensors.at(1)), bias_dtype, optional(tensors.at(2)), tensors.at(3),
                    of_norm, s.eps, s.training, s.shared);
    variable_list results(inputs);
    size_t next = 0;
    for (size_t i = 0; i < of_norm.size(); ++i) {
      if (of_norm[i]) results[i] = found.at(next++);
    }
    if (needed.at(3)) results[3] = g;
    return results;
  }

  // The same, of what compiled code passes.
  static variable_list of_packed(const variable_list& incoming, const std::vector<at::IValue>& args) {
    if (!incoming.at(0).defined()) return variable_list(inputs);
    PackedArgs packed(args);
    const auto tensors = packed.unpack<variable_list>();
    const auto needed = packed.unpack<std::vector<bool>>();
    const auto bias_dtype = packed.unpack<int64_t>();
    const auto eps = packed.unpack<double>();
    const auto training = packed.unpack<bool>();
    return gradients(incoming[0], tensors, needed, {bias_dtype, eps, training, packed.unpack<int64_t>()});
  }

  SavedVariable x_, weight_;
  Tensor mean_, var_;
  Settings settings_;
};

// Places one tensor after another one in the graph. The two have the same values. So hooks on either one see gradients
// that come through the other one.
class StandsForFunction final : public Node {
 public:
  static NodePtr after(const Tensor& t) {
    const auto node = make_node<StandsForFunction>();
    node->set_next_edges({torch::autograd::impl::gradient_edge(t)});
    return node;
  }

  std::string name() const override { return "StandsForFunction"; }
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
  // It has nothing that compiled code depends on.
  void compiled_args(CompiledNodeArgs&) const override {}
  variable_list apply_with_saved(const variable_list& gradients, SwapSavedVariables&) override { return gradients; }
};

constexpr int64_t identity = 0;
// The scale of a converted norm (kernels.h).
constexpr int64_t scale_is_weight = 2;
// So small that one plus it is one.
constexpr double identity_eps = 1e-30;

// Without a graph node x is a leaf.
torch::autograd::Edge edge_of(const Tensor& x) {
  return {x.grad_fn(), static_cast<uint32_t>(x.output_nr())};
}

// Whether a call is like a plan's, and a graph is recorded.
bool fits(const Plan& plan, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
          const OptTensor& running_mean, const OptTensor& running_var) {
  if (x.sizes() != plan.sizes || x.strides() != plan.strides) return false;
  if (x.scalar_type() != plan.dtype || x.device() != plan.device) return false;
  const auto are_vectors = [&](std::initializer_list<const OptTensor*> tensors,
                               const std::optional<at::ScalarType>& dtype) {
    for (const OptTensor* t : tensors) {
      if (t->has_value() && ((*t)->sizes() != at::IntArrayRef(x.size(1)) || (*t)->scalar_type() != dtype)) return false;
    }
    return true;
  };
  if (weight.has_value() != plan.parameter_dtype.has_value() || !are_vectors({&weight, &bias}, plan.parameter_dtype)) {
    return false;
  }
  if (running_mean.has_value() != plan.statistics_dtype.has_value() ||
      running_var.has_value() != running_mean.has_value() ||
      !are_vectors({&running_mean, &running_var}, plan.statistics_dtype)) {
    return false;
  }
  return torch::autograd::compute_requires_grad(x, weight, bias);
}

// A tensor without memory, of the shape, strides, dtype and device of another one. Python makes it a subclass's, whose
// __torch_dispatch__ sees the ops that are called with it.
Tensor stand_in_like(const Tensor& t) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor result = at::for_blob(nullptr, t.sizes())
                            .strides(t.strides())
                            .context(nullptr, [](void*) {})
                            .target_device(t.device())
                            .options(t.options())
                            .allocator(c10::GetAllocator(c10::kMeta))
                            .resizeable_storage()
                            .make_tensor();
  result.unsafeGetTensorImpl()->set_python_dispatch(true);
  return result;
}

// What stands for a waiting output; undefined once it is gone.
Tensor stand_in_of(const Waiting& w) {
  auto stand_in = w.stand_in.lock();
  return stand_in.defined() ? Tensor(std::move(stand_in)) : Tensor();
}

bool has_place(const Waiting& w, const Tensor& stand_in) {
  return stand_in.defined() && w.node == stand_in.grad_fn();
}

// Whether one node can stand for the norm and what follows: nothing has changed since the norm was called.
bool is_fusible(const Waiting& w, const Tensor& stand_in) {
  return at::GradMode::is_enabled() && w.memory.defined() && w.memory._version() == w.version_of_memory &&
         has_place(w, stand_in) && edge_of(w.x) == w.edge && w.x.requires_grad() == w.seen_x.requires_grad &&
         Seen(w.weight) == w.seen_weight && Seen(w.bias) == w.seen_bias && Seen(w.residual) == w.seen_residual;
}

// Counts the batch. On the CPU an op takes longer than the addition.
void count(const OptTensor& batches) {
  if (!batches.has_value()) return;
  if (batches->is_cpu() && batches->scalar_type() == at::kLong && batches->numel() == 1) {
    ++*batches->mutable_data_ptr<int64_t>();
  } else {
    batches->add_(1);
  }
}

void place(Waiting& w, const Tensor& stand_in) {
  w.node =
      WaitingFunction::of(w.x, w.weight, w.bias, w.residual, std::nullopt, w.var, owned_by<Plan>(w.plan).eps, true, 0);
  place_output(w.node, stand_in);
}

Output sum_of(const Tensor& waiting, const Tensor& residual, bool in_place) {
  Waiting& w = owned_by<Waiting>(waiting);
  Tensor sum = stand_in_of(w);
  if (!is_fusible(w, sum) || w.residual.has_value() || w.activation != identity) return {};
  const Tensor& memory = w.memory;
  const bool is_alike = residual.sizes() == memory.sizes() && residual.strides() == memory.strides() &&
                        residual.scalar_type() == memory.scalar_type() && !residual.is_alias_of(memory);
  if (!is_alike || !is_usual(memory, {&w.weight, &w.bias}, true) || !is_usual(residual, {}, true)) {
    return {};
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    memory.add_(residual);
  }
  auto added = std::make_unique<Waiting>(w);
  w.memory = Tensor();
  added->residual = residual;
  added->seen_residual = Seen(residual);
  if (in_place) {
    bump_version(sum);
  } else {
    sum = stand_in_like(added->memory);
    added->stand_in = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(sum.getIntrusivePtr());
  }
  place(*added, sum);
  return {sum, owner_of(std::move(added))};
}

}  // namespace

Plan::Plan(const Tensor& x, const OptTensor& weight, const OptTensor& running_mean, double momentum, double eps,
           int64_t activation, double activation_param, const OptTensor& rows, int64_t saved, std::string name)
    : sizes(x.sizes().vec()),
      strides(x.strides().vec()),
      dtype(x.scalar_type()),
      device(x.device()),
      momentum(momentum),
      eps(eps),
      activation(activation),
      activation_param(activation_param),
      rows(rows),
      saved(saved),
      name(std::move(name)) {
  if (weight.has_value()) parameter_dtype = weight->scalar_type();
  if (running_mean.has_value()) statistics_dtype = running_mean->scalar_type();
  if (activation == identity) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto options = x.options().dtype(dtype == at::kDouble ? at::kDouble : at::kFloat);
    identity_mean = at::zeros({x.size(1)}, options);
    identity_var = at::ones({x.size(1)}, options);
  }
}

Seen::Seen(const OptTensor& t) {
  if (!t.has_value() || !t->defined()) return;
  version = t->_version();
  address = reinterpret_cast<int64_t>(t->data_ptr());
  requires_grad = t->requires_grad();
}

Tensor plan(const Tensor& x, const OptTensor& weight, const OptTensor& running_mean, double momentum, double eps,
            int64_t activation, double activation_param, const OptTensor& rows, int64_t saved, std::string name) {
  return owner_of(std::make_unique<Plan>(x, weight, running_mean, momentum, eps, activation, activation_param, rows,
                                         saved, std::move(name)));
}

Output norm(const Tensor& plan, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
            const OptTensor& running_mean, const OptTensor& running_var, const OptTensor& batches) {
  const Plan& p = owned_by<Plan>(plan);
  // In inference mode no tensor that is made here has a version. What is no number may not be counted.
  if (c10::InferenceMode::is_enabled() || (batches.has_value() && batches->dim() > 0)) return {};
  if (!fits(p, x, weight, bias, running_mean, running_var) ||
      !is_usual(x, {&weight, &bias, &running_mean, &running_var, &batches}, true)) {
    return {};
  }
  // Python chooses the channels whose xhat is saved.
  if (weight.has_value() && weight->is_cpu() && call<HasLost>("inplace_abn::has_lost", "", *weight, p.eps, p.rows)) {
    return {};
  }
  const Tensor stand_in = stand_in_like(x);
  auto waiting = std::make_unique<Waiting>(stand_in);
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    waiting->memory = uninitialised_like(x);
    if (p.rows.has_value()) waiting->verbatim = of_channels(x, p.saved);
    waiting->var = std::get<1>(call<LocalForwardOut>("inplace_abn::local_forward", "out", x, weight, bias, std::nullopt,
                                                     running_mean, running_var, p.momentum, std::nullopt, p.eps,
                                                     scale_is_weight, p.activation, p.activation_param, true, 0, p.rows,
                                                     optional(waiting->verbatim), waiting->memory));
    waiting->weight_value = copy(weight);
    waiting->bias_value = copy(bias);
    count(batches);
  }
  bump_version(batches);
  waiting->plan = plan;
  waiting->x = x;
  waiting->weight = weight;
  waiting->bias = bias;
  waiting->activation = p.activation;
  waiting->activation_param = p.activation_param;
  waiting->seen_x = Seen(x);
  waiting->seen_weight = Seen(weight);
  waiting->seen_bias = Seen(bias);
  waiting->version_of_memory = waiting->memory._version();
  waiting->edge = edge_of(x);
  place(*waiting, stand_in);
  return {stand_in, owner_of(std::move(waiting))};
}

Tensor activation(int64_t activation, double activation_param, bool settles, bool in_place) {
  return owner_of(std::make_unique<Activation>(Activation{activation, activation_param, settles, in_place}));
}

Tensor activate(const Tensor& waiting, const Tensor& activation) {
  Waiting& w = owned_by<Waiting>(waiting);
  const Activation& a = owned_by<Activation>(activation);
  const Plan& p = owned_by<Plan>(w.plan);
  const Tensor stand_in = stand_in_of(w);
  // An activation that was applied cannot always be taken back.
  if (!is_fusible(w, stand_in) || !may_attach(w.x, w.memory, w.weight, w.bias, w.residual)) return {};
  // A function that keeps the output is no reason to do without x, which torch's norm keeps and misses.
  if (a.settles && !a.in_place && Seen(w.x) != w.seen_x) return {};
  if (w.activation != a.activation || w.activation_param != a.activation_param) {
    if (w.activation != identity) return {};
    call<Forward>("inplace_abn::forward", "", w.memory, p.identity_mean, p.identity_var, std::nullopt, std::nullopt,
                  std::nullopt, identity_eps, scale_is_weight, a.activation, a.activation_param, true, std::nullopt,
                  std::nullopt);
    w.activation = a.activation;
    w.activation_param = a.activation_param;
  }
  const Tensor z =
      attached(w.x, w.memory, w.weight, w.bias, w.residual, optional(w.weight_value), optional(w.bias_value), w.var,
               p.rows, optional(w.verbatim), true, p.eps, scale_is_weight, a.activation, a.activation_param, 0, p.name);
  if (!z.defined()) return z;
  w.memory = Tensor();
  if (a.settles) {
    w.node = StandsForFunction::after(z);
    place_output(w.node, stand_in);
    if (a.in_place) bump_version(stand_in);
    // What stands for the output stands for z now, and needs nothing else.
    w.x = w.weight_value = w.bias_value = w.var = w.verbatim = Tensor();
    w.weight = w.bias = w.residual = std::nullopt;
    w.edge = {};
  }
  return z;
}

Output add(const Tensor& waiting, const Tensor& residual) {
  return sum_of(waiting, residual, false);
}

Output add_(const Tensor& waiting, const Tensor& residual) {
  return sum_of(waiting, residual, true);
}

bool is_placed(const Tensor& waiting) {
  const Waiting& w = owned_by<Waiting>(waiting);
  return has_place(w, stand_in_of(w));
}

std::tuple<std::vector<Tensor>, std::vector<int64_t>, double> parts(const Tensor& waiting) {
  Waiting& w = owned_by<Waiting>(waiting);
  std::vector<int64_t> numbers{w.activation, is_placed(waiting), w.edge.function != nullptr, w.edge.input_nr,
                               w.version_of_memory};
  for (const Seen& seen : {w.seen_x, w.seen_weight, w.seen_bias, w.seen_residual}) {
    numbers.insert(numbers.end(), {seen.version, seen.address, seen.requires_grad});
  }
  const auto given = [](const OptTensor& t) { return t.value_or(Tensor()); };
  return {{w.x, given(w.weight), given(w.bias), given(w.residual), w.weight_value, w.bias_value, w.var, w.verbatim,
           std::exchange(w.memory, Tensor())},
          numbers,
          w.activation_param};
}

void wait(const Tensor& stand_in, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
          const OptTensor& residual, const OptTensor& mean, const Tensor& var, double eps, bool training,
          int64_t shared) {
  if (!torch::autograd::compute_requires_grad(x, weight, bias, residual)) return;
  place_output(WaitingFunction::of(x, weight, bias, residual, mean, var, eps, training, shared), stand_in);
}

}  // namespace inplace_abn
