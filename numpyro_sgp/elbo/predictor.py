"""Quadrature along one number of each row, and the rule where none is given."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._checks import shown
from numpyro_sgp.elbo.expectation import Expectation, MonteCarlo, Nodes, Shapes
from numpyro_sgp.elbo.quadrature import GaussHermite, Trapezoid, nodes_at_kinks

_PLACES = 4  # nodes at which it is looked in which direction a likelihood changes


@dataclass(frozen=True)
class AlongPredictor(Expectation):
    r"""
    Quadrature for likelihoods of any number of latent functions that take one linear
    combination of them at each row: :math:`\log p(y_n \mid f_n) = h_n(a_n^T f_n)`, as where
    a response has the sum of several functions, times covariates perhaps.

    With :math:`q(f_n) = N(m, L L^T)`, :math:`a^T f_n` is normal with variance
    :math:`|L^T a|^2`, so nodes x of one variable do, at
    :math:`f_n = m + L L^T a / |L^T a| \, x`: 20 for a sum of three functions, where a grid
    takes 1,000 and draws have noise. The direction :math:`L^T a` is that of the gradient of
    the log density by standard normal values, which is looked at anew in each step, so
    that a may have parameters and other latents in it. (In a row whose log density is flat
    wherever that is looked at, it is any.)

    This is the default where an :class:`~numpyro_sgp.AutoSparseGP` finds such a likelihood;
    it is for no other.

    :param rule: :class:`GaussHermite`, or :class:`Trapezoid` where h has kinks.
    :raises TypeError: if that is something else.

    >>> import numpyro_sgp as sgp
    >>> sgp.TraceGP_ELBO(sgp.AlongPredictor(sgp.GaussHermite(30))).expectation
    AlongPredictor(rule=GaussHermite(num_points=30))
    """

    rule: GaussHermite | Trapezoid = GaussHermite(20)

    needs_slopes = True

    def __post_init__(self):
        if not isinstance(self.rule, GaussHermite | Trapezoid):
            raise TypeError(
                "AlongPredictor takes GaussHermite(20) or Trapezoid(400), got "
                f"{shown(self.rule)}."
            )

    def nodes(
        self, rng_key: Array, shapes: Shapes, dtype, slopes=None, twice=False
    ) -> Nodes:
        """
        Nodes of shape ``(S, *batch_shape, N)``; no key is used.

        :param slopes: from nodes by sites to the gradient of the log density by them.
        :param twice: whether directions are differentiated too. First derivatives of
            expectations are right without, since directions are those in which the
            combination has the greatest spread.
        :raises ValueError: without slopes.
        """
        if slopes is None:
            raise ValueError(f"{self} is for TraceGP_ELBO alone.")
        x, weights = self.rule.nodes(rng_key, {"x": (1, 1)}, dtype)
        along = _directions(slopes, shapes, dtype)
        if not twice:
            along = jax.lax.stop_gradient(along)
        nodes = {
            name: x["x"].reshape(-1, *(1,) * len(shapes[name])) * direction
            for name, direction in along.items()
        }
        return nodes, weights

    def check(self, sites):
        super().check(sites)
        if not all(site.coupling.summed for site in sites.values()):
            raise ValueError(
                f"{self} is for likelihoods that take one linear combination of several "
                "latent functions at each row of X, and no AutoSparseGP found that of this "
                "one. Leave the expectation out, or use GaussHermite(10) or "
                "MonteCarlo(num_samples)."
            )


def slopes(log_probs: Callable[[dict], dict], nodes: dict, shapes: Shapes) -> dict:
    """
    The gradient of log densities by nodes.

    :param log_probs: from nodes to log densities by name.
    :param nodes: by GP sites, broadcastable to their shapes.
    :param shapes: ``batch_shape + (N,)`` of each.
    """
    nodes = {name: jnp.broadcast_to(x, shapes[name]) for name, x in nodes.items()}
    return jax.grad(lambda x: sum(jnp.sum(v) for v in log_probs(x).values()))(nodes)


def _directions(slopes, shapes, dtype) -> dict[str, Array]:
    """Unit vectors over all functions, for each row, of the sites' shapes."""
    rng = np.random.default_rng(0)
    places = {
        name: jnp.asarray(rng.normal(size=(_PLACES, *shape[:-1], 1)), dtype)
        for name, shape in shapes.items()
    }
    found = jax.vmap(lambda nodes: slopes(nodes, shapes))(places)
    g = jnp.concatenate(
        [jnp.reshape(v, (_PLACES, -1, v.shape[-1])) for v in found.values()], axis=1
    )
    # Outside of its support a density tells nothing.
    g = jnp.where(jnp.isfinite(g), g, 0.0)
    size = jnp.max(jnp.abs(g), axis=1, keepdims=True)
    best = jnp.argmax(size, axis=0)[None]
    g, size = (jnp.take_along_axis(v, best, axis=0)[0] for v in (g, size))
    g = jnp.where(size > 0.0, g / jnp.where(size > 0.0, size, 1.0), 1.0)
    g = g / jnp.sqrt(jnp.sum(g**2, axis=0))
    ends = np.cumsum([int(np.prod(shape[:-1])) for shape in shapes.values()])[:-1]
    parts = zip(shapes.items(), jnp.split(g, ends), strict=True)
    return {name: part.reshape(shape) for (name, shape), part in parts}


def default_expectation(
    shapes: dict[str, tuple[int, ...]],
    couples_rows: bool = False,
    combines_rows: bool = False,
    kinked: bool = False,
    summed: bool = False,
) -> Expectation:
    """
    The rule of :class:`~numpyro_sgp.TraceGP_ELBO` where none is given.

    :param shapes: ``batch_shape + (N,)`` of each GP site.
    :param couples_rows: whether the likelihood ties rows of X together.
    :param combines_rows: whether rows of one site become one row of another.
    :param kinked: whether the likelihood has kinks.
    :param summed: whether it takes one linear combination of functions at each row.
    """
    if couples_rows:
        return MonteCarlo(10, joint=True)
    if combines_rows:
        return MonteCarlo(10)
    total = sum(int(np.prod(shape[:-1])) for shape in shapes.values())
    number = 1 if summed else total
    if number > 2:
        # A third to a seventh of the noise of ten independent draws, in the same time.
        return MonteCarlo(16, antithetic=True, sequence="sobol")
    rule: GaussHermite | Trapezoid = GaussHermite(20 if number == 1 else 10)
    if kinked:
        rows = max(shape[-1] for shape in shapes.values())
        rule = Trapezoid(nodes_at_kinks(number, rows))
    return AlongPredictor(rule) if summed and total > 1 else rule
