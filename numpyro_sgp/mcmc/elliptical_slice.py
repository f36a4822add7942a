"""Elliptical slice sampling of GP values, for likelihoods with or without a gradient."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.extend.core import Literal
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions.util import is_identically_one
from numpyro.infer import init_to_sample
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import find_valid_initial_params
from numpyro.primitives import Messenger
from numpyro.util import identity, is_prng_key, not_jax_tracer

from numpyro_sgp._checks import check_key
from numpyro_sgp.mcmc.whiten import _Whitened, whiten
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.program import bound


class EllipticalSliceState(NamedTuple):
    """
    State of :class:`EllipticalSlice`; each field may be in ``extra_fields``.

    :param i: number of steps done.
    :param z: whitened values by site.
    :param log_likelihood: of ``z``.
    :param num_evaluations: of the likelihood in the last step.
    :param mean_num_evaluations: mean over the steps of warm-up, or those since then.
    :param rng_key: key for the next step.
    """

    i: Array
    z: dict[str, Array]
    log_likelihood: Array
    num_evaluations: Array
    mean_num_evaluations: Array
    rng_key: Array

    def __getitem__(self, index):
        if isinstance(index, str):  # what NumPyro asks for where there is no such field
            raise ValueError(
                f"EllipticalSlice has no field '{index}' for extra_fields, which may be "
                f"{', '.join(map(repr, self._fields))}."
            )
        return tuple.__getitem__(self, index)


class _SomeKey(Messenger):
    """
    A key for what asks for one outside of the seeds of starts, whose own draws keep theirs:
    an inner :func:`numpyro.handlers.seed` would make all starts the same.
    """

    def process_message(self, msg):
        if msg["type"] not in ("sample", "prng_key") or msg["value"] is not None:
            return
        if not msg.get("is_observed") and msg["kwargs"].get("rng_key") is None:
            msg["kwargs"]["rng_key"] = jax.random.key(0)


class EllipticalSlice(MCMCKernel):
    r"""
    Elliptical slice sampling [1] of the whitened GP values of a model, by BlackJAX.

    Each step draws from an ellipse through the current values and a draw from the prior
    N(0, I), and shrinks to the former until the likelihood is above the slice. It needs
    no gradient, has nothing to tune and never rejects: use it where the likelihood is a
    black box (:class:`~numpyro_sgp.BlackBox`, :func:`jax.pure_callback`) or not smooth.
    Where it has a gradient and data are informative, NUTS most often mixes better.

    Other latents are sampled by another kernel. Both must be given the same ``white``: two
    calls of ``whiten`` make two models, and NumPyro refuses them ("All model-based blocks
    must share the same model")::

        white = sgp.whiten(model)
        kernel = Gibbs([(EllipticalSlice(white), ["f_white"]), (NUTS(white), None)])

    (Hyperparameters of a kernel reach the likelihood through f = L w, so that NUTS is for
    them where it has a gradient: not beside a ``BlackBox``.)

    :param model: a NumPyro model, whitened by :func:`~numpyro_sgp.whiten` here if it is
        not. Its latents (those that :class:`~numpyro.infer.gibbs.Gibbs` gives to this
        kernel) must be N(0, I): whitened GP sites, ``{site}_u_white`` of
        :func:`~numpyro_sgp.sparsify`, or your own; where chains run in parallel, with
        ``infer={"whitened": True}``, since their prior is not known there. Values where
        the log likelihood is not finite are taken to have no probability.
    :param init_strategy: where to start, as in NumPyro's kernels: a draw from the prior by
        default, zero with :func:`numpyro.infer.init_to_feasible`. Redrawn where the
        likelihood is not finite.
    :raises ImportError: if BlackJAX is not installed.
    :raises ValueError: when run, if another latent site is left to it, the likelihood is
        not finite at 100 starts, or the model subsamples its data.

    **References:**

    1. Murray, Adams, MacKay (2010). Elliptical slice sampling. AISTATS.
       https://arxiv.org/abs/1001.0175

    >>> import jax, jax.numpy as jnp, numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> import numpyro_sgp as sgp
    >>> def model(X, y):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> kernel = sgp.EllipticalSlice(model)
    >>> mcmc = MCMC(kernel, num_warmup=10, num_samples=20, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y)
    >>> mcmc.get_samples()["f"].shape
    (20, 5)
    """

    sample_field = "z"

    def __init__(self, model: Callable, *, init_strategy: Callable = init_to_sample):
        if not callable(model):
            raise TypeError(f"model must be a NumPyro model, a function, got {model!r}.")
        _blackjax()
        self._model = model
        self._init_strategy = init_strategy
        self._num_warmup = 0
        self._sample_fn: Any = None

    @property
    def model(self) -> Callable:
        """The model as it was given (Gibbs asks that its blocks have the same one)."""
        return self._model

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: dict[str, Array] | None = None,
        model_args: tuple = (),
        model_kwargs: dict | None = None,
    ) -> EllipticalSliceState:
        """See :meth:`numpyro.infer.mcmc.MCMCKernel.init`."""
        self._num_warmup = num_warmup
        model_kwargs = {} if model_kwargs is None else model_kwargs
        single = is_prng_key(rng_key)
        check_key(rng_key if single or np.ndim(rng_key) == 0 else rng_key[0])
        keys = rng_key[None] if single else rng_key
        keys, init_keys = jnp.swapaxes(jax.vmap(jax.random.split)(keys), 0, 1)
        trace = self._prototype(init_keys[0], model_args, model_kwargs)
        names = self._check_sites(trace, init_params, model_kwargs)
        if single:
            keys, init_keys = keys[0], init_keys[0]
        prototype = {name: trace[name]["value"] for name in names}

        def init_one(rng_key, z):
            none, value = (
                jnp.zeros((), int),
                self._log_likelihood(z, model_args, model_kwargs),
            )
            return EllipticalSliceState(none, z, value, none, jnp.zeros(()), rng_key)

        self._sample_fn = self._step
        if not single:
            init_one = jax.vmap(init_one)
            self._sample_fn = jax.vmap(self._step, in_axes=(0, None, None))
        given = None
        if init_params:
            z = {k: jnp.asarray(init_params[k], prototype[k].dtype) for k in names}
            given = init_one(keys, z)
            known = not_jax_tracer(given.log_likelihood)
            if known and np.isfinite(given.log_likelihood).all():
                return given
            if GIBBS_SITES_KWARG not in model_kwargs:
                if known:
                    self._refuse_start(z, "init_params", single, model_args, model_kwargs)
                return given
        with _SomeKey():
            (z, _, _), valid = find_valid_initial_params(
                init_keys,
                self._white,
                init_strategy=self._init_strategy,
                model_args=model_args,
                model_kwargs=model_kwargs,
                prototype_params=prototype,
                validate_grad=False,
            )
        if not_jax_tracer(valid) and not np.all(valid):
            what = "100 draws from init_strategy"
            self._refuse_start(z, what, single, model_args, model_kwargs)
        drawn = init_one(keys, z)
        if given is None:
            return drawn
        fits = jnp.isfinite(given.log_likelihood)

        def chosen(a, b):
            each = jnp.reshape(fits, fits.shape + (1,) * (a.ndim - fits.ndim))
            return jnp.where(each, a, b)

        z = jax.tree.map(chosen, given.z, drawn.z)
        return drawn._replace(
            z=z, log_likelihood=chosen(given.log_likelihood, drawn.log_likelihood)
        )

    def sample(
        self, state: EllipticalSliceState, model_args: tuple, model_kwargs: dict | None
    ) -> EllipticalSliceState:
        """See :meth:`numpyro.infer.mcmc.MCMCKernel.sample`."""
        return self._sample_fn(state, model_args, model_kwargs)

    def refresh(
        self, state: EllipticalSliceState, model_args: tuple, model_kwargs: dict | None
    ) -> EllipticalSliceState:
        """See :meth:`numpyro.infer.mcmc.MCMCKernel.refresh`."""
        log_likelihood = self._log_likelihood(state.z, model_args, model_kwargs)
        return state._replace(log_likelihood=log_likelihood)

    def wrap_model(self, wrapper: Callable) -> "EllipticalSlice":
        """See :meth:`numpyro.infer.mcmc.MCMCKernel.wrap_model`."""
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._sample_fn = None
        return kernel

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """Nothing to constrain."""
        return identity

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """From whitened values to these and the deterministic sites, f among them."""

        def with_deterministic(z):
            trace = self._trace(z, model_args, model_kwargs)
            return z | {
                k: s["value"] for k, s in trace.items() if s["type"] == "deterministic"
            }

        return with_deterministic

    def get_diagnostics_str(self, state: EllipticalSliceState) -> str:
        """Likelihood evaluations a step; the fewer, the larger the steps."""
        return f"{float(state.mean_num_evaluations):.1f} likelihood evaluations a step"

    def __getstate__(self):
        return {**self.__dict__, "_sample_fn": None}

    # ---- the model ----------------------------------------------------------------

    @property
    def _white(self):
        # Under a wrapper, such as Gibbs's conditioning, it may be whitened already:
        # whitening twice is whitening once.
        return self._model if isinstance(self._model, _Whitened) else whiten(self._model)

    def _trace(self, z, model_args, model_kwargs):
        model = handlers.substitute(handlers.seed(self._white, jax.random.key(0)), data=z)
        model_kwargs = {} if model_kwargs is None else model_kwargs
        with handlers.block():
            return handlers.trace(model).get_trace(*model_args, **model_kwargs)

    def _log_likelihood(self, z, model_args, model_kwargs):
        """What the observed sites, and those that Gibbs conditions on, score."""
        terms = _site_log_likelihoods(self._trace(z, model_args, model_kwargs))
        total = jnp.asarray(sum(terms.values(), 0.0), jnp.result_type(float))
        return jnp.where(jnp.isfinite(total), total, -jnp.inf)

    def _step(self, state, model_args, model_kwargs):
        rng_key, step_key = jax.random.split(state.rng_key)
        old = state.z
        flat, _ = ravel_pytree(old)
        tolerance = jnp.finfo(flat.dtype).eps
        likelihood = _with_constants_done(
            lambda z: self._log_likelihood(z, model_args, model_kwargs), old
        )

        def log_likelihood(z):
            z = jax.tree.map(lambda new, old: new.astype(old.dtype), z, old)
            # The bracket shrinks to the current values, which rounding errors of the
            # likelihood could put below the slice: then it would shrink forever.
            moved = jnp.max(jnp.abs(ravel_pytree(z)[0] - flat)) > tolerance
            return jnp.where(moved, likelihood(z), jnp.inf)

        # z cos(theta) + nu sin(theta) with nu ~ N(0, I), theta from a bracket that shrinks:
        # Fig. 2 of [1].
        module = _blackjax()
        kernel = module.build_kernel(jnp.ones_like(flat), jnp.zeros_like(flat))
        start = module.EllipSliceState(old, state.log_likelihood)
        new, info = kernel(step_key, start, log_likelihood)
        moved = jnp.isfinite(new.logdensity)
        z = jax.tree.map(
            lambda new, old: jnp.where(moved, new.astype(old.dtype), old), new.position, old
        )
        value = jnp.where(moved, new.logdensity, state.log_likelihood)
        count, i = jnp.asarray(info.subiter, int), state.i + 1
        n = jnp.where(i <= self._num_warmup, i, i - self._num_warmup)
        mean = state.mean_num_evaluations
        mean = mean + (count - mean) / n
        return EllipticalSliceState(i, z, value, count, mean, rng_key)

    # ---- set-up -------------------------------------------------------------------

    def _prototype(self, rng_key, model_args, model_kwargs):
        model = handlers.seed(self._white, rng_key)
        model = handlers.substitute(model, substitute_fn=self._init_strategy)
        with handlers.block():
            return handlers.trace(model).get_trace(*model_args, **model_kwargs)

    def _check_sites(self, trace, init_params, model_kwargs):
        """Names of the latent sites, all of them N(0, I)."""
        checks.check_whole_plates(trace, "elliptical slice sampling needs them all")
        latent = [
            name
            for name, site in trace.items()
            if site["type"] == "sample" and not site["is_observed"]
        ]
        others = [name for name in latent if not _is_standard_normal(trace[name])]
        white = [name for name in latent if name not in others]
        if others and not any(site.get("is_observed", False) for site in trace.values()):
            raise ValueError(
                f"The model has no observed site: no data were given, and {others} "
                f"{'is' if len(others) == 1 else 'are'} latent. Pass the data: "
                "mcmc.run(key, X, y), not y=None."
            )
        scaled = [name for name in others if trace[name].get("scale") is not None]
        if scaled:
            raise ValueError(
                f"The prior of {scaled} is scaled (numpyro.handlers.scale, or a plate that "
                "takes some rows), which is no N(0, I). Scale observed sites only."
            )
        if others:
            raise ValueError(
                f"EllipticalSlice samples whitened GP sites only, but {others} "
                f"{'is' if len(others) == 1 else 'are'} latent too. (If it is the "
                "response: pass its data. A prior of your own that is N(0, I) is not known "
                "to be so inside of jit, as in parallel chains: mark its site, "
                "infer={'whitened': True}.) Fix the value: "
                f"handlers.condition(model, data={{{others[0]!r}: ...}}); or sample with "
                "NUTS beside it:\n"
                "    white = numpyro_sgp.whiten(model)\n"
                f"    Gibbs([(EllipticalSlice(white), {white}), (NUTS(white), None)])"
            )
        if not latent:
            raise ValueError("The model has no latent GP site for EllipticalSlice.")
        if init_params and set(init_params) != set(latent):
            hint = ""
            if GIBBS_SITES_KWARG in model_kwargs:
                hint = (
                    " Build all blocks of Gibbs on white = numpyro_sgp.whiten(model), and "
                    f"give EllipticalSlice(white) the sites {latent}."
                )
            raise ValueError(
                f"EllipticalSlice samples the sites {latent}, but got initial values (or, "
                f"from Gibbs, the sites) {sorted(init_params)}.{hint}"
            )
        return latent

    def _refuse_start(self, z, what, single, model_args, model_kwargs):
        def terms(z):
            return _site_log_likelihoods(self._trace(z, model_args, model_kwargs))

        terms = terms(z) if single else jax.vmap(terms)(z)
        bad = {k: np.asarray(v) for k, v in terms.items() if not np.isfinite(v).all()}
        raise ValueError(
            f"The log likelihood is not finite at {what}, the last of which scores "
            f"{bad or terms}. Look for responses outside of the support of their "
            "distribution and for an overflow in the link; or start elsewhere "
            "(init_strategy=init_to_feasible: at zero)."
        )


def _with_constants_done(fn, z):
    """
    ``fn`` with all that does not depend on z computed here, once: a covariance is then
    factorised in each step and not, by a loop that XLA leaves as it is, on each trial.

    :param fn: from z to an array.
    :param z: arrays of the shapes and dtypes it will be called with.
    """
    # Without rules for derivatives, which hide a factor (`linalg.factor_product`).
    traced = jax.make_jaxpr(fn)(z)
    closed = jax.make_jaxpr(lambda z: _without_rules(traced, *jax.tree.leaves(z)))(z)
    jaxpr = closed.jaxpr
    now, later, known = [], [], set(jaxpr.constvars)
    for eqn in jaxpr.eqns:
        if all(isinstance(v, Literal) or v in known for v in eqn.invars):
            now.append(eqn)
            known.update(eqn.outvars)
        else:
            later.append(eqn)
    atoms = [v for eqn in later for v in eqn.invars] + list(jaxpr.outvars)
    needed = {v for v in atoms if not isinstance(v, Literal)}
    made = [v for eqn in now for v in eqn.outvars if v in needed]
    first = jaxpr.replace(invars=[], outvars=made, eqns=now)
    rest = jaxpr.replace(constvars=[*jaxpr.constvars, *made], eqns=later)
    consts = [*closed.consts, *jax.core.eval_jaxpr(first, closed.consts)]

    def call(z):
        (out,) = jax.core.eval_jaxpr(rest, consts, *jax.tree.leaves(z))
        return out

    return call


def _without_rules(closed, *values) -> list:
    """What a traced program returns, with the bodies of functions that have JVP rules."""
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(jaxpr.invars, values, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "custom_jvp_call":
            found = _without_rules(eqn.params["call_jaxpr"], *given)
        else:
            found = bound(eqn.primitive, eqn.params, given)
        known.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _site_log_likelihoods(trace):
    return {
        name: jnp.sum(messages.log_prob(site))
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"]
    }


def _is_standard_normal(site) -> bool:
    if site["scale"] is not None and not is_identically_one(site["scale"]):
        return False
    fn = site["fn"]
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    if not isinstance(fn, dist.Normal):
        return False
    if not_jax_tracer(fn.loc) and not_jax_tracer(fn.scale):
        return bool(np.all(np.asarray(fn.loc) == 0) and np.all(np.asarray(fn.scale) == 1))
    # Inside of jit (chains in parallel) even constants are unknown: go by the mark.
    return site["infer"].get("whitened") is True


def _blackjax():
    try:
        from blackjax.mcmc import elliptical_slice
    except ImportError as error:
        raise ImportError("EllipticalSlice needs BlackJAX: pip install blackjax") from error
    return elliptical_slice
