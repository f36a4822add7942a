"""The bound for one draw of a guide, at nodes that are given later."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import MaskedDistribution
from numpyro.distributions.util import scale_and_mask
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.util import check_model_guide_match, not_jax_tracer

from numpyro_sgp._numpyro import mask_of, validate_model
from numpyro_sgp.distributions import SparsePosterior
from numpyro_sgp.elbo.expectation import Expectation
from numpyro_sgp.elbo.pairs import check_sites
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.coupling import Coupling
from numpyro_sgp.tracing.curvature import Quadratic, quadratic_of, row_precisions
from numpyro_sgp.tracing.linear import LinearProgram
from numpyro_sgp.tracing.predictor import NodeProgram
from numpyro_sgp.tracing.program import Program, opening, watched
from numpyro_sgp.tracing.rows import union


class GPSite(NamedTuple):
    """What the rules need to know of a GP site; ``shape`` is ``batch_shape + (N,)``."""

    shape: tuple[int, ...]
    dtype: Any
    coupling: Coupling
    joint_rows: int
    num_components: int
    independent_latents: bool
    relaxed: bool
    needs_precision: bool
    fed_by: frozenset = frozenset()  # what its marginals, where used, depend on


class Component:
    """
    One Gaussian of the posterior at a GP site, as the bound takes expectations under it.

    :param number: which one; may be traced.
    :param shift: what is added to its marginal means and variances; None for nothing.
    """

    def __init__(self, posterior, number, shift):
        self.posterior = posterior
        self.number = number
        self.shift = shift

    @cached_property
    def marginals(self) -> tuple[Array, Array]:
        """Means and variances (of Shi et al. 2020, eq. 33 and 34, if it is not relaxed)."""
        mean, variance = self.posterior.bound_marginals(self.number)
        if self.shift is not None:
            mean, variance = mean + self.shift[0], variance + self.shift[1]
        return mean, variance

    def place(self, x):
        """f where x is standard normal."""
        if self.shift is None and self.posterior.relaxation is None:
            return self.posterior.place(x, self.number)
        if self.shift is not None and not self.posterior.independent_latents:
            mean_shift, var_shift = self.shift
            return mean_shift + self.posterior.place(x, self.number, var_shift)
        mean, variance = self.marginals
        return mean + jnp.sqrt(variance) * x

    def sample(self, key):
        """A joint draw of f(X)."""
        return self.posterior.sample(key)


class Particle:
    """
    All that the bound is made of, for one draw of the latents beside f. Guide and model run
    once, with openings for the nodes at GP sites, their components, and what else is known
    later only.

    :param make_rule: from shapes of GP sites, whether their rows are coupled or combined,
        whether their likelihood has kinks, how many linear combinations of them it takes at
        each row, and which functions its terms take, to an expectation rule.
    :param run_guide: runs the guide.
    :param run_model: runs the model, given the guide's trace.
    :param rng_key: key for nodes of which only the kind is asked for.
    :param kl_key: key for KLs that are drawn; None where these are to be exact.
    :param moving: whether the marginals of f can be moved, for derivatives by them.
    :raises ValueError: if guide and model do not fit together, or the rule is not for them.
    """

    def __init__(
        self,
        make_rule: Callable,
        run_guide,
        run_model,
        rng_key: Array,
        kl_key: Array | None,
        moving: bool,
    ):
        self._make_rule, self._key, self._kl_key = make_rule, rng_key, kl_key
        self._moving = moving
        self.sites: dict[str, GPSite] = {}
        self._program = Program(lambda: self._run(run_guide, run_model))
        self._origins = self._program.origins
        for name, origins in self._origins["marginals"].items():
            self.sites[name] = self.sites[name]._replace(fed_by=union(origins))
        self.rule = self._rule(self.sites)
        self.rule.check(self.sites)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """``batch_shape + (N,)`` of each GP site."""
        return {name: site.shape for name, site in self.sites.items()}

    @property
    def dtype(self):
        """Of all GP sites."""
        return jnp.result_type(*(site.dtype for site in self.sites.values()))

    def _rule(self, sites) -> Expectation:
        return self._make_rule(
            {name: site.shape for name, site in sites.items()},
            any(s.coupling.couples for s in sites.values()),
            any(s.coupling.combines or s.joint_rows > 1 for s in sites.values()),
            any(s.coupling.kinked for s in sites.values()),
            min(s.coupling.predictors for s in sites.values()),
            sum((s.coupling.axes for s in sites.values()), ()),
        )

    def at_nodes(self, given: dict) -> tuple[Callable[[dict], tuple[dict, dict]], dict]:
        """
        A function from nodes by GP sites to the parts of the bound, those that depend on
        the values of f and the others. Each is by the names of sites: ``log_prob`` of the
        model and ``guide``, log densities beside GPs; at GP sites ``kl``, the ``cost`` of a
        relaxed conditional, ``marginals``, ``prior_mean`` where these can be moved,
        ``log_weight`` of the component; and mutable ``state``. And what the rule asks of
        the model beside, for its nodes.

        :param given: values by the keys of openings, zero where left out:
            ``("component", f)``, ``("precision", f)``, ``("mean", f)``, ``("var", f)``.
        """
        keys = {name: ("node", name) for name in self.sites}
        options: dict[str, Array] = {}
        run: Callable[[dict], dict]
        if self.rule.needs_slopes:
            program = LinearProgram.of(self._program, keys.values())
            log_probs = program.outputs["log_prob"].values()
            run = of_nodes = NodeProgram(program, given, list(log_probs))
            options["slopes"] = of_nodes.slopes(self.shapes, self.dtype)
        else:
            begun = self._program.begun(given, keys.values())

            def run(nodes):
                return begun({keys[name]: x for name, x in nodes.items()})

        def at(nodes):
            split: tuple[dict, dict] = {}, {}
            for kind, values in run(nodes).items():
                for some in split:
                    some[kind] = {}
                for name, value in values.items():
                    split[not union(self._origins[kind][name])][kind][name] = value
            return split

        return at, options

    def precisions(self) -> dict:
        r"""
        :math:`\lambda_n = \sigma_n^{-2}` of a Gaussian likelihood (Titsias 2025) at each
        row, divided by the scale of minibatches, at the sites whose relaxed conditional
        asks for it; by openings.
        """
        names = [name for name, site in self.sites.items() if site.needs_precision]
        if not names:
            return {}

        def log_density(f):
            found = self._program({("f", name): value for name, value in f.items()})
            plain = {**found["log_prob"], **found["plain"]}
            return sum(jnp.sum(value) for value in plain.values())

        # They are the same at any f, or AutoSparseGP would have refused the model.
        zeros = {name: jnp.zeros(s.shape, s.dtype) for name, s in self.sites.items()}
        found = row_precisions(log_density, zeros, names)
        return {("precision", k): v / self.row_scale(k) for k, v in found.items()}

    def gaussian_rows(self) -> tuple[Quadratic, dict[str, Array]]:
        r"""
        What a Gaussian likelihood says of rows, about the prior's mean and divided by the
        scale of KLs, if they have one; and :math:`L^{-1} K_{uX}` by site, where q(u) has a
        factor of K_uu.

        :raises ValueError: if the density is not one of values of f alone: a GP site feeds
            another, or a likelihood has an expectation of its own; if the rule is not exact
            for squares of f, or sites are scaled by arrays, or by several numbers.
        """
        if not self.rule.exact_for_squares:
            raise ValueError(f"{self.rule} is not exact for squares of f.")
        fed = any(site.fed_by for site in self.sites.values())
        seen = frozenset().union(*map(union, self._origins["log_prob"].values()))
        if fed or any(kind == "moments" for kind, _ in seen):
            raise ValueError("The likelihood is no function of the values of GP sites.")
        rest = self._program.begun({}, [("f", name) for name in self.sites])

        def parts(f):
            return rest({("f", name): value for name, value in f.items()})

        fixed = parts({})
        scale, *others = fixed["scale"].values()
        known = all(map(not_jax_tracer, [scale, *others]))
        if jnp.ndim(scale) or (others and not (known and all(c == scale for c in others))):
            raise ValueError("GP sites are scaled by an array, or by several numbers.")

        def density(f):
            return sum(map(jnp.sum, parts(f)["log_prob"].values())) / scale

        return quadratic_of(density, fixed["prior_mean"]), fixed["projection"]

    def row_scale(self, name) -> float:
        """What data plates multiply the terms of the rows of a relaxed GP site by."""
        if self._scaled[name][1] != 1.0:
            raise ValueError(
                f"GP site '{name}' is scaled (numpyro.handlers.scale) and has a tight "
                "bound, which is for the unscaled prior. Use tight='none'."
            )
        log_probs = self._origins["log_prob"].items()
        on_f = sorted(name for name, origins in log_probs if union(origins))
        scales = {self._plate_scale(name, observed) for observed in on_f}
        if len(scales) > 1:
            raise ValueError(
                f"GP site '{name}' has a tight bound, whose terms belong to the rows of "
                f"one data plate, but {on_f} have the scales {sorted(scales)}. Use "
                "tight='none'."
            )
        return scales.pop() if scales else 1.0

    def _plate_scale(self, name, observed) -> float:
        num_rows, scale = self.sites[name].shape[-1], 1.0
        frames, found = self._scaled[observed]
        for frame in frames:
            size, batch = self._subsampled.get(frame.name, (num_rows, num_rows))
            if batch != num_rows:
                raise ValueError(
                    f"GP site '{name}' has a tight bound and {num_rows} rows, but "
                    f"'{observed}' takes a minibatch of {batch} rows of plate "
                    f"'{frame.name}'. Sample the process at the rows of the minibatch, "
                    "X[idx], or use tight='none'."
                )
            scale *= size / batch
        if not np.all(np.abs(found / scale - 1.0) <= 1e-5):
            raise ValueError(
                f"GP site '{name}' has a tight bound, but '{observed}' is scaled beside "
                "its plates (numpyro.handlers.scale). Scale minibatches by "
                "numpyro.plate(name, N, subsample_size=B), or use tight='none'."
            )
        return scale

    # ---- one run of Python --------------------------------------------------------

    def _run(self, run_guide, run_model):
        kinds = "kl", "cost", "marginals", "prior_mean", "projection", "scale", "log_weight"
        parts = {k: {} for k in kinds}
        components = {}

        def at_site(site):
            return site["fn"], self._place(site, parts, components)

        at_sites = messages.AtGPSites(at_site, are=messages.is_sparse_posterior)
        with handlers.trace() as guide_trace, at_sites:
            run_guide()
        with handlers.trace() as model_trace:
            run_model(guide_trace)
        check_model_guide_match(model_trace, guide_trace)
        validate_model(model_trace, plate_warning="loose")
        check_sites(model_trace, guide_trace, self.sites)
        self._subsampled = subsample_plate_sizes(model_trace)
        self._scaled = {
            name: (site["cond_indep_stack"], _known_scale(site))
            for name, site in model_trace.items()
            if site["type"] == "sample"
        }
        closed_forms = self._rule(self.sites).closed_forms
        parts["log_prob"] = {
            name: self._expected(site, model_trace, components)
            if closed_forms and _has_expectation(site)
            else messages.log_prob(site)
            for name, site in model_trace.items()
            if site["type"] == "sample" and name not in self.sites
        }
        # Precisions are read off plain densities, of which closed forms know nothing.
        precise = any(site.needs_precision for site in self.sites.values())
        parts["plain"] = {
            name: messages.log_prob(model_trace[name])
            for name in parts["log_prob"]
            if precise and closed_forms and _has_expectation(model_trace[name])
        }
        parts["guide"] = {
            name: jnp.sum(messages.log_prob(site))
            for name, site in guide_trace.items()
            if site["type"] == "sample" and name not in self.sites
            if not site["is_observed"] or site["infer"].get("is_auxiliary")
        }
        parts["state"] = {**messages.mutable(guide_trace), **messages.mutable(model_trace)}
        return parts

    def _place(self, site, parts, components) -> Array:
        """f at a GP site at a node, and what the posterior there adds to the bound."""
        name, (q, _) = site["name"], messages.unwrap(site["fn"])
        relaxed = q.relaxation is not None
        here = self.sites[name] = GPSite(
            q.shape(),
            q.prior.X.dtype,
            site["infer"].get("coupling", Coupling()),
            q.joint_rows,
            q.num_components,
            q.independent_latents,
            relaxed,
            relaxed and q.relaxation.is_gaussian,
        )
        number: Any = 0
        shift = None
        if here.num_components > 1:
            number = opening(("component", name), (), jnp.int32)
            parts["log_weight"][name] = q.log_weights[number]
        if self._moving:
            shift = [opening((k, name), here.shape, here.dtype) for k in ("mean", "var")]
            parts["prior_mean"][name] = jnp.broadcast_to(q.prior.mean, here.shape)
            if isinstance(q, SparsePosterior):
                parts["projection"][name] = q.projection
        components[name] = component = Component(q, number, shift)
        f = self._rule({name: here}).value(component, self._node(name, here))
        if "marginals" in vars(component):  # where they are used
            parts["marginals"][name] = component.marginals
        parts["scale"][name] = 1.0 if site["scale"] is None else site["scale"]
        parts["kl"][name] = jnp.sum(scale_and_mask(q.prior_kl(self._kl_key), site["scale"]))
        if relaxed:
            precision = None
            if here.needs_precision:
                precision = opening(("precision", name), here.shape, f.dtype)
            parts["cost"][name] = jnp.sum(q.relaxation_cost(precision))
        return watched(("f", name), jnp.reshape(f, site["fn"].shape()))

    def _node(self, name, site):
        rule = self._rule({name: site})
        if not rule.joint:
            return opening(("node", name), site.shape, site.dtype)
        nodes = jax.eval_shape(
            lambda key: rule.nodes(key, {name: site.shape}, site.dtype)[0], self._key
        )
        return opening(("node", name), nodes[name].shape[1:], nodes[name].dtype)

    def _expected(self, site, model_trace, components) -> Array:
        """
        E[log p(y | f)] at an observed site whose distribution has ``expected_log_prob``
        and, as ``f``, the value of a GP site; under the marginals of f alone.
        """
        fn, mask = messages.unwrap(site["fn"])[0], None
        if isinstance(fn, MaskedDistribution):
            fn, mask = fn.base_dist, mask_of(fn)
        names = [name for name in components if model_trace[name]["value"] is fn.f]
        if not names or not self.sites[names[0]].independent_latents:
            raise ValueError(
                f"Site '{site['name']}' has a {type(fn).__name__}, whose expectation is "
                "taken under independent latent functions: give it the value of a GP site "
                "as it is, with covariance='full' for each function. Or use "
                "TraceGP_ELBO(ScoreFunction(num_samples))."
            )
        moments = components[names[0]].marginals
        # It counts as what depends on f.
        moments = [watched(("moments", names[0]), moment) for moment in moments]
        moments = [jnp.reshape(moment, fn.f.shape) for moment in moments]
        expected = fn.expected_log_prob(*moments, site["value"])
        return scale_and_mask(expected, site["scale"], mask)


def _known_scale(site):
    """What plates and handlers scale a site by; NaN where that is not known."""
    scale = 1.0 if site["scale"] is None else site["scale"]
    return scale if not_jax_tracer(scale) else float("nan")


def _has_expectation(site):
    fn = messages.unwrap(site["fn"])[0]
    fn = fn.base_dist if isinstance(fn, MaskedDistribution) else fn
    return site["is_observed"] and hasattr(fn, "expected_log_prob")
