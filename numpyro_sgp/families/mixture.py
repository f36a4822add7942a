"""Mixtures of Gaussians q(u), and bounds of their KL divergence (SAVIGP)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

from numpyro_sgp.families.base import QU, Factors, Family, Param, Sets, Shape, Start
from numpyro_sgp.families.blocks import Block, BlockGaussian, Full
from numpyro_sgp.linalg import diagonal_of, einsum, half_log_det, matmul, solve_lower
from numpyro_sgp.linalg.batches import cholesky, triangular_solve

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
      loses :math:`(1 - \log 2) / 2` for each dimension where components are equal;
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
        assert rng_key is not None, "what is drawn needs a key"
        # KL = sum_k pi_k (KL_k + E_k[log q - log q_k])
        keys = jax.random.split(rng_key, num)
        noise = jax.vmap(lambda k: jax.random.normal(k, (num_samples, *block.mu.shape[1:])))
        ratios = jax.vmap(_log_ratio, in_axes=(0, 0, None, None))(
            jnp.arange(num), noise(keys).astype(block.mu.dtype), block, log_weights
        )
        return within + jnp.sum(weights * jnp.mean(ratios, axis=1))
    quadratic, half_log_dets = _pairs(block)
    own = _sum_batch(_half_log_det(block))
    size = block.mu[0].size
    log_2pi = jnp.log(2 * jnp.pi).astype(own.dtype)
    log_normal = -0.5 * quadratic - half_log_dets - 0.5 * size * log_2pi
    jensen = within + jnp.sum(
        weights
        * (own + 0.5 * size * (1 + log_2pi) + logsumexp(log_normal + log_weights, axis=1))
    )
    if entropy == "jensen":
        return jensen
    # B = (m_k - m_l)' (S_k + S_l)^-1 (m_k - m_l) / 4 + log(|(S_k + S_l) / 2|) / 2 - ...
    distance = 0.25 * quadratic + half_log_dets - 0.5 * size * jnp.log(2.0)
    distance = distance - 0.5 * (own[:, None] + own[None, :])
    pairwise = within + jnp.sum(weights * logsumexp(log_weights - distance, axis=1))
    return jnp.minimum(pairwise, jensen)


def _sum_batch(x):
    """From ``(K, *batch)`` to ``(K,)``."""
    return jnp.sum(x.reshape(x.shape[0], -1), axis=1)


def _half_log_det(block):
    diagonal = block.sqrt
    if not block.is_diagonal:
        diagonal = diagonal_of(block.sqrt)
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
        half_log_dets = 0.5 * jnp.sum(jnp.log(total), axis=-1)
    else:
        # S_k + S_l = P_k (I + W W') P_k' with W = P_k^-1 P_l: no sum of covariances, whose
        # condition is the square of that of their factors.
        P = block.sqrt
        pairs = (len(P), *P.shape)
        others = jnp.broadcast_to(P[None], pairs)
        both = jnp.concatenate([others, difference[..., None]], axis=-1)
        both = _solve(block, jnp.broadcast_to(P[:, None], pairs), both)
        W, white = both[..., :-1], both[..., -1:]
        C = cholesky(jnp.eye(P.shape[-1], dtype=P.dtype) + matmul(W, W.mT))
        quadratic = jnp.sum(solve_lower(C, white) ** 2, axis=(-2, -1))
        half_log_dets = half_log_det(C) + _half_log_det(block)[:, None]
    num = block.mu.shape[0]
    return (
        quadratic.reshape(num, num, -1).sum(-1),
        half_log_dets.reshape(num, num, -1).sum(-1),
    )


def _solve(block, P, B):
    """``inv(P) @ B`` with factors P of components."""
    if block.upper:
        return triangular_solve(P, B, left_side=True, lower=False)
    return solve_lower(P, B)


def _log_ratio(k, noise, block, log_weights):
    """``log q(u) - log N(u; m_k, S_k)`` at draws u of component k, shape ``(S,)``."""
    mu, sqrt = block.mu[k], block.sqrt[k]
    if block.is_diagonal:
        u = mu + sqrt * noise
        white = (u[:, None] - block.mu) / block.sqrt
    else:
        u = mu + einsum("...mk,...k->...m", sqrt, noise)
        centred = u[:, None] - block.mu
        P = jnp.broadcast_to(block.sqrt, (*centred.shape, centred.shape[-1]))
        white = _solve(block, P, centred[..., None])[..., 0]
    num_draws, num = noise.shape[0], log_weights.shape[0]
    log_density = -0.5 * jnp.sum((white**2).reshape(num_draws, num, -1), axis=-1)
    log_density = log_density - _sum_batch(_half_log_det(block))
    own = jax.lax.dynamic_index_in_dim(log_density, k, axis=1, keepdims=False)
    return logsumexp(log_density + log_weights, axis=1) - own


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["components", "logits"],
    meta_fields=["entropy"],
)
@dataclass(frozen=True)
class MixtureGaussian(QU):
    r"""
    :math:`q(u) = \sum_k \pi_k \prod_j N(u_j; m_{kj}, S_{kj})`, eq. (7) of Bonilla, Krauth
    & Dezfouli (2018): a mixture over the inducing variables of all latent functions
    together, which are independent in each component.

    :param components: blocks with ``mu`` of shape ``(K, *batch, M)``.
    :param logits: log weights up to a constant, shape ``(K,)``.
    :param entropy: how the KL is bounded, see :func:`mixture_kl`.
    :raises ValueError: if ``entropy`` is not known, or there are other numbers of logits
        and components.
    """

    components: BlockGaussian
    logits: Array
    entropy: str = "pairwise"

    def check_batch(self, batch_shape: Shape) -> None:
        if self.entropy not in ENTROPIES:
            raise ValueError(f"entropy must be one of {ENTROPIES}, got {self.entropy!r}.")
        for block in self.components.blocks:
            if block.mu.shape[0] != self.num_components:
                raise ValueError(
                    f"There are {self.num_components} logits, but q(u) has "
                    f"{block.mu.shape[0]} components."
                )
            if block.mu.shape[1:-1] != tuple(batch_shape):
                raise ValueError(
                    f"A mixture is over all latent functions together: its means have the "
                    f"shape {block.mu.shape}, but the process has the batch shape "
                    f"{tuple(batch_shape)}."
                )

    @property
    def num_components(self) -> int:
        """Number K of components."""
        return jnp.shape(self.logits)[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing variables in each set."""
        return self.components.sizes

    @property
    def log_weights(self) -> Array:
        r"""Log weights :math:`\log \pi_k`, shape ``(K,)``."""
        return jax.nn.log_softmax(self.logits)

    def component(self, k: Any) -> BlockGaussian:
        return jax.tree.map(lambda x: x[k], self.components)

    def whitened(self, factors: Factors) -> "MixtureGaussian":
        return replace(self, components=self.components.whitened(factors))

    def draw(self, key: Array, sample_shape: Shape, batch_shape: Shape) -> Array:
        """See :meth:`QU.draw`; all latent functions from the same component."""
        key_k, key_u = jax.random.split(key)
        shape = (self.num_components, *batch_shape)
        draws = self.components.draw(key_u, sample_shape, shape)
        k = jax.random.categorical(key_k, self.logits, shape=sample_shape)
        index = k.reshape(*k.shape, *(1,) * (draws.ndim - k.ndim))
        return jnp.take_along_axis(draws, index, axis=k.ndim).squeeze(axis=k.ndim)

    def kl(self, rng_key: Array | None = None, sets: Sets | None = None) -> Array:
        r"""
        An upper bound of the KL (unbiased for ``"monte_carlo"``) of all latent functions
        together, shape ``()``; for K = 1 exact, of each latent function.

        :param rng_key: for ``entropy="monte_carlo"``.
        """
        if self.num_components == 1:
            return self.component(0).kl(rng_key, sets)
        (block,) = self.components.blocks
        rng_key = jax.random.key(0) if rng_key is None else rng_key
        return mixture_kl(block, self.log_weights, self.entropy, rng_key)


