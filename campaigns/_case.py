"""A drawn program with its dense twins, and what compares two of them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.util import potential_energy, unconstrain_fn

from campaigns import _dense
from campaigns._drawn import N, drawn, write

#: Of numbers in float64: K has condition numbers up to 1e7, most often, of which rounding
#: is 1e-9. Of gradients with respect to f, K^-1 f, it is that of the program's own K.
EPS = 1e-8


def differences(what, found, expected, eps=EPS):
    """A sentence if numbers, by name, are not the same: relative to the largest of each."""
    if set(found) != set(expected):
        return [f"{what}: sites {sorted(set(found) ^ set(expected))} in one of them"]
    told = []
    for name, value in expected.items():
        a, b = np.asarray(found[name], float), np.asarray(value, float)
        if a.shape != b.shape:
            told.append(f"{what}: {name} has shape {a.shape}, not {b.shape}")
        elif not (gap := np.abs(a - b).max(initial=0.0)) <= eps * (
            1 + np.abs(b).max(initial=0)
        ):
            told.append(f"{what}: {name} is {gap:.2g} off, of {np.abs(b).max():.3g}")
    return told


class Case:
    """A drawn program, its twins, and values from the prior."""

    def __init__(self, rng, **options):
        self.rng, self.program = rng, drawn(rng, **options)
        self.key = jax.random.key(int(rng.integers(2**31)))
        rows = np.sort(rng.permutation(N)[: self.program.batch])
        self.fixed = {"data": jnp.asarray(rows)} if self.program.batch else {}
        trace = self.trace(self.written(_dense.normal))
        for name, site in trace.items():
            if site["type"] == "param":
                self.fixed[name] = site["value"] * np.exp(0.2 * rng.normal())
        trace = self.trace(self.written(_dense.normal))
        self.values = _latents(trace)
        self.eps = max(EPS, np.finfo(float).eps * _condition(trace))
        trace = self.trace(self.written(_dense.white))
        self.white = _latents(trace)

    def written(self, place):
        """The model, with its parameters and rows of a minibatch given."""
        return handlers.substitute(write(self.program, place), data=self.fixed)

    @property
    def beside(self):
        """Values of the latents beside f."""
        names = {site.name for site in self.program.sites}
        return {name: value for name, value in self.values.items() if name not in names}

    def trace(self, model):
        """Of a run with a key and the responses."""
        return handlers.trace(handlers.seed(model, self.key)).get_trace(self.program.y)


def _latents(trace):
    return {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def _condition(trace):
    """The largest condition number of the covariances of a trace."""
    found = [1.0]
    for site in trace.values():
        fn = site["fn"] if site["type"] == "sample" else None
        while hasattr(fn, "base_dist"):
            fn = fn.base_dist
        if isinstance(fn, dist.MultivariateNormal):
            found.append(np.linalg.cond(fn.scale_tril).max() ** 2)
    return max(found)


def arrays(trace):
    kinds = "sample", "deterministic", "param"
    found = {k: v["value"] for k, v in trace.items() if v["type"] in kinds}
    return {k: v for k, v in found.items() if v is not None}


def potentials(what, ours, dense, args, values, eps=EPS):
    free = unconstrain_fn(dense, args, {}, values)
    found, expected = (
        jax.value_and_grad(lambda free, m=m: potential_energy(m, args, {}, free))(free)
        for m in (ours, dense)
    )
    told = differences(f"potential, {what}", {"": found[0]}, {"": expected[0]})
    return told + differences(f"gradient, {what}", found[1], expected[1], eps)
