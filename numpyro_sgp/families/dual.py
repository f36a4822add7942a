"""Gaussian q(u) by a Gaussian site on u, with natural gradients in its derivatives."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgp.families.base import QU, Factors, Family, Param, Start
from numpyro_sgp.families.blocks import Block, BlockGaussian
from numpyro_sgp.linalg import matmul, solve_lower
from numpyro_sgp.linalg.batches import cholesky, eigh

_MOST_VARIANCE = 10.0  # of whitened variables, in units of the prior's
_MOST_GROWTH = 4.0  # of a variance in one step
_HALVINGS = 20


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["linear", "precision"],
    meta_fields=["rate"],
)
@dataclass(frozen=True)
class DualGaussian(QU):
    r"""
    q(u) over one set of inducing variables as the prior times a Gaussian site,

    .. math::

        q(u) \propto p(u) \exp(\lambda^\top u - u^\top \Lambda u / 2), \qquad
        S = (K^{-1} + \Lambda)^{-1}, \quad m = S \lambda,

    the dual parameters of Adam et al. (2021) [1]. In whitened coordinates, with
    :math:`L L^\top = K`,

    .. math::

        S_w = (I + L^\top \Lambda L)^{-1}, \qquad w = S_w L^\top \lambda.

    **Derivatives.** That by L (and so by hyperparameters and inducing points) is the plain
    one *at fixed sites*: q(u) follows the prior, and what it learned from the data stays.
    In place of those by :math:`\lambda` and :math:`\Lambda` there is the natural gradient,
    that by the expectation parameters :math:`m` and :math:`S + m m^\top` (times -2 for
    :math:`\Lambda`, which is in the natural parameters as :math:`-\Lambda / 2`). With E
    the expected log likelihood, that of -ELBO is the distance to a target,

    .. math::

        \Lambda - L^{-\top} \Bigl(-2 \frac{\partial E}{\partial S_w}\Bigr) L^{-1}, \qquad
        \lambda - L^{-\top} \Bigl(\frac{\partial E}{\partial w}
            - 2 \frac{\partial E}{\partial S_w} w\Bigr),

    so that subtracting :math:`\rho` times it averages targets, of minibatches say:
    :func:`~numpyro_sgp.natural_gradients`. It is halved until that would make no variance
    more than fourfold. Other optimisers need plain derivatives by these two, and cannot be
    used.

    The code of [1] stores :math:`K \lambda` and :math:`K \Lambda K` instead, sums over the
    data of columns of K_uf, which need no solve with L. Held fixed while hyperparameters
    move, they change the site on u; on the banana data that was unstable, and took more
    steps than sites on u.

    Where targets are positive semidefinite, as those of log-concave likelihoods, so is
    their average, and :math:`I + L^\top \Lambda L` is positive definite for any
    hyperparameters. In other cases, or by rounding errors, it may not be when these have
    moved: where it is not, or a whitened variance is above ten, its eigenvalues are lifted
    to at least 0.1, and what was left out fades as the average goes on.

    :param linear: :math:`\lambda`, shape ``(*batch, M)``.
    :param precision: :math:`\Lambda`, shape ``(*batch, M, M)``.
    :param rate: :math:`\rho`, for the halving; None to refuse derivatives.

    **References:**

    1. Adam, Chang, Khan, Solin (2021). Dual Parameterization of Sparse Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/2111.03412
    """

    linear: Array
    precision: Array
    rate: float | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing variables."""
        return (self.linear.shape[-1],)

    def whitened(self, factors: Factors) -> BlockGaussian:
        """The same q by its mean and a square root of its covariance."""
        L = factors.chol
        linear, precision = self.linear, self.precision
        batch = jnp.broadcast_shapes(L.shape[:-2], linear.shape[:-1])
        L = jnp.broadcast_to(L, (*batch, *L.shape[-2:]))
        linear = jnp.broadcast_to(linear, L.shape[:-1]).astype(L.dtype)
        precision = jnp.broadcast_to(precision, L.shape).astype(L.dtype)
        mu, sqrt = _whitened(self.rate, L, linear, precision)
        return BlockGaussian((Block(mu, sqrt, upper=True),))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whitened(rate, L, linear, precision):
    """Whitened mean and upper triangular P with P P' = S_w."""
    return _values(L, linear, precision)[0]


