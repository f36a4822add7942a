"""The guide with one Gaussian over GP sites and effects, for SVI and minibatches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer import autoguide

from numpyro_sgp._programs import on_data
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.families import Full
from numpyro_sgp.families.blocks import Block
from numpyro_sgp.families.constraint import lower_triangular
from numpyro_sgp.fitting.arguments import JOINT_GUIDES
from numpyro_sgp.guides import AutoSparseGP, messengers
from numpyro_sgp.guides.checks import check_set_up, check_support_stays
from numpyro_sgp.guides.messengers import Params, Plates, WithoutGPs
from numpyro_sgp.guides.prepared import base_maker
from numpyro_sgp.integrated.expectation import expected
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.joint_fit import JointFit
from numpyro_sgp.integrated.marginals import field_values, gp_shapes
from numpyro_sgp.integrated.nodes import Drawn, One
from numpyro_sgp.integrated.placing import Constrained, check_likelihood, check_size
from numpyro_sgp.integrated.precision import Square
from numpyro_sgp.integrated.profile import Gaussian, Node
from numpyro_sgp.integrated.row_parts import choose_layout
from numpyro_sgp.integrated.starts import starting_hyperparameters
from numpyro_sgp.integrated.weighing import unweighed
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.plates import FirstRows, WholeIfFew

_DRAWS = 64  # of hyperparameters that are no points, for the result


class FieldValue(dist.Delta):
    """Part of a draw of the field, which has a density only together with the others."""

    def log_prob(self, value, intermediates=None):
        """
        :raises NotImplementedError: always.
        """
        raise NotImplementedError(
            "AutoJointGP has one Gaussian over all GP sites and effects, from which f is "
            "integrated: train it with numpyro_sgp.TraceGP_ELBO()."
        )


@dataclass(frozen=True, eq=False)
class _Known:
    """
    What the set-up found.

    :param field: which latents are the field and which are hyperparameters.
    :param base_guide: of the hyperparameters; None if there are none.
    :param starts: values of the parameters at the start, constrained.
    :param arguments: of the set-up.
    """

    field: Field
    base_guide: Any
    starts: dict
    arguments: tuple

    @property
    def shapes(self) -> dict:
        """Of the parameters."""
        return jax.tree.map(_shape, self.starts)

    @property
    def sites(self) -> dict:
        """GP sites, as :attr:`Setup.sites`."""
        return self.field.sites

    @property
    def coupling(self) -> Any:
        """Which rows the likelihood ties together, as :attr:`Setup.coupling`."""
        return self.field.guide.known().coupling

    @property
    def subsampled(self) -> bool:
        """As :attr:`Setup.subsampled`."""
        return self.field.guide.known().subsampled

    def work(self, num_rows: int) -> float:
        """Multiplications of one product of rows with the field's covariance."""
        size, of_row = self.field.size, self.field.row_size
        return (self.field.layout.number * num_rows * of_row + size**2) * float(size)


