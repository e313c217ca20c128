// A converted norm whose output waits for what follows.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "graph.h"
#include "node.h"

namespace inplace_abn {

// What the calls of a norm are like: training, by local statistics, with these settings. conversion/plan.py makes it of
// a call that it has looked at in full, and tells when it holds.
struct Plan final {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  c10::Device device;
  // Those of weight and bias, and of the running statistics, if there are any.
  std::optional<at::ScalarType> parameter_dtype, statistics_dtype;
  double momentum, eps;
  // The activation that is applied in expectation.
  int64_t activation;
  double activation_param;
  // Each channel's row in the saved xhat, of which there are `saved`; none if nothing is saved.
  OptTensor rows;
  int64_t saved;
  // The layer's, for messages.
  std::string name;
  // Mean and variance with which the norm is the identity, bit for bit, if it has no parameters and next to no eps.
  // They are defined if no activation is applied in expectation.
  Tensor identity_mean, identity_var;

  Plan(const Tensor& x, const OptTensor& weight, const OptTensor& running_mean, double momentum, double eps,
       int64_t activation, double activation_param, const OptTensor& rows, int64_t saved, std::string name);
};

// An activation that follows a norm.
struct Activation final {
  int64_t activation;
  double activation_param;
  // Whether what stands for the output comes right after the result in the graph, and nothing waits any more.
  bool settles;
  // Whether that is a write to it.
  bool in_place;
};

// A tensor at the time of a call. Whoever writes to it, or frees its memory, changes this.
struct Seen {
  int64_t version = 0, address = 0;
  bool requires_grad = false;

  Seen() = default;
  explicit Seen(const OptTensor& t);
  bool operator==(const Seen&) const = default;
};

// A norm's call: what it was called with, what it computed, and what was added since.
struct Waiting final {
  // The tensor that owns the plan.
  Tensor plan;
  Tensor x;
  OptTensor weight, bias, residual;
  // Copies of the parameters, for backward; undefined where there is none.
  Tensor weight_value, bias_value, var, verbatim;
  // The output, with the activation that is applied; undefined once it was taken.
  Tensor memory;
  int64_t activation;
  double activation_param;
  // What all these were like.
  Seen seen_x, seen_weight, seen_bias, seen_residual;
  int64_t version_of_memory;
  torch::autograd::Edge edge;
  // The tensor that stands for the output, which does not outlive its last other reference, and the graph node that it
  // was given.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> stand_in;
  NodePtr node;

  explicit Waiting(const Tensor& stand_in) : stand_in(stand_in.getIntrusivePtr()) {}
};

// A tensor that owns a plan. Plans, activations and waiting outputs are passed as the tensors that own them, because
// torch takes long to pass numbers to ops.
Tensor plan(const Tensor& x, const OptTensor& weight, const OptTensor& running_mean, double momentum, double eps,
            int64_t activation, double activation_param, const OptTensor& rows, int64_t saved, std::string name);

// A tensor that stands for an output, and what it stands for. Both are undefined, and nothing was done, if the call
// needs Python.
using Output = std::tuple<Tensor, Tensor>;

// A norm's call by a plan. Autograd does not notice the update of the running statistics, as in torch. `batches`, the
// number of batches, is counted. The result is undefined, too, if the call is not like the plan's.
Output norm(const Tensor& plan, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
            const OptTensor& running_mean, const OptTensor& running_var, const OptTensor& batches);

// A tensor that owns an activation, as `activate` takes it.
Tensor activation(int64_t activation, double activation_param, bool settles, bool in_place);

// The activation of a waiting output. Returns an undefined tensor, and does nothing, if the call needs Python.
Tensor activate(const Tensor& waiting, const Tensor& activation);

// The sum of a waiting output and a residual, which waits again.
Output add(const Tensor& waiting, const Tensor& residual);

// The same in place: what stands for the output stands for the sum.
Output add_(const Tensor& waiting, const Tensor& residual);

// Whether what stands for the output has the place in the graph that it was given.
bool is_placed(const Tensor& waiting);

// All that Python needs to go on with a waiting output (conversion/plan.py). `waiting` gives up the memory.
std::tuple<std::vector<Tensor>, std::vector<int64_t>, double> parts(const Tensor& waiting);

// Gives the tensor that stands for a norm's output its place in the graph. `mean` is that of frozen statistics.
void wait(const Tensor& stand_in, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
          const OptTensor& residual, const OptTensor& mean, const Tensor& var, double eps, bool training,
          int64_t shared);

}  // namespace inplace_abn
