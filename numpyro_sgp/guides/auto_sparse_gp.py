"""The guide: the model itself, with a sparse posterior at each GP site."""

import copy
import functools
import hashlib
import json
import warnings
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import Delta
from numpyro.infer import autoguide
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.primitives import Messenger
from numpyro.util import find_stack_level, not_jax_tracer

from numpyro_sgp.distributions import SparsePosterior
from numpyro_sgp.distributions.arguments import as_arrays, check_indexable
from numpyro_sgp.guides.approximations import check_approximations
from numpyro_sgp.guides.identity import (
    check_params,
    check_shapes,
    describe,
    shape_and_dtype,
)
from numpyro_sgp.guides.parameters import parameter_blocks
from numpyro_sgp.guides.points import MeanKernel
from numpyro_sgp.inducing import InducingVerdict, assess_inducing
from numpyro_sgp.inducing.covariances import inducing_covariance
from numpyro_sgp.linalg import jittered_cholesky, max_jitter
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.coupling import (
    Coupling,
    find_coupling,
    log_likelihood,
)
from numpyro_sgp.tracing.curvature import check_gaussian
from numpyro_sgp.tracing.row_indices import check_row_indices

# Autoguides whose posterior is built from the model's density, which a guide for the
# latents beside f does not have: f is integrated out of it.
_DENSITY_GUIDES = (
    autoguide.AutoLaplaceApproximation,
    autoguide.AutoDAIS,
    autoguide.AutoSemiDAIS,
    autoguide.AutoSurrogateLikelihoodDAIS,
)
_MAX_SETUP_BATCHES = 64
_COLLAPSED = 1e-3  # a component with all but this weight is the only one


