"""
Random programs: a description drawn from features that go together in any way, and the
NumPyro model that it says. What stands at a GP site is left open (``place``), so that the
same program is written with processes, densely, whitened, or with a bound's nodes there.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

#: Rows, columns, latent functions of a site that has several, and groups of rows.
N, D, Q, GROUPS = 7, 3, 2, 3
FULL_RANK = "RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic"
ENTRIES = (
    "fixed",
    "param",
    "lognormal",
    "transformed",
    "gamma",
    "uniform",
    "halfnormal",
) + ("deterministic", "hierarchical")
ONE = (
    "normal",
    "student",
    "poisson",
    "bernoulli",
    "binomial",
    "counts",
    "ordinal",
    "laplace",
)
TWO = "heteroscedastic", "categorical", "outputs"


@dataclass(frozen=True)
class Site:
    """
    A GP site.

    :param kernel: ``(kind, variance, lengthscale, options)``, or ``("sum", a, b)``,
        ``("product", a, b)``, ``("scaled", c, a)``.
    :param mean: ``"none"``, ``"level"`` (sampled), ``"linear"`` or ``"wave"``.
    :param layout: how a batch of functions comes about; ``"single"`` for none.
    :param inputs: the site whose values it takes; None for the rows of X.
    """

    name: str
    kernel: tuple
    mean: str
    layout: str
    inputs: str | None
    jitter: float | None

    @property
    def functions(self) -> int:
        """How many latent functions."""
        return 1 if self.layout == "single" else Q

    @property
    def columns(self) -> int:
        """Of its inputs."""
        return D if self.inputs is None else 1


@dataclass(frozen=True)
class Drawn:
    """A program. Of ``entries``, hyperparameters by name: how they enter, and a value."""

    sites: tuple[Site, ...]
    entries: dict
    effects: tuple[str, ...]
    likelihood: str
    masked: str
    scales: dict
    factor: str
    shown: bool
    batch: int | None
    reparam: bool
    X: Array
    Z: Array
    y: Array
    mask: Array
    group: Array

    @property
    def is_deep(self) -> bool:
        """Whether a site takes another one's values."""
        return any(site.inputs for site in self.sites)

    @property
    def functions(self) -> int:
        """Latent functions of all sites."""
        return sum(site.functions for site in self.sites)

    def __str__(self):
        sites = ", ".join(f"{s.kernel[0]} {s.mean} {s.layout}" for s in self.sites)
        rest = self.likelihood, self.masked, self.factor, *self.effects, *self.scales
        ways = sorted({way for way, _, _ in self.entries.values()})
        return f"[{sites}] {'deep ' * self.is_deep}{rest} {ways} batch={self.batch}"


def drawn(rng, most_sites=3, bounded=False) -> Drawn:
    """
    :param bounded: whether it is for bounds: no responses that are latent, no White.
    """
    entries: dict = {}
    deep = rng.uniform() < 0.2
    count = 2 if deep else int(rng.integers(1, most_sites + 1))
    layout = rng.choice(
        ["single", "single", "expand", "event", "plate", "kernel", "inside"]
    )
    layout = "single" if deep else str(layout)
    sites = []
    if bounded and layout != "single":
        count = min(count, 2)  # three latent functions, for quadrature
    for i in range(count):
        inputs = "f0" if deep and i == 1 else None
        here = layout if i == 0 else "single"
        sites.append(_site(rng, f"f{i}", here, inputs, entries, bounded))
    several = sites[0].functions > 1
    likelihood = str(rng.choice(TWO if several else ONE))
    masks = ["", "", "handler", "dist"]
    masks += ["obs_mask"] * (likelihood == "normal" and not bounded)
    effects = [e for e in ("intercept", "group", "slope", "ar") if rng.uniform() < 0.3]
    scaled = {k: float(rng.uniform(0.5, 2.5)) for k in ("y", "f", "effects")}
    Z = rng.uniform(-1.5, 1.5, (3, D))
    X = np.linspace(-2, 2, N)[:, None] * [1.0, -0.7, 0.4] + rng.normal(size=(N, D)) * 0.5
    return Drawn(
        tuple(sites),
        entries,
        tuple(effects),
        likelihood,
        str(rng.choice(masks)),
        {k: v for k, v in scaled.items() if rng.uniform() < 0.15},
        str(rng.choice(["", "", "rows", "effects", "total"])),
        bool(rng.uniform() < 0.3),
        int(rng.integers(3, 6)) if rng.uniform() < 0.2 else None,
        bool(rng.uniform() < 0.4),
        jnp.asarray(X),
        jnp.asarray(Z),
        jnp.asarray(_responses(rng, likelihood)),
        jnp.asarray(np.arange(N) != rng.integers(N)),
        jnp.asarray(np.append(np.arange(GROUPS), rng.integers(0, GROUPS, N - GROUPS))),
    )


