"""Variationally sparse MCMC: a model whose GP sites are inducing values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import init_to_median
from numpyro.primitives import Messenger
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import check_model
from numpyro_sgp._threads import one_thread
from numpyro_sgp.distributions import SparsePosterior
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.elbo import GaussHermite, MonteCarlo, Trapezoid
from numpyro_sgp.elbo.predictor import default_expectation
from numpyro_sgp.families import Block, BlockGaussian, Full
from numpyro_sgp.guides import SVGP, VGP
from numpyro_sgp.guides.base import check_approximations
from numpyro_sgp.inducing import InducingVariables
from numpyro_sgp.inducing.covariances import inducing_covariance
from numpyro_sgp.linalg import jittered_cholesky, matmul
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.coupling import Coupling, find_coupling
from numpyro_sgp.tracing.predictor import NodeProgram
from numpyro_sgp.tracing.row_indices import check_row_indices
from numpyro_sgp.tracing.rows import sites_on_f

#: The factor that stands for all observed sites.
EXPECTED = "expected_log_likelihood"
_ALL_ROWS = "MCMC needs them all in each step"


def sparsify(
    model: Callable,
    approximation: SVGP | dict[str, SVGP],
    expectation: GaussHermite | Trapezoid | MonteCarlo | None = None,
) -> Callable:
    r"""
    The model with inducing values in the place of each GP site, for NUTS at the cost of a
    sparse GP, :math:`O(N M^2)` a step [1].

    Its density is

    .. math::

        p(\theta)\, N(v; 0, I)\,
        \exp E_{p(f \mid u, \theta)}[\log p(y \mid f, \theta)], \qquad u = L_\theta v,

    with :math:`L_\theta L_\theta^\top = K_{uu}` at fixed inducing points: the best
    *free-form* variational posterior of inducing values and hyperparameters together. It
    is exact where the inducing points are the inputs. The expectation is taken over any
    model code, as in :class:`~numpyro_sgp.TraceGP_ELBO`.

    The new model has a site ``{site}_u_white`` of shape ``batch_shape + (M,)`` for v, and
    the other latents as they are. (Under a :func:`numpyro.handlers.scope` in the model its
    prefix is there twice, as in names of NumPyro's reparametrisations.) Without its data
    (``y=None``) it draws each GP site jointly from :math:`p(f(X) \mid u, \theta)`, so that
    :class:`numpyro.infer.Predictive` predicts at new inputs. With data, deterministic
    sites that depend on f are left out: f has no value there.

    :param model: a NumPyro model with GP sites (not whitened), and the data as an argument
        or by :func:`numpyro.handlers.condition` (then without predictions elsewhere).
    :param approximation: :class:`~numpyro_sgp.SVGP`, of which the inducing points are
        used (an array, or chosen when the model is first run, or by ``.setup``, with the
        hyperparameters at their prior medians) and the options of q(u) are not; or
        :class:`~numpyro_sgp.VGP`, for all distinct inputs; or a dict of these by site.
    :param expectation: :class:`~numpyro_sgp.GaussHermite`,
        :class:`~numpyro_sgp.Trapezoid` or :class:`~numpyro_sgp.MonteCarlo`, which draws its
        nodes once for all steps; None for what :class:`~numpyro_sgp.TraceGP_ELBO` takes.
    :return: a model with the arguments of ``model``; ``.setup(*args)`` chooses inducing
        points outside of jit, and ``.inducing`` has them by site.
    :raises TypeError: if ``approximation`` or ``expectation`` is something else.
    :raises ValueError: for several sets of inducing points, or an approximation chosen for
        its q(u) (a mixture, coupled, sites); when run, if the model has no GP site or no
        data, subsamples its data, has another latent site that depends on f, or its
        likelihood ties rows of X together (``MonteCarlo(S, joint=True)`` lifts that).

    **References:**

    1. Hensman, Matthews, Filippone, Ghahramani (2015). MCMC for Variationally Sparse
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/1506.04000

    >>> import jax, jax.numpy as jnp, numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, NUTS, Predictive
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 40)[:, None]
    >>> y = jnp.round(2.0 + jnp.sin(3.0 * X[:, 0]))
    >>> sparse = sgp.sparsify(model, sgp.SVGP(5))
    >>> mcmc = MCMC(NUTS(sparse), num_warmup=10, num_samples=20, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y)
    >>> mcmc.get_samples()["f_u_white"].shape
    (20, 5)
    >>> predictive = Predictive(sparse, mcmc.get_samples(), return_sites=["f", "y"])
    >>> predictive(jax.random.key(1), jnp.array([[0.5], [4.0]]))["f"].shape
    (20, 2)
    """
    check_model(model)
    return _Sparsified(model, approximation, expectation)


class _Sparsified:
    """What :func:`sparsify` returns."""

    def __init__(self, model, approximation, expectation):
        one_thread()
        for option in check_approximations(approximation):
            if getattr(option, "num_orthogonal", None) is not None:
                raise ValueError(_one_set(option))
            if _is_about_q(option):
                raise ValueError(
                    "sparsify uses only the inducing points of an approximation, and would "
                    f"ignore the q(u) of {option!r}: use SVGP(M), or VGP() for inducing "
                    "points at all inputs."
                )
        if not isinstance(expectation, GaussHermite | Trapezoid | MonteCarlo | None):
            raise TypeError(
                "expectation must be GaussHermite(20), MonteCarlo(10) or the like, or "
                f"None, got {expectation!r}."
            )
        self.model = model
        self.approximation = approximation
        self.expectation = expectation
        #: Inducing points by GP site, of shape (M, D) or (*batch, M, D).
        self.inducing = {}
        self._sites, self._coupling = frozenset(), Coupling()
        self._observed = frozenset()
        self._on_f = frozenset()

    def __call__(self, *args, **kwargs):
        """Run the model: with its data for inference, without for predictions."""
        args, kwargs = self._set_up(args, kwargs)
        trace = self._run(messages.at_prior_mean, {}, args, kwargs)
        likelihood = _observed(trace)
        if not self._observed <= likelihood:
            with _InducingValues(self):
                return self.model(*args, **kwargs)
        new = sorted(set(trace) - self._sites)
        if new:
            raise ValueError(
                f"Sites {new} were not in the model when it was set up. Sparsify the model "
                "anew for other arguments."
            )
        replace = _InducingValues(self, likelihood)
        with replace:
            self.model(*args, **kwargs)

        @jax.jit  # the first run of a model is outside of jit: many small compilations
        def expected(values):
            return self._expected_log_likelihood(replace.shapes, values, args, kwargs)

        numpyro.factor(EXPECTED, expected(replace.values))

    # ---- set-up -------------------------------------------------------------------

    def setup(self, *args, **kwargs):
        """
        Check the model and choose inducing points. The first run does this by itself; call
        it to do so outside of jit or vmap, or to predict in a new process. What is set up
        stays as it is.

        :param args: arguments of the model, with the data.
        :return: this model.
        """
        self._set_up(args, kwargs)
        return self

    def _set_up(self, args, kwargs):
        """The arguments as arrays; chooses inducing points where there are none."""
        args, kwargs = as_arrays(self.model, args, kwargs)
        check_row_indices(self.model, args, kwargs)
        if self.inducing:
            return args, kwargs
        if not all(not_jax_tracer(leaf) for leaf in jax.tree.leaves((args, kwargs))):
            raise ValueError(
                "A sparsified model chooses its inducing points from known inputs, but its "
                "arguments are traced by jit or vmap. Call sparse.setup(X, y), with the "
                "model's arguments, first."
            )
        try:
            with messages.known_inside_jit():
                self._prepare(args, kwargs)
        except BaseException:
            self.inducing = {}
            raise
        return args, kwargs

    def _prepare(self, args, kwargs):
        trace = self._checked_structure(args, kwargs)
        values, chosen = {}, {}

        def at_site(site):
            name = site["name"]
            prior, _ = messages.unwrap(site["fn"])
            chosen[name] = self._choose(name, prior)
            shape = (*prior.batch_shape, chosen[name].shape[-2])
            white = jax.random.normal(jax.random.key(0), shape, chosen[name].dtype)
            # Inputs of a GP site that takes this one's values are then spread out.
            q = _given(prior, chosen[name], white, self._jitter(name))
            return site["fn"], q.mean

        for name, site in self._run(at_site, {}, args, kwargs).items():
            if site["type"] == "sample" and not site["is_observed"]:
                values[name] = site["value"]
        f = {name: values.pop(name) for name in chosen}
        self._on_f = self._sites_on_f(f, values, args, kwargs)
        self._on_f -= self._unmoved(self._on_f & set(values), f, values, args, kwargs)
        latent_on_f = sorted(self._on_f & set(values))
        if latent_on_f:
            raise ValueError(
                f"Latent sites {latent_on_f} depend on f, whose value a sparsified model "
                "does not have. (If they are responses, pass their data: y, not y=None, or "
                "sparsify(handlers.condition(model, data={...}), ...).)"
            )
        if not getattr(self.expectation, "joint", False):
            self._check_coupling(f, values, args, kwargs)
        self._sites = frozenset(trace)
        self._observed = _observed(trace)
        self.inducing = chosen

    def _checked_structure(self, args, kwargs):
        trace = self._run(messages.at_prior_mean, {}, args, kwargs)
        names = [name for name, site in trace.items() if messages.is_latent_gp(site)]
        if not names:
            raise ValueError(
                "The model has no latent GP site to sparsify. Sample a GaussianProcess in "
                "it, and pass the model itself, not whiten(model)."
            )
        if isinstance(self.approximation, dict) and set(self.approximation) != set(names):
            raise ValueError(
                f"The approximations are for the sites {sorted(self.approximation)}, but "
                f"the model has the GP sites {sorted(names)}."
            )
        for name in names:
            checks.check_inputs(name, messages.unwrap(trace[name]["fn"])[0])
        checks.check_plates(trace)
        checks.check_whole_plates(trace, _ALL_ROWS)
        if not _observed(trace):
            raise ValueError(
                "The model has no observed site. A sparsified model is set up when it "
                "first runs, which must be with the data: run MCMC, or call "
                "sparse.setup(X, y), before Predictive."
            )
        checks.check_observations(trace)
        return trace

    def _choose(self, name, prior):
        X = np.asarray(prior.X).reshape(-1, prior.X.shape[-1])
        try:
            points = self._approximation(name).initial_points(prior, X)
        except ValueError as error:
            raise ValueError(f"GP site '{name}': {error}") from error
        if len(points) != 1:
            raise ValueError(_one_set(self._approximation(name)))
        Kuu = inducing_covariance(prior.kernel, points)
        if not np.isfinite(jittered_cholesky(Kuu, self._jitter(name))[0]).all():
            raise ValueError(
                f"The inducing covariance K_uu of GP site '{name}' has no Cholesky factor "
                "at the prior medians of the hyperparameters. Look for a kernel that is "
                "not positive definite; in float32, try numpyro.enable_x64()."
            )
        return points[0]

    def _sites_on_f(self, f, values, args, kwargs):
        """Names of sites whose value or density depends on f."""

        def of_sites(f):
            trace = self._run(messages.at_values(f), values, args, kwargs)
            log_probs = {k: messages.log_prob(trace[k]) for k in values if k in trace}
            shown = (site for site in trace.values() if site["type"] == "deterministic")
            return log_probs | {site["name"]: site["value"] for site in shown}

        return sites_on_f(of_sites, f)

    def _unmoved(self, names, f, values, args, kwargs) -> set:
        """
        Those of some latents whose density is the same wherever f is: in a scan with
        responses all depend on f by what is told of its program.
        """
        if not names:
            return set()

        @jax.jit
        def densities(f):
            trace = self._run(messages.at_values(f), values, args, kwargs)
            return {name: messages.log_prob(trace[name]) for name in names}

        moved = jax.tree.map(lambda value: value + 1.0 + 0.1 * jnp.sin(3.0 * value), f)
        before, after = densities(f), densities(moved)
        return {name for name in names if np.array_equal(before[name], after[name])}

    def _check_coupling(self, f, values, args, kwargs):
        shapes = {name: value.shape for name, value in f.items()}

        def trace_at(f):
            return self._run(messages.at_values(f), values, args, kwargs)

        coupling = find_coupling(trace_at, shapes, jnp.result_type(*f.values()))
        self._coupling = coupling
        if coupling.couples or coupling.combines:
            raise ValueError(
                "The likelihood ties rows of X together (its log density is no sum of "
                "terms of one row each), or a GP site combines rows of another one, and "
                "quadrature uses the marginals of f alone. Use NUTS(whiten(model)), or "
                "sparsify(..., MonteCarlo(num_samples, joint=True)), whose fixed joint "
                "draws are a rough approximation."
            )

    # ---- running the model ---------------------------------------------------------

    def _run(self, at_site, values, args, kwargs, medians=True):
        """
        The trace with what ``at_site`` puts at GP sites; seen by no outer handler.

        :param medians: whether latents that ``values`` has not are put at their medians,
            or are an error.
        """

        def value(site):
            if site.get("name") in values:
                return values[site["name"]]
            if site["type"] != "sample" or messages.is_latent_gp(site):
                return None
            if not medians and not site["is_observed"]:
                raise ValueError(_no_value(site["name"]))
            return init_to_median(site)

        with handlers.block(), handlers.trace() as trace:
            with handlers.substitute(substitute_fn=value), handlers.seed(rng_seed=0):
                with messages.AtGPSites(at_site):
                    self.model(*args, **kwargs)
        return trace

    def _expected_log_likelihood(self, shapes, values, args, kwargs):
        rule = self.expectation or default_expectation(shapes, *self._coupling[:-1])
        for name in shapes:
            if f"{name}_u_white" not in values:
                raise ValueError(_no_value(f"{name}_u_white"))
        dtype = jnp.result_type(*(values[f"{name}_u_white"] for name in shapes))

        def at(node):
            def at_site(site):
                q = self._posterior(site, values[f"{site['name']}_u_white"])
                return site["fn"], rule.value(q, node[site["name"]])

            return _score(self._run(at_site, values, args, kwargs, medians=False))

        # E_{p(f | u, theta)}[log p(y | f, theta)], by the same nodes in each step.
        options = {}
        if rule.needs_slopes:
            at = NodeProgram.of(at, shapes, dtype)
            options["slopes"] = at.slopes(shapes, dtype)
        nodes, weights = rule.nodes(jax.random.key(0), shapes, dtype, **options)
        return matmul(weights, jax.vmap(at)(nodes))

    def _posterior(self, site, white):
        """p(f(X) | u) at a GP site."""
        name = site["name"]
        if name not in self.inducing:
            raise ValueError(
                f"GP site '{name}' was not in the model when it was set up. Sparsify this "
                "model anew."
            )
        prior, points = messages.unwrap(site["fn"])[0], self.inducing[name]
        columns = points.shape[-1]
        if not isinstance(points, InducingVariables) and prior.X.shape[-1] != columns:
            raise ValueError(
                f"GP site '{name}' has inputs with {prior.X.shape[-1]} columns, but its "
                f"inducing points have {columns}. Sparsify the model anew for other inputs."
            )
        return _given(prior, points, white, self._jitter(name))

    def _approximation(self, name):
        given = self.approximation
        return given[name] if isinstance(given, dict) else given

    def _jitter(self, name):
        return getattr(self._approximation(name), "jitter", None)


class _InducingValues(Messenger):
    """
    Samples whitened inducing values at GP sites, and hides what is not a part of the
    sparsified model.

    :param sparse: the sparsified model.
    :param likelihood: names of the model's own observed sites, which are left to the
        expectation; None where the model is run without its data.
    """

    def __init__(self, sparse, likelihood=None):
        self.sparse = sparse
        self.likelihood = likelihood
        self.values = {}
        self.shapes = {}
        self.names = {}
        super().__init__()

    def process_message(self, msg):
        kind, name = msg["type"], msg.get("name")
        if kind == "plate":
            checks.check_whole_plates({name: msg}, _ALL_ROWS)
        elif kind == "sample" and messages.is_latent_gp(msg):
            self._replace(msg)
        elif self.likelihood is not None and (
            # By name: outer handlers send observed sites too, such as the Jacobians of
            # potential_energy, and these are no part of the likelihood.
            (kind == "sample" and name in self.likelihood)
            or (kind == "deterministic" and name in self.sparse._on_f)
        ):
            msg["stop"] = True
        elif kind in ("sample", "param"):
            self.names[id(msg)] = name  # outer handlers may give it another one

    def _replace(self, msg):
        name = msg["name"]
        prior, reinterpreted = messages.unwrap(msg["fn"])
        checks.check_inputs(name, prior)
        points = self.sparse.inducing.get(name)
        if points is None:
            self.sparse._posterior(msg, None)  # refuses the site
        white = dist.Normal(jnp.zeros((), points.dtype), jnp.ones((), points.dtype))
        white = white.expand((*prior.batch_shape, points.shape[-2]))
        white = white.to_event(1 + reinterpreted)
        v = numpyro.sample(f"{name}_u_white", white, infer={"whitened": True})
        # Handlers inside of the model (a scope) give the site of v another name once more.
        self.values[f"{name}_u_white"] = v
        self.shapes[name] = prior.shape()
        if self.likelihood is None:
            msg["fn"] = messages.rewrap(self.sparse._posterior(msg, v), reinterpreted)
        else:
            msg["value"] = messages.prior_mean(msg)  # of no effect on what is not hidden
            msg["stop"] = True

    def postprocess_message(self, msg):
        # By what the model has: outside of it, reparam makes a site deterministic.
        name = self.names.pop(id(msg), None)
        if name is None or msg.get("infer", {}).get("whitened"):
            return
        if msg.get("infer", {}).get("enumerate") == "parallel" and not msg["is_observed"]:
            raise ValueError(
                f"Latent site '{name}' is enumerated, and a sparsified model takes one "
                "value of each latent. Sample it (numpyro.infer.DiscreteHMCGibbs), or sum "
                "it out in the model (numpyro.distributions.MixtureSameFamily)."
            )
        self.values[name] = msg["value"]


def _given(prior, points, white, jitter):
    """p(f(X) | u): the sparse posterior whose q(u) is a point."""
    q = BlockGaussian((Block(white, jnp.zeros_like(white)),))
    return SparsePosterior(prior, (points,), q, jitter)


def _score(trace):
    """Log density of the observed sites."""
    checks.check_observations(trace)
    names = _observed(trace)
    return sum(jnp.sum(messages.log_prob(s)) for k, s in trace.items() if k in names)


def _observed(trace):
    return frozenset(
        name
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"]
    )


def _is_about_q(option):
    """Whether an approximation is chosen for its q(u) rather than its points."""
    return (
        type(option) not in (SVGP, VGP)
        or option.relaxation is not None
        or not isinstance(option.family, Full)
        or (isinstance(option, VGP) and (option.covariance != "full" or not option.whiten))
    )


def _no_value(name):
    return (
        f"The sparsified model has no value of the latent site '{name}' for the "
        "likelihood: its site comes and goes, or a handler hid or renamed it. Put handlers "
        "that hide inside, sparsify(handler(model), ...), and numpyro.handlers.scope "
        "outside, scope(sparsify(model, ...), prefix=...)."
    )


def _one_set(option):
    return f"sparsify takes one set of inducing points, SVGP(...), and {option!r} has more."