class AutoSparseGP(autoguide.AutoGuide):
    """
    A guide that puts a sparse posterior at every GP site of a model, and any of NumPyro's
    autoguides over the other latent variables.

    The guide runs the model: ``base_guide`` draws the latents that are not GPs, they are
    put into the model, and each :class:`~numpyro_sgp.GaussianProcess` site gets its
    posterior, made from the kernel and the inputs that the model gives it. So model and
    guide cannot disagree about the prior, a GP site may take another site's values as
    inputs, and hyperparameters may be samples, :func:`numpyro.param` or numbers.

    Use it with :class:`~numpyro_sgp.TraceGP_ELBO`; ``TraceMeanField_ELBO`` gives a
    correct bound too, at the cost of a joint draw of f(X) in each step.

    Parameters are named ``{site}_{prefix}_Z``, ``_qu_mu``, ``_qu_sqrt`` (the second set:
    ``_O``, ``_qv_mu``, ``_qv_sqrt``).

    Inducing points are chosen when the guide first runs (or by :meth:`setup`), from the
    inputs that the model sees then; with a subsampling plate, from several batches of it.
    Nothing of size N x N is built. Where no parameters are given, as in ``SVI.init``, f is
    at its prior mean; use a new guide for other data. A GP site with
    ``infer={"joint_rows": n}`` is drawn in the bound with the correlations within each
    group of n consecutive rows (1: of none) and no others, for a layer that combines them
    (:func:`~numpyro_sgp.convolutional_layer`).

    **Restarts.** The base guide starts by the key of ``svi.init`` (or ``svi.run``), also
    where the guide is set up already; inducing points stay those of the set-up, and
    :func:`numpyro.param` starts where its statement says. Many runs at once, of which the
    best is picked::

        guide.setup(X, y)
        keys = jax.random.split(jax.random.key(0), 8)
        runs = jax.vmap(lambda key: svi.run(key, 1000, X, y, progress_bar=False))(keys)
        best = jnp.nanargmin(runs.losses[:, -100:].mean(axis=1))
        params = jax.tree.map(lambda x: x[best], runs.params)

    In a model without other latents q(u) and Z are all that can start elsewhere: give
    ``init_params`` to ``svi.run``, made from the key, such as
    ``{"f_auto_qu_mu": jax.random.normal(key, (M,))}`` (a draw from the prior, if
    whitened), or ``{"f_auto_Z": jax.random.choice(key, X, (M,), replace=False)}``.

    Under :class:`numpyro.handlers.scope`, make the guide of the scoped model: names are
    prefixed once. A scoped *guide* trains too, and ``guide.posterior`` then takes the
    parameters without the prefix.

    :param model: a NumPyro model with one or more GP sites.
    :param approximation: what to put at the GP sites (:class:`~numpyro_sgp.SVGP`,
        :class:`~numpyro_sgp.VGP`, :class:`~numpyro_sgp.MixtureSVGP`,
        :class:`~numpyro_sgp.SOLVEGP`, :class:`~numpyro_sgp.ODVGP`,
        :class:`~numpyro_sgp.InverseFreeSVGP`), or a dict from site name to approximation.
    :param base_guide: guide for the other latents: a class such as
        :class:`~numpyro.infer.autoguide.AutoDelta` (point estimates),
        :class:`~numpyro.infer.autoguide.AutoNormal`, or a function from a model to a
        guide. Not those that use the model's density (Laplace, DAIS).
    :param prefix: put into the names of all parameters (of a base guide that is given as
        a class).
    :param init_loc_fn: initial values of the latents beside f, for such a base guide; its
        own if None.
    :raises ValueError: when first run, if the model has no GP site or no observed site, a
        GP site is inside a data plate, inputs are not finite, observations have another
        shape than their distribution, a latent site is discrete, there are more inducing
        points than distinct inputs, ``approximation`` names a site that is not there, or
        K_uu cannot be factorised.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, optax
        >>> import numpyro.distributions as dist
        >>> import numpyro_sgp as sgp
        >>> def model(X, y=None):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        ...     kernel = sgp.kernels.RBF(1.0, lengthscale)
        ...     f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        ...     with numpyro.plate("data", X.shape[0]):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        >>> X = jnp.linspace(0.0, 3.0, 40)[:, None]
        >>> y = jnp.round(2.0 + jnp.sin(3.0 * X[:, 0]))
        >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(8))
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.02), sgp.TraceGP_ELBO())
        >>> result = svi.run(jax.random.key(0), 50, X, y, progress_bar=False)
        >>> guide.posterior(result.params, X[:3])["f"].mean.shape
        (3,)
    """

    def __init__(
        self,
        model,
        approximation,
        base_guide=autoguide.AutoDelta,
        *,
        prefix="auto",
        init_loc_fn=None,
    ):
        if isinstance(base_guide, autoguide.AutoGuide):
            raise TypeError(
                "base_guide must be a class or a function from a model to a guide, such "
                f"as AutoNormal, not an instance ({type(base_guide).__name__}): it is "
                "made for the part of the model that is left when GP sites are taken out."
            )
        if isinstance(base_guide, type) and issubclass(base_guide, _DENSITY_GUIDES):
            raise TypeError(
                f"{base_guide.__name__} needs the density of the latents beside f, which "
                "a sparse GP integrates out. Use AutoDelta, AutoNormal, "
                "AutoMultivariateNormal or another guide with parameters of its own."
            )
        check_approximations(approximation)
        super().__init__(model, prefix=prefix)
        self.approximation = approximation
        self._base_options = {} if init_loc_fn is None else {"init_loc_fn": init_loc_fn}
        self._make_base = base_guide
        self.base_guide = None
        self._approximations = {}
        self._points = {}
        self._initial = {}
        self._constants = {}
        self._setup_inputs = {}
        self._setup_args = None
        self._shapes_of_params = {}
        self._description = {}
        self._saved = None
        self._takes_rows = False  # by the index of a plate
        self._coupling = Coupling()
        #: Largest step of :func:`~numpyro_sgp.natural_gradients` on dual sites, once begun.
        self.natural_rate: float | None = None

    def __call__(self, *args, **kwargs):
        """
        Run the guide.

        :return: the values of all latent sites by name.
        """
        given, (args, kwargs) = (args, kwargs), as_arrays(self.model, args, kwargs)
        base_key, is_new = numpyro.prng_key(), self.prototype_trace is None
        if is_new:
            self._setup_prototype(base_key, args, kwargs)
        if self._takes_rows:
            check_indexable(self.model, *given)
        starts = None
        if base_key is not None and not (is_new and not_jax_tracer(base_key)):
            starts = functools.cache(lambda: self._starts(base_key, args, kwargs))
        values, plates = {}, _Plates()
        with _Params(self._shapes_of_params, starts) as params:
            if self.base_guide is not None:
                with plates:
                    values = self.base_guide(*args, **kwargs)
            values = {name: values[name] for name in self._latents}
            rng_key, posterior_at = numpyro.prng_key(), self._posteriors()

            def at_site(site):
                posterior = posterior_at(site)
                # Where no optimiser or result has given parameters yet, SVI.init wants a
                # value of the right shape only, and a joint draw would cost O(N^3).
                names = self._names()[site["name"]].values()
                starts_here = not params.started.isdisjoint(names)
                return posterior, messages.prior_mean(site) if starts_here else None

            found = {**values, **plates.values}
            f = self._run_model(at_site, found, rng_key, args, kwargs)
        return {**values, **f}

    def _run_model(self, at_site, given, rng_key, args, kwargs):
        """
        Runs the model with ``at_site`` at its GP sites; shows only these, parameters and
        plates, and returns the values that posteriors got.

        :param at_site: from a GP site's message to its new distribution and its value, or
            None to have it drawn.
        :param given: values of the other latents, and indices of plates.
        """
        at_sites = messages.AtGPSites(at_site, hide_others=True)
        with at_sites, handlers.substitute(data=given), _seeded(rng_key):
            self.model(*args, **kwargs)
        return at_sites.values

    def _posteriors(self):
        """
        Declares the parameters of all GP sites; outside of the model, whose handlers are
        not for them.

        :return: from a GP site's message to its posterior.
        """
        declared = {
            name: approximation.declare(f"{name}_{self.prefix}", self._initial[name])
            for name, approximation in self._approximations.items()
        }
        return functools.partial(self._posterior, declared)

    def _posterior(self, declared, site):
        name = site["name"]
        if name not in self._initial:
            raise ValueError(
                f"GP site '{name}' was not in the model when this guide was set up. Make "
                "a new guide for this model."
            )
        prior, reinterpreted = messages.unwrap(site["fn"])
        approximation, initial = self._approximations[name], self._initial[name]
        columns = initial["Z"].value.shape[-1]
        if prior.X.shape[-1] != columns and not approximation.inter_domain:
            raise ValueError(
                f"GP site '{name}' has inputs with {prior.X.shape[-1]} columns, but its "
                f"inducing points have {columns}. Make a new AutoSparseGP for other inputs."
            )
        values = declared[name]
        constants = {**self._constants[name], "natural_rate": self.natural_rate}
        posterior = approximation.posterior(prior, {**values, **constants})
        approximation.keep_state(values, posterior)
        if (num_rows := site["infer"].get("joint_rows", 1)) != 1:
            try:
                posterior = posterior.drawn_together(num_rows)
            except (ValueError, NotImplementedError) as error:
                raise type(error)(f"GP site '{name}': {error}") from None
        site["infer"] = {**site["infer"], "coupling": self._coupling}
        return messages.rewrap(posterior, reinterpreted)

    # ---- set-up -------------------------------------------------------------------

    def setup(self, *args, **kwargs):
        """
        Set the guide up: check the model, make the base guide and choose inducing points.
        The first run of the guide does this by itself; call it to do so outside of jit or
        vmap, or to use saved parameters in a new process. A guide that is set up stays as
        it is.

        :param args: arguments of the model, with the training data.
        :raises ValueError: as the class says.
        """
        args, kwargs = as_arrays(self.model, args, kwargs)
        if self.prototype_trace is None:
            with handlers.block(), handlers.seed(rng_seed=0):
                self._setup_prototype(numpyro.prng_key(), args, kwargs)

    def _setup_prototype(self, base_key, args, kwargs):
        if not all(not_jax_tracer(leaf) for leaf in jax.tree.leaves((args, kwargs))):
            raise ValueError(
                "AutoSparseGP chooses its inducing points from known inputs, but the "
                "model's arguments are traced by jit or vmap. Call guide.setup(...) with "
                "them first."
            )
        if base_key is None or not not_jax_tracer(base_key):
            base_key = jax.random.key(0)
        try:
            with handlers.block(), messages.known_inside_jit():
                self._prepare(base_key, args, kwargs)
        except BaseException:
            self._forget()
            raise

    def _forget(self):
        """Undoes the set-up."""
        self.prototype_trace, self.base_guide = None, None
        self._approximations, self._points = {}, {}
        self._initial, self._constants, self._setup_inputs = {}, {}, {}

    def _prepare(self, base_key, args, kwargs):
        trace = self._structure(*args, **kwargs)
        gp_sites = [name for name, s in trace.items() if messages.is_latent_gp(s)]
        self._approximations = self._assign(gp_sites)
        self._latents = [
            name
            for name, site in trace.items()
            if site["type"] == "sample" and not site["is_observed"] and name not in gp_sites
        ]
        self.base_guide, values, base_params = self._new_base(
            self.model, base_key, args, kwargs
        )
        subsampled = bool(subsample_plate_sizes(trace))
        for name in gp_sites:
            self._initialise(name, values, subsampled, args, kwargs)
        self._check_likelihood(trace, values, args, kwargs)
        self._setup_args = None if subsampled else (args, kwargs)
        params = {name: s["value"] for name, s in trace.items() if s["type"] == "param"}
        params |= base_params
        for site, names in self._names().items():
            trained = {k for k in names if self._is_trained(site, k)}
            params |= {names[k]: self._initial[site][k].value for k in trained}
        self._shapes_of_params = jax.tree.map(shape_and_dtype, params)
        self._description = describe(
            trace, self._approximations, self._points, self._shapes_of_params
        )
        # What pickles, and what NumPyro's tools ask of a guide.
        self.prototype_trace = {
            name: site
            for name, site in trace.items()
            if site["type"] in ("sample", "deterministic")
        }

    def _new_base(self, model, rng_key, args, kwargs):
        """A guide for the latents beside f, their values in a first run, its parameters."""
        if not self._latents:
            return None, {}, {}
        rest = _WithoutGPs(model, list(self._approximations))
        options = {"prefix": self.prefix, **self._base_options}
        make = self._make_base
        is_class = isinstance(getattr(make, "func", make), type)
        guide = make(rest, **options) if is_class else make(rest)
        with handlers.block(), handlers.trace() as trace, handlers.seed(rng_seed=rng_key):
            values = guide(*args, **kwargs)
        params = {name: s["value"] for name, s in trace.items() if s["type"] == "param"}
        return guide, {name: values[name] for name in self._latents}, params

    def _starts(self, rng_key, args, kwargs):
        """
        The starting values that a new guide would have with this key (at the inducing
        points that were chosen), by name; none where the arguments have no data.
        """
        model = _FirstRows(self.model)
        at_mean = messages.AtGPSites(messages.at_prior_mean)
        with handlers.block(), handlers.trace() as trace, at_mean, _seeded(rng_key):
            model(*args, **kwargs)
        latents = {
            name
            for name, site in trace.items()
            if site["type"] == "sample" and not site["is_observed"]
        }
        if latents != {*self._latents, *self._approximations}:
            return {}
        _, values, starts = self._new_base(model, rng_key, args, kwargs)
        plates = {name: s["value"] for name, s in trace.items() if s["type"] == "plate"}
        given, initial = {**values, **plates}, {}
        for site, names in self._names().items():
            prior = self._prior(site, given, initial, args, kwargs)(jax.random.key(0))
            approximation = self._approximations[site]
            initial[site] = approximation.start(prior, self._points[site])
            starts |= {names[name]: param.value for name, param in initial[site].items()}
        return starts

    def _structure(self, *args, **kwargs):
        """The model's trace with GP sites at their prior means, checked."""
        self._takes_rows = check_row_indices(self.model, args, kwargs)
        placeholder = messages.AtGPSites(messages.at_prior_mean)
        with handlers.trace() as trace, placeholder, _seeded(jax.random.key(0)):
            with _OnePlateEach():
                self.model(*args, **kwargs)
        sample_sites = [s for s in trace.values() if s["type"] == "sample"]
        gp_sites = [s for s in sample_sites if messages.is_latent_gp(s)]
        observed = [s["name"] for s in sample_sites if messages.is_observed_gp(s)]
        if observed and not gp_sites:
            raise ValueError(
                f"GP site '{observed[0]}' is observed, so there is nothing to approximate. "
                "Sample the process without obs, and observe its values with noise: "
                "dist.Normal(f, noise)."
            )
        if not gp_sites:
            names = [s["name"] for s in sample_sites if not s["is_observed"]]
            raise ValueError(
                "The model has no latent GP site for AutoSparseGP (its latent sites: "
                f"{names or 'none'}). Sample a numpyro_sgp.GaussianProcess in it, or use "
                "one of NumPyro's own autoguides."
            )
        mutable = [name for name, s in trace.items() if s["type"] == "mutable"]
        if mutable:
            raise ValueError(
                f"The model has mutable state {mutable}. AutoSparseGP runs the model in "
                "the guide as well, which would update it twice in a step; use layers "
                "without running statistics."
            )
        for site in gp_sites:
            checks.check_inputs(site["name"], messages.unwrap(site["fn"])[0])
        checks.check_plates(trace)
        if not any(s["is_observed"] for s in sample_sites):
            raise ValueError(
                "The model has no observed site. A guide is set up when it first runs, "
                "which must be with the data: call svi.init, svi.run or guide.setup with "
                "y, not y=None, before Predictive or guide.posterior."
            )
        checks.check_latents(trace)
        checks.check_observations(trace)
        return trace

    def _assign(self, gp_sites):
        """The approximation of each GP site."""
        if not isinstance(self.approximation, dict):
            return dict.fromkeys(gp_sites, self.approximation)
        unknown = sorted(set(self.approximation) - set(gp_sites))
        missing = sorted(set(gp_sites) - set(self.approximation))
        if unknown or missing:
            raise ValueError(
                f"The approximations do not match the GP sites {sorted(gp_sites)} of the "
                "model: "
                + (f"unknown sites {unknown}. " if unknown else "")
                + (f"no approximation for {missing}." if missing else "")
            )
        return dict(self.approximation)

    def _initialise(self, name, values, subsampled, args, kwargs):
        """Starting parameters of a GP site; sites before it are initialised already."""
        approximation = self._approximations[name]
        run = self._prior(name, values, self._initial, args, kwargs)
        prior = run(jax.random.key(0))
        X = prior.X.reshape(-1, prior.X.shape[-1])
        if prior.X.ndim > 2 and approximation.constants(np.zeros((1, 1))):
            raise ValueError(
                f"GP site '{name}': {approximation} needs one table of inputs (N, D) for "
                f"all latent functions, but X has the shape {prior.X.shape}. Use "
                "covariance='full'."
            )
        if subsampled and approximation.needs_all_rows:
            raise ValueError(
                f"GP site '{name}': {approximation} has parameters for each row of the "
                "data, so it needs all rows in every step. Train without minibatches, or "
                "use SVGP(num_inducing)."
            )
        if subsampled:
            wanted = max(10 * approximation.num_points, 2_000)
            num_batches = int(np.clip(-(-wanted // len(X)), 1, _MAX_SETUP_BATCHES))
            keys = jax.random.split(jax.random.key(0), num_batches)
            X = jax.lax.map(lambda key: run(key).X, keys).reshape(-1, X.shape[-1])
        X = np.asarray(X)
        self._setup_inputs[name] = (prior.kernel, X)
        if self._saved is not None:
            self._take_saved(name, prior)
            return
        try:
            points = approximation.initial_points(prior, X)
        except ValueError as error:
            raise ValueError(f"GP site '{name}': {error}") from error
        self._points[name] = points
        self._constants[name] = approximation.constants(X)
        self._initial[name] = approximation.start(prior, points)
        Kuu = inducing_covariance(prior.kernel, approximation.factorised(points))
        check_cholesky(name, jittered_cholesky(Kuu, approximation.jitter)[0])

    def _prior(self, name, values, initial, args, kwargs):
        """
        From a random key to the prior of a GP site.

        :param values: of the other latents.
        :param initial: starting parameters of the GP sites before it.
        """
        found = {}

        def at_site(site):
            if site["name"] in initial:
                prior, reinterpreted = messages.unwrap(site["fn"])
                params = {k: p.value for k, p in initial[site["name"]].items()}
                params |= self._constants[site["name"]]
                posterior = self._approximations[site["name"]].posterior(prior, params)
                draw = posterior.sample_parametric(jax.random.key(1))
                return messages.rewrap(posterior, reinterpreted), draw
            if site["name"] == name:
                found["prior"] = messages.unwrap(site["fn"])[0]
            return site["fn"], messages.prior_mean(site)

        def run(rng_key):
            with handlers.block():
                self._run_model(at_site, values, rng_key, args, kwargs)
            return found["prior"]

        return run

    def _check_likelihood(self, trace, values, args, kwargs):
        """
        Finds out whether the likelihood, or the prior of a GP site, mixes rows of another,
        and checks that it suits the bounds asked for.
        """
        shapes, dtypes = {}, []
        for name in self._initial:
            prior, _ = messages.unwrap(trace[name]["fn"])
            shapes[name] = prior.shape()
            dtypes.append(prior.X.dtype)
        dtype = jnp.result_type(*dtypes)

        def trace_at(f):
            at_sites = messages.AtGPSites(messages.at_values(f))
            with handlers.block(), handlers.trace() as trace, at_sites:
                with handlers.substitute(data=values), _seeded(jax.random.key(0)):
                    self.model(*args, **kwargs)
            return trace

        coupled = {
            name
            for name, approximation in self._approximations.items()
            if not approximation.family.independent_latents
        }
        chosen = [name for name in shapes if "joint_rows" in trace[name]["infer"]]
        self._coupling = find_coupling(trace_at, shapes, dtype, coupled, chosen)
        tight = {
            name: option
            for name, option in self._approximations.items()
            if option.relaxation is not None
        }
        if tight and self.couples_rows:
            raise ValueError(
                f"GP sites {sorted(tight)} have a tight bound, which is for likelihoods of "
                "one row at a time, but this one ties rows of X together. Use tight='none'."
            )
        gaussian = [name for name, option in tight.items() if option.relaxation.is_gaussian]
        if gaussian:
            check_gaussian(
                lambda f: log_likelihood(trace_at(f), shapes), shapes, dtype, gaussian
            )
        priors = {
            name: copy.copy(messages.unwrap(trace[name]["fn"])[0]) for name in shapes
        }
        for name, prior in priors.items():
            prior.kernel = self._setup_inputs[name][0]  # with starting hyperparameters
        for name, option in self._approximations.items():
            option.check_likelihood(name, trace_at, priors, self.couples_rows)
        for name in gaussian:
            tight[name].relaxation.check(shapes[name][-1])

    @property
    def couples_rows(self) -> bool:
        """Whether the likelihood ties rows of X together; known after the set-up."""
        return self._coupling.couples

    # ---- results ------------------------------------------------------------------

    @property
    def initial_verdicts(self) -> dict[str, InducingVerdict]:
        """
        How good the starting inducing points of each GP site are; of sites with points
        among the inputs.
        """
        self._check_set_up()
        return {
            name: self._verdict(name, *self._setup_inputs[name], self._initial[name])
            for name in self._with_verdicts()
        }

    def assess(self, params: dict, *args, **kwargs) -> dict[str, InducingVerdict]:
        """
        How well the inducing points of each GP site cover the inputs.

        :param params: parameters of the guide.
        :param args: arguments of the model.
        :return: variance explained, condition number and nearest pair for each site with
            inducing points among the inputs.
        :raises NotImplementedError: if no site has such points.
        """
        self._check_set_up()
        names = self._with_verdicts()
        posteriors = self.posterior(params, *args, **kwargs)
        return {
            name: assess_inducing(
                MeanKernel(q.prior.kernel),
                np.asarray(q.prior.X).reshape(-1, q.prior.X.shape[-1]),
                *_points_for_verdict(q.inducing),
            )
            for name, q in posteriors.items()
            if name in names
        }

    def _with_verdicts(self) -> list[str]:
        """The GP sites whose inducing points are among the inputs."""
        found = [n for n, a in self._approximations.items() if not a.inter_domain]
        if not found:
            raise NotImplementedError(
                f"GP site '{next(iter(self._approximations))}': verdicts are of inducing "
                "points among the inputs, which its inducing variables are not. Compare "
                "the variances of guide.posterior(params, X) with the prior's instead."
            )
        return found

    def _verdict(self, name, kernel, X, initial):
        points = tuple(p.value for p in initial.values() if p.role == "inducing")
        points = self._approximations[name].factorised(points)
        return assess_inducing(MeanKernel(kernel), X, *_points_for_verdict(points))

    def posterior(
        self, params: dict, *args, rng_key=None, **kwargs
    ) -> dict[str, SparsePosterior]:
        """
        q(f(X)) at each GP site, in closed form.

        The latents beside f are at the median of the base guide (their point estimate
        under ``AutoDelta``), and a GP site that feeds another one is at its posterior
        mean. With ``rng_key`` both are drawn, values of GP sites from their marginals; the
        predictive distribution of a deep GP is the mixture over draws::

            keys = jax.random.split(jax.random.key(0), 100)
            mean = jax.vmap(lambda key: guide.posterior(params, X, rng_key=key)["f"].mean)
            mean(keys)                                                # (100, N)

        :param params: parameters of the guide, ``result.params`` of ``svi.run``.
        :param args: arguments of the model; the inputs X, most often.
        :param rng_key: key for a draw of the other latents and of inner layers.
        :return: a distribution for each site, with ``mean`` and ``variance`` of shape
            ``batch_shape + (N,)``, ``covariance_matrix``, ``sample``, ``parallel()``,
            ``orthogonal()`` and ``prior_kl()``.
        :raises ValueError: if names, shapes or kinds of numbers of ``params`` are not this
            guide's and its model's, they are not finite, or K_uu cannot be factorised.
        """
        base_key = inner_key = None
        if rng_key is not None:
            base_key, inner_key = jax.random.split(rng_key)
        return self.posterior_at(params, args, kwargs, base_key, inner_key)[0]

    def posterior_at(
        self, params: dict, args, kwargs, rng_key=None, inner_key=None
    ) -> tuple[dict, dict]:
        """
        As :meth:`posterior`, with the draws of the latents beside f and those at GP sites
        chosen apart.

        :param params: parameters of the guide.
        :param args: tuple of the arguments of the model.
        :param kwargs: dict of its keyword arguments.
        :param rng_key: key for a draw of the other latents; None for their medians.
        :param inner_key: key for draws at GP sites; None for their means.
        :return: the distributions, and the values of GP sites at which those that follow
            are, in the shape of the sites.
        """
        self.check_params(params)
        args, kwargs = as_arrays(self.model, args, kwargs)
        found, values = {}, {}

        def at_site(site):
            checks.check_inputs(site["name"], messages.unwrap(site["fn"])[0])
            fn = posterior_here(site)
            posterior, _ = messages.unwrap(fn)
            check_cholesky(site["name"], posterior.chol)
            _report_collapse(site["name"], posterior)
            self._approximations[site["name"]].report(site["name"], posterior)
            if inner_key is None:
                f = posterior.mean
            else:
                f = _marginal_draw(posterior, jax.random.fold_in(inner_key, len(found)))
            found[site["name"]] = posterior
            values[site["name"]] = jnp.reshape(f, fn.shape())
            return fn, values[site["name"]]

        with handlers.block(), handlers.substitute(data=params):
            others = self._base_values(params, rng_key, args, kwargs)
            posterior_here = self._posteriors()
            self._run_model(at_site, others, jax.random.key(0), args, kwargs)
        return found, values

    def parameter_blocks(self, params: dict, *args, **kwargs) -> dict[str, list[str]]:
        """
        Names of the parameters of guide and model by what they belong to.

        :param params: parameters of the guide.
        :param args: arguments of the model; those of the set-up if left out.
        :return: names under ``"variational"``, ``"inducing"``, ``"kernel"``,
            ``"likelihood"`` and ``"other"``.
        """
        args, kwargs = self._default_args(args, kwargs)
        return parameter_blocks(self, params, *args, **kwargs)

    @property
    def approximations(self) -> dict:
        """What is put at each GP site; known after the set-up."""
        self._check_set_up()
        return dict(self._approximations)

    def parameter_names(self) -> dict[str, dict[str, str]]:
        """
        For each GP site, the names of its parameters in ``params`` by their names in the
        approximation (``"Z"``, ``"qu_mu"`` and so on).
        """
        self._check_set_up()
        return self._names()

    def roles(self) -> dict[str, str]:
        """
        What the parameters of GP sites are for, by name: ``"variational"`` or
        ``"inducing"``.
        """
        names = self.parameter_names()
        return {
            names[site][name]: param.role
            for site, params in self._initial.items()
            for name, param in params.items()
        }

    def variational_names(self) -> dict[str, dict[str, str]]:
        """As :meth:`parameter_names`, of q(u) alone."""
        return {
            site: {
                name: full
                for name, full in names.items()
                if self._initial[site][name].role == "variational"
            }
            for site, names in self.parameter_names().items()
        }

    def take_natural_gradients(self, rate: float) -> None:
        """
        Say that :func:`~numpyro_sgp.natural_gradients` will train this guide, as it does
        when it is made: families whose derivatives are natural gradients refuse them
        otherwise.

        :param rate: the largest step.
        :raises ValueError: if another one was given before.
        """
        if not any(o.family.is_natural for o in check_approximations(self.approximation)):
            return
        if self.natural_rate not in (None, rate):
            raise ValueError(
                f"This guide takes natural gradients of the rate {self.natural_rate} "
                f"already, and another optimiser has {rate}. Make a new guide for it."
            )
        self.natural_rate = rate

    def fingerprint(self) -> str:
        """
        What model and guide are made of as a short string, to be kept beside parameters
        and compared before they are used again: the sites and their distributions,
        kernels and means by their classes, approximations, and names and shapes of the
        parameters. It depends on no values, and on the number of rows only where
        parameters have that length. Known after the set-up.

        :return: 16 hexadecimal digits.
        """
        self._check_set_up()
        text = json.dumps(self._description, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _names(self):
        return {
            site: {name: f"{site}_{self.prefix}_{name}" for name in initial}
            for site, initial in self._initial.items()
        }

    def _is_trained(self, site, name):
        """Whether a value of a GP site is a parameter, not fixed at its start."""
        return self._approximations[site].is_trained(self._initial[site][name])

    def _base_values(self, params, rng_key, args, kwargs):
        if self.base_guide is None:
            return {}
        if rng_key is not None:
            with handlers.seed(rng_seed=rng_key):
                values = self.base_guide(*args, **kwargs)
        else:
            try:
                values = self.base_guide.median(params)
            except NotImplementedError:
                raise NotImplementedError(
                    f"{type(self.base_guide).__name__} has no median to put the latents "
                    "beside f at; draw them: guide.posterior(params, ..., rng_key=key), or "
                    "guide.sample_posterior."
                ) from None
        return {name: values[name] for name in self._latents}

    def sample_posterior(self, rng_key, params, *args, sample_shape=(), **kwargs) -> dict:
        """
        Joint draws of all latent and deterministic sites.

        :param rng_key: random key.
        :param params: parameters of the guide.
        :param args: arguments of the model, its inputs X; those of the set-up if left
            out.
        :param sample_shape: shape of the sample.
        :return: values by site, each of shape ``sample_shape + site shape``.
        """
        self.check_params(params)
        args, kwargs = self._default_args(args, kwargs)

        def draw(key):
            guide_key, model_key = jax.random.split(key)
            guide = handlers.substitute(handlers.seed(self, guide_key), data=params)
            guide_trace = handlers.trace(guide).get_trace(*args, **kwargs)
            model = handlers.substitute(handlers.seed(self.model, model_key), data=params)
            model = _Drawn(handlers.replay(model, guide_trace))
            model_trace = handlers.trace(model).get_trace(*args, **kwargs)
            return {
                name: site["value"]
                for name, site in model_trace.items()
                if name in self._latents
                or name in self._initial
                or site["type"] == "deterministic"
            }

        with handlers.block():
            if not sample_shape:
                return draw(rng_key)
            keys = jax.random.split(rng_key, int(np.prod(sample_shape)))
            rows = max(q.event_shape[0] for q in self._shapes(params, args, kwargs))
            # Draws share a joint covariance of N x N numbers unless hyperparameters are
            # random; a chunk of them is kept near 3e7 numbers.
            chunk = int(np.clip(3e7 // rows**2, 1, len(keys)))
            if chunk < len(keys):
                draws = jax.lax.map(draw, keys, batch_size=chunk)
            else:  # a loop is compiled anew in each call
                draws = jax.vmap(draw)(keys)
        return jax.tree.map(lambda x: x.reshape(*sample_shape, *x.shape[1:]), draws)

    def _shapes(self, params, args, kwargs):
        """The GP priors of a run, as shapes only."""
        found = []

        def at_site(site):
            found.append(messages.unwrap(site["fn"])[0])
            return site["fn"], messages.prior_mean(site)

        def run(params):
            key = jax.random.key(0)
            with handlers.substitute(data=params):
                values = self._base_values(params, key, args, kwargs)
                self._run_model(at_site, values, key, args, kwargs)

        jax.eval_shape(run, params)
        return found

    def median(self, params, *args, **kwargs) -> dict:
        """
        Posterior medians.

        :param params: parameters of the guide.
        :param args: arguments of the model, its inputs X; those of the set-up if left
            out.
        :return: the median of each latent site; that of f given the other latents'.
        """
        args, kwargs = self._default_args(args, kwargs)
        posteriors = self.posterior(params, *args, **kwargs)
        values = self._base_values(params, None, args, kwargs)
        return {**values, **{name: q.quantile(0.5) for name, q in posteriors.items()}}

    def quantiles(self, params, quantiles, *args, **kwargs) -> dict:
        """
        Posterior quantiles.

        :param params: parameters of the guide.
        :param quantiles: a list of numbers between 0 and 1.
        :param args: arguments of the model, its inputs X; those of the set-up if left
            out.
        :return: for each latent site an array with a leading axis of the quantiles;
            those of f given the medians of the other latents.
        """
        args, kwargs = self._default_args(args, kwargs)
        levels = jnp.asarray(quantiles, dtype=jnp.result_type(float))
        values = {}
        if isinstance(self.base_guide, autoguide.AutoDelta):
            values = {
                name: jnp.broadcast_to(value, (*levels.shape, *jnp.shape(value)))
                for name, value in self.base_guide.median(params).items()
            }
        elif self.base_guide is not None:
            values = self.base_guide.quantiles(params, quantiles)
        values = {name: values[name] for name in self._latents}
        for name, q in self.posterior(params, *args, **kwargs).items():
            values[name] = q.quantile(levels)
        return values

    def _default_args(self, args, kwargs):
        if args or kwargs:
            return as_arrays(self.model, args, kwargs)
        self._check_set_up()
        if self._setup_args is None:
            raise ValueError(
                "Say at which inputs: pass the model's arguments after the parameters "
                "(this guide was set up with minibatches)."
            )
        return self._setup_args

    def _check_set_up(self):
        if self.prototype_trace is None:
            raise ValueError(
                "This guide has not been set up: run svi.init, svi.run or guide.setup with "
                "the training data first."
            )

    def check_params(self, params: dict) -> None:
        """
        :raises ValueError: if ``params`` are not this guide's, or not finite.
        """
        self._check_set_up()
        check_params(params, self._shapes_of_params, self._fixed())

    def _fixed(self):
        """Values of the GP sites that are not trained, by name."""
        return {
            full_name: self._initial[site][name].value
            for site, names in self._names().items()
            for name, full_name in names.items()
            if not self._is_trained(site, name)
        }

    def setup_state(self) -> dict:
        """What :meth:`setup_from` needs, arrays by name: it is not in the parameters."""
        self._check_set_up()
        initial = {
            site: {name: param.value for name, param in params.items()}
            for site, params in self._initial.items()
        }
        return {
            "initial": initial,
            "constants": self._constants,
        }

    def setup_from(self, saved: dict, fingerprint: str, *args, **kwargs) -> None:
        """
        As :meth:`setup`, with inducing points from a guide that was set up before, so that
        the arguments need not have the training data.

        :param saved: of that guide's :meth:`setup_state`.
        :param fingerprint: of that guide.
        :param args: arguments of the model, with observations.
        :raises ValueError: if it is of another model or other options; this guide is then
            not set up.
        """
        self._saved = saved
        try:
            self.setup(*args, **kwargs)
        finally:
            self._saved = None
        if (found := self.fingerprint()) != fingerprint:
            self._forget()
            raise ValueError(
                f"The fingerprint of what was saved is {fingerprint}, and that of this "
                f"guide {found}. Use the model, the approximation and the base guide that "
                "were trained."
            )

    def _take_saved(self, name, prior):
        """Starting parameters of a GP site from :meth:`setup_from`."""
        if name not in self._saved["initial"]:
            raise ValueError(
                f"The model has a GP site '{name}', but the guide that was saved had only "
                f"{sorted(self._saved['initial'])}."
            )
        initial = self._saved["initial"][name]
        columns = initial["Z"].shape[-1] if "Z" in initial else prior.X.shape[-1]
        if prior.X.shape[-1] != columns and not self._approximations[name].inter_domain:
            raise ValueError(
                f"GP site '{name}' has inputs with {prior.X.shape[-1]} columns, but the "
                f"inducing points that were saved have {columns}."
            )
        approximation = self._approximations[name]
        self._points[name] = approximation.points_in(initial)
        self._initial[name] = {
            key: replace(param, value=initial[key])
            for key, param in approximation.start(prior, self._points[name]).items()
        }
        self._constants[name] = self._saved["constants"][name]

    def others_at(self, params: dict, args, kwargs, rng_key=None) -> dict:
        """
        Values of the latents beside the GP sites, those that :meth:`posterior_at` has for
        the same arguments.

        :param params: parameters of the guide.
        :param args: tuple of the arguments of the model.
        :param kwargs: dict of its keyword arguments.
        :param rng_key: key for a draw; None for their medians.
        """
        self.check_params(params)
        args, kwargs = as_arrays(self.model, args, kwargs)
        with handlers.block(), handlers.substitute(data=params):
            return self._base_values(params, rng_key, args, kwargs)

    def draws_others(self, params: dict, args, kwargs) -> bool:
        """
        Whether the base guide is a distribution of the latents beside the GP sites, rather
        than a point (``AutoDelta``). The parameters are those of :meth:`others_at`.
        """
        if self.base_guide is None:
            return False
        with handlers.block(), handlers.trace() as trace, handlers.seed(rng_seed=0):
            with handlers.substitute(data=params):
                self.base_guide(*args, **kwargs)
        return any(
            site["type"] == "sample"
            and not isinstance(messages.unwrap(site["fn"])[0], Delta)
            for site in trace.values()
        )


def check_cholesky(name: str, chol: jax.Array) -> None:
    """
    :raises ValueError: if the factor of K_uu is known and not finite.
    """
    if not_jax_tracer(chol) and not np.isfinite(chol).all():
        dtype = chol.dtype
        raise ValueError(
            f"The inducing covariance K_uu of GP site '{name}' has no Cholesky factor, "
            f"even with a jitter of {max_jitter(dtype):g} times its mean diagonal "
            f"({dtype}). Look for NaN or infinite kernel hyperparameters (has training "
            "diverged?), or a kernel that is not positive definite; in float32, try "
            "numpyro.enable_x64()."
        )


def _report_collapse(name, posterior):
    """Warns where a mixture has become a single component."""
    if posterior.num_components == 1 or not not_jax_tracer(posterior.log_weights):
        return
    weights = np.exp(np.asarray(posterior.log_weights))
    if np.max(weights) > 1 - _COLLAPSED:
        warnings.warn(
            f"The mixture at GP site '{name}' has collapsed to one component (weights "
            f"{np.array2string(weights, precision=3)}): SVGP(M, covariance=...) gives the "
            "same at less cost. Where several modes are expected, start the components "
            "further apart (MixtureSVGP(..., spread=1.0)) or with another seed.",
            UserWarning,
            stacklevel=find_stack_level(),
        )




class _Drawn(Messenger):
    """Puts NaN where a distribution cannot be drawn from, which stops nothing else."""

    def process_message(self, msg):
        messages.draw(msg)


class _Plates(Messenger):
    """The indices of plates by their names here, whatever handlers outside call them."""

    def __init__(self):
        self.values = {}
        super().__init__()

    def process_message(self, msg):
        self._name = msg.get("name")

    def postprocess_message(self, msg):
        if msg["type"] == "plate":
            self.values[self._name] = msg["value"]


class _Params(Messenger):
    """
    Checks the shapes of parameters, and says where those that nobody gives start.

    :param shapes: of the set-up, by name.
    :param starts: a function that returns starting values by name; None for the starts
        that the statements have.
    """

    def __init__(self, shapes, starts):
        self.shapes = shapes
        self.starts = starts
        self.started = set()
        self._asked = set()
        super().__init__()

    def __enter__(self):
        super().__enter__()
        return self

    def process_message(self, msg):
        if msg["type"] != "param":
            return
        self._name = name = msg["name"]
        # Starts by a function, and those of modules, which ask for parameters before they
        # make any, are drawn with the key of this run anyway.
        if msg["args"] and msg["args"][0] is None:
            self._asked.add(name)
        elif msg["args"] and name not in self._asked:
            msg["fn"] = functools.partial(self._start, name)

    def _start(self, name, start, **_):
        self.started.add(name)
        return start if self.starts is None else self.starts().get(name, start)

    def postprocess_message(self, msg):
        if msg["type"] != "param" or msg["value"] is None:
            return
        if self._name in self.shapes:
            check_shapes(self._name, msg["value"], self.shapes[self._name])


class _FirstRows(Messenger):
    """
    Gives a subsampled plate its first rows, which do for starting values: outside of a
    compiled program, a draw is from an array of all of them.
    """

    def process_message(self, msg):
        if msg["type"] == "plate" and msg["value"] is None:
            size, subsample_size = msg["args"]
            if subsample_size not in (None, size):
                numpyro.prng_key()  # that of the draw, so that later ones have theirs
                msg["value"] = jnp.arange(subsample_size)


class _OnePlateEach(Messenger):
    """Refuses a subsampled plate that is made twice, which draws two minibatches."""

    def __enter__(self):
        self.seen = set()
        return super().__enter__()

    def process_message(self, msg):
        if msg["type"] != "plate":
            return
        name, (size, subsample_size) = msg["name"], msg["args"]
        if name in self.seen and subsample_size not in (None, size):
            raise ValueError(
                f"The model makes the subsampled plate '{name}' twice, and each draws a "
                "minibatch of its own, so that rows of X and y would not match. Make it "
                f"once and enter it as often as needed: data = numpyro.plate('{name}', "
                f"{size}, subsample_size={subsample_size}); with data as idx: ...; with "
                "data: ..."
            )
        self.seen.add(name)


class _WithoutGPs:
    """The model for the base guide: GP sites hidden, at their prior means."""

    def __init__(self, model, gp_sites):
        self.model = model
        self.gp_sites = gp_sites

    def __call__(self, *args, **kwargs):
        with handlers.block(hide_fn=self._hides):
            with messages.AtGPSites(messages.at_prior_mean):
                return self.model(*args, **kwargs)

    def _hides(self, site):
        return site["type"] == "deterministic" or site.get("name") in self.gp_sites


def _marginal_draw(posterior, key):
    """Values of f from their marginals, of one component of a mixture."""
    key_k, key_x = jax.random.split(key)
    component = 0
    if posterior.num_components > 1:
        component = jax.random.categorical(key_k, posterior.log_weights)
    x = jax.random.normal(key_x, posterior.shape(), posterior.prior.X.dtype)
    return posterior.place(x, component)


@contextmanager
def _seeded(rng_key):
    if rng_key is None:
        yield
    else:
        with handlers.seed(rng_seed=rng_key):
            yield


def _points_for_verdict(points):
    """Z and the other sets as arrays; of points for each latent, the first latent's."""
    flat = [np.asarray(p).reshape(-1, *np.shape(p)[-2:])[0] for p in points]
    return flat[0], tuple(flat[1:])