def _site(rng, name, layout, inputs, entries, bounded):
    plated = layout in ("kernel", "inside")

    def leaf(kind, plated=False):
        names = [f"{name}_{kind}_{what}{len(entries)}" for what in ("variance", "length")]
        for key, value in zip(names, (1.0, 1.2), strict=True):
            way = str(rng.choice(ENTRIES))
            entries[key] = (way, value * np.exp(0.2 * rng.normal()), plated)
        option = str(rng.choice(["", "", "ard", "active"]))
        return kind, *names, option if inputs is None and not plated else ""

    kernel = leaf(str(rng.choice(FULL_RANK)), plated)
    others = [*FULL_RANK, "Linear", "Constant", "Periodic", "Polynomial"]
    others += [] if bounded else ["White"]
    shape = rng.choice(["leaf", "leaf", "sum", "product", "scaled"])
    if shape == "sum":
        kernel = ("sum", kernel, leaf(str(rng.choice(others))))
    elif shape == "product":
        kernel = ("product", kernel, leaf(str(rng.choice(FULL_RANK))))
    elif shape == "scaled":
        kernel = ("scaled", float(rng.uniform(0.5, 2.0)), kernel)
    means = ["none", "none", "level", "linear", "wave"]
    # Values of a site may be near to one another, where K is ill conditioned.
    jitter = 1e-3 if inputs else rng.choice([None, 1e-6, 1e-4])
    return Site(name, kernel, str(rng.choice(means)), layout, inputs, jitter)


def _responses(rng, likelihood):
    if likelihood in ("poisson", "counts", "binomial"):
        return rng.integers(0, 5, N)
    if likelihood == "bernoulli":
        return rng.integers(0, 2, N)
    if likelihood in ("categorical", "ordinal"):
        return rng.integers(0, 3, N)
    return rng.normal(size=(Q, N) if likelihood == "outputs" else N)


# ---- the model ------------------------------------------------------------------------


def write(p: Drawn, place):
    """
    The model, a function of responses (None for draws).

    :param place: from a site, hyperparameters, inputs and the mean at them to the values
        there; called where the site stands, inside of its plates.
    """

    def model(y=None):
        data = numpyro.plate("data", N, subsample_size=p.batch)
        with data as idx:
            rows = p.X[idx]
        y = None if y is None else y[..., idx]
        hypers = {name: _enter(name, *entry) for name, entry in p.entries.items()}
        values = {}
        for site in p.sites:
            inputs = rows if site.inputs is None else values[site.inputs][:, None]
            with _scaled(p, "f"):
                values[site.name] = _at(site, hypers, inputs, place)
        with _scaled(p, "effects"):
            total, effects = _effects(p, rows, idx)
        first, *others = values.values()
        if p.is_deep:
            first, others = others[-1], []
        total = total + sum(others)
        a, b = (first[0] + total, first[1]) if first.ndim == 2 else (first + total, total)
        if p.shown:
            numpyro.deterministic("eta", a)
        if p.factor == "effects":
            numpyro.factor("soft", -0.1 * sum(jnp.sum(e**2) for e in effects.values()))
        if p.factor == "total":
            numpyro.factor("soft", -0.05 * jnp.sum((a - 1.0) ** 2))
        if p.factor == "rows":
            with data:
                numpyro.factor("soft", -0.1 * (a - 1.0) ** 2)
        _observe(p, data, idx, a, b, y)

    return handlers.reparam(model, config=_reparams(p)) if p.reparam else model


def _scaled(p, what):
    found = ExitStack()
    if what in p.scales:
        found.enter_context(handlers.scale(scale=p.scales[what]))
    return found


def _reparams(p):
    found = {n: TransformReparam() for n, e in p.entries.items() if e[0] == "transformed"}
    return found | {"group": LocScaleReparam(0.0)}


