"""The evidence lower bound of models with GP sites."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import MaskedDistribution
from numpyro.distributions.util import scale_and_mask
from numpyro.infer.elbo import ELBO
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.util import (
    _validate_model,
    check_model_guide_match,
    not_jax_tracer,
)

from numpyro_sgp.distributions import sites
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.elbo.coupling import log_likelihood
from numpyro_sgp.elbo.curvature import row_precisions
from numpyro_sgp.elbo.expectation import (
    GaussHermite,
    MonteCarlo,
    ScoreFunction,
    default_expectation,
)
from numpyro_sgp.elbo.rows import by_row, sites_on_f
from numpyro_sgp.elbo.score import surrogate


class TraceGP_ELBO(ELBO):
    r"""
    Evidence lower bound of a model with GP sites and a guide of sparse posteriors,

    .. math::

        \sum_n E_{q(f_n)}[\log p(y_n \mid f_n)] - \mathrm{KL}[q(u) \| p(u)]

    with the expectation taken over *any* model code: the model is run with f at
    :math:`\mu + \sigma x_s`, and what it scores is averaged with weights :math:`w_s`.
    Only the marginals of f are used. The posterior is made once for all nodes, so a step
    factorises each K_uu once. Other latent variables are drawn from the guide once a
    particle, as in :class:`~numpyro.infer.Trace_ELBO`; subsampling plates scale the
    expected log likelihood and not the KL.

    A relaxed conditional (``tight=...`` of an approximation) makes the bound tighter; what
    it costs is part of the data's terms and scaled as these are.

    A likelihood with an expectation of its own (an ``expected_log_prob``, as
    :class:`~numpyro_sgp.likelihoods.RobustMax` has) is not averaged over nodes.

    The components of a mixture posterior (:class:`~numpyro_sgp.MixtureSVGP`) are integrated
    one by one and weighted, so that no component is ever drawn.

    :param expectation: :class:`GaussHermite`, :class:`MonteCarlo`,
        :class:`ScoreFunction` (for a likelihood without a gradient), or None for
        ``GaussHermite(20)`` with one latent function, ``GaussHermite(10)`` with two, and
        ``MonteCarlo(10)`` with more, or where a GP site combines several rows of another
        one (``joint=True`` where an :class:`~numpyro_sgp.AutoSparseGP` found that the
        likelihood ties rows together).
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

    **Example:**

    .. doctest::

        >>> import numpyro_sgp as sgp
        >>> loss = sgp.TraceGP_ELBO(sgp.GaussHermite(20))
    """

    def __init__(
        self,
        expectation: GaussHermite | MonteCarlo | ScoreFunction | None = None,
        num_particles: int = 1,
        vectorize_particles=True,
        sum_sites: bool = True,
    ):
        if expectation is not None and (
            isinstance(expectation, type) or not hasattr(expectation, "nodes")
        ):
            raise TypeError(
                "expectation must be a rule such as GaussHermite(20) or MonteCarlo(10), or "
                f"None, got {expectation!r}."
            )
        self.expectation = expectation
        self.sum_sites = sum_sites
        super().__init__(num_particles, vectorize_particles)

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        """See :meth:`numpyro.infer.ELBO.loss_with_mutable_state`."""
        args, kwargs = as_arrays(model, args, kwargs)
        if getattr(guide, "prototype_trace", ...) is None and hasattr(guide, "setup"):
            guide.setup(*args, **kwargs)  # not inside eval_shape, where X is unknown

        def particle(rng_key):
            return self._particle(rng_key, param_map, model, guide, args, kwargs)[:2]

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

        :return: the loss, and for each GP site :math:`\mu_n`,
            :math:`\partial E / \partial \mu_n` and
            :math:`\partial E / \partial \sigma_n^2`, arrays of shape
            ``batch_shape + (N,)``; the derivatives are divided by the scale of the site's
            KL, if it has one (:class:`numpyro.handlers.scale`).
        """
        if self.num_particles != 1:
            raise ValueError("marginal_gradients needs num_particles=1.")
        args, kwargs = as_arrays(model, args, kwargs)

        def elbo(shift):
            terms, _, marginals = self._particle(
                rng_key, param_map, model, guide, args, kwargs, shift
            )
            return sum(terms.values()), marginals

        found = jax.eval_shape(lambda: elbo({})[1])
        shift = {
            name: tuple(jnp.zeros(s.shape, s.dtype) for s in moments[:2])
            for name, moments in found.items()
        }
        (total, marginals), slopes = jax.value_and_grad(elbo, has_aux=True)(shift)
        if any(jnp.ndim(scale) for *_, scale in marginals.values()):
            raise ValueError("A GP site may be scaled by a number only, not by an array.")
        return -total, {
            name: (mean, *(slope / scale for slope in slopes[name]))
            for name, (mean, _, scale) in marginals.items()
        }

    def _particle(self, rng_key, param_map, model, guide, args, kwargs, shift=None):
        """
        ELBO contributions by site, and mutable state, for one draw of the guide.

        :param shift: what is added to the marginal means and variances of GP sites, whose
            marginals are then returned too; an empty dict stands for zeros.
        """
        model_key, guide_key, node_key, kl_key = random.split(rng_key, 4)

        def run(place):
            """Guide and model with f where ``place`` puts it."""
            seeded = handlers.substitute(handlers.seed(guide, guide_key), data=param_map)
            placed = handlers.substitute(seeded, substitute_fn=place)
            guide_trace = handlers.trace(placed).get_trace(*args, **kwargs)
            mutable = _mutable(guide_trace)
            replayed = handlers.replay(handlers.seed(model, model_key), guide_trace)
            model_trace = handlers.trace(
                handlers.substitute(replayed, data={**param_map, **mutable})
            ).get_trace(*args, **kwargs)
            return guide_trace, model_trace, {**mutable, **_mutable(model_trace)}

        found = self._gp_sites(run)
        expectation = self._rule(found)
        score = isinstance(expectation, ScoreFunction)
        joint = getattr(expectation, "joint", False)
        relaxed = any(site.tight is not None for site in found.values())
        on_f = _sites_on_f(run, found) if score or relaxed else set()
        if shift is not None:
            for name, site in found.items():
                several = joint or site.num_components > 1 or site.joint_rows > 1
                if several or not site.independent_latents:
                    raise ValueError(
                        "Natural gradients are made of derivatives by the marginals of f, "
                        f"but GP site '{name}' has a mixture, coupled latent functions or "
                        "joint draws (of rows that are tied together). Use "
                        "natural=False."
                    )

        precisions = self._precisions(run, found)

        def at(node, component):
            """
            Terms of the ELBO with f at one node of one component, and what does not depend
            on the node: log weight and marginals of the component.
            """
            log_weight, marginals, placed = [], {}, {}

            def place(site):
                if not sites.is_sparse_posterior(site):
                    return None
                q, _ = sites.unwrap(site["fn"])
                name = site["name"]
                x, k = node[name], component[name]
                if found[name].num_components > 1:
                    log_weight.append(q.log_weights[k])
                if joint:
                    f = q.sample(x)
                elif score or shift is not None or q.relaxation is not None:
                    mean, variance = q.bound_marginals(k)
                    if shift:
                        mean, variance = mean + shift[name][0], variance + shift[name][1]
                    f = mean + jnp.sqrt(variance) * x
                    if score or shift is not None:
                        marginals[name] = (mean, variance)
                else:
                    f = q.place(x, k)
                if score:
                    f = jax.lax.stop_gradient(f)
                else:
                    placed[name] = lambda: marginals.get(name) or q.bound_marginals(k)
                return jnp.reshape(f, site["fn"].shape())

            guide_trace, model_trace, mutable = run(place)
            log_probs = _log_prob_arrays(model_trace, found, placed)
            terms = _contributions(model_trace, guide_trace, kl_key, log_probs)
            for name, site in found.items():
                if site.tight is not None:
                    q, _ = sites.unwrap(guide_trace[name]["fn"])
                    scale = _row_scale(model_trace, name, site.shape[-1], on_f)
                    cost = q.relaxation_cost(precisions.get(name, 0.0) / scale)
                    terms[name] = terms[name] - scale * jnp.sum(cost)
            rows = _row_values(log_probs, found, on_f) if score else {}
            if shift is not None:
                for name, moments in marginals.items():
                    scale = guide_trace[name]["scale"]
                    marginals[name] = (*moments, 1.0 if scale is None else scale)
            # The guide's own state, unlike the model's, seldom depends on f.
            own = _mutable(guide_trace).keys() - _mutable(model_trace).keys()
            own = {k: mutable.pop(k) for k in sorted(own)}
            outside = sum(log_weight, jnp.zeros(())), marginals
            return (terms, rows, mutable), own, outside

        def at_component(component, key):
            nodes, weights = expectation.nodes(key, found.shapes, found.dtype)

            def run_at(axis):
                """With an axis of nodes, or none, in the guide's own state."""
                run = jax.vmap(lambda node: at(node, component), out_axes=(0, axis, None))
                return run(nodes)

            try:
                stacked, own, (log_weight, marginals) = _one_state(run_at, weights)
                terms, rows, mutable = stacked
            except ValueError as error:
                if "out_axes" not in str(error):
                    raise
                what = "ScoreFunction needs" if score else "Natural gradients need"
                raise ValueError(
                    f"{what} GP sites whose inputs do not depend on another GP site; here "
                    "one does (a deep GP). Use MonteCarlo(num_samples), and natural=False "
                    "for fit_lbfgs."
                ) from None
            # What does not depend on f is the same at every node; the weights sum to 1.
            terms = jax.tree.map(lambda x: jnp.dot(weights.astype(x.dtype), x), terms)
            # State that depends on f is that of the likeliest node, not one in the tails.
            mutable = jax.tree.map(lambda x: x[jnp.argmax(weights)], mutable) | own
            for name, values in rows.items():
                terms[name] = terms[name] + sum(
                    surrogate(
                        *marginals[site][:2], nodes[site], v, expectation.control_variate
                    )
                    for site, v in values.items()
                )
            return terms, mutable, jnp.exp(log_weight), marginals

        components = found.components()
        if len(components) == 1:
            terms, mutable, _, marginals = at_component(components[0], node_key)
            return terms, mutable, marginals
        # Stratified over the components: none of them is drawn.
        keys = random.split(node_key, len(components))
        stacked = jax.tree.map(lambda *k: jnp.array(k), *components)
        terms, mutable, weights, _ = jax.vmap(at_component)(stacked, keys)
        terms = jax.tree.map(lambda x: jnp.dot(weights.astype(x.dtype), x), terms)
        return terms, jax.tree.map(lambda x: x[jnp.argmax(weights)], mutable), {}

    def _precisions(self, run, found) -> dict[str, Array]:
        """Of the Gaussian likelihood at each row of the sites whose bound asks for it."""
        names = [name for name, site in found.items() if site.tight]
        if not names:
            return {}

        def log_density(values):
            return log_likelihood(run(_placed(values))[1], found)

        # They are the same at any f, or AutoSparseGP would have refused the model.
        zeros = {name: jnp.zeros(site.shape, site.dtype) for name, site in found.items()}
        return row_precisions(log_density, zeros, names)

    def _rule(self, found):
        """The expectation rule, checked against the GP sites."""
        coupled = any(site.couples_rows for site in found.values())
        combined = any(s.combines_rows or s.joint_rows > 1 for s in found.values())
        expectation = self.expectation
        if expectation is None:
            expectation = default_expectation(found.shapes, coupled, combined)
        if combined and isinstance(expectation, GaussHermite):
            raise ValueError(
                "A GP site combines several rows of another one (an image of patches), or "
                "draws rows together (joint_rows), where one quadrature node for all rows "
                f"would be wrong. Use MonteCarlo(num_samples) in place of {expectation}."
            )
        joint = getattr(expectation, "joint", False)
        if coupled and not joint:
            raise ValueError(
                "The likelihood ties rows of X together (a log density with mixed second "
                f"derivatives between rows), and {expectation} uses the marginals of f "
                "alone. Use TraceGP_ELBO(MonteCarlo(num_samples, joint=True))."
            )
        for name, site in found.items():
            if site.joint_rows > 1 and (
                site.tight is not None or isinstance(expectation, ScoreFunction)
            ):
                raise ValueError(
                    f"GP site '{name}' draws groups of {site.joint_rows} rows together "
                    "(joint_rows), but a tight bound and ScoreFunction use the marginals "
                    "of f alone. Use tight='none' and MonteCarlo(num_samples)."
                )
            if joint and site.tight is not None:
                raise ValueError(
                    f"GP site '{name}' has a tight bound, which is for expectations under "
                    "marginals of f; MonteCarlo(..., joint=True) draws rows together. Use "
                    "tight='none'."
                )
            if joint and site.num_components > 1:
                raise ValueError(
                    f"GP site '{name}' has a mixture posterior, whose components are "
                    "integrated one by one; MonteCarlo(..., joint=True) draws from all of "
                    "them. Use a single Gaussian (SVGP) for a likelihood that ties rows "
                    "together."
                )
            if isinstance(expectation, ScoreFunction) and not site.independent_latents:
                raise ValueError(
                    f"GP site '{name}' has coupled latent functions, but ScoreFunction "
                    "needs them to be independent at each row. Use "
                    "MonteCarlo(num_samples), or covariance='full' for each function."
                )
        return expectation

    def _gp_sites(self, run):
        """The GP sites of a run, without computing anything."""
        found = _GPSites()

        def place(site):
            if not sites.is_sparse_posterior(site):
                return None
            q, _ = sites.unwrap(site["fn"])
            found[site["name"]] = _GPSite(
                q.shape(),
                site["fn"].shape(),
                q.prior.X.dtype,
                site["infer"].get("couples_rows", False),
                site["infer"].get("combines_rows", False),
                q.joint_rows,
                q.num_components,
                q.independent_latents,
                None if q.relaxation is None else q.relaxation.is_gaussian,
            )
            return jnp.zeros(site["fn"].shape(), q.prior.X.dtype)

        def check():
            guide_trace, model_trace, _ = run(place)
            check_model_guide_match(model_trace, guide_trace)
            _validate_model(model_trace, plate_warning="loose")
            _check_pair(model_trace, guide_trace, found)

        jax.eval_shape(check)
        return found


