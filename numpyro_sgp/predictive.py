"""Predictive densities of a guide, and predictions from posterior samples of MCMC."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from numpyro import handlers

from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.elbo import GaussHermite, MonteCarlo
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.coupling import feeding
from numpyro_sgp.tracing.row_indices import check_row_indices
from numpyro_sgp.tracing.rows import by_row, sites_on_f

# Numbers held at one time: of rows and nodes, and of inducing points, rows and draws.
_MAX_NODE_NUMBERS, _MAX_NUMBERS_OF_DRAWS = 3e6, 3e7
_RULES = GaussHermite(100), GaussHermite(30), MonteCarlo(2000)
_RULES_OF_A_DRAW = GaussHermite(100), GaussHermite(30), MonteCarlo(100)
_TIED = (
    "Marginals of f are integrated row by row, but the likelihood ties rows together (or "
    "joint draws were asked for). Draw f by guide.sample_posterior, and average over the "
    "draws: the density of all rows, or what is to be predicted."
)


def log_predictive_density(
    guide,
    params: dict,
    *args,
    expectation=None,
    rng_key=None,
    num_draws: int = 100,
    **kwargs,
) -> dict:
    r"""
    Log predictive density of observations at new inputs under an
    :class:`~numpyro_sgp.AutoSparseGP`,

    .. math::

        \log p(y_n) = \log \sum_k \pi_k \sum_s w_s \, p(y_n \mid f_n = \mu_{kn}
        + \sigma_{kn} x_s),

    with the nodes of an expectation rule and, for a mixture, its components, in O(N M^2).
    What q(f) is given is drawn ``num_draws`` times, and the densities are averaged: the
    latents beside f where the base guide is a distribution of them (``AutoNormal``; they
    stay at the points of ``AutoDelta``), and GP sites that feed others (the inner layers of
    a deep GP), from their marginals. Rows then have the same draws.

    A row whose observations are all masked (:class:`numpyro.handlers.mask`) has NaN, and
    one of which some are masked has the density of the others. So the NLPD of the data
    that are there is ``-jnp.nanmean(density)``.

    :param guide: the guide.
    :param params: its parameters.
    :param args: arguments of the model: new inputs and observations.
    :param expectation: a rule for the GP sites that feed no other; None for
        ``GaussHermite(100)`` with one latent function, ``GaussHermite(30)`` with two, and
        ``MonteCarlo(2000)`` with more (``MonteCarlo(100)`` where there are draws).
    :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
    :param num_draws: number of draws of other latents and inner layers; without effect if
        there are none.
    :return: for each observed site an array of shape ``(N,)``, NaN where a mask leaves a
        row out; the negative mean of the rest is the NLPD.
    :raises ValueError: if the arguments have no observations, an observed site has no
        value for each row, or ``num_draws`` is not positive.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, optax
        >>> import numpyro.distributions as dist
        >>> import numpyro_sgp as sgp
        >>> def model(X, y=None):
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        ...     with numpyro.plate("data", X.shape[0]):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
        >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
        >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
        >>> sgp.log_predictive_density(guide, result.params, X, y)["y"].shape
        (5,)
    """
    args, kwargs = as_arrays(guide.model, args, kwargs)
    check_row_indices(guide.model, args, kwargs)
    density, observed = batch_log_density(
        guide, params, args, kwargs, expectation, rng_key, num_draws, whole=True
    )
    return {name: jnp.where(observed[name], v, jnp.nan) for name, v in density.items()}


def batch_log_density(
    guide,
    params,
    args,
    kwargs,
    expectation=None,
    rng_key=None,
    num_draws=100,
    whole=False,
) -> tuple[dict, dict]:
    """
    What :func:`log_predictive_density` does.

    :param whole: whether to refuse subsampled plates; not where a batch of rows is given
        from outside.
    :return: log densities by row, and whether a row has any observation that is not masked.
    """
    if getattr(expectation, "joint", False):
        raise ValueError(_TIED)
    parts = MixtureParts(guide, params, args, kwargs, rng_key, num_draws)

    def of_sites(f):
        return _by_site(_checked(parts.run(f, parts.others), whole))

    means = {name: q.mean for name, q in parts.posteriors.items()}
    on_f = sites_on_f(of_sites, means)
    num_rows = parts.num_rows
    observed = _observed(parts.run(means, parts.others), num_rows, on_f)
    if not parts.drawn:
        run = partial(parts.run, others=parts.others)
        rules, limit = _RULES, _MAX_NODE_NUMBERS
        last = parts.posteriors
        return _density(run, last, on_f, expectation, parts.key, rules, limit), observed

    def given_draw(keys):
        found, given, others = parts.at(keys)
        last = {name: found[name] for name in parts.last}

        def run(f):
            return parts.run({**given, **f}, others)

        rules, limit = _RULES_OF_A_DRAW, _MAX_NODE_NUMBERS / parts.chunk
        return _density(run, last, on_f, expectation, keys[2], rules, limit)

    values = parts.map(given_draw)
    densities = jax.tree.map(
        lambda v: logsumexp(v, axis=0) - np.log(len(parts.keys)), values
    )
    return densities, observed


def _alone(posteriors) -> dict:
    """The same posteriors, each row drawn by itself."""
    return {
        name: q.drawn_together(1) if q.joint_rows > 1 else q
        for name, q in posteriors.items()
    }


class MixtureParts:
    """
    What the rows of a predictive distribution are mixtures of: draws of the latents beside
    f, where the base guide draws them, and of inner layers, and given those the marginals
    of the last GP sites.

    :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
    :param num_draws: number of draws, if there is something to draw.
    """

    def __init__(self, guide, params, args, kwargs, rng_key, num_draws):
        if guide.couples_rows:
            raise ValueError(_TIED)
        if num_draws < 1:
            raise ValueError(f"num_draws must be positive, got {num_draws}.")
        self.guide, self.params, self.args, self.kwargs = guide, params, args, kwargs
        self.key = jax.random.key(0) if rng_key is None else rng_key
        #: Sites that were observed when the guide was set up.
        self.responses = [
            name
            for name, site in (guide.approximations and guide.prototype_trace).items()
            if messages.is_response(site)
        ]
        self._draws_others = guide.draws_others(params, args, kwargs)
        base_key = self.key if self._draws_others else None
        found, _ = guide.posterior_at(params, args, kwargs, base_key)
        #: Marginals of each GP site at one draw of the other latents, and that draw.
        self.posteriors = _alone(found)
        self.others = guide.others_at(params, args, kwargs, base_key)
        shapes = {name: q.shape() for name, q in self.posteriors.items()}
        dtype = jnp.result_type(*(q.mean.dtype for q in self.posteriors.values()))
        below = feeding(lambda f: self.run(f, self.others), shapes, dtype)
        #: GP sites that feed no other.
        self.last = [name for name in shapes if name not in below]
        self.drawn = self._draws_others or bool(below)
        self.keys = jax.random.split(self.key, (num_draws if self.drawn else 1, 3))
        numbers = sum(
            int(np.prod(q.batch_shape)) * q.chol.shape[-1] * (q.chol.shape[-1] + rows)
            for q, rows in ((q, q.event_shape[0]) for q in self.posteriors.values())
        )
        #: Draws done at a time.
        self.chunk = int(np.clip(_MAX_NUMBERS_OF_DRAWS / numbers, 1, len(self.keys)))

    @property
    def num_rows(self) -> int:
        """Of the data; inner layers may have other rows, such as patches."""
        return max(self.posteriors[name].event_shape[0] for name in self.last)

    def at(self, keys):
        """
        One draw.

        :param keys: one row of ``self.keys``.
        :return: posteriors of all GP sites, and values of those that feed others and of
            the other latents.
        """
        base_key = keys[1] if self._draws_others else None
        where = self.params, self.args, self.kwargs, base_key
        found, values = self.guide.posterior_at(*where, inner_key=keys[0])
        given = {name: values[name] for name in found if name not in self.last}
        return _alone(found), given, self.guide.others_at(*where)

    def map(self, given_draw):
        """``given_draw`` of each row of ``self.keys``, so many at a time as fit."""
        if self.chunk < len(self.keys):
            return jax.lax.map(given_draw, self.keys, batch_size=self.chunk)
        return jax.vmap(given_draw)(self.keys)  # a loop is compiled anew in each call

    def run(self, f, others, rng_key=0, responses=None):
        """
        The model's trace with these values of its GP sites and other latents.

        :param rng_key: of what else the model draws.
        :param responses: values of responses that the model's arguments do not give; zeros
            for those that have none here. They are not drawn: a black box cannot be.
        """

        def at_site(msg):
            name = msg["name"]
            if msg["type"] != "sample":
                return None
            if name in self.posteriors:
                return jnp.reshape(f[name], msg["fn"].shape())
            if name in self.responses and msg["value"] is None:
                return (responses or {}).get(name, jnp.zeros(msg["fn"].shape()))
            return others.get(name)

        model = handlers.seed(self.guide.model, rng_key)
        model = handlers.substitute(model, data=self.params)
        with handlers.block(), handlers.trace() as trace:
            handlers.substitute(model, substitute_fn=at_site)(*self.args, **self.kwargs)
        return trace


def _density(run, posteriors, on_f, expectation, rng_key, rules, limit) -> dict:
    """
    Log density of observed sites by row, with GP sites integrated under their marginals.

    :param run: from values of all GP sites to the model's trace.
    :param posteriors: of the sites that are integrated.
    :param rules: where ``expectation`` is None, by the number of latent functions; the
        last one for more.
    :param limit: numbers of rows and nodes held at one time.
    """
    shapes = {name: q.shape() for name, q in posteriors.items()}
    dtype = jnp.result_type(*(q.mean.dtype for q in posteriors.values()))
    functions = sum(int(np.prod(shape[:-1])) for shape in shapes.values())
    if expectation is None:
        expectation = rules[min(functions, len(rules)) - 1]
    num_rows = max(shape[-1] for shape in shapes.values())

    def at(node, component):
        f = {name: q.place(node[name], component[name]) for name, q in posteriors.items()}
        return _observed_rows(run(f), num_rows, on_f)

    counts = [range(q.num_components) for q in posteriors.values()]
    total = []
    for ks in itertools.product(*counts):
        component = dict(zip(posteriors, ks, strict=True))
        nodes, weights = expectation.nodes(rng_key, shapes, dtype)
        chunk = int(np.clip(limit / (num_rows * functions), 1, len(weights)))
        at_node = partial(at, component=component)
        if chunk < len(weights):
            values = jax.lax.map(at_node, nodes, batch_size=chunk)
        else:  # a loop is compiled anew in each call
            values = jax.vmap(at_node)(nodes)
        log_weight = sum(q.log_weights[component[name]] for name, q in posteriors.items())
        log_weights = (jnp.log(weights) + log_weight)[:, None]
        total.append(
            {name: logsumexp(v + log_weights, axis=0) for name, v in values.items()}
        )
    return jax.tree.map(lambda *parts: logsumexp(jnp.stack(parts), axis=0), *total)


def _checked(trace, whole):
    """A trace whose data plates are whole and whose observations have the right shape."""
    if whole:
        checks.check_whole_plates(trace, "the predictive density is of every row")
    checks.check_observations(trace)
    return trace


def _by_site(trace) -> dict:
    """Log densities of observed sites."""
    return {
        name: messages.log_prob(site, scaled=False)
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"]
    }


def _observed(trace, num_rows, on_f) -> dict:
    """Whether each row of an observed site has an observation that is not masked."""
    _observed_rows(trace, num_rows, on_f)  # which says what is wrong with shapes
    return {name: by_row(messages.counted(trace[name]), num_rows) > 0 for name in on_f}


def _observed_rows(trace, num_rows, on_f) -> dict:
    """Log likelihood of each observed site that depends on f, by row."""
    values = {}
    for name, site in trace.items():
        if name not in on_f:
            continue
        values[name] = by_row(messages.log_prob(site, scaled=False), num_rows)
        if values[name] is None:
            raise ValueError(
                f"Observed site '{name}' has log likelihoods of shape "
                f"{jnp.shape(messages.log_prob(site))}, not one for each of the {num_rows} "
                "rows."
            )
    if not values:
        raise ValueError(
            "The model has no observed site with these arguments. Pass observations too: "
            "log_predictive_density(guide, params, X_new, y_new)."
        )
    return values


class GPPredictive:
    r"""
    Predictive distribution at new inputs, given samples of f at the training inputs.

    For each sample, a GP site at the new inputs is drawn jointly from
    :math:`p(f_* \mid f(X), \theta)`; all other sites follow from the model as in
    :class:`numpyro.infer.Predictive`. Samples of an inducing-point guide need no such step:
    use ``Predictive(model, guide=guide, ...)`` for them.

    :param model: the model (not whitened).
    :param posterior_samples: samples by site with one leading axis, those of
        ``mcmc.get_samples()``; each GP site must be there.
    :param train_args: the positional arguments the samples were drawn with.
    :param train_kwargs: the keyword arguments.
    :param return_sites: names of sites to return; None for all unobserved and
        deterministic ones but the hyperparameters in ``posterior_samples``.
    :param batch_size: number of samples done at a time; by default so many that their
        covariance matrices hold about 3e7 numbers.
    :raises ValueError: if a GP site has no samples, samples do not fit the training inputs,
        inputs are not finite, or a site of ``return_sites`` is not in the model.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_sgp as sgp
        >>> def model(X, y=None):
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        ...     with numpyro.plate("data", X.shape[0]):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
        >>> samples = {"f": jnp.zeros((10, 5))}  # from mcmc.get_samples()
        >>> predictive = sgp.GPPredictive(model, samples, train_args=(X, y))
        >>> draws = predictive(jax.random.key(0), jnp.array([[0.5], [5.0]]))
        >>> draws["f"].shape, draws["y"].shape
        ((10, 2), (10, 2))
    """

    def __init__(
        self,
        model,
        posterior_samples: dict,
        *,
        train_args: tuple = (),
        train_kwargs: dict | None = None,
        return_sites=None,
        batch_size: int | None = None,
    ):
        if not isinstance(train_args, tuple):
            raise TypeError(
                "train_args must be the tuple of the model's training arguments, such as "
                f"(X, y), got {type(train_args).__name__}."
            )
        self.model = model
        self.posterior_samples = dict(posterior_samples)
        train = as_arrays(model, train_args, train_kwargs or {})
        self.train_args, self.train_kwargs = train
        self.return_sites = (
            [return_sites] if isinstance(return_sites, str) else return_sites
        )
        self.batch_size = batch_size
        shapes = {k: jnp.shape(v) for k, v in self.posterior_samples.items()}
        sizes = {shape[:1] for shape in shapes.values()}
        if len(sizes) != 1:
            raise ValueError(
                "posterior_samples must be arrays with one leading axis of the same "
                f"length, got {shapes}."
                " (For several chains, use mcmc.get_samples() without group_by_chain.)"
            )
        (self.num_samples,) = sizes.pop()

    def __call__(self, rng_key, *args, **kwargs) -> dict:
        """
        Draw at new inputs.

        :param rng_key: random key.
        :param args: arguments of the model at the new inputs, such as ``X_new``.
        :return: values by site, with a leading axis of the samples.
        """
        args, kwargs = as_arrays(self.model, args, kwargs)
        first = jax.tree.map(lambda x: x[0], self.posterior_samples)
        numbers = self._check(first, args, kwargs)
        chunk = self.batch_size or int(np.clip(3e7 // numbers, 1, self.num_samples))

        def draw(inputs):
            key, sample = inputs
            return self._draw(key, sample, args, kwargs)

        keys = jax.random.split(rng_key, self.num_samples)
        return jax.lax.map(draw, (keys, self.posterior_samples), batch_size=chunk)

    def _check(self, sample, args, kwargs) -> int:
        """Checks sites and shapes; numbers in the covariances of old and new rows."""
        train = _gp_priors(self.model, sample, self.train_args, self.train_kwargs)
        if not train:
            raise ValueError(
                "The model has no latent GP site; use numpyro.infer.Predictive."
            )
        rows = {}
        for name, prior in train.items():
            checks.check_inputs(name, prior)
            if name not in sample:
                raise ValueError(
                    f"posterior_samples has no values of GP site '{name}', only of "
                    f"{sorted(sample)}."
                )
            if jnp.shape(sample[name]) != prior.shape():
                raise ValueError(
                    f"The samples of GP site '{name}' have shape "
                    f"{jnp.shape(sample[name])}, but at train_args it has "
                    f"{prior.shape()}. Pass the arguments that the samples were drawn "
                    "with."
                )
            rows[name] = prior.event_shape[0]
        new = {}
        others = {name: value for name, value in sample.items() if name not in train}

        def at_new(others):
            new.update(_gp_priors(self.model, others, args, kwargs))

        jax.eval_shape(at_new, others)
        for name, prior in new.items():
            checks.check_inputs(name, prior)
            columns = train[name].X.shape[-1] if name in train else prior.X.shape[-1]
            if prior.X.shape[-1] != columns:
                raise ValueError(
                    f"GP site '{name}' has new inputs with {prior.X.shape[-1]} columns, "
                    f"but the training inputs have {columns}."
                )
            rows[name] = rows.get(name, 0) + prior.event_shape[0]
        priors = {**train, **new}
        return sum(int(np.prod(priors[k].batch_shape)) * n**2 for k, n in rows.items())

    def _draw(self, rng_key, sample, args, kwargs):
        train = _gp_priors(self.model, sample, self.train_args, self.train_kwargs)
        others = {k: v for k, v in sample.items() if k not in train}
        model = handlers.seed(self.model, rng_key)
        with handlers.trace() as trace, _conditioned(train, sample):
            with handlers.substitute(substitute_fn=_values(others)):
                model(*args, **kwargs)
        if self.return_sites is not None:
            unknown = sorted(set(self.return_sites) - set(trace))
            if unknown:
                raise ValueError(
                    f"return_sites has {unknown}, but the model has only {sorted(trace)}."
                )
            return {name: trace[name]["value"] for name in self.return_sites}
        return {
            name: site["value"]
            for name, site in trace.items()
            if site["type"] == "deterministic"
            or (site["type"] == "sample" and not site["is_observed"] and name not in others)
        }


def _conditioned(train, values):
    """For GP sites, their distributions given the values at the training inputs."""

    def at_site(site):
        prior, reinterpreted = messages.unwrap(site["fn"])
        name = site["name"]
        if name not in train:
            return site["fn"], None
        conditional = train[name].condition(values[name], prior.X)
        return messages.rewrap(conditional, reinterpreted), None

    return messages.AtGPSites(at_site)


def _gp_priors(model, sample, args, kwargs) -> dict:
    """The GP sites of a run with the sampled values."""
    model = handlers.seed(model, 0)
    model = handlers.substitute(model, substitute_fn=_values(sample))
    # No joint draw where there is no value.
    at_mean = messages.AtGPSites(
        lambda m: (m["fn"], messages.prior_mean(m) if m["value"] is None else None)
    )
    with handlers.block(), handlers.trace() as trace, at_mean:
        model(*args, **kwargs)
    return {
        name: messages.unwrap(site["fn"])[0]
        for name, site in trace.items()
        if messages.is_latent_gp(site)
    }


def _values(sample):
    """Sampled values, but not those of deterministic sites: inputs may differ."""

    def substitute(msg):
        return None if msg["type"] == "deterministic" else sample.get(msg["name"])

    return substitute
