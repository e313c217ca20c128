"""Fits the rational functions that invert activations with a minimum, and writes include/inplace_abn/fits.h.

Such an activation is act(y) = y * gate(y). To the right of its minimum, 1 / gate(y) is a smooth function of t = sqrt(z
- z_min). To the left of it, y is a smooth function of t = sqrt(ln(z_min / z)). Both functions are approximated by P(t)
/ Q(t), with P(0) / Q(0) exact. To add an activation, add its gate, its slope and the range of its fits to `CURVES`.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mpmath
import numpy as np
from numpy.polynomial import chebyshev, polynomial

ROOT = Path(__file__).parents[1]
POINTS, ROUNDS = 2000, 300
FINE, COARSE = "Fine", "Coarse"
"""The names of the fit for float and double, and of the fit for 16 bits."""
NEGLIGIBLE = {FINE: 3e-8, COARSE: 4e-6}
"""Where 1 - gate(y) is smaller than this number, z is taken for y."""

mpmath.mp.dps = 40
Real = Any
"""The type of mpmath's numbers. mpmath has no annotations."""


class Curve(NamedTuple):
    name: str
    """The name in the table of activations."""
    gate: Callable[[Real], Real]
    slope: Callable[[Real, Real], Real]
    """act'(y) as a function of gate(y) and y."""
    minimum: float
    """The approximate position of the minimum."""
    degrees: dict[str, int]
    least: dict[str, float]
    """The least y that is fitted."""


def sigmoid(x: Real) -> Real:
    return 1 / (1 + mpmath.exp(-x))


def tanh_argument(y: Real) -> Real:
    """The gate of gelu_tanh is the sigmoid of this function."""
    return mpmath.sqrt(8 / mpmath.pi) * (y + mpmath.mpf("0.044715") * y**3)


def tanh_steepness(y: Real) -> Real:
    return mpmath.sqrt(8 / mpmath.pi) * (1 + 3 * mpmath.mpf("0.044715") * y**2)


def mish_gate(y: Real) -> Real:
    square = mpmath.exp(y) * (mpmath.exp(y) + 2)
    return square / (square + 2)


CURVES = {
    "Silu": Curve(
        "silu", sigmoid, lambda g, y: g * (1 + y * (1 - g)), -1.28, {FINE: 7, COARSE: 4}, {FINE: -730, COARSE: -93}
    ),
    "Gelu": Curve(
        "gelu",
        lambda y: mpmath.erfc(-y / mpmath.sqrt(2)) / 2,
        lambda g, y: g + y * mpmath.npdf(y),
        -0.75,
        {FINE: 7, COARSE: 4},
        {FINE: -12.5, COARSE: -12.5},
    ),
    "GeluTanh": Curve(
        "gelu_tanh",
        lambda y: sigmoid(tanh_argument(y)),
        lambda g, y: g * (1 + y * (1 - g) * tanh_steepness(y)),
        -0.75,
        {FINE: 7, COARSE: 4},
        {FINE: -9.5, COARSE: -9.5},
    ),
    "Mish": Curve(
        "mish",
        mish_gate,
        lambda g, y: g + y * (1 - g * g) * sigmoid(y),
        -1.19,
        {FINE: 8, COARSE: 4},
        {FINE: -730, COARSE: -93},
    ),
}


class Branch(NamedTuple):
    """Values of a function of t, and the weights of their errors."""

    t: np.ndarray
    value: np.ndarray
    at_zero: float
    weight: np.ndarray


def points(start: Real, end: Real) -> list[Real]:
    angles = [mpmath.pi * (i + mpmath.mpf(1) / 2) / POINTS for i in range(POINTS)]
    return [start + (end - start) * (1 - mpmath.cos(angle)) / 2 for angle in angles]


