"""Linear algebra on arrays; no kernels, no sites."""

from numpyro_sgp.linalg.cholesky import (
    default_jitter,
    factor_product,
    jittered_cholesky,
    max_jitter,
    whitened_solve,
    with_jitter,
)
from numpyro_sgp.linalg.products import at_least, einsum, matmul
from numpyro_sgp.linalg.quadrature import gauss_hermite, tensor_grid, trapezoid
from numpyro_sgp.linalg.triangular import (
    diagonal_of,
    gaussian_log_prob,
    half_log_det,
    solve_lower,
    triangular_product,
)

__all__ = [
    "at_least",
    "default_jitter",
    "diagonal_of",
    "einsum",
    "factor_product",
    "gauss_hermite",
    "gaussian_log_prob",
    "half_log_det",
    "jittered_cholesky",
    "matmul",
    "max_jitter",
    "solve_lower",
    "tensor_grid",
    "trapezoid",
    "triangular_product",
    "whitened_solve",
    "with_jitter",
]
