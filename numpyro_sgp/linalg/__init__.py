"""Linear algebra on arrays; no kernels, no sites."""

from numpyro_sgp.linalg.cholesky import (
    default_jitter,
    jittered_cholesky,
    max_jitter,
    whitened_solve,
    with_jitter,
)
from numpyro_sgp.linalg.inverse_free import (
    InverseRoot,
    inverse_root,
    log_det,
    matmul,
    ulisse,
)
from numpyro_sgp.linalg.quadrature import gauss_hermite, tensor_grid
from numpyro_sgp.linalg.triangular import solve_lower, triangular_product

__all__ = [
    "InverseRoot",
    "default_jitter",
    "gauss_hermite",
    "inverse_root",
    "jittered_cholesky",
    "log_det",
    "matmul",
    "max_jitter",
    "solve_lower",
    "tensor_grid",
    "triangular_product",
    "ulisse",
    "whitened_solve",
    "with_jitter",
]
