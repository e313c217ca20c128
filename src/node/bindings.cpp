// The functions of the graph node as a Python module, for builds from source. A call takes some microseconds less than
// that of a torch op. The module works with the torch and the Python that it was built with only.

#include <torch/extension.h>
#include <torch/version.h>

#include <utility>

#include "norm.h"

namespace {

using inplace_abn::Holders;

auto set_sole_holders(std::optional<std::pair<int64_t, int64_t>> gradient, std::optional<int64_t> output) {
  inplace_abn::set_sole_holders({gradient, output});
}

auto last_counts() {
  const Holders counts = inplace_abn::last_counts();
  return std::pair(counts.gradient, counts.output);
}

}  // namespace

PYBIND11_MODULE(_node, m) {
  const pybind11::call_guard<pybind11::gil_scoped_release> without_gil;
  m.def("inplace_abn", &inplace_abn::inplace_abn, without_gil);
  m.def("attached", &inplace_abn::attached, without_gil);
  m.def("activation_alone", &inplace_abn::activation_alone, without_gil);
  m.def("norm", &inplace_abn::norm, without_gil);
  m.def("norm_rows", &inplace_abn::norm_rows, without_gil);
  m.def("attach_norm", &inplace_abn::attach_norm, without_gil);
  m.def("keep", &inplace_abn::keep, without_gil);
  m.def("keep_as", &inplace_abn::keep_as, without_gil);
  m.def("activate", &inplace_abn::activate, without_gil);
  m.def("parts", &inplace_abn::parts, without_gil);
  m.def("set_sole_holders", &set_sole_holders);
  m.def("last_counts", &last_counts);
  m.attr("torch_version") = TORCH_VERSION;
}
