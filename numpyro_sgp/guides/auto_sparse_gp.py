"""The guide: the model itself, with a sparse posterior at each GP site."""

import functools
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.infer import autoguide
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import check_key, check_levels, check_sample_shape
from numpyro_sgp._programs import mapped, on_data
from numpyro_sgp._threads import methods_alone
from numpyro_sgp.distributions import KeptPosterior, SparsePosterior
from numpyro_sgp.distributions.arguments import (
    as_arrays,
    check_indexable,
    frames_as_arrays,
)
from numpyro_sgp.distributions.columns import check_columns, telling_columns
from numpyro_sgp.guides.memory import check_joint
from numpyro_sgp.guides.messengers import (
    Drawn,
    Params,
    Plates,
    drawn_by,
    run_model,
)
from numpyro_sgp.guides.point_latents import point_latents
from numpyro_sgp.guides.prepared import PreparedGuide
from numpyro_sgp.guides.reports import report, verdicts
from numpyro_sgp.guides.row_latents import check_row_latents, values_of_groups
from numpyro_sgp.inducing import InducingVerdict
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.plates import FirstRows, WholeIfFew
from numpyro_sgp.tracing.row_indices import check_codes, check_row_indices


class _AllFound(BaseException):
    """All GP sites have been seen; no error that a model might catch."""