def right(curve: Curve, y_min: Real, linear: Real) -> Branch:
    y = points(y_min, linear)
    gates = [curve.gate(v) for v in y]
    z_min = y_min * curve.gate(y_min)
    t = [mpmath.sqrt(v * g - z_min) for v, g in zip(y, gates, strict=True)]
    h = mpmath.mpf("1e-12")
    # z = y * gate(y) is given, so a relative error of the gate causes the opposite relative error of y. ``moved`` is
    # the error of the slope that both cause. Errors of the slope weigh a third of errors of y.
    moved = [abs(curve.slope(g * (1 + h), v / (1 + h)) - curve.slope(g, v)) / h for v, g in zip(y, gates, strict=True)]
    weight = [max(1, m / 3) * g for m, g in zip(moved, gates, strict=True)]
    return Branch(array(t), array([1 / g for g in gates]), float(1 / curve.gate(y_min)), array(weight))


def left(curve: Curve, y_min: Real, least: float) -> Branch:
    y = points(y_min, mpmath.mpf(least))
    z_min = y_min * curve.gate(y_min)
    t = [mpmath.sqrt(mpmath.log(z_min / (v * curve.gate(v)))) for v in y]
    return Branch(array(t), array(y), float(y_min), 1 / np.abs(array(y)))


def array(values: list[Real]) -> np.ndarray:
    return np.array([float(v) for v in values])


def in_powers_of_t(coefficients: np.ndarray) -> np.ndarray:
    """The coefficients, in powers of t, of (t + 2)^degree times a Chebyshev series in u = (t - 2) / (t + 2)."""
    series = chebyshev.cheb2poly(coefficients)
    result, degree = np.zeros(1), len(coefficients) - 1
    for k, c in enumerate(series):
        term = polynomial.polymul(polynomial.polypow([-2, 1], k), polynomial.polypow([2, 1], degree - k))
        result = polynomial.polyadd(result, c * term)
    return result


