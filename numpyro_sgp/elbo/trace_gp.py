"""The evidence lower bound of models with GP sites."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.infer.elbo import ELBO

from numpyro_sgp._checks import check_whole
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.elbo.expectation import (
    AtNodes,
    Expectation,
    check_expectation,
    check_inputs_known,
    weighted,
)
from numpyro_sgp.elbo.pairs import check_priors, is_own
from numpyro_sgp.elbo.particle import Particle
from numpyro_sgp.elbo.predictor import default_expectation
from numpyro_sgp.tracing import messages


class MarginalGradients(NamedTuple):
    """See :meth:`TraceGP_ELBO.marginal_gradients`."""

    mean: jax.Array
    to_mean: jax.Array
    to_variance: jax.Array
    prior_mean: jax.Array


class TraceGP_ELBO(ELBO):
    r"""
    Evidence lower bound of a model with GP sites and a guide of sparse posteriors,

    .. math::

        \sum_n E_{q(f_n)}[\log p(y_n \mid f_n)] - \mathrm{KL}[q(u) \| p(u)]

    (Shi et al. 2020, eq. 2, and 31 for several sets), with the expectation taken over *any*
    model code: the model is run with f at :math:`\mu + \sigma x_s`, and what it scores is
    averaged with weights :math:`w_s`. Only the marginals of f are used. Guide and model are
    traced once for all nodes, and a step factorises each K_uu once. Other latent variables
    are drawn from the guide once a particle, as in :class:`~numpyro.infer.Trace_ELBO`;
    subsampling plates scale the expected log likelihood and not the KL.

    A relaxed conditional (``tight=...`` of an approximation) makes the bound tighter; what
    it costs is part of the data's terms and scaled as these are.

    A likelihood with an expectation of its own (an ``expected_log_prob``, as
    :class:`~numpyro_sgp.likelihoods.RobustMax` has) is not averaged over nodes.

    The components of a mixture posterior (:class:`~numpyro_sgp.MixtureSVGP`) are integrated
    one by one and weighted, so that no component is ever drawn.

    :param expectation: :class:`GaussHermite`, :class:`Trapezoid`,
        :class:`AlongPredictors`, :class:`MonteCarlo`, :class:`ScoreFunction` (for a
        likelihood without a gradient), another
        :class:`~numpyro_sgp.elbo.Expectation`, or None for ``GaussHermite(20)`` with one
        latent function, ``GaussHermite(10)`` with two (``Trapezoid(400)`` in the place of
        20 nodes and ``Trapezoid(40)`` of 10, with fewer for more than 2048 rows, where the
        likelihood has kinks, as a Laplace distribution has), the same in
        :class:`AlongPredictors` with several of which the likelihood takes one or two
        linear combinations at each row (their sum), the same nodes for functions that are
        in no term together with several of which each term takes one or two (responses
        with functions of their own), and
        ``MonteCarlo(16, antithetic=True, sequence="sobol")`` with more;
        ``MonteCarlo(10)`` where a GP site combines several rows of another one
        (``joint=True`` where the likelihood ties rows together). An
        :class:`~numpyro_sgp.AutoSparseGP` finds out about sums, terms, kinks and ties.
    :param num_particles: number of draws of the latents beside f; mutable state is that of
        the first.
    :param vectorize_particles: as in :class:`~numpyro.infer.Trace_ELBO`.
    :param sum_sites: whether to return one number, or the negative contribution of each
        site by name (minus the expected log likelihood of an observed site, the KL of a
        GP site).
    :raises ValueError: for quadrature over more than three latent functions, or where
        rows are combined or drawn together, a rule on
        marginals for a likelihood that ties rows of X together, a guide without sparse
        posteriors, or a guide that draws another minibatch than the model.

    >>> import numpyro_sgp as sgp
    >>> loss = sgp.TraceGP_ELBO(sgp.GaussHermite(20))
    """

    #: Whether a KL that has an estimate by random numbers is estimated.
    draws_kl = True

    def __init__(
        self,
        expectation: Expectation | None = None,
        num_particles: int = 1,
        vectorize_particles=True,
        sum_sites: bool = True,
    ):
        check_expectation(expectation)
        check_whole(num_particles, "num_particles", least=1)
        self.expectation = expectation
        self.sum_sites = sum_sites
        super().__init__(num_particles, vectorize_particles)

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        """See :meth:`numpyro.infer.ELBO.loss_with_mutable_state`."""
        if getattr(guide, "prototype_trace", ...) is None and hasattr(guide, "setup"):
            guide.setup(*args, **kwargs)  # not where X is unknown

        joint = getattr(guide, "bound_terms", None)  # that of AutoJointGP
        if joint is not None and self.expectation is not None:
            raise ValueError(
                f"{type(guide).__name__} integrates the likelihood over linear predictors, "
                "by quadrature where there are up to three in a row. Leave the expectation "
                "out: TraceGP_ELBO()."
            )

        def particle(rng_key):
            if joint is not None:
                return joint(rng_key, param_map, *as_arrays(model, args, kwargs)), {}
            run = self._particle(rng_key, param_map, model, guide, args, kwargs)
            return _bound(*run)[:2]

        if self.num_particles == 1:
            terms, mutable = particle(rng_key)
        else:
            keys = random.split(rng_key, self.num_particles)
            terms, mutable = self.vectorize_particles_fn(particle, keys)
            terms = jax.tree.map(lambda x: jnp.mean(x, axis=0), terms)
            # NumPyro's ELBOs drop the state, and with it the structure of SVI's.
            mutable = jax.tree.map(lambda x: x[0], mutable)
        loss = jax.tree.map(jnp.negative, terms)
        if self.sum_sites:
            loss = sum(loss.values())
        return {"loss": loss, "mutable_state": mutable or None}

    def marginal_gradients(self, rng_key, param_map, model, guide, *args, **kwargs):
        r"""
        The loss, and the derivatives of the expected log likelihood with respect to the
        marginals of f at each row: what natural gradients are made of. The random numbers
        are those of the loss with the same key.

        :return: the loss, and for each GP site a named tuple of arrays of shape
            ``batch_shape + (N,)``: ``mean``, :math:`\mu_n`, ``to_mean``,
            :math:`\partial E / \partial \mu_n`, ``to_variance``,
            :math:`\partial E / \partial \sigma_n^2`, and ``prior_mean``, :math:`m(x_n)`;
            the derivatives are divided by the scale of the site's KL, if it has one
            (:class:`numpyro.handlers.scale`).
        """
        if self.num_particles != 1:
            raise ValueError("marginal_gradients needs num_particles=1.")
        particle, node_key = self._particle(
            rng_key, param_map, model, guide, args, kwargs, moving=True
        )
        for name, site in particle.sites.items():
            several = particle.rule.joint or site.num_components > 1 or site.joint_rows > 1
            if several or not site.independent_latents:
                raise ValueError(
                    "Natural gradients are made of derivatives by the marginals of f, but "
                    f"GP site '{name}' has a mixture, coupled latent functions or joint "
                    "draws (of rows that are tied together). Use natural=False."
                )
        check_inputs_known(particle.sites, "Natural gradients need")

        def elbo(shift):
            terms, _, fixed = _bound(particle, node_key, shift)
            return sum(terms.values()), fixed

        shift = {
            (kind, name): jnp.zeros(site.shape, site.dtype)
            for name, site in particle.sites.items()
            for kind in ("mean", "var")
        }
        (total, fixed), slopes = jax.value_and_grad(elbo, has_aux=True)(shift)
        scales = fixed["scale"]
        if any(jnp.ndim(scale) for scale in scales.values()):
            raise ValueError("A GP site may be scaled by a number only, not by an array.")
        return -total, {
            name: MarginalGradients(
                mean,
                *(slopes[kind, name] / scales[name] for kind in ("mean", "var")),
                fixed["prior_mean"][name],
            )
            for name, (mean, _) in fixed["marginals"].items()
        }

    def gaussian_rows(self, rng_key, param_map, model, guide, args, kwargs):
        r"""
        What a Gaussian likelihood says of rows. Latents beside f are those of the loss with
        the same key.

        :param args: tuple of the arguments of the model.
        :param kwargs: dict of its keyword arguments.
        :return: a named tuple of ``linear`` and ``precision``, by GP site, and the like, of
            f less the prior's mean; and by site ``projection``, :math:`L^{-1} K_{uX}`.
        """
        given = rng_key, param_map, model, guide, args, kwargs
        return self._particle(*given, moving=True)[0].gaussian_rows()

    def moved(self, rng_key, shift, param_map, model, guide, args, kwargs):
        """
        The bound with the marginals of f moved: that of a posterior with independent parts
        added to it, but for their KL. The random numbers are those of the loss with the
        same key, one particle.

        :param shift: what is added, by ``("mean", site)`` and ``("var", site)``; zero where
            left out.
        :param args: tuple of the arguments of the model.
        :param kwargs: dict of its keyword arguments.
        :return: contributions by site, whose sum is the bound; and what the rules know of
            each GP site (:class:`~numpyro_sgp.elbo.particle.GPSite`).
        """
        particle, node_key = self._particle(
            rng_key, param_map, model, guide, args, kwargs, moving=True
        )
        return _bound(particle, node_key, shift)[0], particle.sites

    def rule_for(self, shapes: dict[str, tuple[int, ...]], *told) -> Expectation:
        """
        The rule for some GP sites: the one that was given, or the one that suits them.

        :param shapes: ``batch_shape + (N,)`` of each GP site.
        :param told: what else is known of them, as ``default_expectation`` takes it.
        """
        return self.expectation or default_expectation(shapes, *told)

    def _particle(self, rng_key, param_map, model, guide, args, kwargs, moving=False):
        """Guide and model, run once, and the key for the nodes."""
        args, kwargs = as_arrays(model, args, kwargs)
        model_key, guide_key, node_key, kl_key = random.split(rng_key, 4)
        params = jax.tree.map(lambda x: x, param_map)  # dicts of state may be changed

        def run_guide(params=params):
            with handlers.substitute(data=params), handlers.seed(rng_seed=guide_key):
                guide(*args, **kwargs)

        def run_model(guide_trace, params=params):
            # Not all of NumPyro's control flow replays.
            state = {**messages.drawn(guide_trace), **messages.mutable(guide_trace)}
            given = handlers.substitute(data={**params, **state})
            with given, handlers.replay(trace=guide_trace):
                with handlers.seed(rng_seed=model_key):
                    model(*args, **kwargs)

        if not is_own(model, guide):
            check_priors(run_guide, lambda params, trace: run_model(trace, params), params)

        drawn = kl_key if self.draws_kl else None
        runs = self.rule_for, run_guide, run_model
        return Particle(*runs, kl_key, drawn, moving), node_key


def _bound(particle, rng_key, given=None):
    """
    :param given: values by the keys of openings.
    :return: contributions by site, mutable state, and what does not depend on f.
    """
    given = {**(given or {}), **particle.precisions()}
    several = {k: s.num_components for k, s in particle.sites.items()}
    numbers = list(itertools.product(*map(range, several.values())))
    if len(numbers) == 1:
        return _of_component(particle, rng_key, given)
    # E = sum_k pi_k E_k (Bonilla et al. 2018, eq. 24): no component is drawn.
    components = {
        ("component", name): jnp.array(ks)
        for name, ks in zip(several, zip(*numbers, strict=True), strict=True)
    }
    terms, state, fixed = jax.vmap(
        lambda key, component: _of_component(particle, key, {**given, **component})
    )(random.split(rng_key, len(numbers)), components)
    weights = jnp.exp(sum(fixed["log_weight"].values()))
    terms = {name: weighted(weights, term) for name, term in terms.items()}
    return terms, _likeliest(state, weights), fixed


def _of_component(particle, rng_key, given):
    """The same under one component of each posterior, the expectation by the rule."""
    rule, (at, options) = particle.rule, particle.at_nodes(given)
    nodes, weights = rule.nodes(rng_key, particle.shapes, particle.dtype, **options)
    on_f, fixed = jax.vmap(at, out_axes=(0, None))(nodes)
    terms = rule.average(AtNodes(on_f["log_prob"], nodes, weights, fixed["marginals"]))
    terms |= {name: jnp.sum(value) for name, value in fixed["log_prob"].items()}

    def subtract(kind, scale=lambda name: 1.0):
        means = {name: weighted(weights, value) for name, value in on_f[kind].items()}
        for name, value in (fixed[kind] | means).items():
            terms[name] = terms.get(name, 0.0) - scale(name) * value

    subtract("guide")  # log q of the latents beside f
    subtract("kl")
    # Of a relaxed q(f | u) (Titsias 2025), by rows: scaled as the data's terms are.
    subtract("cost", particle.row_scale)
    return terms, _likeliest(on_f["state"], weights) | fixed["state"], fixed


def _likeliest(state, weights):
    """State that depends on f is that of the likeliest node, not one in the tails."""
    return jax.tree.map(lambda x: x[jnp.argmax(weights)], state)
