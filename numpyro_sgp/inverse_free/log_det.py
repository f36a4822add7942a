"""Log-determinants from matrix products: unbiased gradients, values by quadrature."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgp.inverse_free.iterations import check_one_matrix, preconditioned, ulisse
from numpyro_sgp.linalg import matmul
from numpyro_sgp.linalg.batches import eigh


def log_det(
    rng_key: Array,
    K: Array,
    preconditioner: Array | None,
    num_probes: int,
    keep: float = 0.7,
    first: int = 1,
    num_lanczos: int = 20,
) -> Array:
    r"""
    An estimate of :math:`\log|K|` whose derivative is unbiased, by matrix products only.

    The derivative with respect to K is that of :math:`\log|K|` on average over keys:

    .. math:: d \log|K| = \mathrm{tr}(K^{-1} dK)
        \approx \frac1H \sum_h s_h^\top\, dK\, r_h

    with :math:`r_h` of random signs and :math:`s_h` by :func:`ulisse` (van der
    Wilk et al. 2019, whose sum lacks the 1/H). It is unbiased as far as
    :func:`ulisse` is, with less variance for better preconditioners. Second derivatives
    are not those of :math:`\log|K|`.

    The value is not that of the surrogate that is differentiated, but

    .. math:: \log|K| = \log|L_T^\top K L_T| - 2 \sum_i \log (L_T)_{ii},

    the first by stochastic Lanczos quadrature with the same :math:`r_h` (Ubaru, Chen
    and Saad 2017). It is exact where :math:`L_T L_T^\top = K^{-1}`, and has a variance
    of order :math:`\|L_T^\top K L_T - I\|_F^2 / H` nearby; without a preconditioner it
    is rough, and biased where ``num_lanczos`` is below M.

    :param rng_key: key of the probes and of :func:`ulisse`.
    :param K: symmetric positive definite, shape ``(M, M)``; batches by :func:`jax.vmap`.
    :param preconditioner: lower triangular :math:`L_T` with
        :math:`L_T L_T^\top \approx K^{-1}`, shape ``(M, M)``, or None for the identity.
        It counts as a constant.
    :param num_probes: number H of probes.
    :param keep: as in :func:`ulisse`.
    :param first: as in :func:`ulisse`.
    :param num_lanczos: Lanczos steps of the value, M at most.
    :return: a scalar.
    :raises ValueError: for shapes that do not match, or numbers out of range.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.inverse_free import inverse_root, log_det
    >>> K = jnp.array([[2.0, 1.0], [1.0, 2.0]])
    >>> L = inverse_root(K, tol=1e-5).root
    >>> value = log_det(jax.random.key(0), K, L, num_probes=4)
    >>> bool(jnp.allclose(value, jnp.log(3.0), atol=1e-4))
    True
    """
    check_one_matrix(K, preconditioner)
    if num_probes < 1 or num_lanczos < 1:
        raise ValueError(
            "log_det takes at least one probe and one Lanczos step, got "
            f"num_probes={num_probes} and num_lanczos={num_lanczos}."
        )
    key_probes, key_terms = jax.random.split(rng_key)
    r = jax.random.rademacher(key_probes, (K.shape[0], num_probes), K.dtype)
    s = ulisse(key_terms, K, r, preconditioner, first, keep)
    surrogate = jnp.sum(s * matmul(K, r)) / num_probes
    value = _log_det_value(*lax.stop_gradient((K, preconditioner)), r, num_lanczos)
    return value + (surrogate - lax.stop_gradient(surrogate))


def _log_det_value(K, L, r, num_lanczos):
    """Stochastic Lanczos quadrature, from probes in the columns of r."""
    product = partial(matmul, K) if L is None else preconditioned(K, L)
    steps = min(num_lanczos, K.shape[0])
    T = jax.vmap(lambda v: _lanczos(product, v, steps), in_axes=1)(r)
    ritz, vectors = eigh(T)
    # A Ritz value is no smaller than the least eigenvalue; what is below the rounding
    # error of the largest has no correct digit, nor a sign.
    eps = jnp.finfo(K.dtype).eps
    ritz = jnp.maximum(ritz, eps * ritz[:, -1:])
    # The probes have M for their squared length.
    logs = jnp.sum(jnp.square(vectors[:, 0, :]) * jnp.log(ritz), axis=-1)
    value = K.shape[0] * jnp.mean(logs)
    if L is None:
        return value
    return value - 2 * jnp.sum(jnp.log(jnp.diagonal(L)))


def _lanczos(product, v, steps):
    """
    The tridiagonal matrix of ``steps`` Lanczos steps from v, shape ``(steps, steps)``.

    Where the Krylov space of v is exhausted it goes on from rounding errors, or zeros,
    in rows that are decoupled from the first.
    """

    def step(carry, i):
        Q, q = carry
        Q = Q.at[i].set(q)
        w = product(q)
        alpha = matmul(q, w)
        for _ in range(2):  # once leaves errors of the size of cancelled digits
            w = w - matmul(Q.T, matmul(Q, w))
        beta = jnp.sqrt(jnp.sum(jnp.square(w)))
        return (Q, w / jnp.where(beta > 0, beta, 1.0)), (alpha, beta)

    q = v / jnp.sqrt(jnp.sum(jnp.square(v)))
    carry = (jnp.zeros((steps, v.shape[0]), v.dtype), q)
    _, (alpha, beta) = lax.scan(step, carry, jnp.arange(steps))
    off = jnp.diag(beta[:-1], 1)
    return jnp.diag(alpha) + off + off.T
