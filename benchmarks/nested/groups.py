"""
What groups cost beside a GP in nested inference: seconds of a core for the best q(w) at
some hyperparameters, from that nearby, without and with the slope; and seconds of the whole
of it. Groups are apart in the precision of q(w), or, with ``--dense``, numbers as others.

    python benchmarks/nested/groups.py
    python benchmarks/nested/groups.py --dense 300 1000 2000
    python benchmarks/nested/groups.py --whole 1000
"""

import argparse
import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_sgp as sgp
from numpyro_sgp.integrated import groups
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.profile import Profile
from numpyro_sgp.integrated.row_parts import choose_layout

RESULTS = Path(__file__).parent.parent / "results" / "nested_groups.json"
ROWS, POINTS = 10_000, 40


def model(X, group, number, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", number):
        b = numpyro.sample("b", dist.Normal(0.0, tau))
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + f + b[group])), obs=y)


def simulated(number):
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 10.0, (ROWS, 1)), axis=0)
    group, b = rng.integers(0, number, ROWS), 0.5 * rng.normal(size=number)
    return X, group, number, rng.poisson(np.exp(0.5 + np.sin(X[:, 0]) + b[group]))


def measured(number):
    """Medians of two, after a call that compiles."""
    data = simulated(number)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(POINTS))
    guide.setup(*data)
    field = Field(guide, data, {})
    choose_layout(field, jnp.zeros(2), data, {}, grouped=True)
    profile = Profile(field, data, {})
    at = np.array([0.6, -0.6])
    start, _ = profile(at, profile.prior())
    found = {"node": [], "slope": []}
    for step in ([0.1, 0.05], [-0.1, 0.05]):
        for kind in found:
            began = time.process_time()
            profile(at + step, start.q, kind == "slope")
            found[kind].append(time.process_time() - began)
    medians = {k: round(float(np.median(v)), 2) for k, v in found.items()}
    return {"size": field.size, **medians}


def whole(number):
    """Seconds of a core for all of it, with compilation."""
    data, began = simulated(number), time.process_time()
    found = sgp.nested(model, sgp.SVGP(POINTS), data, progress_bar=False)
    seconds = round(time.process_time() - began, 1)
    tau = found.hyperparameters["tau"]
    q = found.posterior(*data[:3], None)["b"]
    told = {"tau": [float(tau.mean()), float(tau.std())], "sd": float(q.sd.mean())}
    nodes, evidence = len(found.nodes.nodes), found.log_evidence
    return {"seconds": seconds, "nodes": nodes, "log_evidence": evidence, **told}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", type=int, nargs="*", default=[300, 1000, 2000, 5000])
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--whole", action="store_true")
    numpyro.enable_x64()
    options = parser.parse_args()
    kind = "dense" if options.dense else "apart"
    if options.dense:
        groups.FEWEST = 10**9
    found = json.loads(RESULTS.read_text())
    of, where = (whole, f"whole, {kind}") if options.whole else (measured, kind)
    for number in options.groups:
        found.setdefault(where, {})[str(number)] = of(number)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