@dataclass(frozen=True)
class Mixture(Family):
    """
    A mixture of K Gaussians.

    :param num_components: K.
    :param each: the covariance of each component.
    :param entropy: how the KL is bounded.
    :param spread: how far apart components start, in prior standard deviations.
    :param seed: of the starting means.
    """

    num_components: int
    each: Full
    entropy: str = "pairwise"
    spread: float = 0.5
    seed: int = 0

    name = "mixture"
    whitened_only = False
    no_natural_step = "a mixture. Train mixtures by Adam or fit_lbfgs."

    def start(self, at: Start) -> dict[str, Param]:
        """See :meth:`Family.start`; near the prior, and components apart."""
        K = self.num_components
        params = self.each.start(at._replace(batch_shape=(K, *at.batch_shape)))
        params["qu_logits"] = Param(jnp.zeros(K, at.dtype))
        if K == 1:
            return params
        mu, L = params["qu_mu"].value, at.factor()
        variance = jnp.sum(L**2, axis=-1, keepdims=True)  # the diagonal of K_uu
        shift = self.spread * jnp.sqrt(variance)
        shift = solve_lower(L, shift) if at.whiten else shift
        key_k, key_noise = jax.random.split(jax.random.key(self.seed))
        levels = jax.scipy.stats.norm.ppf((jnp.arange(K) + 0.5) / K).astype(mu.dtype)
        levels = jnp.broadcast_to(
            levels.reshape(K, *(1,) * len(at.batch_shape)), mu.shape[:-1]
        )
        # Latent functions go up and down in different orders.
        levels = jax.random.permutation(key_k, levels, axis=0, independent=True)
        noise = 0.1 * self.spread * jax.random.normal(key_noise, mu.shape, mu.dtype)
        if not at.whiten:
            noise = einsum("...mk,...k->...m", L, noise)
        params["qu_mu"] = Param(mu + levels[..., None] * shift[..., 0] + noise)
        return params

    def around(self, modes: list[dict], bounds: list[float]) -> dict:
        """
        Parameters of a mixture of Gaussians at modes of their own, with weights by their
        bounds; components beyond these share the first, with means around its own, about
        half of ``spread`` of its standard deviations away.

        :param modes: parameters of the Gaussians, NumPy arrays by name, the best first; no
            more of them count than there are components.
        :param bounds: that of each.
        """
        modes = modes[: self.num_components]
        own = [0] * (self.num_components - len(modes)) + [*range(len(modes))]
        mu, sqrt = (np.stack([modes[k][n] for k in own]) for n in ("qu_mu", "qu_sqrt"))
        same = np.asarray(own) == 0
        noise = np.random.default_rng(self.seed).normal(size=mu[same].shape)
        noise = (noise - noise.mean(axis=0)) * np.sqrt(len(noise) / max(len(noise) - 1, 1))
        full = sqrt.ndim > mu.ndim
        steps = (
            einsum("...mk,...k->...m", sqrt[same], noise) if full else sqrt[same] * noise
        )
        mu[same] += 0.5 * self.spread * np.asarray(steps)
        logits = np.asarray(bounds)[own] - bounds[0] - np.log(np.where(same, same.sum(), 1))
        return {
            **modes[0],
            "qu_mu": mu,
            "qu_sqrt": sqrt,
            "qu_logits": logits.astype(mu.dtype),
        }

    def build(self, params: dict, whiten: bool) -> MixtureGaussian:
        components = self.each.build(params, whiten)
        return MixtureGaussian(components, params["qu_logits"], self.entropy)
