"""A family of one's own: q(u) with a low-rank plus diagonal covariance.

The worked example of CONTRIBUTING.md. A family is one file: options and parameters
(``LowRank``) and q(u) in arrays (a ``BlockGaussian`` of a ``LowRankBlock``). Posteriors,
bounds, minibatches, predictions, draws and saving are shared; natural gradients and
``nats_left`` are not for it::

    fitted = sgp.fit(model, sgp.SVGP(50, covariance=LowRank(5)), (X, y))
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints

from numpyro_sgp.families import Block, BlockGaussian, Family, Param, Start


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["mu", "sqrt", "factor"],
    meta_fields=["upper"],
)
@dataclass(frozen=True)
class LowRankBlock(Block):
    r"""
    :math:`N(\mu, \mathrm{diag}(s^2) + W W^\top)` over one set of inducing variables, in
    whitened coordinates: O(N M R) for its part of the variances at N rows, O(M R^2) for its
    KL divergence.

    :param mu: mean, shape ``(*batch, M)``.
    :param sqrt: s, shape ``(*batch, M)``.
    :param factor: W, shape ``(*batch, M, R)``.
    """

    factor: Array | None = None  # a default, as the fields before it have

    @property
    def is_diagonal(self) -> bool:
        """It is not: ``sqrt`` has the shape of a diagonal one, but W is there too."""
        return False

    def project(self, A: Array) -> Array:
        """``[diag(s), W].T @ A``, shape ``(*batch, M + R, N)``."""
        low = jnp.einsum("...mr,...mn->...rn", self.factor, A)
        return jnp.concatenate([self.sqrt[..., None] * A, low], axis=-2)

    def spread(self, noise: Array) -> Array:
        """Draws around the mean, by a Cholesky factor of S."""
        return jnp.einsum("...mk,...k->...m", jnp.linalg.cholesky(self.covariance), noise)

    @property
    def covariance(self) -> Array:
        """S, shape ``(*batch, M, M)``."""
        low = jnp.einsum("...mr,...nr->...mn", self.factor, self.factor)
        return low + self.sqrt[..., None] ** 2 * jnp.eye(self.size, dtype=low.dtype)

    def kl(self) -> Array:
        r"""
        :math:`\mathrm{KL}[N(\mu, S) \| N(0, I)]`, with
        :math:`|S| = |\mathrm{diag}(s^2)|\, |I + W^\top \mathrm{diag}(s^{-2}) W|`.
        """
        W, s = self.factor, self.sqrt
        scaled = W / s[..., None]
        inner = jnp.einsum("...mr,...mq->...rq", scaled, scaled)
        inner = inner + jnp.eye(W.shape[-1], dtype=W.dtype)
        log_det = 2.0 * jnp.sum(jnp.log(s), axis=-1) + jnp.linalg.slogdet(inner)[1]
        trace = jnp.sum(s**2, axis=-1) + jnp.sum(W**2, axis=(-2, -1))
        square = jnp.sum(self.mu**2, axis=-1)
        return 0.5 * (trace + square - self.size - log_det)


@dataclass(frozen=True)
class LowRank(Family):
    """
    A low-rank plus diagonal covariance for each latent function.

    :param rank: R, the number of columns of W.
    """

    rank: int = 2

    name = "low_rank"

    def start(self, at: Start) -> dict[str, Param]:
        """See :meth:`Family.start`: W is small, and not zero, where its slope is zero."""
        (size,) = at.sizes
        shape = (*at.batch_shape, size)
        key = jax.random.key(0)
        W = 1e-3 * jax.random.normal(key, (*shape, self.rank), at.dtype)
        sd = at.scale * jnp.ones(shape, at.dtype)
        return {
            "qu_mu": Param(jnp.zeros(shape, at.dtype)),
            "qu_sd": Param(sd, constraints.softplus_positive),
            "qu_factor": Param(W),
        }

    def build(self, params: dict, whiten: bool) -> BlockGaussian:
        """See :meth:`Family.build`."""
        block = LowRankBlock(params["qu_mu"], params["qu_sd"], factor=params["qu_factor"])
        return BlockGaussian((block,), whiten)
