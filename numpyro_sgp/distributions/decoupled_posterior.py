"""q(f(X)) of ODVGP at scale: a mean of thousands of points, without their Cholesky."""

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.relaxation import consecutive_blocks
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.families import BlockGaussian
from numpyro_sgp.inducing.covariances import union
from numpyro_sgp.linalg import solve_lower

_COLUMNS = 1024  # columns of K_vv held in memory where all of them are used


class DecoupledPosterior(SparsePosterior):
    r"""
    A :class:`SparsePosterior` with one set Z, whose mean has a part by orthogonal points O,
    :math:`c(X, O)\, a` with :math:`c(x, x') = k(x, x') - k(x, Z) K_{uu}^{-1} k(Z, x')`
    [1, 2]: the posterior of ODVGP with :math:`q(v) = N(C_{vv} a, C_{vv})`.

    Its KL divergence from the prior has the term

    .. math::

        \tfrac12 a^\top C_{vv} a
        = \tfrac12 a^\top K_{vv} a - \tfrac12 \| L^{-1} K_{uv} a \|^2 ,

    of which :math:`K_{vv}` alone has as many rows and columns as there are points O. With
    ``num_columns`` it is estimated without bias from that many random columns,
    :math:`\frac{M_2}{b} \sum_{j \in \mathrm{batch}} a_j K_{v v_j}^\top a`. A step costs
    O(M^2 (B + M_2) + M_2 (B + b)), and no matrix of size M_2 is factorised.

    :param prior: the process at X, with ``batch_shape`` Q (or none).
    :param inducing: points Z, shape ``(M, D)`` or ``(*batch, M, D)``.
    :param q: q(u), of one block.
    :param orthogonal: points O, shape ``(M2, D)`` or ``(*batch, M2, D)``.
    :param weights: a, shape ``(*batch, M2)``.
    :param num_columns: number b of columns; all if None.
    :param jitter: relative jitter of K_uu.
    :raises ValueError: if shapes do not fit together.

    **References:**

    1. Salimbeni, Cheng, Boots, Deisenroth (2018). Orthogonally Decoupled Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/1809.08820
    2. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes, section 5. AISTATS. https://arxiv.org/abs/1910.10596

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> from numpyro_sgp.families import Block, BlockGaussian
        >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
        >>> q = BlockGaussian((Block(jnp.zeros(4), jnp.eye(4)),))
        >>> prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.1), X)
        >>> posterior = sgp.DecoupledPosterior(prior, X[::14], q, X, jnp.ones(50))
        >>> posterior.mean.shape
        (50,)
    """

    pytree_data_fields = ("points", "weights")
    pytree_aux_fields = ("num_columns", "_has_orthogonal")

    def __init__(
        self,
        prior: GaussianProcess,
        inducing: Array,
        q: BlockGaussian,
        orthogonal: Array,
        weights: Array,
        num_columns: int | None = None,
        jitter: float | None = None,
        *,
        validate_args: bool | None = None,
    ):
        num_points, dim = jnp.shape(orthogonal)[-2:]
        if dim != prior.X.shape[-1] or jnp.shape(weights)[-1:] != (num_points,):
            raise ValueError(
                f"The orthogonal points must have the shape (M2, {prior.X.shape[-1]}) and "
                f"the weights (*batch, M2), got {jnp.shape(orthogonal)} and "
                f"{jnp.shape(weights)}."
            )
        if num_columns is not None and not 1 <= num_columns <= num_points:
            raise ValueError(
                f"num_columns must be between 1 and {num_points}, got {num_columns}."
            )
        self.points = orthogonal
        self.weights = weights
        self.num_columns = num_columns
        self._has_orthogonal = True
        super().__init__(prior, (inducing,), q, jitter, validate_args=validate_args)

    def _pulled(self):
        """inv(L) K_uv a, shape ``(*batch, M)``."""
        A = solve_lower(self.chol, self._cross(self.points))
        return jnp.einsum("...mn,...n->...m", A, self.weights)

    @property
    def mean(self) -> Array:
        """Marginal means, shape ``batch_shape + (N,)``."""
        mean = super().mean
        if not self._has_orthogonal:
            return mean
        K = self.prior.kernel(self.prior.X, self.points)
        mean = mean + jnp.einsum("...nm,...m->...n", K, self.weights)
        return mean - jnp.einsum("...mn,...m->...n", self.projection, self._pulled())

    def prior_kl(self, rng_key=None) -> Array:
        r"""
        :math:`\mathrm{KL}[q(u) \| p(u)] + \frac12 a^\top C_{vv} a`, shape ``batch_shape``.

        :param rng_key: which columns of K_vv are taken; all where None.
        """
        kl = super().prior_kl()
        if not self._has_orthogonal:
            return kl
        num_points = self.points.shape[-2]
        if self.num_columns is None or rng_key is None:
            blocks = consecutive_blocks(num_points, min(num_points, _COLUMNS))
            parts = jax.lax.map(jax.checkpoint(self._product), jnp.asarray(blocks))
            product = jnp.sum(parts, axis=0)
        else:
            columns = jax.random.choice(
                rng_key, num_points, (self.num_columns,), replace=False
            )
            product = self._product(columns) * (num_points / self.num_columns)
        explained = jnp.sum(self._pulled() ** 2, axis=-1)
        return kl + jnp.broadcast_to(0.5 * (product - explained), self.batch_shape)

    def _product(self, columns):
        """sum_j a_j K_vv[:, j]' a over some columns, ``(*batch,)``; -1 for no column."""
        K = self.prior.kernel(self.points[..., columns, :], self.points)
        each = jnp.einsum("...jm,...m->...j", K, self.weights)
        return jnp.sum((columns >= 0) * self.weights[..., columns] * each, axis=-1)

    def _with_fixed_part(self, points, weights):
        if not self._has_orthogonal:
            return points, weights
        # c(x, O) a = k(x, O) a - k(x, Z) L^-T inv(L) K_uv a.
        back = solve_lower(self.chol, self._pulled()[..., None], transpose=True)
        fixed = jnp.broadcast_to(
            self.weights, (*weights.shape[:-1], self.weights.shape[-1])
        )
        weights = jnp.concatenate([weights - back[..., 0], fixed], axis=-1)
        return union((points, self.points)), weights

    def _part(self, sets, residual):
        part = super()._part(sets, residual)
        part._has_orthogonal = residual
        return part
