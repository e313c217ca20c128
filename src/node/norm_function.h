// The node of a norm's output. It keeps x, as torch's does, until something keeps the output anyway.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/var.h>

#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls.h"
#include "gradients.h"

namespace inplace_abn {

using NormBackward = std::vector<Tensor>(const Tensor& g, const Tensor& x, const OptTensor& weight,
                                         std::optional<at::ScalarType> bias_dtype, const OptTensor& mean,
                                         const OptTensor& var, const std::vector<bool>& needed, double eps,
                                         bool training, int64_t shared, int64_t norm_of_rows);
using HasLeft = bool(const Tensor& weight, const OptTensor& bias, double least, double added, const OptTensor& bounds,
                     const OptTensor& rows);

constexpr int64_t identity = 0;
// The scale of a converted norm (kernels.h).
constexpr int64_t scale_is_weight = 2;

// A tensor at the time of a call. Whoever writes to it, or frees its memory, changes this.
struct Seen {
  int64_t version = 0, address = 0;
  bool requires_grad = false;

  Seen() = default;
  explicit Seen(const Tensor& t) {
    if (!t.defined()) return;
    version = t._version();
    address = reinterpret_cast<int64_t>(t.data_ptr());
    requires_grad = t.requires_grad();
  }
  bool operator==(const Seen&) const = default;
};

// Tells whether a tensor was written to while backward knows it by an alias, which has a version of its own. An alias
// that has become a copy has other memory.
class Aliased {
 public:
  Aliased() = default;
  Aliased(const Tensor& t, const Tensor& alias) {
    if (t.is_same(alias) || t.data_ptr() != alias.data_ptr()) return;
    alias_ = alias;
    memory_ = alias.data_ptr();
    counter_ = t.unsafeGetTensorImpl()->version_counter();
    first_ = counter_.current_version();
  }
  void check(const char* what, const std::string& layer) const {
    if (!alias_.defined() || counter_.current_version() == first_) return;
    if (alias_.data_ptr() == memory_) raise_modified(what, layer);
  }

 private:
  Tensor alias_;
  const void* memory_ = nullptr;
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  uint32_t first_ = 0;
};

// There are none under saved-tensor hooks, which do not see all that is kept.
class NormFunction final : public Node {
 public:
  static void attach(const Tensor& y, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                     const OptTensor& mean, const OptTensor& var, const NodeSettings& settings,
                     const std::string& name) {
    const auto node = make_node<NormFunction>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
    place_output(node, y);
    node->x_ = {x, false};
    node->weight_ = {weight, false};
    node->x = x;
    node->weight = weight.value_or(Tensor());
    node->bias = bias.value_or(Tensor());
    node->mean = mean.value_or(Tensor());
    node->var = var.value_or(Tensor());
    node->settings = settings;
    node->layer = name;
    node->seen_ = node->seen();
  }

  // The node of t, or of the operand of this number if t is a sum; null if it is another node. The output of torch's
  // instance norm is a view.
  static NormFunction* of(const Tensor& t, int64_t operand) {
    auto* own = t.grad_fn().get();
    for (const int64_t edge : {operand, int64_t{0}}) {
      if (own == nullptr || dynamic_cast<NormFunction*>(own) != nullptr) break;
      own = static_cast<size_t>(edge) < own->num_outputs() ? own->next_edge(edge).function.get() : nullptr;
    }
    return dynamic_cast<NormFunction*>(own);
  }

  std::string name() const override { return keeps_output_ ? "InPlaceABNFunction" : "NormFunction"; }

  // Whether a node can be made that does without this one: all is as it was in the call, and x is there.
  bool is_unchanged() const {
    return at::GradMode::is_enabled() && !keeps_output_ && x.defined() && seen() == seen_ &&
           torch::autograd::Edge(x.grad_fn(), static_cast<uint32_t>(x.output_nr())) == place_of_x();
  }

  bool keeps_output() const { return keeps_output_; }

  // Whether a weight on the CPU whose channel is not saved has left its bounds, so that Python has to decide.
  bool has_left(const OptTensor& bounds, const OptTensor& rows) const {
    const double least = settings.rows != 0 ? least_weight_of_rows : settings.eps;
    return weight.defined() && weight.is_cpu() &&
           call<HasLeft>("inplace_abn::has_left", "", weight, optional(bias), least, 0.0, bounds, rows);
  }

  // What backward needs of the statistics: the variance, or rstd of each row, which only torch's layer norm gives.
  Tensor statistics() const {
    if (settings.rows == 0 || var.defined()) return var;
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto wide = wide_type(x);
    const Tensor of_squares =
        settings.rows == layer_norm
            ? at::var(x.to(wide), at::IntArrayRef{-1}, 0, true)
            : at::linalg_vector_norm(x, 2, at::IntArrayRef{-1}, true, wide).square_().div_(x.size(-1));
    return of_squares.add(settings.eps).rsqrt_();
  }