class _GPSite(NamedTuple):
    """What the rules need to know of a GP site; ``shape`` is ``batch_shape + (N,)``."""

    shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    dtype: object
    couples_rows: bool
    combines_rows: bool
    joint_rows: int
    num_components: int
    independent_latents: bool
    tight: bool | None  # relaxed, and for Gaussian likelihoods only


class _GPSites(dict):
    """GP sites by name."""

    @property
    def shapes(self):
        return {name: site.shape for name, site in self.items()}

    @property
    def dtype(self):
        return jnp.result_type(*(site.dtype for site in self.values()))

    def components(self):
        """All combinations of one component of each site."""
        counts = [range(site.num_components) for site in self.values()]
        return [dict(zip(self, ks, strict=True)) for ks in itertools.product(*counts)]


def _one_state(run_at, weights):
    """
    ``run_at(None)``, with one state of the guide for all nodes, of which there are no
    copies then; where it does depend on f, that of the likeliest node of ``run_at(0)``.
    """
    try:
        return run_at(None)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
    terms, own, outside = run_at(0)
    return terms, jax.tree.map(lambda x: x[jnp.argmax(weights)], own), outside


def _mutable(trace):
    return {k: v["value"] for k, v in trace.items() if v["type"] == "mutable"}


def _check_pair(model_trace, guide_trace, shapes):
    if not shapes:
        raise ValueError(
            "The guide has no sparse posterior at any site. Use AutoSparseGP(model, ...) "
            "as the guide, or one of NumPyro's ELBOs with this one."
        )
    for name, site in model_trace.items():
        if sites.is_latent_gp(site) and name not in shapes:
            raise ValueError(f"The guide has no sparse posterior at GP site '{name}'.")
    for name in subsample_plate_sizes(model_trace):
        if name not in guide_trace:
            raise ValueError(
                f"The model subsamples plate '{name}', but the guide does not open it, so "
                "that each would see a minibatch of its own. Open "
                f"numpyro.plate('{name}', ...) with the same sizes in the guide."
            )


