"""What is asked of a drawn program beside its dense twin; each gives cases and failures."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.util import compute_log_probs, potential_energy, unconstrain_fn

import numpyro_sgp as sgp
from campaigns import _dense
from campaigns._case import arrays, differences, potentials
from campaigns._drawn import write

#: Draws of the prior, and how many standard errors a moment of them may be off: of all the
#: moments of a thousand programs one is, by chance, with a probability below 1e-3.
DRAWS, ERRORS = 2000, 6.5


def density(case):
    """Log densities site by site, potential energies and their gradients, also whitened."""
    args, values, told = (case.program.y,), case.values, []
    ours, dense = case.written(_dense.process), case.written(_dense.normal)
    found, sites = compute_log_probs(ours, args, {}, values)
    expected, dense_sites = compute_log_probs(dense, args, {}, values)
    told += differences("log density", found, expected)
    kinds = [[(k, v["type"]) for k, v in t.items()] for t in (sites, dense_sites)]
    if kinds[0] != kinds[1]:
        told.append(f"sites {kinds[0]} and not {kinds[1]}")
    told += differences("value", arrays(sites), arrays(dense_sites))
    told += potentials("as it is", ours, dense, args, values, case.eps)
    twin = case.written(_dense.white)
    whitened = handlers.substitute(
        sgp.whiten(write(case.program, _dense.process)), case.fixed
    )
    told += potentials("whitened", whitened, twin, args, case.white, case.eps)
    return 4, told


def transformed(case):
    """Jit (of inputs and responses too) and vmap of potentials, also whitened."""
    p, told = case.program, []

    def energy(free, X, y, wrap, place):
        model = write(replace(p, X=X), place)
        model = handlers.substitute(wrap(model) if wrap else model, data=case.fixed)
        return potential_energy(model, (y,), {}, free)

    pairs = {"as it is": (None, _dense.normal, case.values)}
    pairs["whitened"] = (sgp.whiten, _dense.white, case.white)
    for what, (wrap, twin, values) in pairs.items():
        free = unconstrain_fn(case.written(twin), (p.y,), {}, values)
        several = {k: jnp.stack([v, 0.9 * v, v + 0.01]) for k, v in free.items()}

        def ours(free, X, y, wrap=wrap):
            return energy(free, X, y, wrap, _dense.process)

        def dense(free, twin=twin):
            return energy(free, p.X, p.y, None, twin)

        found = jax.jit(jax.value_and_grad(ours))(free, p.X, p.y)
        expected = jax.value_and_grad(dense)(free)
        told += differences(f"jit, {what}", {"": found[0]}, {"": expected[0]})
        told += differences(f"jit of gradient, {what}", found[1], expected[1], case.eps)
        found = jax.vmap(lambda free, of=ours: of(free, p.X, p.y))(several)
        one = [dense({k: v[i] for k, v in several.items()}) for i in range(3)]
        told += differences(f"vmap, {what}", {"": found}, {"": jnp.stack(one)})
    return 4, told


def handled(case):
    """Under NumPyro's handlers: values, sites and log densities are those of the twin."""
    p, told = case.program, []
    f = {site.name: case.values[site.name] + 0.1 for site in p.sites}
    for what, wrap in _ways(case, f).items():
        data = case.fixed | case.beside
        runs = [
            case.trace(wrap(handlers.substitute(write(p, place), data=data)))
            for place in (_dense.process, _dense.normal)
        ]
        told += _same_runs(what, *runs, drawn=what == "uncondition")
        if what in ("substitute", "condition", "replay"):
            if any(not np.array_equal(runs[0][k]["value"], f[k]) for k in f):
                told.append(f"{what}: values are not those that were given")
    return len(_ways(case, f)) + 2, told + _lifted(case, f) + _conditioned(case, f)


def _ways(case, f):
    """Handlers by name, from a model to a model."""

    def at_f(model):
        return handlers.substitute(model, data=f)

    first, last = list(f)[:1], dict(list(f.items())[-1:])
    twin = at_f(handlers.substitute(case.written(_dense.normal), data=case.beside))
    return {
        "substitute": at_f,
        "condition": lambda m: handlers.condition(m, data=f),
        "condition one": lambda m: handlers.condition(at_f(m), data=last),
        "do": lambda m: handlers.do(at_f(m), data=last),
        "block": lambda m: handlers.block(at_f(m), hide=first),
        "scope": lambda m: handlers.scope(at_f(m), prefix="a"),
        "scale": lambda m: handlers.scale(at_f(m), scale=1.7),
        "mask": lambda m: handlers.mask(at_f(m), mask=False),
        "replay": lambda m: handlers.replay(m, trace=case.trace(twin)),
        "uncondition": lambda m: handlers.uncondition(at_f(m)),
    }


