"""Bounds of the log evidence from both sides, for regression with Gaussian noise."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from numpyro_sgp.diagnostics.moved_bound import MAX_ROWS, MovedBound
from numpyro_sgp.diagnostics.optimality import check_fitted
from numpyro_sgp.elbo import GaussHermite, TraceGP_ELBO


class EvidenceBracket(NamedTuple):
    """
    Between what log p(y | hyperparameters) lies.

    :param lower: nats.
    :param upper: nats.
    :param unknown: why it cannot be told (then both are NaN), or empty.
    :param gain: what is between the lower end and the bound at hand.
    """

    lower: float
    upper: float
    unknown: str = ""
    gain: float = float("nan")


def evidence_bracket(guide, params: dict, *args, rng_key=None, **kwargs) -> EvidenceBracket:
    r"""
    Bounds of log p(y | hyperparameters) from both sides, for Gaussian likelihoods.

    With Q of the inducing points and the orthogonal ones that
    :func:`~numpyro_sgp.diagnostics.sparsity.sparsity_curve` would add, and t the sum of
    the prior variances that they leave: above [1]

    .. math::

        -\tfrac12 \log |Q + \Sigma| - \tfrac12 r^\top (Q + t I + \Sigma)^{-1} r
            - \tfrac N2 \log 2\pi ,

    below the collapsed bound with a relaxed conditional [2], which is at least that of any
    q(u) and of what the curve gains. The noise variances, one for each row, and
    :math:`r = y - m(X)` are read off the slopes of the expected log likelihood. Values of
    observed sites that do not depend on f count, priors of hyperparameters do not.

    :param guide: an :class:`~numpyro_sgp.AutoSparseGP` that is set up.
    :param params: parameters, ``result.params`` of ``svi.run``.
    :param args: arguments of the model, with all of the data.
    :param rng_key: random key; ``jax.random.key(0)`` if None.
    :param kwargs: keyword arguments of the model.
    :return: the bracket, ``unknown`` for other likelihoods, more than one GP site, latent
        functions that share observations, and hyperparameters that are drawn.
    :raises TypeError: if the guide is no AutoSparseGP.
    :raises ValueError: if it is not set up, ``params`` lack q(u), or the model takes a
        minibatch.

    **References:**

    1. Titsias (2014). Variational Inference for Gaussian and Determinantal Point
       Processes. NIPS workshop on variational inference.
    2. Titsias (2025). New Bounds for Sparse Variational Gaussian Processes. ICML.
       https://arxiv.org/abs/2502.08730

    >>> import jax.numpy as jnp, numpyro
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> from numpyro_sgp.diagnostics.evidence import evidence_bracket
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.2), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 40)[:, None]
    >>> y = jnp.sin(5.0 * X[:, 0])
    >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(8, train_inducing=False))
    >>> guide.setup(X, y)
    >>> params = {"f_auto_qu_mu": jnp.zeros(8), "f_auto_qu_sqrt": jnp.eye(8)}
    >>> bracket = evidence_bracket(guide, params, X, y)
    >>> evidence = sgp.MarginalGP(sgp.kernels.RBF(1.0, 0.5), X, 0.2).log_prob(y)
    >>> bool(bracket.lower - 0.01 < evidence < bracket.upper + 0.01)
    True
    """
    return begin_bracket(guide, params, args, kwargs, rng_key)()


def begin_bracket(
    guide, params, args, kwargs, rng_key=None
) -> Callable[[], EvidenceBracket]:
    """What is to be called for :func:`evidence_bracket`; compiles beside."""
    check_fitted(guide, params, "evidence_bracket")
    # Three nodes are exact for a quadratic, and no closed form hides it.
    bound = MovedBound(guide, TraceGP_ELBO(GaussHermite(3)), args, kwargs)
    nan = float("nan")
    why = bound.why_unknown(params, MAX_ROWS)
    if not why and len(bound.shapes) > 1:
        why = f"there are {len(bound.shapes)} GP sites"
    if why:
        return partial(EvidenceBracket, nan, nan, why)
    bound.prepare(params, rng_key)
    return partial(bracket_of, bound, params, rng_key)


def bracket_of(bound: MovedBound, params, rng_key=None) -> EvidenceBracket:
    """The bracket of a bound with one GP site, by quadrature."""
    nan = float("nan")
    ((name, shape),) = bound.shapes.items()
    key, other = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    field, again = (bound.fields(k, params)[name] for k in (key, other))
    if not jax.tree.all(jax.tree.map(np.array_equal, field, again)):
        return EvidenceBracket(nan, nan, "hyperparameters are drawn by the guide")
    # Slopes at wide marginals, which rounding harms least.
    still = {name: (np.zeros(shape), field.prior)}
    size = np.sqrt(field.prior)
    size = size * np.random.default_rng(0).uniform(-1.0, 1.0, size.shape)
    moved = {name: (size, 2.0 * field.prior)}
    (g, precision), (g_moved, precision_moved) = (
        bound.look(key, params, shift)[1][name] for shift in (still, moved)
    )
    tolerance = 1e4 * np.finfo(bound.dtype).eps
    scale = precision.max() * (np.abs(size) + 1.0) + np.abs(g)
    apart = np.abs(g - precision * size - g_moved) / scale
    bend = np.abs(precision - precision_moved) / precision.max()
    if not (np.max(apart) < tolerance and np.max(bend) < tolerance):
        return EvidenceBracket(nan, nan, "the likelihood is not Gaussian in each f alone")
    precision = np.where(precision > tolerance * precision.max(), precision, 0.0)
    root = np.sqrt(precision)
    away = np.divide(g, root, out=np.zeros_like(g), where=root > 0)
    # log p(y | f) = constant - sum of squares / 2; the rest of the normaliser cancels.
    terms = bound.terms(key, params)
    observed = bound.observed(params)
    fit = sum(float(np.asarray(term).sum()) for k, term in terms.items() if k in observed)
    constant = fit + 0.5 * np.sum(away**2 + precision * field.variance)
    residual = away + root * field.mean
    most = bound.most_points(field)
    _, R = bound.choose(key, params, name, field, precision, most)
    lower = upper = constant
    for i in range(len(g)):
        A = np.concatenate([field.A[i % len(field.A)], R[i]]).astype(float)
        left = np.maximum(field.left[i] - np.sum(R[i].astype(float) ** 2, axis=0), 0.0)
        slack = 4 * np.finfo(bound.dtype).eps * field.prior[i]
        below, above = gaussian_bracket(A, left, slack, residual[i], root[i])
        lower, upper = lower + below, upper + above
    at_hand = fit + float(np.asarray(terms[name]).sum())
    lower = float(max(lower, at_hand))
    return EvidenceBracket(lower, float(upper), gain=lower - at_hand)


def gaussian_bracket(A, left, slack, residual, root) -> tuple[float, float]:
    r"""
    Bounds of :math:`-\frac12 \log|I + K| - \frac12 r^\top (I + K)^{-1} r` for K known by
    its projections, all scaled by the roots of precisions: r and K, not the arguments A,
    left and slack.

    :param A: ``(M, N)``, with A'A below the prior's covariance.
    :param left: the diagonal of what it leaves, ``(N,)``.
    :param slack: by how much rounding may have made that too small, ``(N,)``.
    :param residual: r, ``(N,)``.
    :param root: square roots of precisions, ``(N,)``.
    """
    A = A * root
    Ar, AA, square = A @ residual, A @ A.T, residual @ residual

    def quadratic(A, Ar, AA, square, noise):
        """r' (noise I + A'A)^-1 r."""
        solved = np.linalg.solve(noise * np.eye(len(AA)) + AA, Ar)
        return (square - Ar @ solved) / noise

    half_log_det = 0.5 * np.linalg.slogdet(np.eye(len(A)) + AA)[1]
    lower = -half_log_det - 0.5 * quadratic(A, Ar, AA, square, 1.0)
    lower -= 0.5 * np.sum(np.log1p(root**2 * left))
    t = np.sum(root**2 * (left + slack))
    upper = -half_log_det - 0.5 * quadratic(A, Ar, AA, square, 1.0 + t)
    return lower, upper
