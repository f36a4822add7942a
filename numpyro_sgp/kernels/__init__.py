"""Kernels: frozen pytrees with batches, that add and multiply."""

from numpyro_sgp.kernels.adapters import (
    GPJaxKernel,
    ObjectKernel,
    TinygpKernel,
    as_kernel,
)
from numpyro_sgp.kernels.base import Kernel, Product, Scaled, Sum
from numpyro_sgp.kernels.convolutional import Convolutional, extract_patches
from numpyro_sgp.kernels.other import Constant, Linear, Polynomial, White
from numpyro_sgp.kernels.stationary import (
    RBF,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    Stationary,
)

__all__ = [
    "RBF",
    "Constant",
    "Convolutional",
    "GPJaxKernel",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "ObjectKernel",
    "Periodic",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "Scaled",
    "Stationary",
    "Sum",
    "TinygpKernel",
    "White",
    "as_kernel",
    "extract_patches",
]