class AutoJointGP(autoguide.AutoGuide):
    r"""
    A guide with one Gaussian over the inducing variables of all GP sites *and* over the
    latents with normal priors that act beside them (intercepts, slopes, random walks),

    .. math::

        q(w) = N(m, P P^\top), \qquad w \sim N(0, I) \text{ a priori},

    so that sites and effects which the data tie together are tied in q. What is part of
    the field is found in the model's arithmetic, as :func:`~numpyro_sgp.nested` does. Of
    the likelihood's linear predictors :math:`\eta_n = b_n^\top w` only the marginals are
    needed, and the KL is in closed form:

    .. math::

        \sum_n E_{q(\eta_n)} \log p(y_n \mid \eta_n, \theta)
        - \tfrac12 \left(|m|^2 + |P|_F^2 - \dim w\right) + \log |P| .

    For models of several GP sites or of sites beside effects that are too large for
    ``nested`` (which integrates the hyperparameters and is to be preferred elsewhere):
    likelihoods may be subsampled by a plate. Train it by
    :func:`~numpyro_sgp.natural_gradients` and :class:`~numpyro_sgp.TraceGP_ELBO`; a step
    costs two to three times that of :class:`~numpyro_sgp.AutoSparseGP`, for two sites.
    :meth:`result` has posteriors and predictions; ``sgp.fit(..., joint=True)`` does all of
    this.

    What rows have to do with is told by those of the set-up: where each of them has the
    effect of one group of many, later batches of rows with several have the bound NaN. Call
    :meth:`setup` with rows of all kinds first.

    Parameters are ``{prefix}_field_mu`` and ``{prefix}_field_sqrt``, inducing points
    ``{site}_{prefix}_Z``, and those of the base guide.

    :param model: a NumPyro model with GP sites, whose likelihood uses one row of linear
        predictors at a time.
    :param approximation: what to put at GP sites: :class:`~numpyro_sgp.SVGP`,
        :class:`~numpyro_sgp.SOLVEGP` or :class:`~numpyro_sgp.VGP` with full covariances, or
        a dict of them by site.
    :param base_guide: guide of the other latents, as for
        :class:`~numpyro_sgp.AutoSparseGP`.
    :param prefix: put into the names of all parameters.
    :raises ValueError: when first run, if the model is none of one Gaussian field: a deep
        GP, a mixture, a black box, a likelihood that ties rows together.

    >>> import jax, jax.numpy as jnp, numpyro, optax
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f + slope * X[:, 0], 0.1), obs=y)
    >>> X = jnp.linspace(0.0, 2.0, 30)[:, None]
    >>> y = jnp.sin(5.0 * X[:, 0]) + X[:, 0]
    >>> guide = sgp.AutoJointGP(model, sgp.SVGP(10))
    >>> optimiser = sgp.natural_gradients(guide, 1.0, optax.adam(0.01))
    >>> svi = numpyro.infer.SVI(model, guide, optimiser, sgp.TraceGP_ELBO())
    >>> result = svi.run(jax.random.key(0), 10, X, y, progress_bar=False)
    >>> posterior = guide.result(result.params, X, y)
    >>> posterior.posterior(X[:3])["slope"].sd.shape
    ()
    """

    def __init__(
        self,
        model: Callable,
        approximation: Any,
        base_guide: Callable = autoguide.AutoDelta,
        *,
        prefix: str = "auto",
    ):
        super().__init__(model, prefix=prefix)
        # Refuses what it refuses.
        self._sparse = AutoSparseGP(model, approximation, base_guide, prefix=prefix)
        self._make_base = base_maker(base_guide, prefix)
        self._set_up: _Known | None = None

    # ---- set-up -------------------------------------------------------------------

    def setup(self, *args, **kwargs) -> None:
        """
        Sets the guide up: see :meth:`AutoSparseGP.setup`.

        :param args: arguments of the model, with the training data.
        :raises ValueError: as the class says.
        """
        if self._set_up is None:
            args, kwargs = as_arrays(self.model, args, kwargs)
            with handlers.block():
                self._set_up = self._look(jax.random.key(0), args, kwargs)
            self.prototype_trace = self._sparse.prototype_trace

    def _look(self, rng_key, args, kwargs) -> _Known:
        guide = AutoSparseGP(self.model, self._sparse.approximation, prefix=self.prefix)
        guide.setup(*args, **kwargs)
        self._sparse = guide
        check_support_stays(guide, args, kwargs)
        check_likelihood(guide, args, kwargs)
        field = Field(guide, args, kwargs)
        starts = starting_hyperparameters(field, rng_key, args, kwargs)
        free = jnp.asarray(starts[0], field.dtype)
        choose_layout(field, free, args, kwargs, grouped=True)
        check_size(field, whole=True)
        base_guide, params = None, {}
        if field.thetas:
            base_guide = self._make_base(_WithoutField(self.model, field))
            seeded = handlers.seed(base_guide, rng_key)
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
            params = {k: s["value"] for k, s in trace.items() if s["type"] == "param"}
        known = _Known(field, base_guide, params, (args, kwargs))
        with handlers.trace() as trace:
            self._declared(known)
        params.update({k: s["value"] for k, s in trace.items() if s["type"] == "param"})
        return known

    def starts(self, rng_key: Array, args: tuple, kwargs: dict) -> dict:
        """
        Starting values of the guide's parameters: see :meth:`AutoSparseGP.starts`.

        :param rng_key: not used; those of the set-up are the same each time.
        """
        self.setup(*args, **kwargs)
        return dict(self.known().starts)

    def known(self) -> _Known:
        """
        What the set-up found.

        :raises ValueError: if the guide is not set up.
        """
        return check_set_up(self._set_up)

    def _declared(self, known) -> tuple[Array, Array, dict[str, dict]]:
        """m and P of q(w), and the values at GP sites, as parameters."""
        field, size = known.field, known.field.size
        names = self.parameter_names()["field"]
        mu = numpyro.param(names["qu_mu"], jnp.zeros(size, field.dtype))
        eye = jnp.eye(size, dtype=field.dtype)
        root = numpyro.param(names["qu_sqrt"], eye, constraint=lower_triangular)
        points = {}
        for name, site in field.sites.items():
            inducing = {k: p for k, p in site.initial.items() if p.role == "inducing"}
            declared = site.approximation.declare(site.prefix, inducing)
            points[name] = {**field.points[name], **declared}
        return mu, root, points

    # ---- for natural gradients ------------------------------------------------------

    def parameter_names(self) -> dict[str, dict[str, str]]:
        """Names of the parameters of q(w), by their names in a family q(u)."""
        start = f"{self.prefix}_field"
        return {"field": {"qu_mu": f"{start}_mu", "qu_sqrt": f"{start}_sqrt"}}

    def roles(self) -> dict[str, str]:
        """What parameters are for, by name: ``"variational"`` or ``"inducing"``."""
        found = dict.fromkeys(self.parameter_names()["field"].values(), "variational")
        for site in self.known().field.sites.values():
            for name, param in site.initial.items():
                if param.role == "inducing" and site.approximation.is_trained(param):
                    found[site.names[name]] = "inducing"
        return found

    @property
    def approximations(self) -> dict:
        """The family of q(w)."""
        return {"field": SimpleNamespace(family=Full(), draws_kl=False)}

    def take_natural_gradients(self, rate: float) -> None:
        """As :meth:`AutoSparseGP.take_natural_gradients`; there is nothing to prepare."""
        del rate

    # ---- the bound ------------------------------------------------------------------

    def bound_terms(self, rng_key: Array, params: dict, args: tuple, kwargs: dict) -> dict:
        """
        What :class:`~numpyro_sgp.TraceGP_ELBO` sums up: for one draw of the
        hyperparameters the expected log likelihood, the KL of q(w) and, for each
        hyperparameter, log p; and log q of all.

        :param rng_key: key of that draw and of a minibatch.
        :param params: constrained parameters of guide and model.
        """
        known, (base_key, key) = self.known(), jax.random.split(rng_key)
        with handlers.block(), handlers.substitute(data=params):
            mean, root, points = self._declared(known)
            thetas, log_q = self._thetas(known, base_key, args, kwargs)
        seeded = handlers.seed(handlers.substitute(self.model, data=params), key)
        field = known.field.running(seeded)
        terms = field.terms(thetas, points, args, kwargs)
        moments = terms.linear.moments(mean, Square(root))
        found = {
            "likelihood": expected(terms.log_likelihood, *moments, kinked=field.kinked),
            "field": -Block(mean, root).kl(),
        }
        if known.base_guide is not None:
            found["hyperparameters"] = terms.log_prior - log_q
        return found

    def _thetas(self, known, rng_key, args, kwargs):
        """Hyperparameters from the base guide, and their log density under it."""
        if known.base_guide is None:
            return Constrained(), 0.0
        with handlers.trace() as trace:
            seeded = handlers.seed(known.base_guide, rng_key)
            values = self._drawn(known, seeded, args, kwargs)
        sites = [s for s in trace.values() if s["type"] == "sample"]
        log_q = sum(jnp.sum(messages.log_prob(site)) for site in sites)
        return Constrained({name: values[name] for name in known.field.thetas}), log_q

    def _drawn(self, known, base_guide, args, kwargs) -> dict:
        return messengers.drawn_by(base_guide, known.field.thetas, args, kwargs)

    # ---- as a guide -----------------------------------------------------------------

    def __call__(self, *args, **kwargs) -> dict[str, Any]:
        """
        Draws all latents.

        :return: their values by name.
        """
        args, kwargs = as_arrays(self.model, args, kwargs)
        self.setup(*args, **kwargs)
        known = self.known()
        with Params(known.shapes, None) as params:
            mean, root, points = self._declared(known)
            values = {}
            if known.base_guide is not None:
                values = self._drawn(known, known.base_guide, args, kwargs)
        thetas = Constrained({name: values[name] for name in known.field.thetas})
        started = not params.started.isdisjoint(self.parameter_names()["field"].values())
        rng_key = numpyro.prng_key()
        rng_key = jax.random.key(0) if rng_key is None else rng_key
        plate_key, w_key, noise_key = jax.random.split(rng_key, 3)
        model = FirstRows(self.model) if started else self.model
        plates = _plates(model, plate_key, args, kwargs)
        here = handlers.seed(handlers.substitute(self.model, data=plates), plate_key)
        field = known.field.running(here)
        # Where no parameters are given, as in SVI.init, values of the right shape will do.
        with handlers.block():
            w = mean + Square(root).draw(jax.random.normal(w_key, mean.shape, mean.dtype))
            shapes = gp_shapes(field, points, args, kwargs)
            noise = {
                name: jax.random.normal(jax.random.fold_in(noise_key, i), (1, *shape))
                for i, (name, shape) in enumerate(shapes.items())
            }
            where = points, args, kwargs
            drawn = field_values(field, thetas, w[None], noise, *where, joint=not started)
        found = {}
        for name, value in drawn.items():
            fn = FieldValue(value[0], event_dim=value.ndim - 1)
            found[name] = numpyro.sample(name, fn)
        return {**{name: values[name] for name in known.field.thetas}, **found}

    def others_at(self, params: dict, args: tuple, kwargs: dict) -> dict:
        """
        Medians of the hyperparameters.

        :param params: parameters of the guide.
        """
        known = self.known()
        if known.base_guide is None:
            return {}
        values = known.base_guide.median(params)
        return {name: values[name] for name in known.field.thetas}

    # ---- results --------------------------------------------------------------------

    def result(self, params: dict, *args, **kwargs) -> JointFit:
        """
        Posteriors and predictions, with hyperparameters as this guide has them, at points
        under ``AutoDelta``, else 64 draws of the base guide.

        :param params: parameters of guide and model, such as ``result.params``.
        :param args: arguments of the model with all of the training data; those of the
            set-up if left out.
        """
        began = time.monotonic()
        if args or kwargs:
            args, kwargs = as_arrays(self.model, args, kwargs)
        else:
            args, kwargs = self.known().arguments
        found = self.fitted(params, args, kwargs)
        found.seconds = time.monotonic() - began
        return found

    def fitted(self, params: dict, args: tuple, kwargs: dict, **training) -> JointFit:
        """
        :meth:`result` of a training.

        :param training: what :class:`JointFit` knows of it.
        """
        known = self.known()
        with handlers.block(), handlers.substitute(data=params):
            mean, root, points = self._declared(known)
            draws = self._draws(known, params, args, kwargs)
        field, own = known.field, {k: v for k, v in params.items() if k not in known.starts}
        if own:  # parameters of the model
            field = field.running(handlers.substitute(self.model, data=own))

        def raveled(args, kwargs, draws):
            return jax.lax.map(lambda values: field.ravel(values, args, kwargs), draws)

        free = np.zeros((1, 0), field.dtype)
        if field.thetas:
            free = np.asarray(on_data(raveled, args, kwargs, draws))
        q = unweighed(mean, Square(root))
        unknown = Gaussian.prior(0, known.field.dtype)
        nodes = tuple(Node(at, 0.0, unknown, np.nan, q) for at in free)
        centre, kind = free.mean(axis=0), One if len(free) == 1 else Drawn
        spread = (
            np.eye(len(centre)) if len(free) == 1 else np.diag(free.std(axis=0) + 1e-12)
        )
        weights = np.full(len(free), 1.0 / len(free))
        # The evidence is not known, and is not said.
        numbers = np.nan, 0.0, centre, spread
        found = kind(nodes, weights, *numbers, points, "by AutoJointGP")
        return JointFit(field, found, args, kwargs, params=params, **training)

    def _draws(self, known, params, args, kwargs) -> dict:
        """Hyperparameters by name, with a leading axis of draws; of points there is one."""
        base = known.base_guide
        if base is None:
            return {}
        if isinstance(base, autoguide.AutoDelta):
            found = {k: jnp.asarray(v)[None] for k, v in base.median(params).items()}
        else:
            keys = jax.random.split(jax.random.key(0), _DRAWS)
            found = jax.lax.map(lambda k: handlers.seed(base, k)(*args, **kwargs), keys)
        return {name: found[name] for name in known.field.thetas}

    def posterior(self, params: dict, *args, **kwargs) -> dict:
        """
        Marginals of GP sites, of effects and of sums of them: see :meth:`Nested.posterior`.

        :param params: parameters of guide and model.
        :param args: arguments of the model, ``X_new`` most often.
        """
        return self.result(params).posterior(*args, **kwargs)

    def sample_posterior(
        self, rng_key: Array, params: dict, *args, sample_shape: tuple = (), **kwargs
    ) -> dict:
        """
        Joint draws of all latent and deterministic sites: see :meth:`Nested.sample`.

        :param rng_key: random key.
        :param params: parameters of guide and model.
        :param args: arguments of the model; those of the set-up if left out.
        :param sample_shape: shape of the sample.
        """
        found = self.result(params)
        return found.sample(rng_key, *args, sample_shape=sample_shape, **kwargs)

    def median(self, params: dict, *args, **kwargs) -> dict:
        """Posterior medians: see :meth:`Nested.median`."""
        return self.result(params).median(*args, **kwargs)

    def quantiles(self, params: dict, quantiles: Sequence[float], *args, **kwargs) -> dict:
        """Posterior quantiles: see :meth:`Nested.quantiles`."""
        return self.result(params).quantiles(quantiles, *args, **kwargs)


class _WithoutField:
    """The model for the base guide: GP sites at their prior means and effects, hidden."""

    def __init__(self, model, field):
        self._inner = WithoutGPs(model, list(field.sites))
        self._effects = field.effects

    def __call__(self, *args, **kwargs) -> dict[str, Any]:
        with handlers.block(hide=list(self._effects)):
            return self._inner(*args, **kwargs)


def _plates(model, rng_key, args, kwargs) -> dict:
    """The rows that subsampled plates take, shown to what runs the guide."""

    def other(site):
        return site["type"] != "plate"

    plates, at_mean = Plates(), messages.AtGPSites(messages.at_prior_mean)
    with plates, handlers.block(hide_fn=other), at_mean:
        handlers.seed(WholeIfFew(model), rng_key)(*args, **kwargs)
    return plates.values


def _shape(value):
    return jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))


JOINT_GUIDES.append(AutoJointGP)
