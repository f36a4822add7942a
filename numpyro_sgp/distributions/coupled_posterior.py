"""q(f(X)) with one Gaussian over the inducing variables of all latent functions."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.posterior import gaussian_log_prob
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.families import Block, BlockGaussian
from numpyro_sgp.linalg import jittered_cholesky


class CoupledPosterior(SparsePosterior):
    r"""
    :math:`q(f(X))` of Q latent functions whose inducing variables have one joint Gaussian,
    :math:`q(u_1, \ldots, u_Q) = N(m, S)` with S of shape ``(QM, QM)``.

    The latent functions at a row are correlated: :meth:`place` uses the Q x Q covariance
    of each row. :attr:`variance` and :attr:`covariance_matrix` are those of each function;
    :attr:`row_covariance` has the rest.

    :param prior: the process at X, with ``batch_shape`` Q.
    :param inducing: the inducing points, shape ``(M, D)`` or ``(*batch, M, D)``.
    :param mu: whitened mean, shape ``(*batch, M)``.
    :param sqrt: lower factor of the whitened covariance, shape ``(QM, QM)``, the latent
        functions one after the other.
    :param jitter: relative jitter of the inducing covariance.

    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X).expand([3])
    >>> posterior = sgp.CoupledPosterior(prior, X[::14], jnp.zeros((3, 4)), jnp.eye(12))
    >>> posterior.mean.shape, posterior.row_covariance.shape
    ((3, 50), (50, 3, 3))
    """

    pytree_data_fields = ("joint_sqrt",)
    independent_latents = False

    def __init__(
        self,
        prior: GaussianProcess,
        inducing: Array,
        mu: Array,
        sqrt: Array,
        jitter: float | None = None,
        *,
        validate_args: bool | None = None,
    ):
        num = math.prod(prior.batch_shape)
        size = num * mu.shape[-1]
        if sqrt.shape != (size, size):
            raise ValueError(
                f"{num} latent functions with {mu.shape[-1]} inducing points need a factor "
                f"of shape ({size}, {size}), got {sqrt.shape}."
            )
        self.joint_sqrt = sqrt
        # Rows of the joint factor that belong to one function: (*batch, M, QM).
        rows = sqrt.reshape(*prior.batch_shape, mu.shape[-1], size)
        q = BlockGaussian((Block(mu, rows),))
        super().__init__(prior, (inducing,), q, jitter, validate_args=validate_args)

    @property
    def independent_blocks(self) -> tuple[Block]:
        """See :attr:`SparsePosterior.independent_blocks`: one over all functions."""
        (block,) = self.q.blocks
        mu = jnp.broadcast_to(block.mu, (*self.batch_shape, block.size)).reshape(-1)
        return (Block(mu, self.joint_sqrt),)

    def with_blocks(self, blocks) -> "CoupledPosterior":
        """See :meth:`SparsePosterior.with_blocks`."""
        (joint,) = blocks
        shape = (*self.batch_shape, self.q.blocks[0].size)
        rows = joint.sqrt.reshape(*shape, -1)
        new = super().with_blocks((Block(joint.mu.reshape(shape), rows),))
        new.joint_sqrt = joint.sqrt
        return new

    @property
    def _rows(self):
        """``A_q' R_q``, what the joint factor adds at each row: ``(*batch, N, QM)``."""
        (block,) = self.q.blocks
        return jnp.einsum("...mk,...mn->...nk", block.sqrt, self.projection)

    @property
    def row_covariance(self) -> Array:
        """Covariance of the Q latent functions at each row, shape ``(N, Q, Q)``."""
        num = math.prod(self.batch_shape)
        rows = self._rows.reshape(num, self.event_shape[0], -1)
        total = jnp.einsum("qnk,pnk->nqp", rows, rows)
        prior = jnp.broadcast_to(self.prior.kernel.diag(self.prior.X), self.shape())
        residual = prior - jnp.sum(self.projection**2, axis=-2)
        floor = jnp.finfo(prior.dtype).eps * prior
        residual = jnp.maximum(residual, floor).reshape(num, -1)
        return total + jnp.eye(num, dtype=total.dtype) * residual.T[..., None]

    def place(self, x: Array, component=0) -> Array:
        """See :meth:`GPPosterior.place`; correlated within each row."""
        del component
        num = math.prod(self.batch_shape)
        L = jnp.linalg.cholesky(self.row_covariance)
        x = jnp.broadcast_to(x, self.shape()).reshape(num, -1)
        return self.mean + jnp.einsum("nqp,pn->qn", L, x).reshape(self.shape())

    def sample_parametric(self, key, sample_shape=()) -> Array:
        """See :meth:`SparsePosterior.sample_parametric`."""
        size = self.joint_sqrt.shape[-1]
        noise = jax.random.normal(key, (*sample_shape, size), self.joint_sqrt.dtype)
        rows = self._rows.reshape(math.prod(self.batch_shape), -1, size)
        f = jnp.einsum("qnk,...k->...qn", rows, noise)
        return self.mean + f.reshape(self.shape(sample_shape))

    def _sample_whitened(self, key, sample_shape) -> Array:
        """See :meth:`GPPosterior._sample_whitened`; joint over the latent functions."""
        (block,) = self.q.blocks
        size = self.joint_sqrt.shape[-1]
        noise = jax.random.normal(key, (*sample_shape, size), self.joint_sqrt.dtype)
        noise = jnp.einsum("jk,...k->...j", self.joint_sqrt, noise)
        return block.mu + noise.reshape(*sample_shape, *self.batch_shape, block.size)

    def _part(self, sets, residual):
        raise NotImplementedError(
            "parallel() and orthogonal() are for latent functions with a q(u) of their own."
        )

    def prior_kl(self, rng_key=None) -> Array:
        """KL[q(u) || p(u)] of all latent functions together, shape ``()``."""
        (joint,) = self.independent_blocks
        return joint.kl()

    def _joint_log_prob(self, value):
        num, rows = math.prod(self.batch_shape), self.event_shape[0]
        F = self._rows.reshape(num * rows, -1)
        total = F @ F.T
        residual = jnp.broadcast_to(
            self._residual_covariance(), (*self.batch_shape, rows, rows)
        ).reshape(num, rows, rows)
        total = total + jax.scipy.linalg.block_diag(*residual)
        size = jnp.mean(self.prior.kernel.diag(self.prior.X))
        L, _ = jittered_cholesky(total, self.prior.jitter, size)
        lead = jnp.shape(value)[: jnp.ndim(value) - 1 - len(self.batch_shape)]
        centred = (value - self.mean).reshape(*lead, -1)
        log_prob = gaussian_log_prob(centred, L)
        log_prob = log_prob.reshape(*lead, *(1,) * len(self.batch_shape)) / num
        return jnp.broadcast_to(log_prob, (*lead, *self.batch_shape))

    def expand(self, batch_shape) -> "CoupledPosterior":
        """Refused but for the same shape."""
        if tuple(batch_shape) == self.batch_shape:
            return self
        raise ValueError(
            f"A posterior over {self.batch_shape} coupled latent functions cannot be "
            f"expanded to {tuple(batch_shape)}."
        )
