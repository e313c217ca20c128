#include <torch/extension.h>
PYBIND11_MODULE(_backend, m) {}
