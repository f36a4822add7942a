"""
What is known exactly of Gaussian models, beside what the package tells of them.

    python -m campaigns.exact                    # some minutes in float64
    python -m campaigns.exact --precision float32

The models are those of `campaigns.bounds`; NumPy computes all that is exact densely in
float64, by formulas of its own. Kinds of blocks:

- an approximation: after natural steps q(u) has the best bound of its form, which is the
  collapsed one (Titsias 2009; that of VGP is the evidence but for the jitter) or that of
  the relaxation (Titsias 2025; Bui and Titsias 2025);
- ``bracket``: the evidence is within `evidence_bracket`;
- ``verdict``: `nats_left` is what q(u) has left to gain, and what `sparsity_curve` says is
  lost to inducing points is never more than truly is.
"""

import argparse
from functools import partial

import jax
import numpy as np

from campaigns import bounds
from campaigns._table import Found, Table
from numpyro_sgp.diagnostics.evidence import evidence_bracket
from numpyro_sgp.diagnostics.optimality import nats_left
from numpyro_sgp.diagnostics.sparsity import sparsity_curve
from numpyro_sgp.linalg.cholesky import default_jitter

#: Natural steps to an optimum: one makes no variance more than fourfold.
STEPS = 60
#: Models of a block; those whose verdict is looked at.
EACH, FEWER = 140, 50
#: Rows of each block of V where q(f | u) is relaxed.
OPTIMA = {
    "SVGP": None,
    "SVGP unwhitened": None,
    "SVGP coupled": None,
    "SVGP tight diagonal": 1,
    "SVGP tight block": 3,
    "VGP": None,
}
TOLD = "bracket", "verdict"


def kernel(A, B, variance, length):
    """The matrix of an RBF kernel."""
    return variance * np.exp(-0.5 * (((A[:, None] - B) / length) ** 2).sum(-1))


def optimum(X, y, Z, variance, length, noise, rows, jitter):
    """
    The bound at the best q(u).

    :param rows: of each block of V; None where q(f | u) is the prior's.
    :return: nats.
    """
    Kzz = kernel(Z, Z, variance, length) + jitter * variance * np.eye(len(Z))
    Kzx = kernel(Z, X, variance, length)
    Q = Kzx.T @ np.linalg.solve(Kzz, Kzx)
    left = kernel(X, X, variance, length) - Q
    C = 0.5 * (Q + Q.T) + noise**2 * np.eye(len(X))
    found = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(2 * np.pi * C)[1])
    if rows is None:
        return found - 0.5 * np.trace(left) / noise**2
    for start in range(0, len(X), rows):
        block = left[start : start + rows, start : start + rows] / noise**2
        found -= 0.5 * np.linalg.slogdet(np.eye(len(block)) + block)[1]
    return found


def look(block, precision, each=None):
    """Models of a block, named ``kind, size``."""
    kind, size = block.rsplit(", ", 1)
    if kind in OPTIMA:
        return optima(block, kind, size, precision, each or EACH)
    return told(
        block, kind, size, precision, each or (EACH if kind == "bracket" else FEWER)
    )


def optima(block, family, size, precision, each):
    """The best q(u) of an approximation."""
    case = bounds.Case.of(block, family, size, precision, steps=STEPS)
    failed, worst = [], 0.0
    for number in range(each):
        # The points of VGP are the inputs that it was set up with.
        X, y, free, given, (_, terms) = case.drawn(same_inputs=family == "VGP")
        found = float(case.best(free, X, y))
        Z = X if family == "VGP" else free["f_auto_Z"]
        data = (np.asarray(a, float) for a in (X, y, Z))
        expected = optimum(*data, *given, OPTIMA[family], default_jitter(precision))
        worst = max(worst, abs(found - expected) / terms)
        if not abs(found - expected) <= bounds.EPS[precision] * terms:
            failed.append(
                f"{number}: best q(u) has {found:.9g} and not {expected:.9g} "
                f"(terms of {terms:.3g})"
            )
    return Found(each, failed, {"worst of terms": worst})


def told(block, kind, size, precision, each):
    """Brackets, or what verdicts are made of, at random q(u)."""
    case = bounds.Case.of(block, "SVGP", size, precision)
    failed, nearest = [], 0.0
    for number in range(each):
        X, y, free, given, (exact, terms) = case.drawn()
        params, eps = case.svi.constrain_fn(free), bounds.EPS[precision] * terms
        if kind == "bracket":
            lower, upper, why, _ = evidence_bracket(case.guide, params, X, y)
            between = lower - eps <= exact <= upper + eps
            if why or not between:
                failed.append(f"{number}: {exact:.9g}, {lower:.9g} to {upper:.9g} {why}")
            continue
        data = (np.asarray(a, float) for a in (X, y, free["f_auto_Z"]))
        best = optimum(*data, *given, None, default_jitter(precision))
        left = best - float(case.first(free, X, y))
        found = nats_left(case.guide, params, X, y)
        if not abs(found - left) <= eps + 1e-4 * left:
            failed.append(f"{number}: q(u) has {left:.6g} left, told {found:.6g}")
        curve = sparsity_curve(case.guide, params, X, y)
        if curve.unknown or not curve.lost <= exact - best + eps:
            failed.append(f"{number}: {exact - best:.6g} are lost, told {curve}")
        elif exact - best > 0.1:
            nearest = max(nearest, curve.lost / (exact - best))
    numbers = {} if kind == "bracket" else {"largest share told": nearest}
    return Found(each * (1 if kind == "bracket" else 2), failed, numbers)


def blocks():
    """Their names."""
    return [f"{kind}, {size}" for size in bounds.SIZES for kind in (*OPTIMA, *TOLD)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--precision", choices=bounds.EPS, default="float64")
    precision = parser.parse_args().precision
    jax.config.update("jax_enable_x64", precision == "float64")
    table = Table(f"exact_{precision}")
    table.run(blocks(), partial(look, precision=precision))
    print(f"{table.cases} cases, {len(table.failed)} failed")


if __name__ == "__main__":
    main()
