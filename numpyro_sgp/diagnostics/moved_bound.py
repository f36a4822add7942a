"""The bound of a fit as a function of the marginals of f, and what Z leaves of f."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from numpyro_sgp._programs import NEEDS_KNOWN_DATA, Data, shared
from numpyro_sgp.distributions import SparsePosterior
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.families import QU
from numpyro_sgp.linalg.cholesky import default_jitter
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.coupling import feeding

#: Rows up to which points are added.
MAX_ROWS = 100_000
_FEW_NUMBERS = 2e5  # of the data, with which a program is compiled briefly
_CHEAP = 2e5  # rows times points up to which more points are tried
_NOTHING = 1e-3  # nats for the sake of which no point is added


class Field(NamedTuple):
    """
    What inducing points leave of a GP site, for one draw of its hyperparameters. Its Q
    latent functions are in one axis.

    :param A: whitened projection, ``(Q, M, N)``, or ``(1, M, N)`` where all share it.
    :param prior: prior variances, ``(Q, N)``.
    :param left: those that the inducing points leave, ``(Q, N)``.
    :param X: inputs, ``(*batch, N, D)``.
    :param mean: means of q(f), less those of the prior, ``(Q, N)``.
    :param variance: variances of q(f) in the bound, ``(Q, N)``.
    :param factor: what multiplies ``left`` in them where q(f | u) is relaxed, or 1.
    """

    A: np.ndarray
    prior: np.ndarray
    left: np.ndarray
    X: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    factor: np.ndarray


class MovedBound:
    """
    The bound of a guide with the marginals of f moved, compiled once for any parameters.

    :param guide: an AutoSparseGP that is set up.
    :param loss: a TraceGP_ELBO.
    :param args: tuple of the arguments of the model, all of the data.
    :param kwargs: dict of its keyword arguments.
    """

    def __init__(self, guide, loss, args, kwargs):
        self.guide, self.loss = guide, loss
        self.args, self.kwargs = as_arrays(guide.model, args, kwargs)
        self._data = Data(self.args, self.kwargs)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.relaxations: dict[str, type] = {}
        self.num_inducing = 0
        self._sites: dict = {}
        self._terms = jax.jit(self._terms_of)  # traced once, for looks and for slopes
        slopes = jax.value_and_grad(self._value, argnums=3, has_aux=True)
        few = self._data.size < _FEW_NUMBERS
        self._slopes = shared(slopes, briefly=few)
        self._fields = shared(self._fields_of, briefly=few)
        self._columns = shared(self._columns_of, briefly=True)

    def why_unknown(self, params, max_rows: int) -> str:
        """
        Why points cannot be added, or ``""``; learns shapes. Nothing is computed.

        :raises ValueError: if the model takes a minibatch.
        """
        why: list[str] = []

        def run(params):
            posteriors = self._posteriors(self._data.arrays, jax.random.key(0), params, why)
            for name, posterior in posteriors.items():
                self.shapes[name] = posterior.shape()
                self.num_inducing += sum(p.shape[-2] for p in posterior.inducing)
                if not isinstance(posterior, SparsePosterior):
                    kind = type(self.guide.approximations[name]).__name__
                    why.append(f"q(u) at '{name}' has no factor of K_uu ({kind})")
                elif type(posterior.q).mean_shift is not QU.mean_shift:
                    why.append(
                        f"the mean at '{name}' has a part beside q(u) (a decoupled q)"
                    )
                elif posterior.joint_rows > 1:
                    why.append(f"rows of '{name}' are drawn together")
                if posterior.relaxation is not None:
                    self.relaxations[name] = type(posterior.relaxation)
                    blocks = posterior.q.component(0).blocks if not why else ()
                    if posterior.num_components > 1 or any(b.is_prior for b in blocks):
                        why.append(f"the bound at '{name}' is tight, of a mixture or ODVGP")
            return jax.tree.leaves([p.prior.X for p in posteriors.values()])

        self.num_inducing = 0
        dtype = jnp.result_type(*jax.eval_shape(run, params))
        rows = max(shape[-1] for shape in self.shapes.values())
        if not why and rows > max_rows:
            why.append(f"there are {rows} rows, more than {max_rows}")
        if not why and len(self.shapes) > 1 and (below := self._below(params, dtype)):
            why.append(f"GP sites {sorted(below)} feed others (a deep GP)")
        self.dtype = dtype
        if not why:
            still = self.as_shift(self.no_shift())
            given = jax.random.key(0), params, still
            try:
                jax.eval_shape(self._terms, self._data.arrays, *given)
            except NEEDS_KNOWN_DATA:  # a model that looks at its data
                self._data = Data(self.args, self.kwargs, known=True)
                jax.eval_shape(self._terms, self._data.arrays, *given)
            if any(site.coupling.couples for site in self._sites.values()):
                why.append("the likelihood ties rows together")
        return why[0] if why else ""

    def prepare(self, params, rng_key=None) -> None:
        """Begins to compile beside, where :meth:`why_unknown` is empty."""
        rng_key = jax.random.key(0) if rng_key is None else rng_key
        given = self._data.arrays, rng_key, params
        self._slopes.prepare(*given, self.as_shift(self.no_shift()))
        self._fields.prepare(*given)

    def _below(self, params, dtype):
        def trace_at(f):
            where = self.guide.model, self.args, self.kwargs
            return messages.trace_of(*where, data=params, at_site=messages.at_values(f))

        return feeding(trace_at, self.shapes, dtype)

    def _posteriors(self, arrays, key, params, why=None):
        """The posteriors at GP sites, for the draws that the loss makes with this key."""
        found = {}

        def at_site(site):
            name = site["name"]
            found[name], _ = messages.unwrap(site["fn"])
            if why is not None and site["scale"] is not None:
                why.append(f"GP site '{name}' is scaled (numpyro.handlers.scale)")
            return site["fn"], jnp.zeros(site["fn"].shape())

        guide_key = jax.random.split(key, 4)[1]
        run = handlers.substitute(handlers.seed(self.guide, guide_key), data=dict(params))
        at_sites = messages.AtGPSites(at_site, are=messages.is_sparse_posterior)
        with handlers.block(), handlers.trace() as trace, at_sites:
            args, kwargs = self._data.filled(arrays)
            run(*args, **kwargs)
        checks.check_whole_plates(trace, "bounds with more points are of all rows")
        return found

    def _fields_of(self, arrays, key, params):
        def field(posterior):
            prior, shape = posterior.prior, posterior.shape()
            A = posterior.projection
            if A.ndim > 2:
                A = jnp.broadcast_to(A, (*shape[:-1], *A.shape[-2:]))
            A = A.reshape(-1, *A.shape[-2:])

            def by_row(value):
                return jnp.broadcast_to(value, shape).reshape(-1, shape[-1])

            variance = by_row(prior.kernel.diag(prior.X))
            left = jnp.maximum(variance - jnp.sum(A**2, axis=-2), 0.0)
            mean, factor, q = posterior.mean - prior.mean, 1.0, posterior.variance
            if posterior.relaxation is not None:
                factor, q = posterior.relaxation.factor, posterior.bound_marginals()[1]
            return Field(A, variance, left, prior.X, *map(by_row, (mean, q, factor)))

        found = self._posteriors(arrays, key, params)
        return {name: field(posterior) for name, posterior in found.items()}

    def _columns_of(self, arrays, key, params, name_points):
        ((name, points),) = name_points.items()
        posterior = self._posteriors(arrays, key, params)[name]
        shape = posterior.shape()
        K = posterior.prior.kernel(points.reshape(*shape[:-1], 1, -1), posterior.prior.X)
        return jnp.broadcast_to(K[..., 0, :], shape).reshape(-1, shape[-1])

    def _terms_of(self, arrays, key, params, shift):
        where = self.guide.model, self.guide, *self._data.filled(arrays)
        terms, self._sites = self.loss.moved(key, shift, params, *where)
        return terms

    def _value(self, arrays, key, params, shift):
        terms = self._terms(arrays, key, params, shift)
        return sum(jnp.sum(term) for term in terms.values()), terms

    def observed(self, params) -> set[str]:
        """Names of the observed sites of the model."""
        found: set[str] = set()

        def run(params):
            where = self.guide.model, self.args, self.kwargs
            trace = messages.trace_of(*where, data=params, at_site=messages.at_prior_mean)
            found.update(
                k
                for k, site in trace.items()
                if site["type"] == "sample" and site["is_observed"]
            )

        jax.eval_shape(run, params)
        return found

    def fields(self, key, params) -> dict[str, Field]:
        """By site, in NumPy."""
        return jax.tree.map(np.asarray, self._fields(self._data.arrays, key, params))

    def as_shift(self, moved: dict) -> dict:
        """From (means, variances) by site, ``(Q, N)``, to what :meth:`terms` takes."""
        return {
            (kind, name): np.asarray(value, self.dtype).reshape(self.shapes[name])
            for name, pair in moved.items()
            for kind, value in zip(("mean", "var"), pair, strict=True)
        }

    def no_shift(self) -> dict:
        """Zeros for :meth:`as_shift`."""
        return {name: (np.zeros(s), np.zeros(s)) for name, s in self.shapes.items()}

    def terms(self, key, params) -> dict[str, Array]:
        """Contributions to the bound by site, nothing moved."""
        where = self._data.arrays, key, params
        (_, terms), _ = self._slopes(*where, self.as_shift(self.no_shift()))
        return terms

    def look(self, key, params, moved) -> tuple[float, dict]:
        """
        The bound with marginals moved, and its slopes by site: those by the means, and
        minus twice those by the variances, ``(Q, N)``.
        """
        where = self._data.arrays, key, params
        (value, _), slopes = self._slopes(*where, self.as_shift(moved))
        slopes = {k: np.asarray(slope, dtype=float) for k, slope in slopes.items()}
        by_site = {
            name: tuple(
                sign * slopes[kind, name].reshape(-1, shape[-1])
                for sign, kind in ((1.0, "mean"), (-2.0, "var"))
            )
            for name, shape in self.shapes.items()
        }
        return float(value), by_site

    def most_points(self, field: Field) -> int:
        """
        How many points it makes sense to add: as many as there are, or 32; four times as
        many where that is cheap; no more than rows.
        """
        M, N = field.A.shape[-2:]
        return min(max(32, 4 * M if N * M <= _CHEAP else M), N)

    def choose(self, key, params, name, field: Field, precision, most: int):
        r"""
        Rows of X, one after another for each latent function where
        :math:`\lambda_n d_n` is largest, with d_n the prior variance that the inducing
        points and those before leave.

        :param precision: :math:`\lambda_n`, ``(Q, N)``.
        :return: row numbers ``(number, Q)``, fewer than ``most`` where more add nothing,
            and what :meth:`rows` has for them.
        """
        return self._rows(key, params, name, field, precision, None, most)

    def rows(self, key, params, name, field: Field, order) -> np.ndarray:
        """
        :math:`A_v = L_v^{-1} C_{vX}` of the points in this order, ``(Q, number, N)``: what
        remains of their covariances given the inducing points, whitened.
        """
        return self._rows(key, params, name, field, None, order, len(order))[1]

    def _rows(self, key, params, name, field, precision, order, most):
        A, left = field.A, field.left
        Q, N = left.shape
        each, shared = np.arange(Q), len(A) == 1
        # The jitter of SOLVE-GP's factors; what rounding leaves is no variance.
        jitter = default_jitter(self.dtype) * np.mean(field.prior, axis=-1)
        R = np.zeros((Q, most, N), self.dtype)
        chosen: list[np.ndarray] = []
        where = self._data.arrays, key, params
        free = np.ones((Q, N))
        for j in range(most):
            if order is None:
                score = precision * left * free
                if 0.5 * np.sum(precision * left) < _NOTHING:
                    break
                at = np.argmax(score, axis=-1)
                if np.all(left[each, at] <= jitter) or np.max(score) <= 0.0:
                    break
                free[each, at] = 0.0
            else:
                at = order[j]
            chosen.append(at)
            X = field.X
            if X.ndim > 2:  # of each function
                batch = (*self.shapes[name], X.shape[-1])
                X = np.broadcast_to(X, batch).reshape(Q, N, -1)[each, at]
            else:
                X = X[at]
            K = np.asarray(self._columns(*where, {name: X}))
            a = A[0][:, at].T if shared else A[each, :, at]
            column = K - np.matmul(a[:, None, :], A)[:, 0]
            column = column - np.einsum("qjn,qj->qn", R[:, :j], R[each, :j, at])
            variance = left[each, at]
            usable = variance > jitter
            R[:, j] = column * (usable / np.sqrt(variance + jitter))[:, None]
            left = np.maximum(left - R[:, j].astype(left.dtype) ** 2, 0.0)
        return np.array(chosen, int).reshape(-1, Q), R[:, : len(chosen)]
