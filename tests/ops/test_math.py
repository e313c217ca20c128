"""The elementary functions of `math.h`, against the C library's in float64, over their whole range."""

import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

INCLUDE = Path(__file__).parents[2] / "include"
pytestmark = pytest.mark.skipif(not INCLUDE.is_dir(), reason="needs the source tree and a C++ compiler")
# Enough floats of any exponent, at a distance that no power of two divides.
STEP = 509

PROGRAM = """
#include <algorithm>
#include <cstdio>
#include "inplace_abn/math.h"

using namespace inplace_abn;

double larger(double a, double b) {
  return b != b ? HUGE_VAL : std::max(a, b);
}

// The largest error over floats from `from` to `to`, which have one sign: in units in the last place, and relative.
template <typename Ours, typename Exact>
void report(const char* name, float from, float to, const Ours& ours, const Exact& exact) {
  double ulps = 0, relative = 0;
  const auto first = bits_to<uint32_t>(from), last = bits_to<uint32_t>(to);
  for (uint64_t bits = first; bits <= last; bits += STEP) {
    const auto x = bits_to<float>(static_cast<uint32_t>(bits));
    const double y = exact(static_cast<double>(x)), error = std::abs(ours(x) - y);
    const double ulp = std::ldexp(1.0, std::max(std::ilogb(y), -126) - 23);
    if (error == 0) continue;
    ulps = larger(ulps, error / ulp);
    relative = larger(relative, error / std::abs(y));
  }
  std::printf("%s %.17g %.17g\\n", name, ulps, relative);
}

int main() {
  const auto exp = [](double x) { return std::exp(x); };
  const auto log = [](double x) { return std::log(x); };
  report("exp_bounded", 0x1p-60f, 88.37f, exp_bounded<float>, exp);
  report("exp_bounded", -0x1p-60f, -87, exp_bounded<float>, exp);
  report("exp_coarse", 0x1p-60f, 88.37f, exp_coarse<float>, exp);
  report("exp_coarse", -0x1p-60f, -87, exp_coarse<float>, exp);
  report("log_positive", 0x1p-126f, 0x1.fffffep127f, log_positive<float>, log);
  report("log_coarse", 0x1p-126f, 0x1.fffffep127f, [](float x) { return log_coarse(x); }, log);
  report("expm1_nonpositive", -0x1p-60f, -87, expm1_nonpositive<float>, [](double x) { return std::expm1(x); });
  report("log1p_nonpositive", -0x1p-60f, -0x1.fffffep-1f, log1p_nonpositive<float>,
         [](double x) { return std::log1p(x); });
  report("normal_mass_below", 0x1p-60f, 20, [](float x) { return normal_mass_below(x); },
         [](double x) { return normal_mass_below(x); });
  report("normal_mass_below", -0x1p-60f, -13, [](float x) { return normal_mass_below(x); },
         [](double x) { return normal_mass_below(x); });
}
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The largest errors of each function: in units in the last place, and relative ones."""
    folder = tmp_path_factory.mktemp("math")
    (folder / "report.cpp").write_text(PROGRAM)
    command = [*cpp_extension.get_cxx_compiler().split(), "-std=c++20", "-O2", f"-DSTEP={STEP}", f"-I{INCLUDE}"]
    subprocess.run([*command, "-o", folder / "report", folder / "report.cpp"], check=True)
    printed = subprocess.run([folder / "report"], capture_output=True, text=True, check=True).stdout
    found: dict[str, list[tuple[float, float]]] = {}
    for name, ulps, relative in map(str.split, printed.splitlines()):
        found.setdefault(name, []).append((float(ulps), float(relative)))
    return {name: tuple(map(max, zip(*both, strict=True))) for name, both in found.items()}


@pytest.mark.parametrize(
    ("name", "most"), [("exp_bounded", 2), ("log_positive", 2), ("expm1_nonpositive", 3), ("log1p_nonpositive", 3)]
)
def test_the_largest_error_is_what_the_header_says_in_units_in_the_last_place(errors, name, most):
    assert errors[name][0] <= most


@pytest.mark.parametrize(("name", "most"), [("exp_coarse", 1e-5), ("log_coarse", 7e-5), ("normal_mass_below", 5e-6)])
def test_the_largest_relative_error_of_what_is_coarser_is_small(errors, name, most):
    assert errors[name][1] <= most