def fit(branch: Branch, degree: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns P, Q with Q(0) = 1, and the largest weighted error. Uses linearised least squares with Lawson's
    weights."""
    t, weight = branch.t, branch.weight
    target = branch.value - branch.at_zero
    # The system is well conditioned in u, which resolves the neighbourhood of t = 2 as well as large t.
    basis = chebyshev.chebvander((t - 2) / (t + 2), degree)
    lawson, denominator = np.ones(POINTS), np.ones(POINTS)
    best = (np.inf, np.zeros(2 * degree + 1))
    for i in range(ROUNDS):
        w = np.sqrt(lawson) * weight / np.abs(denominator)
        # value - at_zero = S / Q. S is 0 where t = 0, that is where u = -1.
        numerator = basis[:, 1:] - (-1.0) ** np.arange(1, degree + 1)
        system = np.hstack([numerator, -target[:, None] * basis[:, 1:]])
        solution = np.linalg.lstsq(system * w[:, None], target * w, rcond=None)[0]
        denominator = 1 + basis[:, 1:] @ solution[degree:]
        error = np.abs(weight * (target - numerator @ solution[:degree] / denominator))
        if error.max() < best[0]:
            best = (error.max(), solution)
        if i > 5:
            lawson *= error / error.max() + 1e-6
            lawson /= lawson.mean()
    signs = (-1.0) ** np.arange(1, degree + 1)
    s = in_powers_of_t(np.r_[-best[1][:degree] @ signs, best[1][:degree]])
    q = in_powers_of_t(np.r_[1, best[1][degree:]])
    s, q = s / q[0], q / q[0]
    s[0] = 0
    return branch.at_zero * q + s, q, best[0]


def normal_tail() -> Branch:
    """The normal distribution's mass beyond x, over exp(-x^2 / 2). gelu's gate to the left of zero is computed from
    it."""
    x = points(mpmath.mpf(0), mpmath.mpf(13))
    values = array([mpmath.erfc(v / mpmath.sqrt(2)) / 2 * mpmath.exp(v * v / 2) for v in x])
    return Branch(array(x), values, 0.5, 1 / values)


def evaluated(coefficients: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The value of a polynomial in u, computed in float32 and in the order of the kernels."""
    c, u = coefficients.astype(np.float32), u.astype(np.float32)
    u2 = u * u
    high = c[4]
    if len(c) > 5:
        high = high + u * c[5] + u2 * (c[6] + u * c[7])
    if len(c) > 8:
        high = high + u2 * u2 * c[8]
    return c[0] + u * c[1] + u2 * (c[2] + u * c[3]) + u2 * u2 * high


def about(coefficients: np.ndarray, centre: float) -> np.ndarray:
    """The coefficients of a polynomial in t, in powers of t - centre."""
    result = np.zeros(1)
    for k, c in enumerate(coefficients):
        result = polynomial.polyadd(result, c * polynomial.polypow([centre, 1], k))
    return result


class Fit(NamedTuple):
    degree: int
    error: float
    """The largest weighted error of y and of the slope, in exact arithmetic. Errors are relative."""
    linear: float
    """From this y on, z is taken for y."""
    centre: float
    """The polynomials of the right branch are in powers of t - centre. With this centre they lose least to
    roundings."""
    right: tuple[np.ndarray, np.ndarray]
    left: tuple[np.ndarray, np.ndarray]


def fit_curve(curve: Curve, y_min: Real, kind: str) -> Fit:
    linear = mpmath.findroot(lambda y: mpmath.log((1 - curve.gate(y)) / NEGLIGIBLE[kind]), 4)
    on_right, on_left = right(curve, y_min, linear), left(curve, y_min, curve.least[kind])
    degree = curve.degrees[kind]
    p, q, error = fit(on_right, degree)
    left_p, left_q, left_error = fit(on_left, degree)

    def loss(centre: float) -> float:
        u = on_right.t.astype(np.float32) - np.float32(centre)
        found = evaluated(about(p, centre), u) / evaluated(about(q, centre), u)
        return float(np.max(np.abs(found - on_right.value) * on_right.weight))

    centre = 0.0
    if kind == FINE:
        centre = min((round(on_right.t.max() * i / 8 * 64) / 64 for i in range(6)), key=loss)
    around = about(p, centre), about(q, centre)
    return Fit(degree, max(error, left_error), float(linear), centre, around, (left_p, left_q))


def cpp(name: str, coefficients: np.ndarray) -> str:
    return f"static constexpr double {name}[] = {{{', '.join(f'{c:.10g}' for c in coefficients)}}};"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    header = [
        "// Coefficients for curves.h, which says what of, and math.h. Written by scripts/fit_inverses.py.",
        "#pragma once\n",
        "namespace inplace_abn::fits {\n",
        "// The normal distribution's mass beyond x is exp(-x^2 / 2) * P(x) / Q(x), for 0 <= x <= 13.",
        "struct NormalTail {",
    ]
    p, q, error = fit(normal_tail(), 5)
    header += [f"// error {error:.0e}", cpp("p", p), cpp("q", q), "};\n"]
    for name, curve in CURVES.items():
        y_min = mpmath.findroot(lambda y, c=curve: c.slope(c.gate(y), y), curve.minimum)
        lowest = mpmath.nstr(y_min, 21), mpmath.nstr(y_min * curve.gate(y_min), 21)
        fits = {kind: fit_curve(curve, y_min, kind) for kind in (FINE, COARSE)}
        header += [f"struct {name} {{", f"static constexpr double y_min = {lowest[0]}, z_min = {lowest[1]};\n"]
        for label, found in fits.items():
            header.append(f"struct {label} {{  // error {found.error:.0e}")
            header.append(f"static constexpr int degree = {found.degree};")
            header.append(f"static constexpr double linear = {found.linear:.4g}, centre = {found.centre};")
            for side, pair in (("right", found.right), ("left", found.left)):
                header += [cpp(f"{side}_p", pair[0]), cpp(f"{side}_q", pair[1])]
            header.append("};")
        header.append("};\n")
    header.append("}  // namespace inplace_abn::fits")
    path = ROOT / "include/inplace_abn/fits.h"
    path.write_text("\n".join(header) + "\n")
    subprocess.run(["clang-format", "-i", path], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
