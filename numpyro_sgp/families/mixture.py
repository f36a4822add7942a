"""Entropy of mixtures of Gaussians over whitened inducing variables."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp

from numpyro_sgp.families.block_gaussian import Block
from numpyro_sgp.linalg import solve_lower

ENTROPIES = ("pairwise", "jensen", "monte_carlo")


def mixture_kl(
    block: Block,
    log_weights: Array,
    entropy: str = "pairwise",
    rng_key: Array | None = None,
    num_samples: int = 16,
) -> Array:
    r"""
    :math:`\mathrm{KL}[q \| N(0, I)]` of a mixture :math:`q = \sum_k \pi_k N(m_k, S_k)`, or
    an upper bound of it: the cross entropy is exact (eq. 19 of [1]), the entropy of q is

    - ``"jensen"``: eq. 18 of [1],
      :math:`-\sum_k \pi_k \log \sum_l \pi_l N(m_k; m_l, S_k + S_l)`, a lower bound that
      loses :math:`(1 - \log 2) / 2` for each dimension even where K = 1;
    - ``"pairwise"``: :math:`\sum_k \pi_k H_k - \sum_k \pi_k \log \sum_l \pi_l e^{-B_{kl}}`
      with the Bhattacharyya distances B of the components [2], a lower bound that is exact
      for K = 1, for equal and for well separated components; or Jensen's, where that is
      larger (in one or two dimensions it can be);
    - ``"monte_carlo"``: unbiased, with draws from each component.

    K = 1 is exact by every method.

    :param block: whitened components: ``mu`` of shape ``(K, *batch, M)``, a mixture over
        all of the ``batch`` and M dimensions together.
    :param log_weights: :math:`\log \pi`, shape ``(K,)``.
    :param entropy: the method.
    :param rng_key: for ``"monte_carlo"``.
    :param num_samples: draws from each component, for ``"monte_carlo"``.
    :return: a number.

    **References:**

    1. Bonilla, Krauth, Dezfouli (2018). Generic Inference in Latent Gaussian Process
       Models. https://arxiv.org/abs/1609.00577
    2. Kolchinsky, Tracey (2017). Estimating Mixture Entropy with Pairwise Distances.
       Entropy. https://arxiv.org/abs/1706.02419
    """
    weights = jnp.exp(log_weights)
    num = log_weights.shape[0]
    parts = _sum_batch(block.kl())  # exact KL of each component from the prior
    within = jnp.sum(weights * parts)
    if num == 1:
        return within
    if entropy == "monte_carlo":
        # KL = sum_k pi_k (KL_k + E_k[log q - log q_k])
        keys = jax.random.split(rng_key, num)
        noise = jax.vmap(lambda k: jax.random.normal(k, (num_samples, *block.mu.shape[1:])))
        ratios = jax.vmap(_log_ratio, in_axes=(0, 0, None, None))(
            jnp.arange(num), noise(keys).astype(block.mu.dtype), block, log_weights
        )
        return within + jnp.sum(weights * jnp.mean(ratios, axis=1))
    quadratic, half_log_det = _pairs(block)
    own = _sum_batch(_half_log_det(block))
    size = block.mu[0].size
    log_2pi = jnp.log(2 * jnp.pi).astype(own.dtype)
    log_normal = -0.5 * quadratic - half_log_det - 0.5 * size * log_2pi
    jensen = within + jnp.sum(
        weights
        * (own + 0.5 * size * (1 + log_2pi) + logsumexp(log_normal + log_weights, axis=1))
    )
    if entropy == "jensen":
        return jensen
    # B = (m_k - m_l)' (S_k + S_l)^-1 (m_k - m_l) / 4 + log(|(S_k + S_l) / 2|) / 2 - ...
    distance = 0.25 * quadratic + half_log_det - 0.5 * size * jnp.log(2.0)
    distance = distance - 0.5 * (own[:, None] + own[None, :])
    pairwise = within + jnp.sum(weights * logsumexp(log_weights - distance, axis=1))
    return jnp.minimum(pairwise, jensen)


def _sum_batch(x):
    """From ``(K, *batch)`` to ``(K,)``."""
    return jnp.sum(x.reshape(x.shape[0], -1), axis=1)


def _half_log_det(block):
    diagonal = block.sqrt
    if not block.is_diagonal:
        diagonal = jnp.diagonal(block.sqrt, axis1=-2, axis2=-1)
    return jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1)


def _pairs(block):
    """
    :math:`(m_k - m_l)^\\top (S_k + S_l)^{-1} (m_k - m_l)` and
    :math:`\\log |S_k + S_l| / 2`, both of shape ``(K, K)``.
    """
    difference = block.mu[:, None] - block.mu[None]
    if block.is_diagonal:
        total = block.sqrt[:, None] ** 2 + block.sqrt[None] ** 2
        quadratic = jnp.sum(difference**2 / total, axis=-1)
        half_log_det = 0.5 * jnp.sum(jnp.log(total), axis=-1)
    else:
        S = jnp.einsum("...mk,...nk->...mn", block.sqrt, block.sqrt)
        L = jnp.linalg.cholesky(S[:, None] + S[None])
        quadratic = jnp.sum(solve_lower(L, difference[..., None]) ** 2, axis=(-2, -1))
        diagonal = jnp.diagonal(L, axis1=-2, axis2=-1)
        half_log_det = jnp.sum(jnp.log(diagonal), axis=-1)
    num = block.mu.shape[0]
    return (
        quadratic.reshape(num, num, -1).sum(-1),
        half_log_det.reshape(num, num, -1).sum(-1),
    )


def _log_ratio(k, noise, block, log_weights):
    """``log q(u) - log N(u; m_k, S_k)`` at draws u of component k, shape ``(S,)``."""
    mu, sqrt = block.mu[k], block.sqrt[k]
    if block.is_diagonal:
        u = mu + sqrt * noise
        white = (u[:, None] - block.mu) / block.sqrt
    else:
        u = mu + jnp.einsum("...mk,...k->...m", sqrt, noise)
        centred = u[:, None] - block.mu
        # A square root of any kind, so through its covariance.
        L = jnp.linalg.cholesky(jnp.einsum("...mk,...nk->...mn", block.sqrt, block.sqrt))
        L = jnp.broadcast_to(L, (*centred.shape, centred.shape[-1]))
        white = solve_lower(L, centred[..., None])[..., 0]
    num_draws, num = noise.shape[0], log_weights.shape[0]
    log_density = -0.5 * jnp.sum((white**2).reshape(num_draws, num, -1), axis=-1)
    log_density = log_density - _sum_batch(_half_log_det(block))
    own = jax.lax.dynamic_index_in_dim(log_density, k, axis=1, keepdims=False)
    return logsumexp(log_density + log_weights, axis=1) - own