  // xhat of these channels, or columns.
  OptTensor xhat_of(const OptTensor& channels, at::ScalarType dtype) const {
    if (!channels.has_value()) return std::nullopt;
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (settings.rows != 0) {
      Tensor values = x.index_select(-1, *channels).to(wide_type(x));
      if (settings.rows == layer_norm) values.sub_(mean.defined() ? mean : x.mean(-1, true, values.scalar_type()));
      return values.mul_(statistics()).to(dtype);
    }
    std::vector<int64_t> shape(x.dim(), 1);
    shape[0] = -1;
    shape[1] = channels->numel();
    const auto chosen = [&](const Tensor& t) { return t.view({-1, x.size(1)}).index_select(1, *channels).view(shape); };
    Tensor result = of_channels(x, channels->numel());
    result.copy_((x.index_select(1, *channels) - chosen(mean)) * (chosen(var) + settings.eps).rsqrt());
    return result;
  }

  void keep(const Tensor& t, const OptTensor& residual, const Tensor& var_of_call, const OptTensor& rows,
            const OptTensor& verbatim) {
    const std::lock_guard lock(mutex_);
    // A sum comes after this node, which must not hold what leads to itself.
    const auto& producer = t.grad_fn();
    is_own_ = producer.get() == this;
    y_ = {is_own_ || !producer ? t : t.detach(), is_own_};
    // An alias stays the tensor that it is: whoever made it may give it memory of its own.
    if (residual.has_value()) residual_ = {residual->requires_grad() ? residual->detach() : *residual, false};
    const at::AutoDispatchBelowADInplaceOrView guard;
    values_ = {optional(copy(optional(weight))), optional(copy(optional(bias))), var_of_call, rows, verbatim};
    keeps_output_ = true;
    // Unlike one that was reset, a new one can be unpacked, which compiled autograd does.
    x_ = SavedVariable();
    weight_ = SavedVariable();
    x = weight = bias = mean = var = Tensor();
  }

  // Says of which tensors the kept ones may be aliases.
  void kept_as(const Aliased& output, const Aliased& residual) {
    aliased_output_ = output;
    aliased_residual_ = residual;
  }

  variable_list apply(variable_list&& incoming) override {
    std::unique_lock lock(mutex_);
    if (!incoming.at(0).defined()) return variable_list(inputs);
    const auto needed = needed_by_edges(*this, inputs);
    if (!keeps_output_) {
      const variable_list saved = tensors();
      // Under the hooks of a checkpoint the gradients' computation may come back here.
      lock.unlock();
      return gradients(incoming[0], saved, needed, bias_dtype(), settings);
    }
    // Only the engine gives up what it passes to backward.
    const bool by_engine = torch::autograd::get_current_node().get() == this;
    const bool own_dy = by_engine && owns_gradient(incoming[0]);
    const Tensor y = output();
    // Owners of memory are counted with a tensor that unpacking makes. An alias comes back as the one that was saved.
    NodeSaved saved{is_own_ ? y : y.detach(), optional(residual()), values_};
    if (at::GradMode::is_enabled()) lock.unlock();
    return of_norm(
        gradients_of(incoming[0], std::move(saved), with_residual(needed), settings, by_engine, own_dy, this));
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
    y_.reset_data();
    residual_.reset_data();
    aliased_output_ = aliased_residual_ = {};
    x = weight = bias = mean = var = Tensor();
    values_ = {};
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(keeps_output_);
    args.collect(x_, false);
    args.collect(weight_, false);
    args.collect(y_, true);
    args.collect(residual_, false);
    args.collect(mean);
    args.collect(var);
    args.collect(values_.var);
    for (const OptTensor* t : {&values_.weight, &values_.bias, &values_.rows, &values_.verbatim}) args.collect(*t);
    args.collect(bias_dtype());
    args.collect(settings.eps);
    args.collect(settings.training);
    args.collect(settings.shared);
    args.collect(settings.rows);
  }

  variable_list apply_with_saved(const variable_list& incoming, SwapSavedVariables& saved) override {
    const auto each = [&](auto visit) {
      visit(x_);
      visit(weight_);
      visit(y_);
      visit(residual_);
      visit(mean);
      visit(var);
      visit(values_.var);
      for (OptTensor* t : {&values_.weight, &values_.bias, &values_.rows, &values_.verbatim}) visit(*t);
    };
    each([&](auto& t) { saved.before(t); });
    const auto given = [](const OptTensor& t) { return t.value_or(Tensor()); };
    PackedArgs packed;
    packed.pack(keeps_output_);
    packed.pack(keeps_output_ ? variable_list{output(), residual(), given(values_.weight), given(values_.bias),
                                              values_.var, given(values_.rows), given(values_.verbatim)}
                              : tensors());
    packed.pack(needed_by_edges(*this, inputs));
    packed.pack(bias_dtype());
    packed.pack(settings.eps);
    packed.pack(settings.training);
    packed.pack(settings.shared);
    packed.pack(settings.rows);
    variable_list results = call_when_compiled(*this, saved, incoming, packed, &of_packed);
    each([&](auto& t) { saved.after(t); });
    return results;
  }

