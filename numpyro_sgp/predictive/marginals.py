"""Marginals of f at any number of rows, with what does not depend on them computed once."""

import functools
from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._checks import check_guide, check_whole
from numpyro_sgp._kept import program
from numpyro_sgp._programs import (
    FEW,
    NEEDS_KNOWN_DATA,
    forget,
    join_static,
    on_data,
    split_static,
)
from numpyro_sgp._threads import alone
from numpyro_sgp.distributions import Kept, SparsePosterior, keep
from numpyro_sgp.distributions.arguments import has_no_numbers, refuse_sparse
from numpyro_sgp.inducing.covariances import inducing_covariance
from numpyro_sgp.predictive.row_batches import RowPlan, by_batches, plan_of
from numpyro_sgp.tracing.messages import is_inside_jit, known_inside_jit
from numpyro_sgp.tracing.state import kind_of, running, shape_of
from numpyro_sgp.tracing.trees import is_number, is_plain


class Marginals(NamedTuple):
    """
    Of f at each row.

    :param mean: shape ``batch_shape + (N,)``.
    :param variance: the same shape.

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 12)[:, None]
    >>> data = X, jnp.sin(X[:, 0])
    >>> fitted = sgp.fit(model, sgp.SVGP(4), data, progress_bar=False)
    >>> f = fitted.predictor()(X[:3])["f"]
    >>> f.mean.shape, bool((f.variance > 0).all())
    ((3,), True)
    """

    mean: np.ndarray
    variance: np.ndarray


class Predictor:
    r"""
    Marginal means and variances of f at new inputs, as ``guide.posterior`` has them
    (hyperparameters and other latents at their medians), for many calls: the factor of
    K_uu and what else does not depend on the inputs is computed once, when first needed.

    Rows are done ``batch_size`` at a time, fewer filled up to a power of two, so that a few
    programs do for any number of them, in bounded memory. A batch of B rows costs its
    kernel values, and one product of a triangular M x M with an M x B matrix where q(u) is
    a Gaussian without coupling and smaller than the prior; else up to two of them. (The
    posteriors of :class:`~numpyro_sgp.InverseFreeSVGP` keep nothing.)

    What is kept is of the first call's kernel. A call whose kernel is another one, as the
    model computes hyperparameters from its inputs or has them as arguments, is right and
    keeps nothing: as slow as ``guide.posterior``. It is of the model as it is in the first
    call, as compiled functions of JAX are of what they read when they are traced: make
    another one, or call ``fitted.predict``, where a global number that the model reads has
    changed.

    :param guide: an :class:`~numpyro_sgp.AutoSparseGP` that is set up.
    :param params: its parameters.
    :param batch_size: rows done at a time. What a batch needs should stay below 32 MB,
        above which glibc gives memory back to the system after each: with 1024 inducing
        points in double precision 1000 rows at a time take half as long again as 512.
    :raises ValueError: if parameters are not those of the guide; in a call with rows of
        another number or kind, if the model computes something else than in the first.

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> X = jnp.linspace(0.0, 6.0, 30)[:, None]
    >>> data = X, jnp.sin(X[:, 0])
    >>> fitted = sgp.fit(model, sgp.SVGP(5), data, progress_bar=False)
    >>> predictor = fitted.predictor()
    >>> predictor(jnp.linspace(0.0, 6.0, 2500)[:, None])["f"].mean.shape
    (2500,)
    """

    def __init__(self, guide, params: dict, batch_size: int = 512):
        check_guide(guide)
        guide.check_params(params)
        check_whole(batch_size, "batch_size", least=1)
        self.guide, self.params, self.batch_size = guide, params, batch_size
        #: By GP site what does not depend on inputs; None before the first call.
        self.kept: dict | None = None
        self._made_of: dict = {}  # which is for the same kernels alone
        # Of the model as it was: by kinds of arguments, and by shapes of batches.
        self._plans: OrderedDict = OrderedDict()
        self._states: OrderedDict = OrderedDict()

    @alone
    def __call__(self, *args, **kwargs) -> dict[str, Marginals]:
        """
        :param args: arguments of the model, ``X_new`` most often.
        :return: for each GP site its marginals, in arrays of NumPy; where arguments are
            traced (``jax.jit``, ``grad``, ``vmap``) in one piece, as a part of that
            program. Call it outside once before, so that what it keeps is known there.
        :raises ValueError: if the inputs do not fit the model.
        """
        args, kwargs = self.guide.as_set_up(args, kwargs)
        given = args, kwargs
        leaves = jax.tree.leaves(given)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            # Inside of jit, grad or vmap: a part of their program.
            with running(self.guide.model) as states:
                self._check_still(states, False)
            at = functools.partial(_moments, self.guide, self.params, args, kwargs)
            found, is_same = at(self.kept, self._made_of)
            if self.kept:
                found = jax.lax.cond(is_same, lambda: found, lambda: at({}, {})[0])
            return {name: Marginals(*moments) for name, moments in found.items()}
        refuse_sparse(self.guide.model, args, kwargs)
        self.guide.check_rows(args, kwargs)
        self.guide.check_finite(self.params, args, kwargs)
        if any(map(has_no_numbers, leaves)):
            return self._one_by_one(args, kwargs)
        # Programs look another way where what is known in them is computed at once.
        is_inside = is_inside_jit()
        with running(self.guide.model) as states, known_inside_jit():
            return self._in_batches(given, states, is_inside)

    def _in_batches(self, given, states, is_inside):
        arrays, static = split_static(given)
        program_of_rows, parts = program(self.guide, _marginals), []

        def run(batch):
            state = self._state_at(states, batch, static, is_inside)
            if self.kept is None:
                where = join_static(batch, static)
                self.kept, self._made_of = kept_of(self.guide, self.params, *where)
            kept = ({}, {}) if is_other else (self.kept, self._made_of)
            told = {"static": static, "state": state}
            return program_of_rows(self.params, batch, *kept, **told)

        try:
            plan, is_other = self._plan_of(arrays, static), False
            rows = plan.rows(arrays, self.batch_size, only_f=True)
            found = by_batches(run, arrays, self.batch_size, rows)
            if not all(is_same for (_, is_same), *_ in found):
                is_other = True
                found = by_batches(run, arrays, self.batch_size, rows)
        except NEEDS_KNOWN_DATA:  # a model that counts groups, say
            return self._one_by_one(*given)
        for (each, _), count, size in found:
            share = count / max(size, 1)
            parts.append({k: [_first(v, share) for v in m] for k, m in each.items()})
        return {
            name: Marginals(
                *(np.concatenate([part[name][i] for part in parts], -1) for i in (0, 1))
            )
            for name in parts[0]
        }

    def _plan_of(self, arrays, static) -> RowPlan:
        """How rows of this kind are done apart, found out once."""
        kind = static, kind_of(arrays)
        if kind not in self._plans:
            plan = plan_of(self.guide, arrays, static, self.batch_size)
            forget(self._plans, FEW)
            self._plans[kind] = plan
        return self._plans[kind]

    def _state_at(self, states, batch, static, is_inside):
        """
        What the model computes of such a batch, looked at once.

        :raises ValueError: as :meth:`_check_still`.
        """
        key = is_inside, static, tuple(map(shape_of, batch))
        if key not in self._states:
            self._check_still(states, is_inside)
            forget(self._states, FEW)
            self._states[key] = states(batch, static)
        return self._states[key]

    def _check_still(self, states, is_inside):
        """
        :raises ValueError: if the model computes something else than at the shapes that
            were new before.
        """
        seen = (key for key in reversed(self._states) if key[0] == is_inside)
        if (last := next(seen, None)) is None:
            return
        _, static, shapes = last
        before = self._states[last]
        now = states([jax.ShapeDtypeStruct(*shape) for shape in shapes], static)
        if isinstance(before, bytes) and now != before:
            raise ValueError(
                "The model computes something else than when this predictor was first "
                "called: a number that it reads beside its arguments has changed. Make "
                "another predictor."
            )

    def _one_by_one(self, args, kwargs):
        """Operation by operation."""
        found, _ = self.guide.posterior_at(self.params, args, kwargs)
        return {
            name: Marginals(np.asarray(q.mean), np.asarray(q.variance))
            for name, q in found.items()
        }