def _row_scale(trace, name, num_rows, on_f) -> float:
    """
    What data plates multiply the terms of the rows of a GP site by, for its tight bound.

    :param on_f: names of the observed sites that depend on f.
    """
    if trace[name]["scale"] is not None:
        raise ValueError(
            f"GP site '{name}' is scaled (numpyro.handlers.scale) and has a tight bound, "
            "which is for the unscaled prior. Use tight='none'."
        )
    subsampled, scales = subsample_plate_sizes(trace), set()
    for observed in on_f:
        site, scale = trace[observed], 1.0
        for frame in site["cond_indep_stack"]:
            size, batch = subsampled.get(frame.name, (1, 1))
            if frame.name in subsampled and batch != num_rows:
                raise ValueError(
                    f"GP site '{name}' has a tight bound and {num_rows} rows, but "
                    f"'{observed}' takes a minibatch of {batch} rows of plate "
                    f"'{frame.name}'. Sample the process at the rows of the minibatch, "
                    "X[idx], or use tight='none'."
                )
            scale *= size / batch
        found = 1.0 if site["scale"] is None else site["scale"]
        if not not_jax_tracer(found) or abs(float(found) / scale - 1.0) > 1e-5:
            raise ValueError(
                f"GP site '{name}' has a tight bound, but '{observed}' is scaled beside "
                "its plates (numpyro.handlers.scale). Scale minibatches by "
                "numpyro.plate(name, N, subsample_size=B), or use tight='none'."
            )
        scales.add(scale)
    if len(scales) > 1:
        raise ValueError(
            f"GP site '{name}' has a tight bound, whose terms belong to the rows of one "
            f"data plate, but {sorted(on_f)} have the scales {sorted(scales)}. Use "
            "tight='none'."
        )
    return scales.pop() if scales else 1.0


