// The gradients of what keeps its output, as all nodes compute them.
#pragma once

#include <string>
#include <vector>

#include "graph.h"
#include "node.h"

namespace inplace_abn {

// The arguments of a call that are no tensors.
struct NodeSettings {
  double eps;
  int64_t scale;
  int64_t activation;
  double activation_param;
  bool training;
  // How many neighbouring channels of a sample share statistics, 0 if statistics are of the batch, or `whole`.
  int64_t shared;
  // The norm of rows, or 0 for norms over batch and space.
  int64_t rows = 0;
};

// The value of `shared` if the tensor is one channel, as for an activation alone.
constexpr int64_t whole = -1;
// The values of `rows`.
constexpr int64_t layer_norm = 1, rms_norm = 2;
// The smallest weight from whose output a norm of rows recovers xhat (reference.LEAST_WEIGHT).
constexpr double least_weight_of_rows = 1e-5;

// What backward needs of the call, besides z and the residual. Later writes to the parameters do not matter.
struct NodeValues {
  OptTensor weight, bias;
  Tensor var;
  // xhat of some channels, and each channel's row in it. For a norm of rows: which columns these are.
  OptTensor rows, verbatim;
};

struct NodeSaved {
  Tensor z;
  OptTensor residual;
  NodeValues values;
};

// The gradients of x, weight, bias and the residual, as far as they are needed. z is overwritten if the engine runs the
// node and nothing else holds z, and dz if the node owns it. Without a node, which compiled code has not, nothing is.
variable_list gradients_of(const Tensor& dz, NodeSaved saved, const std::vector<bool>& needed,
                           const NodeSettings& settings, bool by_engine, bool own_dz, const Node* node);

// The same without a residual, for a norm of rows, whose `values.var` is rstd of each row. dx is written over dy if
// `own_dy`.
variable_list gradients_of_rows(const NodeSaved& saved, const Tensor& dy, const std::vector<bool>& needed,
                                const NodeSettings& settings, bool own_dy);

// Whether the calling backward is the only holder of the gradient that it was given.
bool owns_gradient(const Tensor& dz);

// Raises the error that says what to do about a tensor that was modified in place, and tells the layer.
[[noreturn]] void raise_modified(const char* what, const std::string& layer);

// A saved tensor. Raises an error that says what to do if it was modified in place.
Tensor unpacked(const SavedVariable& t, const char* what, const std::string& layer, const NodePtr& node);

}  // namespace inplace_abn
