"""Bounds and sparsified densities of drawn programs beside those by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.util import log_density

import numpyro_sgp as sgp
from campaigns import _bound, _dense
from campaigns._case import EPS, differences
from campaigns._drawn import D

#: Nodes for each latent function, by the number of these.
NODES = {1: 12, 2: 6, 3: 4}
#: More draws of q(u) of each program, which compile nothing, and the shares of programs
#: whose gradient is compared, and the density of the sparsified model.
MORE, GRADIENTS, SPARSIFIED = 4, 0.3, 0.4
APPROXIMATIONS = "SVGP", "unwhitened", "diagonal", "SOLVE-GP", "ODVGP"


def bound(case):
    """The loss at a random q(u) and its gradient; the density of the sparsified model."""
    p, rng = case.program, case.rng
    model = case.written(_dense.process)
    kinds = {site.name: str(rng.choice(APPROXIMATIONS)) for site in p.sites}
    points = {s.name: rng.normal(size=(5, D))[:, : s.columns] for s in p.sites}
    chosen = {name: _approximation(kind, points[name]) for name, kind in kinds.items()}
    guide = sgp.AutoSparseGP(model, chosen)
    guide.setup(p.y)
    params = _moved(rng, guide.known().starts, case.values)
    rule = sgp.GaussHermite(NODES[p.functions])
    loss = sgp.TraceGP_ELBO(rule).loss

    def ours(params):
        return -loss(case.key, params, model, guide, p.y)

    def hand(params, value):
        values = {n: params.get(f"{n}_auto_loc") for n in case.values}
        values = {n: v for n, v in values.items() if v is not None}
        return value(p, case.fixed, values, _of_params(params, kinds))

    by_nodes = partial(hand, value=partial(_bound.bound, num=rule.num_points))
    told, cases = [], 0
    several = [params] + [_moved(rng, params, case.values) for _ in range(MORE)]
    pair = [jax.jit(ours), jax.jit(by_nodes)]
    for given in several:
        found, expected = (of(given) for of in pair)
        told += differences(f"bound {set(kinds.values())}", {"": found}, {"": expected})
        cases += 1
    if rng.uniform() < GRADIENTS:
        slopes, by_hand = (jax.jit(jax.grad(of)) for of in (ours, by_nodes))
        found, expected = _lower(slopes(params)), _lower(by_hand(params))
        # Near-singular K_uu: what the last digits of the parameters change of the twin's.
        own = _apart(_lower(by_hand(_last_digits(params))), expected)
        told += differences("gradient", found, expected, max(EPS, 10 * own))
        cases += 1
    if p.likelihood in ("normal", "outputs") and not p.is_deep:
        exact = jax.jit(partial(hand, value=_bound.closed_form))(params)
        told += differences("closed form", {"": pair[0](params)}, {"": exact})
        cases += 1
    if p.batch is None and rng.uniform() < SPARSIFIED:
        told += _sparsified(case, model, points, rule)
        cases += 1
    return cases, told


def _approximation(kind, Z):
    if kind == "SOLVE-GP":
        return sgp.SOLVEGP(inducing=Z[:3], orthogonal=(Z[3:],))
    if kind == "ODVGP":
        return sgp.ODVGP(inducing=Z[:3], orthogonal=(Z[3:],))
    covariance = "diagonal" if kind == "diagonal" else "full"
    return sgp.SVGP(inducing=Z, whiten=kind != "unwhitened", covariance=covariance)


def _moved(rng, starts, values):
    """Parameters away from where they start; the latents beside f at given values."""
    found = {}
    for name, start in starts.items():
        noise = rng.normal(size=jnp.shape(start))
        if name.endswith("_auto_loc"):
            found[name] = values[name.removesuffix("_auto_loc")]
        elif name.endswith("_sqrt"):
            found[name] = start * jnp.exp(0.3 * noise)
            if start.ndim > 1 and start.shape[-2] == start.shape[-1]:
                found[name] = found[name] + jnp.tril(0.3 * noise, -1)
        else:
            found[name] = start + 0.5 * noise * (not name.endswith(("_Z", "_O")))
    return found


def _of_params(params, kinds):
    """q(u) of each site for the bound by hand: two sets are one, with a block each."""
    found = {}
    for name, kind in kinds.items():
        Z, m, R = (params[f"{name}_auto_{part}"] for part in ("Z", "qu_mu", "qu_sqrt"))
        R = R[..., None] * jnp.eye(R.shape[-1]) if kind == "diagonal" else jnp.tril(R)
        if f"{name}_auto_O" in params:
            size = params[f"{name}_auto_O"].shape[0]
            second = params.get(f"{name}_auto_qv_sqrt", jnp.eye(size))
            second = jnp.broadcast_to(jnp.tril(second), (*m.shape[:-1], size, size))
            first = jnp.concatenate([R, jnp.zeros((*R.shape[:-1], size))], axis=-1)
            other = jnp.zeros((*second.shape[:-1], R.shape[-1]))
            R = jnp.concatenate([first, jnp.concatenate([other, second], -1)], axis=-2)
            Z = jnp.concatenate([Z, params[f"{name}_auto_O"]])
            m = jnp.concatenate([m, params[f"{name}_auto_qv_mu"]], axis=-1)
        whiten = kind != "unwhitened"
        found[name] = {"Z": Z, "mean": m, "root": R, "whiten": whiten, "point": False}
    return found


def _last_digits(params):
    """Parameters with other last digits."""
    rng = np.random.default_rng(0)
    return {k: v * (1 + 1e-15 * rng.normal(size=v.shape)) for k, v in params.items()}


def _apart(found, expected):
    """The largest difference, as :func:`differences` has it."""
    gaps = [
        jnp.abs(found[k] - v).max() / (1 + jnp.abs(v).max()) for k, v in expected.items()
    ]
    return float(max(gaps))


def _lower(gradient):
    """Derivatives by what is below the diagonal of factors."""
    matrices = {k for k, v in gradient.items() if k.endswith("_sqrt") and v.ndim > 1}
    square = {k for k in matrices if gradient[k].shape[-1] == gradient[k].shape[-2]}
    return {k: jnp.tril(v) if k in square else v for k, v in gradient.items()}


def _sparsified(case, model, points, rule):
    """The density of the sparsified model, at values of its latents."""
    p, values = case.program, dict(case.values)
    for site in p.sites:
        del values[site.name]
    chosen = {name: sgp.SVGP(inducing=Z) for name, Z in points.items()}
    sparse = sgp.sparsify(model, chosen, rule).setup(p.y)
    shapes = {s.name: (s.functions, 5) if s.functions > 1 else (5,) for s in p.sites}
    values |= {f"{k}_u_white": case.rng.normal(size=v) for k, v in shapes.items()}
    values = {name: jnp.asarray(value) for name, value in values.items()}

    def ours(values):
        return log_density(sparse, (p.y,), {}, values)[0]

    def hand(values):
        q = {
            name: {"Z": jnp.asarray(Z), "mean": values[f"{name}_u_white"], "whiten": True}
            | {"root": jnp.zeros((5, 5)), "point": True}
            for name, Z in points.items()
        }
        beside = {name: values[name] for name in case.values if name in values}
        return _bound.bound(p, case.fixed, beside, q, rule.num_points)

    found, expected = (jax.jit(of)(values) for of in (ours, hand))
    return differences("sparsified", {"": found}, {"": expected})