def _log_prob_arrays(model_trace, found, marginals=None) -> dict[str, Array]:
    """
    Log densities of the sites beside GPs, each evaluated once; with ``marginals`` of GP
    sites, the expected one of a distribution that has it in closed form.
    """
    return {
        name: _expected_log_prob(site, model_trace, found, marginals)
        if marginals and _has_expectation(site)
        else sites.log_prob(site)
        for name, site in model_trace.items()
        if site["type"] == "sample" and name not in found
    }


def _has_expectation(site):
    fn = sites.unwrap(site["fn"])[0]
    fn = fn.base_dist if isinstance(fn, MaskedDistribution) else fn
    return site["is_observed"] and hasattr(fn, "expected_log_prob")


def _expected_log_prob(site, model_trace, found, marginals):
    """
    E[log p(y | f)] at an observed site whose distribution has ``expected_log_prob`` and, as
    ``f``, the value of a GP site; under the marginals of f alone.
    """
    fn, mask = sites.unwrap(site["fn"])[0], None
    if isinstance(fn, MaskedDistribution):
        fn, mask = fn.base_dist, fn._mask
    names = [name for name in marginals if model_trace[name]["value"] is fn.f]
    if not names or not found[names[0]].independent_latents:
        raise ValueError(
            f"Site '{site['name']}' has a {type(fn).__name__}, whose expectation is taken "
            "under independent latent functions: give it the value of a GP site as it is, "
            "with covariance='full' for each function. Or use "
            "TraceGP_ELBO(ScoreFunction(num_samples))."
        )
    moments = [jnp.reshape(x, fn.f.shape) for x in marginals[names[0]]()]
    expected = fn.expected_log_prob(*moments, site["value"])
    return scale_and_mask(expected, site["scale"], mask)