  Tensor x, weight, bias, mean, var;
  NodeSettings settings{};
  std::string layer;

 private:
  // The number of tensors that may need a gradient: x, weight and bias.
  static constexpr size_t inputs = 3;
  // What stands for the dtype of a bias that there is not.
  static constexpr int64_t no_bias = -1;

  std::tuple<Seen, Seen, Seen> seen() const { return {Seen(x), Seen(weight), Seen(bias)}; }
  // A leaf has a node that collects gradients, and no node of its own.
  torch::autograd::Edge place_of_x() const {
    return x.is_leaf() ? torch::autograd::Edge(nullptr, static_cast<uint32_t>(x.output_nr())) : next_edge(0);
  }
  int64_t bias_dtype() const { return bias.defined() ? static_cast<int64_t>(bias.scalar_type()) : no_bias; }
  // x, weight, mean and var. Those that there are not are undefined.
  variable_list tensors() const {
    // torch's norms of channels keep their input, too, and have an error of their own. A norm of rows by hand may not.
    const Tensor found = settings.rows == 0 ? x_.unpack() : unpacked(x_, "input", layer, nullptr);
    return {found, weight_.unpack(), mean, var};
  }

  Tensor output() {
    aliased_output_.check("output", layer);
    return unpacked(y_, "output", layer, getptr());
  }
  // Undefined if there is none.
  Tensor residual() {
    aliased_residual_.check("residual", layer);
    return unpacked(residual_, "residual", layer, getptr());
  }

  // By an op that autograd/native.py defines, which autograd sees.
  static variable_list gradients(const Tensor& g, const variable_list& tensors, const std::vector<bool>& needed,
                                 int64_t bias_dtype, const NodeSettings& s) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow("inplace_abn::native_norm_backward", "").typed<NormBackward>();
    std::optional<at::ScalarType> dtype;
    if (bias_dtype != no_bias) dtype = static_cast<at::ScalarType>(bias_dtype);
    const std::vector<Tensor> found =
        handle.call(g, tensors.at(0), optional(tensors.at(1)), dtype, optional(tensors.at(2)), optional(tensors.at(3)),
                    needed, s.eps, s.training, s.shared, s.rows);
    variable_list results(inputs);
    size_t next = 0;
    for (size_t i = 0; i < inputs; ++i) {
      if (needed[i]) results[i] = found.at(next++);
    }
    return results;
  }

  static std::vector<bool> with_residual(std::vector<bool> needed) {
    needed.push_back(false);
    return needed;
  }
  static variable_list of_norm(variable_list gradients) {
    gradients.resize(inputs);
    return gradients;
  }

  // The same, of what compiled code passes.
  static variable_list of_packed(const variable_list& incoming, const std::vector<at::IValue>& args) {
    if (!incoming.at(0).defined()) return variable_list(inputs);
    PackedArgs packed(args);
    const auto keeps_output = packed.unpack<bool>();
    const auto tensors = packed.unpack<variable_list>();
    const auto needed = packed.unpack<std::vector<bool>>();
    const auto bias_dtype = packed.unpack<int64_t>();
    NodeSettings s{packed.unpack<double>(), scale_is_weight, identity, 0.0, true, 0};
    s.training = packed.unpack<bool>();
    s.shared = packed.unpack<int64_t>();
    s.rows = packed.unpack<int64_t>();
    if (!keeps_output) return gradients(incoming[0], tensors, needed, bias_dtype, s);
    const NodeValues values{optional(tensors.at(2)), optional(tensors.at(3)), tensors.at(4), optional(tensors.at(5)),
                            optional(tensors.at(6))};
    const NodeSaved found{tensors.at(0), optional(tensors.at(1)), values};
    return of_norm(gradients_of(incoming[0], found, with_residual(needed), s, false, false, nullptr));
  }

  SavedVariable x_, weight_, y_, residual_;
  Aliased aliased_output_, aliased_residual_;
  NodeValues values_;
  std::tuple<Seen, Seen, Seen> seen_;
  bool keeps_output_ = false;
  // Whether the kept output is that of this node, and no alias.
  bool is_own_ = false;
};

}  // namespace inplace_abn
