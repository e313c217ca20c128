// What graph nodes that are written by hand have in common. torch's Function would save and wrap more than they need.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace inplace_abn {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::PackedArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// Releases of torch count references to nodes in different ways.
using NodePtr = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;

template <typename Kind, typename Pointer = NodePtr>
auto make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::make_shared<Kind>();
  } else {
    return c10::make_intrusive<Kind>();
  }
}

// Gives a tensor the place of the node's next output in the graph.
inline void place_output(const NodePtr& node, const at::Tensor& t) {
  torch::autograd::impl::set_gradient_edge(t, {node, node->add_input_metadata(t)});
}

// For each of the first `count` edges of the node that runs, whether its gradient is needed.
inline std::vector<bool> needed_by_edges(const Node& node, size_t count) {
  std::vector<bool> result;
  for (size_t i = 0; i < count; ++i) result.push_back(node.task_should_compute_output(i));
  return result;
}

// Makes compiled code call a function with what was packed, as it is: autograd's compiler traces neither calls of
// autograd nor reference counts.
inline variable_list call_when_compiled(const Node& node, SwapSavedVariables& saved, const variable_list& incoming,
                                        const PackedArgs& packed,
                                        variable_list (*function)(const variable_list&,
                                                                  const std::vector<at::IValue>&)) {
  namespace compiler = torch::dynamo::autograd;
  using Edges = std::vector<std::optional<torch::autograd::InputMetadata>>;
  std::vector<at::TypePtr> schema;
  for (const auto& value : packed.vec()) schema.push_back(value.type());
  const auto& interface = compiler::getPyCompilerInterface();
  const std::string name =
      interface->bind_function(saved.get_py_compiler(), node.name(), function, std::move(schema), true, false);
  const auto edges = compiler::IValuePacker<Edges>::pack(compiler::get_input_metadata(node.next_edges()));
  return interface->call_function(saved.get_py_compiler(), "apply_functional", name, incoming, packed.vec(), edges);
}

}  // namespace inplace_abn
