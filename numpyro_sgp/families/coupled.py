"""One Gaussian q(u) over the inducing variables of all latent functions of a site."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.families.base import QU, Factors, Family, Param, Sets, Shape, Start
from numpyro_sgp.families.blocks import Block, BlockGaussian, gaussian_step
from numpyro_sgp.families.constraint import lower_triangular


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CoupledGaussian(QU):
    r"""
    :math:`q(u_1, \ldots, u_Q) = N(m, S)` with S of shape ``(QM, QM)``, in whitened
    coordinates of each function: latent functions at a row are correlated.

    :param mu: mean, shape ``(*batch, M)``.
    :param sqrt: lower factor of S, shape ``(QM, QM)``, the latent functions one after the
        other.
    :raises ValueError: if shapes do not fit together.
    """

    mu: Array
    sqrt: Array

    independent_latents = False

    def check_batch(self, batch_shape: Shape) -> None:
        """
        :raises ValueError: if the factor is not of all functions of a process.
        """
        if self.mu.shape[:-1] != tuple(batch_shape):
            raise ValueError(
                f"The mean is that of all latent functions, {tuple(batch_shape)} of them, "
                f"but it has the shape {self.mu.shape}."
            )
        num = math.prod(batch_shape)
        size = num * self.mu.shape[-1]
        if self.sqrt.shape != (size, size):
            raise ValueError(
                f"{num} latent functions with {self.mu.shape[-1]} inducing points need a "
                f"factor of shape ({size}, {size}), got {self.sqrt.shape}."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing variables of each function."""
        return (self.mu.shape[-1],)

    def whitened(self, factors: Factors) -> "CoupledGaussian":
        """It is in whitened coordinates."""
        return self

    def component(self, k: Any) -> BlockGaussian:
        """Of each function alone, by its rows of the factor: ``(*batch, M, QM)``."""
        rows = self.sqrt.reshape(*self.mu.shape, -1)
        return BlockGaussian((Block(self.mu, rows),))

    def draw(self, key: Array, sample_shape: Shape, batch_shape: Shape) -> Array:
        """See :meth:`QU.draw`; joint over the latent functions."""
        (joint,) = self.parts
        noise = jax.random.normal(key, (*sample_shape, joint.size), self.mu.dtype)
        return self.mu + joint.spread(noise).reshape(*sample_shape, *self.mu.shape)

    def kl(self, rng_key: Array | None = None, sets: Sets | None = None) -> Array:
        """KL of all latent functions together, shape ``()``."""
        (joint,) = self.parts
        return joint.kl()

    @property
    def parts(self) -> tuple[Block]:
        """One Gaussian over all functions."""
        return (Block(self.mu.reshape(-1), self.sqrt),)

    def with_parts(self, parts: tuple) -> "CoupledGaussian":
        (joint,) = parts
        return CoupledGaussian(joint.mu.reshape(self.mu.shape), joint.sqrt)


@dataclass(frozen=True)
class Coupled(Family):
    """One full covariance over all latent functions of the site together."""

    name = "coupled"
    has_all_gaussians = True
    independent_latents = False

    def start(self, at: Start) -> dict[str, Param]:
        shape = (*at.batch_shape, *at.sizes)
        sqrt = at.scale * jnp.eye(math.prod(shape), dtype=at.dtype)
        return {
            "qu_mu": Param(jnp.zeros(shape, at.dtype)),
            "qu_sqrt": Param(sqrt, lower_triangular),
        }

    def build(self, params: dict, whiten: bool) -> CoupledGaussian:
        return CoupledGaussian(params["qu_mu"], params["qu_sqrt"])

    def takes_natural_steps(self, names: Iterable[str]) -> tuple[str, ...]:
        return ("qu_mu", "qu_sqrt")

    def natural_step(self, free: dict, slopes: dict, rate: Array) -> dict:
        to_mu, to_sqrt = slopes["qu_mu"], slopes["qu_sqrt"]
        mu, sqrt = gaussian_step(free["qu_mu"], free["qu_sqrt"], to_mu, to_sqrt, rate)
        return {"qu_mu": mu, "qu_sqrt": sqrt}