def _marginals(guide, params, arrays, kept, made_of, *, static):
    return _moments(guide, params, *join_static(arrays, static), kept, made_of)


def _moments(guide, params, args, kwargs, kept, made_of):
    """Means and variances; and whether kernels are those that what is kept was made of."""
    found, _ = guide.posterior_at(params, args, kwargs, kept=kept)
    pairs = [(made_of[name], _kernel_at(found[name])) for name in made_of]
    moments = {name: (q.mean, q.variance) for name, q in found.items()}
    return moments, jnp.all(jnp.array([_are_close(*pair) for pair in pairs], bool))


def _kernel_at(q: SparsePosterior) -> dict:
    """What says all of a kernel that a factor of K_uu depends on: its numbers, or K_uu."""
    kernel = q.prior.kernel
    if is_plain(kernel):
        return {"numbers": [v for v in jax.tree.leaves(kernel) if is_number(v)]}
    return {"K_uu": [inducing_covariance(kernel, q.inducing)]}


def _are_close(before: dict, now: dict):
    """Whether they are the same but for rounding in another program."""
    shapes = [{k: [jnp.shape(a) for a in v] for k, v in d.items()} for d in (before, now)]
    if shapes[0] != shapes[1]:
        return False
    found = []
    for kind, arrays in before.items():
        for a, b in zip(arrays, now[kind], strict=True):
            size = jnp.maximum(jnp.abs(a), jnp.abs(b))  # of each hyperparameter
            size = size if kind == "numbers" else size.max()
            rounding = 64 * jnp.finfo(jnp.result_type(float)).eps
            found.append(jnp.all(jnp.abs(a - b) <= rounding * size))
    return jnp.all(jnp.array(found, bool))


def _first(values, share) -> np.ndarray:
    """The rows that count."""
    values = np.asarray(values)
    return values[..., : round(share * values.shape[-1])]


def kept_of(guide, params: dict, args, kwargs) -> tuple[dict, dict]:
    """
    By GP site what its marginals have in common at all inputs, where it is kept; and what
    the kernels are that this is for.

    :param args: tuple of arguments of the model, with some inputs.
    :param kwargs: dict of its keyword arguments.
    """

    def run(args, kwargs, params):
        found, _ = guide.posterior_at(params, args, kwargs)
        return {
            name: ((q.chol, q.jitter_used, q.q), _kernel_at(q))
            for name, q in found.items()
            if type(q) is SparsePosterior
        }

    found = on_data(run, args, kwargs, params)
    kept: dict[str, Kept] = {}
    for name, (factors, _) in found.items():
        if np.isfinite(factors[0]).all():
            kept[name] = keep(*factors)
        else:
            guide.posterior(params, *args, **kwargs)  # which says why
    return kept, {name: found[name][1] for name in kept}