def _lifted(case, f):
    """Parameters that are given priors by ``lift``."""
    sites = case.trace(case.written(_dense.normal)).items()
    starts = {name: site["value"] for name, site in sites if site["type"] == "param"}
    prior = {name: dist.LogNormal(jnp.log(value), 0.1) for name, value in starts.items()}
    data = {k: v for k, v in case.fixed.items() if k not in starts} | f | case.beside
    runs = [
        case.trace(handlers.substitute(handlers.lift(model, prior=prior), data=data))
        for model in (write(case.program, p) for p in (_dense.process, _dense.normal))
    ]
    return _same_runs("lift", *runs, drawn=bool(starts))


def _conditioned(case, f):
    """A site that is conditioned stays as it is when the others are whitened."""
    last = list(f)[-1]
    model = handlers.condition(write(case.program, _dense.process), data={last: f[last]})
    data = case.fixed | {k: v for k, v in case.white.items() if k != f"{last}_white"}
    site = case.trace(handlers.substitute(sgp.whiten(model), data=data))[last]
    if site["type"] == "sample" and np.array_equal(site["value"], f[last]):
        return []
    return ["whiten of condition: the site is not as it was given"]


def _same_runs(what, ours, dense, drawn):
    """:param drawn: whether values are drawn anew, others in another program."""
    kinds = [
        [(k, s["type"], s.get("is_observed"), np.shape(s["value"])) for k, s in t.items()]
        for t in (ours, dense)
    ]
    if kinds[0] != kinds[1]:
        return [f"{what}: sites {kinds[0]} and not {kinds[1]}"]
    if drawn:
        return []
    found, expected = (
        {k: _scored(s) for k, s in t.items() if s["type"] == "sample"}
        for t in (ours, dense)
    )
    values = [{k: v for k, v in arrays(t).items()} for t in (ours, dense)]
    return differences(what, found, expected) + differences(f"{what}, values", *values)


def _scored(site):
    scale = 1.0 if site["scale"] is None else site["scale"]
    return jnp.sum(site["fn"].log_prob(site["value"])) * scale


def draws(case):
    """Shapes and names of Predictive's draws, and the moments of f in them."""
    p, told = case.program, []
    ours, dense = (case.written(place) for place in (_dense.process, _dense.normal))
    found = Predictive(ours, num_samples=DRAWS, parallel=True)(case.key)
    shapes = jax.eval_shape(Predictive(dense, num_samples=DRAWS, parallel=True), case.key)
    if {k: v.shape for k, v in found.items()} != {k: v.shape for k, v in shapes.items()}:
        told.append(f"draws: shapes of {sorted(found)} are not those of {sorted(shapes)}")

    def residuals(values):
        model = case.written(_dense.residual(values))
        model = handlers.seed(handlers.substitute(model, data=values), case.key)
        trace = handlers.trace(model).get_trace()
        return {s.name: trace[f"{s.name}_white"]["value"] for s in p.sites}

    kept = {k: v for k, v in found.items() if k not in ("y", "eta")}
    eps = jax.vmap(residuals)(kept)
    eps = np.concatenate([np.reshape(v, (DRAWS, -1)) for v in eps.values()], axis=1)
    away = np.abs(eps.mean(0)) * DRAWS**0.5
    covariance = eps.T @ eps / DRAWS - np.eye(eps.shape[1])
    spread = np.abs(covariance) / np.sqrt((1 + np.eye(len(covariance))) / DRAWS)
    for what, gap in (("means", away), ("covariances", spread)):
        if not gap.max() < ERRORS:
            told.append(f"draws: {what} are {gap.max():.1f} standard errors off")
    again = Predictive(ours, {k: v[:3] for k, v in kept.items()}, parallel=True)(case.key)
    for name in [k for k in ("eta",) if p.shown]:
        told += differences("given draws", {name: again[name]}, {name: found[name][:3]})
    return 3, told


def chains(case):
    """The same short chain of NUTS, whitened or as it is, by the program and its twin."""
    p = case.program
    ours, dense = case.written(_dense.process), case.written(_dense.normal)
    values, names = case.values, [site.name for site in p.sites]
    if case.rng.uniform() < 0.7:
        ours = handlers.substitute(sgp.whiten(write(p, _dense.process)), data=case.fixed)
        dense, values = case.written(_dense.white), case.white
    free = unconstrain_fn(dense, (p.y,), {}, values)
    near = jax.tree.map(lambda value: value * (1.0 + 1e-12), free)
    runs = []
    for model, start in ((ours, free), (dense, free), (dense, near)):
        kernel = NUTS(model, max_tree_depth=3)
        mcmc = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False)
        mcmc.run(case.key, p.y, init_params=start)
        runs.append(mcmc.get_samples())
    # Rounding grows along twenty trajectories, by a factor of a thousand most often; of
    # some by 1e9, as the twin shows that starts beside itself.
    ours, dense, beside = runs
    grown = [np.abs(beside[k] - v).max() / (1 + np.abs(v).max()) for k, v in dense.items()]
    return 1, differences("chain", ours, dense, eps=max(1e-6, *grown)) + [
        f"chain: {name} stands still"
        for name in names
        if np.ptp(ours[name], axis=0).max() == 0
    ]