@methods_alone
class AutoSparseGP(PreparedGuide):
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
    :param prefix: put into the names of all parameters (of a base guide, if it is a class).
    :param init_loc_fn: initial values of the latents beside f, for such a base guide; if
        None, medians of some draws from their priors, also where NumPyro would start it
        at draws from (-2, 2).
    :raises ValueError: when first run, if the model has no GP site or no observed site, a
        GP site is inside a data plate, inputs are not finite, observations have another
        shape than their distribution, a latent site is discrete, there are more inducing
        points than distinct inputs, ``approximation`` names a site that is not there, or
        K_uu cannot be factorised.

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

    def __call__(self, *args, **kwargs):
        """
        Run the guide.

        :return: the values of all latent sites by name.
        """
        given, (args, kwargs) = (args, kwargs), as_arrays(self.model, args, kwargs)
        base_key, is_new = numpyro.prng_key(), self._setup is None
        if is_new:
            self._keep(self._prepare(base_key, args, kwargs))
        starts = None
        if base_key is not None and not (is_new and not_jax_tracer(base_key)):
            starts = functools.cache(lambda: self._starts_by(base_key, args, kwargs))
        values, plates = {}, Plates()
        latents = self.known().latents
        with Params(self._setup.shapes, starts) as params:
            if self.base_guide is not None:
                with plates:
                    values = drawn_by(self.base_guide, latents, args, kwargs)
            rng_key = numpyro.prng_key()
            posterior_at = self._setup.posteriors(self.natural_rate)
            # Where no optimiser or result has given parameters yet, SVI.init wants values
            # of the right shape only: a joint draw would cost O(N^3), a draw of rows time.
            started = {
                name
                for name, site in self._setup.sites.items()
                if not params.started.isdisjoint(site.names.values())
            }
            model = FirstRows(self.model) if started else self.model

            def at_site(site):
                posterior = posterior_at(site)
                starts_here = site["name"] in started
                return posterior, messages.prior_mean(site) if starts_here else None

            found = {**values, **plates.values}
            f = run_model(model, at_site, found, rng_key, args, kwargs)
        if self._setup.takes_rows:
            check_indexable(self.model, given, (args, kwargs))
        return {**values, **f}

    @property
    def initial_verdicts(self) -> dict[str, InducingVerdict]:
        """How good the starting inducing points are, where they are among the inputs."""
        found = {
            name: (site.kernel, site.X, site.approximation.factorised(site.points))
            for name, site in self.known().sites.items()
        }
        return verdicts(found, self.approximations)

    def assess(self, params: dict, *args, **kwargs) -> dict[str, InducingVerdict]:
        """
        How well the inducing points of each GP site cover the inputs.

        :param params: parameters of the guide.
        :param args: arguments of the model.
        :return: variance explained, condition number and nearest pair for each site with
            inducing points among the inputs.
        :raises NotImplementedError: if no site has such points.
        """
        posteriors = self.posterior(params, *args, **kwargs)
        found = {
            name: (q.prior.kernel, q.prior.X, q.inducing) for name, q in posteriors.items()
        }
        return verdicts(found, self.approximations)

    def posterior(
        self, params: dict, *args, rng_key=None, **kwargs
    ) -> dict[str, SparsePosterior]:
        """
        q(f(X)) at each GP site, in closed form.

        The latents beside f, hyperparameters among them, are at the median of the base
        guide (their point estimate under ``AutoDelta``), and a GP site that feeds another
        one is at its posterior mean. With ``rng_key`` both are drawn, values of GP sites
        from their marginals; the predictive distribution of a deep GP is the mixture over
        draws::

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
        self.check_rows(*self.as_set_up(args, kwargs))
        return self.posterior_at(params, args, kwargs, base_key, inner_key)[0]

    def posterior_at(
        self, params: dict, args, kwargs, rng_key=None, inner_key=None, kept=None
    ) -> tuple[dict, dict]:
        """
        As :meth:`posterior`, with the draws of the latents beside f and those at GP sites
        chosen apart.

        :param params: parameters of the guide.
        :param args: tuple of the arguments of the model.
        :param kwargs: dict of its keyword arguments.
        :param rng_key: key for a draw of the other latents; None for their medians.
        :param inner_key: key for draws at GP sites; None for their means.
        :param kept: :class:`~numpyro_sgp.distributions.Kept` of GP sites, for the same
            parameters and values of the other latents.
        :return: the distributions, and the values of GP sites at which those that follow
            are, in the shape of the sites.
        """
        self.check_params(params)
        args, kwargs = self.as_set_up(args, kwargs)
        found, values = {}, {}

        def at_site(site):
            checks.check_inputs(site["name"], messages.unwrap(site["fn"])[0])
            fn = posterior_here(site)
            posterior, reinterpreted = messages.unwrap(fn)
            if kept and site["name"] in kept:
                posterior = KeptPosterior(posterior, kept[site["name"]])
                fn = messages.rewrap(posterior, reinterpreted)
            report(site["name"], posterior, self.approximations[site["name"]])
            if inner_key is None:
                f = posterior.mean
            else:
                f = posterior.draw_rows(jax.random.fold_in(inner_key, len(found)))
            found[site["name"]] = posterior
            values[site["name"]] = jnp.reshape(f, fn.shape())
            if found.keys() == self.known().sites.keys():
                raise _AllFound  # what follows in the model is not looked at
            return fn, values[site["name"]]

        telling = telling_columns(self.model, lambda: self.known().inputs, args, kwargs)
        given = handlers.substitute(data=params)
        with telling, handlers.block(), given, suppress(_AllFound):
            others = self._base_values(params, rng_key, args, kwargs)
            posterior_here = self.known().posteriors(self.natural_rate)
            run_model(self.model, at_site, others, jax.random.key(0), args, kwargs)
        return found, values

    def _base_values(self, params, rng_key, args, kwargs):
        if self.base_guide is None:
            return {}
        if rng_key is not None:
            with handlers.seed(rng_seed=rng_key):
                return drawn_by(self.base_guide, self.known().latents, args, kwargs)
        else:
            base, values = self.base_guide, None
            if hasattr(base, "median"):  # a function has none
                with suppress(NotImplementedError):
                    values = base.median(params)
            if values is None:
                name = getattr(base, "__name__", type(base).__name__)
                raise NotImplementedError(
                    f"{name} has no median to put the latents beside f at; draw them: "
                    "guide.posterior(params, ..., rng_key=key), or guide.sample_posterior."
                )
        return {name: values[name] for name in self.known().latents}

    def sample_posterior(self, rng_key, params, *args, sample_shape=(), **kwargs) -> dict:
        """
        Joint draws of all latent and deterministic sites.

        :param rng_key: random key.
        :param params: parameters of the guide.
        :param args: arguments of the model, its inputs X; those of the set-up if left
            out.
        :param sample_shape: shape of the sample.
        :return: values by site, each of shape ``sample_shape + site shape``.
        :raises ValueError: if covariances of all rows of f cannot fit into memory, or the
            model draws the rows of f by a plate.
        """
        check_key(rng_key)
        sample_shape = check_sample_shape(sample_shape)
        self.check_params(params)
        args, kwargs = self._default_args(args, kwargs)
        self.check_rows(args, kwargs)
        latents = {*self.known().latents, *self.approximations}

        def draw(args, kwargs, params, key):
            guide_key, model_key = jax.random.split(key)
            guide = handlers.substitute(handlers.seed(self, guide_key), data=params)
            guide_trace = handlers.trace(guide).get_trace(*args, **kwargs)
            for name in self.approximations:
                check_joint(name, guide_trace[name]["value"])
            given = {**params, **messages.drawn(guide_trace)}
            model = handlers.seed(WholeIfFew(self.model), model_key)
            model = handlers.substitute(model, data=given)
            model = Drawn(handlers.replay(model, guide_trace))
            model_trace = handlers.trace(model).get_trace(*args, **kwargs)
            return {
                name: site["value"]
                for name, site in model_trace.items()
                if name in latents or site["type"] == "deterministic"
            }

        def several(args, kwargs, params, key):
            number = int(np.prod(sample_shape))
            keys = jax.random.split(key, max(number, 1))
            one = functools.partial(draw, args, kwargs, params)
            shapes = jax.eval_shape(one, keys[0])
            rows = max(shapes[name].shape[-1] for name in self.approximations)
            # Draws share a joint covariance of N x N numbers unless hyperparameters are
            # random; a chunk of them is kept near 3e7 numbers.
            chunk = int(np.clip(3e7 // rows**2, 1, len(keys)))
            draws = mapped(one, keys, chunk)
            return {
                k: x[:number].reshape(*sample_shape, *x.shape[1:]) for k, x in draws.items()
            }

        with handlers.block():
            if not sample_shape:
                return on_data(draw, args, kwargs, params, rng_key)
            # Random hyperparameters have a kernel matrix of all rows for each draw.
            briefly = isinstance(self.base_guide, autoguide.AutoDelta | None)
            return on_data(several, args, kwargs, params, rng_key, briefly=briefly)

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
        :param quantiles: a list of numbers between 0 and 1, or one such number.
        :param args: arguments of the model, its inputs X; those of the set-up if left
            out.
        :return: for each latent site an array with a leading axis of the quantiles (none
            for one number); those of f given the medians of the other latents.
        :raises ValueError: if a level is not between 0 and 1.
        """
        if all(map(not_jax_tracer, jax.tree.leaves(quantiles))):
            known = np.asarray(quantiles) if hasattr(quantiles, "dtype") else quantiles
            one = isinstance(known, str) or np.ndim(known) == 0
            check_levels([quantiles] if one else known)
        args, kwargs = self._default_args(args, kwargs)
        levels = jnp.asarray(quantiles, dtype=jnp.result_type(float))
        values = {}
        if isinstance(self.base_guide, autoguide.AutoDelta):
            values = {
                name: jnp.broadcast_to(value, (*levels.shape, *jnp.shape(value)))
                for name, value in self.base_guide.median(params).items()
            }
        elif self.base_guide is not None:
            if not hasattr(self.base_guide, "quantiles"):  # a function
                name = getattr(self.base_guide, "__name__", type(self.base_guide).__name__)
                raise NotImplementedError(
                    f"{name} has no quantiles of the latents beside f; draw them: "
                    "guide.sample_posterior(key, params, ..., sample_shape=(1000,))."
                )
            # In one axis, for NumPyro's guides make one of a number each in its own way.
            found = self.base_guide.quantiles(params, levels.ravel())
            values = {
                name: jnp.reshape(v, (*levels.shape, *jnp.shape(v)[1:]))
                for name, v in found.items()
            }
        values = {name: values[name] for name in self.known().latents}
        for name, q in self.posterior(params, *args, **kwargs).items():
            values[name] = q.quantile(levels)
        return values

    def _default_args(self, args, kwargs):
        if args or kwargs:
            return self.as_set_up(args, kwargs)
        if self.known().arguments is None:
            raise ValueError(
                "Say at which inputs: pass the model's arguments after the parameters "
                "(this guide was set up with minibatches, or from a file)."
            )
        return self._setup.arguments

    def as_set_up(self, args, kwargs) -> tuple[tuple, dict]:
        """
        Arguments of the model as arrays, frames as matrices too where the guide was set up
        with arrays: a model may do something else with a frame, and no compiled program
        takes one.

        :param args: tuple of the arguments of the model.
        :param kwargs: dict of its keyword arguments.
        :raises ValueError: if columns of a frame are in other places than they were.
        """
        args, kwargs = as_arrays(self.model, args, kwargs)
        columns = None if self._setup is None else self._setup.columns
        if columns is None:
            return args, kwargs
        check_columns(self.model, columns, args, kwargs)
        return frames_as_arrays((args, kwargs))

    def check_finite(self, params, args, kwargs) -> None:
        """
        :raises ValueError: if inputs of a GP site are not finite.
        """
        leaves = jax.tree.leaves((args, kwargs))
        arrays = (v for v in leaves if isinstance(v, np.ndarray | jax.Array))
        known = (v for v in arrays if not_jax_tracer(v))
        real = (v for v in known if jnp.issubdtype(v.dtype, jnp.floating))
        if not all(np.isfinite(v).all() for v in real):
            self.posterior(params, *args, **kwargs)  # which says why, if it is these

    def check_rows(self, args, kwargs, of_responses=False) -> None:
        """
        :param of_responses: whether responses are asked for, rather than GP sites.
        :raises ValueError: if codes of groups are none of the model's, there are latents
            for each row and these are others, or the model draws the rows of a minibatch,
            so that predictions would be of these.
        """
        if of_responses:
            check_row_latents(self.known(), self.model, args, kwargs)
        held = values_of_groups(self.known())
        if not self.known().takes_rows:
            check_codes(self.model, args, kwargs, held)
            return
        found = check_row_indices(self.model, args, kwargs, held)
        if found.drawn and (found.inputs or of_responses):
            name, number, size = found.drawn[0]
            raise ValueError(
                f"With these arguments the model takes a minibatch of plate '{name}' "
                f"({number} of {size} rows), but predictions are of every row that is "
                "given. Pass all of the data and no batch size (batch_size=None, or what "
                "the model calls it); where it draws a minibatch because y is given, leave "
                "subsample_size out: sgp.fit(..., batch_size=256) draws them itself."
            )

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
        args, kwargs = self.as_set_up(args, kwargs)
        with handlers.block(), handlers.substitute(data=params):
            return self._base_values(params, rng_key, args, kwargs)

    def draws_others(self, params: dict, args, kwargs) -> bool:
        """
        Whether the base guide is a distribution of the latents beside the GP sites, rather
        than a point (``AutoDelta``). The parameters are those of :meth:`others_at`.
        """
        latents = self.known().latents
        return not point_latents(self, params, args, kwargs).issuperset(latents)
