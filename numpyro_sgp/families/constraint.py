"""The factor of a variational covariance as a parameter."""

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints
from numpyro.distributions.transforms import ParameterFreeTransform, biject_to

from numpyro_sgp.linalg import diagonal_of


class _LowerTriangular(constraints.ParameterFreeConstraint):
    """Lower triangular matrices with a positive diagonal."""

    event_dim = 2

    def __call__(self, x):
        lower = jnp.all(jnp.triu(x, 1) == 0, axis=(-2, -1))
        return lower & jnp.all(diagonal_of(x) > 0, axis=-1)

    def feasible_like(self, prototype):
        return jnp.broadcast_to(
            jnp.eye(jnp.shape(prototype)[-1], dtype=prototype.dtype),
            jnp.shape(prototype),
        )


class LowerTriangularTransform(ParameterFreeTransform):
    """
    Square matrices to lower triangular ones: the upper half is dropped, the diagonal
    goes through softplus. Keeps the dtype of its argument (NumPyro's
    ``SoftplusLowerCholeskyTransform`` allocates in the default dtype) and needs no
    gather or scatter.
    """

    domain = constraints.independent(constraints.real, 2)
    codomain = _LowerTriangular()

    def __call__(self, x):
        return _forward(x)

    def _inverse(self, y):
        return _backward(y)

    def log_abs_det_jacobian(self, x, y, intermediates=None):
        diagonal = diagonal_of(x)
        return -jnp.sum(jax.nn.softplus(-diagonal), axis=-1)

    def forward_shape(self, shape):
        return shape

    def inverse_shape(self, shape):
        return shape


@jax.jit  # SVI.init takes transforms operation by operation
def _forward(x):
    diagonal = diagonal_of(x)
    return _with_diagonal(x, jax.nn.softplus(diagonal))


@jax.jit
def _backward(y):
    diagonal = diagonal_of(y)
    return _with_diagonal(y, diagonal + jnp.log(-jnp.expm1(-diagonal)))


def _with_diagonal(x, diagonal):
    eye = jnp.eye(x.shape[-1], dtype=x.dtype)
    return jnp.tril(x, -1) + diagonal[..., None] * eye


lower_triangular = _LowerTriangular()


@biject_to.register(_LowerTriangular)
def _(constraint):
    return LowerTriangularTransform()
