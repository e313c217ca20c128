// A converted norm whose output waits for what follows.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/custom_class.h>

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "node.h"

namespace inplace_abn {

// What the calls of a norm are like: training, by local statistics, with these settings. conversion/plan.py makes it of
// a call that it has looked at in full, and tells when it holds.
struct Plan final : torch::CustomClassHolder {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  c10::Device device;
  // Those of weight and bias, and of the running statistics, if there are any.
  std::optional<at::ScalarType> parameter_dtype, statistics_dtype;
  double momentum, eps;
  // The activation that is applied in expectation.
  int64_t activation;
  double activation_param;
  // The layer's, for messages.
  std::string name;

  Plan(const Tensor& x, const OptTensor& weight, const OptTensor& running_mean, double momentum, double eps,
       int64_t activation, double activation_param, std::string name);
};

// A tensor at the time of a call. Whoever writes to it, or frees its memory, changes this.
struct Seen {
  int64_t version = 0, address = 0;
  bool requires_grad = false;

  Seen() = default;
  explicit Seen(const OptTensor& t);
  bool operator==(const Seen&) const = default;
};

// Releases of torch count references to nodes in different ways.
using NodePtr = std::decay_t<decltype(std::declval<Tensor>().grad_fn())>;

// A norm's call: what it was called with, what it computed, and what was added since.
struct Waiting final : torch::CustomClassHolder {
  c10::intrusive_ptr<Plan> plan;
  Tensor x;
  OptTensor weight, bias, residual;
  // Copies of the parameters, for backward; undefined where there is none.
  Tensor weight_value, bias_value, var;
  // The output, with the activation that is applied; undefined once it was taken.
  Tensor memory;
  int64_t activation;
  double activation_param;
  // What all these were like.
  Seen seen_x, seen_weight, seen_bias, seen_residual;
  int64_t version_of_memory;
  torch::autograd::Edge edge;
  // The graph node of the tensor that stands for the output.
  NodePtr node;
};

using WaitingPtr = c10::intrusive_ptr<Waiting>;

// A norm's call by a plan. The stand-in gets its place in the graph. Autograd does not notice the update of the running
// statistics, as in torch. `batches`, the number of batches, is counted. Returns nothing, and does nothing, if the call
// is not like the plan's, or needs Python.
std::optional<WaitingPtr> norm(const c10::intrusive_ptr<Plan>& plan, const Tensor& stand_in, const Tensor& x,
                               const OptTensor& weight, const OptTensor& bias, const OptTensor& running_mean,
                               const OptTensor& running_var, const OptTensor& batches);

// The activation of a waiting output, for which `stand_in` stands. If it is in place, the stand-in comes right after
// the result in the graph. Returns an undefined tensor, and does nothing, if the call needs Python.
Tensor activate(const WaitingPtr& waiting, const Tensor& stand_in, int64_t activation, double activation_param,
                bool in_place);

// The sum of a waiting output and a residual, which waits again. `sum` stands for it; it is `stand_in` if the sum is in
// place. Returns nothing, and does nothing, if the call needs Python.
std::optional<WaitingPtr> add(const WaitingPtr& waiting, const Tensor& stand_in, const Tensor& sum,
                              const Tensor& residual);

// All that Python needs to go on with a waiting output (conversion/plan.py). `waiting` gives up the memory.
std::tuple<std::vector<Tensor>, std::vector<int64_t>, double> parts(const WaitingPtr& waiting, const Tensor& stand_in);

// Gives the tensor that stands for a norm's output its place in the graph. `mean` is that of frozen statistics.
void wait(const Tensor& stand_in, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
          const OptTensor& residual, const OptTensor& mean, const Tensor& var, double eps, bool training,
          int64_t shared);

}  // namespace inplace_abn