def _enter(name, way, value, plated):
    """A hyperparameter, by one of ``ENTRIES``."""
    if way == "fixed":
        return jnp.asarray(value) * jnp.ones(Q) if plated else value
    if way == "param":
        start = jnp.asarray(value) * (jnp.ones(Q) if plated else 1.0)
        return numpyro.param(name, start, constraint=dist.constraints.positive)
    loc = np.log(value)
    if way == "hierarchical":
        loc = numpyro.sample(f"{name}_loc", dist.Normal(loc, 0.1))
    fn = {
        "lognormal": dist.LogNormal(loc, 0.2),
        "hierarchical": dist.LogNormal(loc, 0.2),
        "transformed": dist.TransformedDistribution(
            dist.Normal(loc, 0.2), dist.transforms.ExpTransform()
        ),
        "gamma": dist.Gamma(20.0, 20.0 / value),
        "uniform": dist.Uniform(0.5 * value, 1.5 * value),
        "halfnormal": dist.HalfNormal(value),
        "deterministic": dist.Normal(loc, 0.2),
    }[way]
    with ExitStack() as stack:
        if plated:
            stack.enter_context(numpyro.plate(f"{name}_plate", Q))
        if way == "deterministic":
            found = jnp.exp(numpyro.sample(f"{name}_log", fn))
            return numpyro.deterministic(name, found)
        # A half normal may be near zero, where K is no longer well conditioned.
        return numpyro.sample(name, fn) + (0.3 if way == "halfnormal" else 0.0)


def _at(site, hypers, inputs, place):
    name, batch = site.name, () if site.layout == "single" else (Q,)
    if site.mean == "level":
        with ExitStack() as stack:
            if batch:
                stack.enter_context(numpyro.plate(f"{name}_levels", Q))
            mean = numpyro.sample(f"{name}_level", dist.Normal(0.0, 0.5))
    else:
        mean = site.mean
    with ExitStack() as stack:
        if site.layout in ("plate", "inside"):
            stack.enter_context(numpyro.plate(f"{name}_functions", Q))
        return place(site, hypers, inputs, mean)


def _effects(p, rows, idx):
    """What is added to f at the rows, and the effects by name."""
    total, found = jnp.zeros(rows.shape[0]), {}
    if "intercept" in p.effects:
        found["intercept"] = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
        total = total + found["intercept"]
    if "group" in p.effects:
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        with numpyro.plate("groups", GROUPS):
            found["group"] = numpyro.sample("group", dist.Normal(0.0, spread))
        total = total + found["group"][p.group[idx]]
    if "slope" in p.effects:
        slope = dist.Normal(0.0, 1.0).expand([D]).to_event(1)
        found["slope"] = numpyro.sample("slope", slope)
        total = total + rows @ found["slope"]
    if "ar" in p.effects:

        def step(before, _):
            now = numpyro.sample("ar", dist.Normal(0.7 * before, 0.5))
            return now, now

        found["ar"] = scan(step, jnp.zeros(()), jnp.arange(N))[1]
        total = total + found["ar"][idx]
    return total, found


def _observe(p, data, idx, a, b, y):
    kind = p.likelihood
    if kind in ("normal", "student", "outputs", "laplace"):
        noise = numpyro.sample("noise", dist.Gamma(20.0, 40.0))
    if kind == "ordinal":
        cuts = dist.TransformedDistribution(
            dist.Normal(0.0, 1.0).expand([2]).to_event(1),
            dist.transforms.OrderedTransform(),
        )
        cuts = numpyro.sample("cuts", cuts)
    if kind == "counts":
        concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 0.3))
    fn = {
        "normal": lambda: dist.Normal(a, noise),
        "laplace": lambda: dist.Laplace(a, noise),
        "student": lambda: dist.StudentT(4.0, a, noise),
        "poisson": lambda: dist.Poisson(jnp.exp(a)),
        "bernoulli": lambda: dist.Bernoulli(logits=a),
        "binomial": lambda: dist.Binomial(5, logits=a),
        "counts": lambda: dist.NegativeBinomial2(jnp.exp(a), concentration),
        "ordinal": lambda: dist.OrderedLogistic(a, cuts),
        "heteroscedastic": lambda: dist.Normal(a, jnp.exp(0.5 * b)),
        "categorical": lambda: dist.Categorical(
            logits=jnp.stack([jnp.zeros_like(a), a, b], axis=-1)
        ),
        "outputs": lambda: dist.Normal(jnp.stack([a, b]), noise),
    }[kind]()
    mask = p.mask[idx]
    fn = fn.mask(mask) if p.masked == "dist" else fn
    options = {"obs_mask": mask} if p.masked == "obs_mask" and y is not None else {}
    with ExitStack() as stack:
        stack.enter_context(_scaled(p, "y"))
        if p.masked == "handler":
            stack.enter_context(handlers.mask(mask=mask))
        if kind == "outputs":
            stack.enter_context(numpyro.plate("outputs", Q, dim=-2))
        stack.enter_context(data)
        numpyro.sample("y", fn, obs=y, **options)
