"""Quadrature along few numbers of each row, and the rule where none is given."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._checks import check_whole, shown
from numpyro_sgp.elbo.expectation import Expectation, MonteCarlo, Nodes, Shapes
from numpyro_sgp.elbo.quadrature import GaussHermite, Trapezoid, nodes_at_kinks
from numpyro_sgp.linalg import einsum

_PLACES = 4  # for each number, where it is looked in which directions a likelihood changes


@dataclass(frozen=True)
class AlongPredictors(Expectation):
    r"""
    Quadrature for likelihoods of any number of latent functions that take one or two linear
    combinations of them at each row: :math:`\log p(y_n \mid f_n) = h_n(A_n f_n)`, as where
    a response has the sum of several functions, times covariates perhaps, or its mean and
    its scale have such sums.

    With :math:`q(f_n) = N(m, L L^T)`, all that :math:`A f_n` needs is in the span of the
    columns of :math:`L^T A^T`. With an orthonormal basis B of it, nodes x of one or two
    variables do, at :math:`f_n = m + L B x`: 20 for a sum of three functions, where a grid
    takes 1,000 and draws have noise. The span is that of the gradients of the log density
    by standard normal values, which are looked at anew in each step, so that A may have
    parameters and other latents in it. (In a row whose log density is flat wherever that
    is looked at, it is any.)

    This is the default where an :class:`~numpyro_sgp.AutoSparseGP` finds such a likelihood;
    it is for no other.

    :param rule: :class:`GaussHermite`, or :class:`Trapezoid` where h has kinks.
    :param number: of combinations, at most three.
    :raises TypeError: if the rule is something else.
    :raises ValueError: if the number is.

    >>> import numpyro_sgp as sgp
    >>> sgp.TraceGP_ELBO(sgp.AlongPredictors(sgp.GaussHermite(30))).expectation
    AlongPredictors(rule=GaussHermite(num_points=30), number=1)
    """

    rule: GaussHermite | Trapezoid = GaussHermite(20)
    number: int = 1

    needs_slopes = True

    def __post_init__(self):
        if not isinstance(self.rule, GaussHermite | Trapezoid):
            raise TypeError(
                "AlongPredictors takes GaussHermite(20) or Trapezoid(400), got "
                f"{shown(self.rule)}."
            )
        check_whole(self.number, "number", least=1)

    def nodes(
        self, rng_key: Array, shapes: Shapes, dtype, slopes=None, twice=False
    ) -> Nodes:
        """
        Nodes of shape ``(S, *batch_shape, N)``; no key is used.

        :param slopes: from nodes by sites to the gradient of the log density by them.
        :param twice: whether bases are differentiated too. First derivatives of
            expectations are right without: what is outside of the span has no part in them.
        :raises ValueError: without slopes.
        """
        if slopes is None:
            raise ValueError(f"{self} is for TraceGP_ELBO alone.")
        x, weights = self.rule.nodes(rng_key, {"x": (self.number, 1)}, dtype)
        basis = _basis(slopes, shapes, dtype, self.number)
        if not twice:
            basis = jax.lax.stop_gradient(basis)
        nodes = einsum("sp,pkn->skn", x["x"][..., 0], basis)
        return _by_site(nodes, shapes), weights

    def check(self, sites):
        super().check(sites)
        found = {site.coupling.predictors for site in sites.values()}
        if not all(1 <= number <= self.number for number in found):
            raise ValueError(
                f"{self} is for likelihoods that take so many linear combinations of "
                "several latent functions at each row of X, and no AutoSparseGP found that "
                "of this one. Leave the expectation out, or use GaussHermite(10) or "
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


def _by_site(values, shapes) -> dict[str, Array]:
    """Of values ``(S, K, N)`` of all functions those of each site, ``(S, *shape)``."""
    ends = np.cumsum([int(np.prod(shape[:-1])) for shape in shapes.values()])[:-1]
    parts = zip(shapes.items(), jnp.split(values, ends, axis=1), strict=True)
    return {k: part.reshape(-1, *shape) for (k, shape), part in parts}


def _basis(slopes, shapes, dtype, number) -> Array:
    """
    Orthonormal vectors over all K functions at each row, of shape ``(number, K, N)``, in
    the order in which most is left of gradients at a few places.
    """
    rng, places = np.random.default_rng(0), _PLACES * number
    number_of_all = sum(int(np.prod(shape[:-1])) for shape in shapes.values())
    draws = jnp.asarray(rng.normal(size=(places, number_of_all, 1)), dtype)
    at = {k: (*shape[:-1], 1) for k, shape in shapes.items()}
    found = jax.vmap(lambda nodes: slopes(nodes, shapes))(_by_site(draws, at))
    g = jnp.concatenate([v.reshape(places, -1, v.shape[-1]) for v in found.values()], 1)
    # Outside of its support a density tells nothing.
    g = jnp.where(jnp.isfinite(g), g, 0.0)
    size = jnp.max(jnp.abs(g), axis=1, keepdims=True)
    g = g / jnp.where(size > 0.0, size, 1.0)
    norm = jnp.sqrt(jnp.sum(g**2, axis=1, keepdims=True))
    g = g / jnp.where(norm > 0.0, norm, 1.0)
    basis: list[Array] = []
    left, least = g, 0.0
    for _ in range(number):
        vector = jnp.take_along_axis(left, jnp.argmax(size, axis=0)[None], axis=0)[0]
        is_known = jnp.max(size, axis=0) > least
        vector = jnp.where(is_known, vector, _away_from(basis, vector))
        basis.append(vector / jnp.sqrt(jnp.sum(vector**2, axis=0)))
        left = _apart(g, basis)
        size = jnp.sqrt(jnp.sum(left**2, axis=1, keepdims=True) + jnp.finfo(dtype).tiny)
        least = 1e2 * float(jnp.finfo(dtype).eps)
    return jnp.stack(basis)


def _apart(vectors, basis):
    """What is left of vectors ``(S, K, N)`` beside a basis; twice, for its rounding."""
    for unit in 2 * basis:
        vectors = vectors - jnp.sum(vectors * unit, axis=1, keepdims=True) * unit
    return vectors


def _away_from(basis, like):
    """What is left beside a basis of the function that has least to do with it."""
    taken = sum((unit**2 for unit in basis), start=jnp.zeros_like(like))
    chosen = jax.nn.one_hot(jnp.argmin(taken, axis=0), len(like), axis=0, dtype=like.dtype)
    return _apart(chosen[None], basis)[0]


def default_expectation(
    shapes: dict[str, tuple[int, ...]],
    couples_rows: bool = False,
    combines_rows: bool = False,
    kinked: bool = False,
    predictors: int = 0,
) -> Expectation:
    """
    The rule of :class:`~numpyro_sgp.TraceGP_ELBO` where none is given.

    :param shapes: ``batch_shape + (N,)`` of each GP site.
    :param couples_rows: whether the likelihood ties rows of X together.
    :param combines_rows: whether rows of one site become one row of another.
    :param kinked: whether the likelihood has kinks.
    :param predictors: of how many linear combinations of functions it is at each row, 0
        where that is not known.
    """
    if couples_rows:
        return MonteCarlo(10, joint=True)
    if combines_rows:
        return MonteCarlo(10)
    total = sum(int(np.prod(shape[:-1])) for shape in shapes.values())
    number = predictors or total
    if number > 2:
        # A third to a seventh of the noise of ten independent draws, in the same time.
        return MonteCarlo(16, antithetic=True, sequence="sobol")
    rule: GaussHermite | Trapezoid = GaussHermite(20 if number == 1 else 10)
    if kinked:
        rows = max(shape[-1] for shape in shapes.values())
        rule = Trapezoid(nodes_at_kinks(number, rows))
    return AlongPredictors(rule, number) if number < total else rule
