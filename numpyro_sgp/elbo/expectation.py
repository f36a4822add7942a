"""Rules for expectations under the marginals of GP sites."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp.linalg import gauss_hermite, tensor_grid

_MAX_GRID_LATENTS = 3


@dataclass(frozen=True)
class GaussHermite:
    """
    Gauss-Hermite quadrature over the latent functions at each data point.

    Deterministic; exact where the log likelihood is a polynomial of degree
    ``2 num_points - 1`` in f, so two points do for a Gaussian likelihood. Several latent
    functions need the grid ``num_points ** number``, so at most three are allowed.
    Sites that feed other GP sites are integrated in the order of the model.

    Every data point uses the same nodes. That is exact as long as no term of the log
    likelihood involves the latent values at two rows of X.

    :param num_points: number of nodes for each latent function.

    >>> import numpyro_sgp as sgp
    >>> sgp.TraceGP_ELBO(sgp.GaussHermite(10)).expectation
    GaussHermite(num_points=10)
    """

    num_points: int = 20

    def __post_init__(self):
        if self.num_points < 1:
            raise ValueError(f"num_points must be positive, got {self.num_points}.")

    def nodes(
        self, rng_key: Array, shapes: dict[str, tuple[int, ...]], dtype
    ) -> tuple[dict[str, Array], Array]:
        """
        Standard normal nodes for the values of GP sites.

        :param rng_key: not used.
        :param shapes: ``batch_shape + (N,)`` of each site.
        :param dtype: dtype of the nodes.
        :return: for each site nodes of shape ``(S, *batch_shape, 1)``, and weights of
            shape ``(S,)``.
        :raises ValueError: for more than three latent functions.
        """
        del rng_key
        counts = {name: int(np.prod(shape[:-1])) for name, shape in shapes.items()}
        total = sum(counts.values())
        if total > _MAX_GRID_LATENTS:
            sizes = ", ".join(f"'{name}': {count}" for name, count in counts.items())
            raise ValueError(
                f"GaussHermite on {total} latent functions ({sizes}) would need "
                f"{self.num_points}**{total} nodes for each data point; it takes at most "
                f"{_MAX_GRID_LATENTS}. Use TraceGP_ELBO(MonteCarlo(num_samples))."
            )
        grid, weights = tensor_grid(*gauss_hermite(self.num_points), total)
        nodes, end = {}, 0
        for name, shape in shapes.items():
            start, end = end, end + counts[name]
            nodes[name] = jnp.asarray(grid[:, start:end].reshape(-1, *shape[:-1], 1), dtype)
        return nodes, jnp.asarray(weights, dtype)


@dataclass(frozen=True)
class MonteCarlo:
    """
    Reparameterised Monte Carlo, with independent draws for each data point.

    :param num_samples: number of draws from each marginal.
    :param joint: whether to draw f(X) jointly, which costs O(B^3) for B rows. Only needed
        where terms of the likelihood involve several rows of X (a multivariate normal
        over rows, an integral of f); draws from the marginals would be wrong there.

    >>> import numpyro_sgp as sgp
    >>> sgp.MonteCarlo(8)
    MonteCarlo(num_samples=8, joint=False)
    """

    num_samples: int = 10
    joint: bool = False

    def __post_init__(self):
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be positive, got {self.num_samples}.")

    def nodes(
        self, rng_key: Array, shapes: dict[str, tuple[int, ...]], dtype
    ) -> tuple[dict[str, Array], Array]:
        """
        As :meth:`GaussHermite.nodes`, with draws of shape ``(S, *batch_shape, N)``, or
        with keys of shape ``(S,)`` for joint draws.
        """
        keys = dict(zip(shapes, jax.random.split(rng_key, len(shapes)), strict=True))
        num = self.num_samples
        if self.joint:
            nodes = {name: jax.random.split(key, num) for name, key in keys.items()}
        else:
            nodes = {
                name: jax.random.normal(key, (num, *shapes[name]), dtype)
                for name, key in keys.items()
            }
        return nodes, jnp.full(num, 1.0 / num, dtype)
