// The Python module _backend. It calls the ops, which the kernels' library has registered.

#include <torch/extension.h>
#include <torch/version.h>

#include "autograd.h"
#include "graph.h"
#include "inplace_abn/activation.h"

PYBIND11_MODULE(_backend, m) {
  using inplace_abn::Activation;
  using inplace_abn::Watch;
  using pybind11::arg;
  pybind11::enum_<Activation>(m, "Activation")
      .value("identity", Activation::identity)
      .value("leaky_relu", Activation::leaky_relu)
      .value("elu", Activation::elu)
      .value("relu", Activation::relu)
      .value("silu", Activation::silu)
      .value("hardswish", Activation::hardswish);
  pybind11::class_<Watch>(m, "Watch")
      .def(pybind11::init<>())
      .def("start", &Watch::start, arg("output"))
      .def("check_unmodified", &Watch::check_unmodified, arg("unpacked"));
  m.def("inplace_abn", &inplace_abn::inplace_abn, arg("x"), arg("weight"), arg("bias"), arg("residual"),
        arg("running_mean"), arg("running_var"), arg("training"), arg("momentum"), arg("momentum_tensor"), arg("eps"),
        arg("signed_weight"), arg("activation"), arg("activation_param"),
        pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("check_producer", &inplace_abn::check_producer, arg("x"), pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("set_sole_holders", &inplace_abn::set_sole_holders, arg("gradients"), arg("output_storage"));
  m.def("last_observed", &inplace_abn::last_observed);
  m.def("observe_gradient", &inplace_abn::observe_gradient, arg("output"));
  m.def("holders", &inplace_abn::holders, arg("tensor"));
  m.def("gradient_holders", &inplace_abn::gradient_holders, arg("gradient"));
  m.def("check_call", &inplace_abn::check_call, arg("x"), arg("weight"), arg("bias"), arg("residual"),
        arg("running_mean"), arg("running_var"), arg("requires_grad"));
  m.def("check_transforms", &inplace_abn::check_transforms, arg("tensor"));
  m.def("set_input_edge", &inplace_abn::set_input_edge, arg("tensor"), arg("output"));
  m.attr("torch_version") = TORCH_VERSION;
}
