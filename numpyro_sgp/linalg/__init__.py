"""Linear algebra on arrays; no kernels, no sites."""

from numpyro_sgp.linalg.cholesky import (
    default_jitter,
    jittered_cholesky,
    max_jitter,
    solve_lower,
    whitened_solve,
)
from numpyro_sgp.linalg.quadrature import gauss_hermite, tensor_grid

__all__ = [
    "default_jitter",
    "gauss_hermite",
    "jittered_cholesky",
    "max_jitter",
    "solve_lower",
    "tensor_grid",
    "whitened_solve",
]
