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
  int64_t shared;
};

// What backward needs of the call, besides z and the residual. Later writes to the parameters do not matter.
struct NodeValues {
  OptTensor weight, bias;
  Tensor var;
  // xhat of some channels, and each channel's row in it.
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

// Whether the calling backward is the only holder of the gradient that it was given.
bool owns_gradient(const Tensor& dz);

// Raises the error that says what to do about a tensor that was modified in place, and tells the layer.
[[noreturn]] void raise_modified(const char* what, const std::string& layer);

// A saved tensor. Raises an error that says what to do if it was modified in place.
Tensor unpacked(const SavedVariable& t, const char* what, const std::string& layer, const NodePtr& node);

}  // namespace inplace_abn