def _values(L, linear, precision):
    """The same, and what derivatives need."""
    eye = jnp.eye(L.shape[-1], dtype=L.dtype)
    root = matmul(precision, L)
    given = eye + _symmetric(matmul(L.mT, root))

    def factors(B):
        C = cholesky(B)
        return C, solve_lower(C, jnp.broadcast_to(eye, C.shape)).mT

    C, P = factors(given)
    # False for NaN, what is not positive definite.
    fits = jnp.all(jnp.sum(P**2, axis=-1) <= _MOST_VARIANCE, axis=-1)[..., None, None]

    def keep():
        return C, P, root, jnp.zeros_like(given)

    def lift():
        values, V = eigh(given)
        least = 1.0 / _MOST_VARIANCE
        lifted = matmul(V * jnp.maximum(values, least)[..., None, :], V.mT)
        excess = jnp.where(fits, 0.0, given - _symmetric(lifted))
        new_root = root - solve_lower(L, excess, transpose=True)
        return *factors(given - excess), new_root, excess

    C, P, root, excess = lax.cond(jnp.all(fits), keep, lift)
    w = _apply(P, _apply(P.mT, _apply(L.mT, linear)))
    return (w, P), (L, linear, C, P, w, root, excess)


def _forward(rate, L, linear, precision):
    if rate is None:
        raise ValueError(
            "The derivatives of covariance='dual' are natural gradients, for "
            "natural_gradients(guide, rate, optax.adam(...)) as the optimiser: make it "
            "with this guide. Other optimisers need another covariance, 'full' for one."
        )
    return _values(L, linear, precision)


def _backward(rate, kept, slopes):
    """Plain derivative by L, natural gradients by the site."""
    L, linear, C, P, w, root, excess = kept
    to_w, to_P = slopes
    # B = C C' = S_w^-1, P = C^-T. dL/dS_w = C G C' with G = (phi + phi') / 2, phi the upper
    # triangle of P' dL/dP with half the diagonal, and dL/dB = -P G P'.
    eye = jnp.eye(L.shape[-1], dtype=L.dtype)
    G = _symmetric(jnp.triu(matmul(P.mT, to_P)) * (1.0 - 0.5 * eye))
    share = _share(G, rate)[..., None]
    to_S = share[..., None] * matmul(matmul(C, G), C.mT)
    to_linear = share * to_w - 2.0 * _apply(to_S, w)
    to_linear = solve_lower(L, to_linear[..., None], transpose=True)
    # What was left out of the site counts as part of it, so that it fades.
    half = solve_lower(L, excess - 2.0 * to_S, transpose=True)
    to_precision = _symmetric(solve_lower(L, half.mT, transpose=True))
    # B = I + L' Lambda L and w = S_w L' lambda.
    s = _apply(P, _apply(P.mT, to_w))
    to_B = -matmul(matmul(P, G), P.mT) - _symmetric(s[..., None] * w[..., None, :])
    to_L = 2.0 * matmul(root, to_B) + linear[..., None] * s[..., None, :]
    return jnp.tril(to_L), to_linear[..., 0], to_precision


_whitened.defvjp(_forward, _backward)


def _share(G, rate):
    """
    What share of a step by the rate, which takes the precision C C' to
    C (I + 2 rate G) C', makes no variance more than fourfold: a power of 1/2.
    """
    eye = jnp.eye(G.shape[-1], dtype=G.dtype)

    def fits(share):
        step = 2.0 * rate * share[..., None, None] * G
        C = cholesky((1.0 - 1.0 / _MOST_GROWTH) * eye + step)
        return jnp.all(jnp.isfinite(C), axis=(-2, -1))

    def go_on(carry):
        count, _, fit = carry
        return (count <= _HALVINGS) & ~jnp.all(fit)

    def halve(carry):
        count, share, fit = carry
        share = jnp.where(fit, share, 0.5 * share)
        return count + 1, share, fits(share)

    # The first attempt is in the loop too: the program has one.
    twice = jnp.full(G.shape[:-2], 2.0, G.dtype)
    start = jnp.zeros((), jnp.int32), twice, jnp.zeros(twice.shape, bool)
    return lax.while_loop(go_on, halve, start)[1]


def _symmetric(A):
    return 0.5 * (A + A.mT)


def _apply(A, x):
    return matmul(A, x[..., None])[..., 0]


@dataclass(frozen=True)
class Dual(Family):
    """The prior times a Gaussian site on u, for minibatches and natural gradients."""

    name = "dual"
    has_all_gaussians = True
    has_scale = False
    is_natural = True

    def start(self, at: Start) -> dict[str, Param]:
        shape = (*at.batch_shape, *at.sizes)
        return {
            "qu_linear": Param(jnp.zeros(shape, at.dtype)),
            "qu_precision": Param(jnp.zeros((*shape, shape[-1]), at.dtype)),
        }

    def build(self, params: dict, whiten: bool) -> DualGaussian:
        rate = params.get("natural_rate")
        return DualGaussian(params["qu_linear"], params["qu_precision"], rate)

    def takes_natural_steps(self, names: Iterable[str]) -> tuple[str, ...]:
        return ("qu_linear", "qu_precision")

    def natural_step(self, free: dict, slopes: dict, rate: Array) -> dict:
        """See :meth:`Family.natural_step`; these slopes are natural already."""
        return {k: -jnp.asarray(rate, free[k].dtype) * slopes[k] for k in free}