def _contributions(model_trace, guide_trace, kl_key, log_probs) -> dict[str, Array]:
    """log p - log q of each site, by the KL at GP sites."""
    terms = {}
    for name, site in model_trace.items():
        if site["type"] != "sample":
            continue
        if name in guide_trace and sites.is_sparse_posterior(guide_trace[name]):
            guide_site = guide_trace[name]
            kl = sites.unwrap(guide_site["fn"])[0].prior_kl(kl_key)
            terms[name] = -jnp.sum(scale_and_mask(kl, guide_site["scale"]))
        else:
            terms[name] = jnp.sum(log_probs[name])
    for name, site in guide_trace.items():
        if site["type"] != "sample" or sites.is_sparse_posterior(site):
            continue
        if not site["is_observed"] or site["infer"].get("is_auxiliary"):
            terms[name] = terms.get(name, 0.0) - jnp.sum(sites.log_prob(site))
    return terms


def _placed(values):
    """Puts known values at GP sites."""

    def place(site):
        if not sites.is_sparse_posterior(site):
            return None
        return jnp.reshape(values[site["name"]], site["fn"].shape())

    return place


def _sites_on_f(run, found) -> set[str]:
    """Names of the sites beside GPs whose log density depends on f."""

    def log_probs(values):
        return _log_prob_arrays(run(_placed(values))[1], found)

    values = {
        name: jax.ShapeDtypeStruct(site.value_shape, site.dtype)
        for name, site in found.items()
    }
    return sites_on_f(log_probs, values)


def _row_values(log_probs, found, on_f) -> dict[str, dict[str, Array]]:
    """
    For each site of the model that depends on f, and each GP site, its log density at each
    row of X, shape ``(N,)``.
    """
    rows = {name: site.shape[-1] for name, site in found.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            "ScoreFunction needs all GP sites at the same rows, but they have "
            + ", ".join(f"{n} rows at '{name}'" for name, n in rows.items())
            + ". Use MonteCarlo(num_samples)."
        )
    num_rows = next(iter(rows.values()))
    values = {}
    for name in on_f:
        log_prob = by_row(log_probs[name], num_rows)
        if log_prob is None:
            raise ValueError(
                f"ScoreFunction needs one log density for each of the {num_rows} rows, "
                f"but site '{name}', which depends on f, has the shape "
                f"{log_probs[name].shape}: it does not factorise over the data. Write the "
                "likelihood inside numpyro.plate('data', N), or a factor as one value for "
                "each row; or use MonteCarlo(num_samples, joint=True)."
            )
        values[name] = dict.fromkeys(found, log_prob)
    return values
