"""Fits the rational functions with which activation.h inverts silu, and prints them as its C++ arrays.

With t = sqrt(z - z_min) on the right of the minimum, and t = sqrt(ln(z_min / z)) on its left, both exp(-y) on the right
and y on the left are smooth functions of t, here approximated by P(t) / Q(t) with P(0) / Q(0) exact.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import chebyshev, polynomial

Y_MIN, Z_MIN = np.longdouble("-1.278464542761073795109"), np.longdouble("-0.278464542761073795109")
POINTS, ROUNDS = 4000, 300


@dataclass
class Branch:
    """Values of a function of t, and how much their errors weigh."""

    largest: float
    t: np.ndarray
    value: np.ndarray
    at_zero: np.longdouble
    weight: np.ndarray


def sigmoid(y: np.ndarray | np.longdouble) -> np.ndarray:
    return 1 / (1 + np.exp(-y))


def nodes(largest: float) -> np.ndarray:
    angles = np.pi * (np.arange(POINTS, dtype=np.longdouble) + 0.5) / POINTS
    return np.longdouble(largest) * (1 - np.cos(angles)) / 2


def bisect(z: np.ndarray, low: float, high: float, rising: bool) -> np.ndarray:
    """The y in [low, high] with silu(y) = z."""
    lows, highs = np.full_like(z, low), np.full_like(z, high)
    for _ in range(100):
        middle = (lows + highs) / 2
        below = (middle * sigmoid(middle) < z) == rising
        lows, highs = np.where(below, middle, lows), np.where(below, highs, middle)
    return (lows + highs) / 2


def right(largest: float) -> Branch:
    t = nodes(largest)
    z = Z_MIN + t * t
    value = np.exp(-bisect(z, Y_MIN, 64, rising=True))
    # What an error does to y = z * (1 + value), relatively, and a third of what it does to the
    # derivative (1 + z * value) / (1 + value).
    weight = np.maximum(1, np.abs(z - 1) / (1 + value) / 3) / (1 + value)
    return Branch(largest, t, value, np.exp(-Y_MIN), weight)


def left(largest: float) -> Branch:
    t = nodes(largest)
    value = bisect(Z_MIN * np.exp(-t * t), -1024, Y_MIN, rising=False)
    return Branch(largest, t, value, Y_MIN, 1 / np.abs(value))


def in_powers_of_t(coefficients: np.ndarray) -> np.ndarray:
    """Of a Chebyshev series in u = (t - 2) / (t + 2), times (t + 1)^degree."""
    series = chebyshev.cheb2poly(coefficients)
    result, degree = np.zeros(1), len(coefficients) - 1
    for k, c in enumerate(series):
        term = polynomial.polymul(polynomial.polypow([-2, 1], k), polynomial.polypow([2, 1], degree - k))
        result = polynomial.polyadd(result, c * term)
    return result


def fit(branch: Branch, degree: int) -> tuple[np.ndarray, np.ndarray, float]:
    """P, Q with Q(0) = 1, and the largest weighted error, by linearised least squares with Lawson's weights."""
    t, weight = branch.t.astype(float), branch.weight.astype(float)
    target = (branch.value - branch.at_zero).astype(float)
    # In u, which sees the neighbourhood of t = 2 and the far end alike, the system is well conditioned.
    basis = chebyshev.chebvander((t - 2) / (t + 2), degree)
    lawson, denominator = np.ones(POINTS), np.ones(POINTS)
    best = (np.inf, np.zeros(2 * degree + 1))
    for i in range(ROUNDS):
        w = np.sqrt(lawson) * weight / np.abs(denominator)
        # value - at_zero = S / Q with S(0) = 0, which is at u = -1.
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
    return float(branch.at_zero) * q + s, q, best[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fit",
        nargs=3,
        action="append",
        metavar=("DEGREE", "RIGHT", "LEFT"),
        help="a degree, and the largest t on either side; by default those of 16 bits, and of float and double",
    )
    args = parser.parse_args()
    for fit_of in args.fit or [("4", "3.5", "9.6"), ("7", "4.1", "27")]:
        degree = int(fit_of[0])
        for name, branch in (("right", right(float(fit_of[1]))), ("left", left(float(fit_of[2])))):
            p, q, error = fit(branch, degree)
            print(f"// degree {degree}, {name}: {error:.1e}")
            for coefficients in (p, q):
                print("{" + ", ".join(f"{c:.10g}" for c in coefficients) + "}")


if __name__ == "__main__":
    main()
