"""Quadrature along few numbers of each row, and the rule where none is given."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._checks import check_whole, shown
from numpyro_sgp.elbo.expectation import Expectation, MonteCarlo, Nodes, Shapes
from numpyro_sgp.elbo.quadrature import (
    GaussHermite,
    SharedAxes,
    Trapezoid,
    nodes_at_kinks,
)
from numpyro_sgp.linalg import einsum


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
    takes 1,000 and draws have noise. A is read off the program of the model in each step,
    so that it may have parameters and other latents in it.

    This is the default where an :class:`~numpyro_sgp.AutoSparseGP` finds such a likelihood;
    it is for no other.

    :param rule: :class:`GaussHermite`, or :class:`Trapezoid` where h has kinks.
    :param number: of combinations, one to three.
    :raises TypeError: if the rule is something else.
    :raises ValueError: if the number is.

    >>> import numpyro_sgp as sgp
    >>> sgp.TraceGP_ELBO(sgp.AlongPredictors(sgp.GaussHermite(30))).expectation
    AlongPredictors(rule=GaussHermite(num_points=30), number=1)
    """

    rule: GaussHermite | Trapezoid = GaussHermite(20)
    number: int = 1

    needs_slopes = True

    @property
    def exact_for_squares(self) -> bool:  # type: ignore[override]
        """See :attr:`Expectation.exact_for_squares`."""
        return self.rule.exact_for_squares

    def __post_init__(self):
        if not isinstance(self.rule, GaussHermite | Trapezoid):
            raise TypeError(
                "AlongPredictors takes GaussHermite(20) or Trapezoid(400), got "
                f"{shown(self.rule)}."
            )
        if check_whole(self.number, "number", least=1) > 3:
            raise ValueError(f"number must be three or less, got {self.number}.")

    def nodes(self, rng_key: Array, shapes: Shapes, dtype, slopes=None) -> Nodes:
        """
        Nodes of shape ``(S, *batch_shape, N)``; no key is used.

        :param slopes: of P combinations, by standard normal values of the K functions, of
            shape ``(K, P, N)``.
        :raises ValueError: without slopes, or for those of more than ``number``.
        """
        if slopes is None:
            raise ValueError(f"{self} is for TraceGP_ELBO alone.")
        if (absent := self.number - slopes.shape[1]) < 0:
            raise ValueError(
                f"The likelihood takes {slopes.shape[1]} linear combinations of latent "
                f"functions at each row with these arguments, and {self} is for "
                f"{self.number}. Leave the expectation out and set the guide up with "
                "arguments for which the model does the same."
            )
        # Fewer, where others are in a closed form: what is in their place has no part.
        slopes = jnp.pad(slopes, ((0, 0), (0, absent), (0, 0)))
        x, weights = self.rule.nodes(rng_key, {"x": (self.number, 1)}, dtype)
        nodes = einsum("sp,pkn->skn", x["x"][..., 0], _basis(slopes))
        ends = np.cumsum([int(np.prod(shape[:-1])) for shape in shapes.values()])[:-1]
        parts = zip(shapes.items(), jnp.split(nodes, ends, axis=1), strict=True)
        return {k: part.reshape(-1, *shape) for (k, shape), part in parts}, weights

    def check(self, sites):
        super().check(sites)
        found = {site.coupling.predictors for site in sites.values()}
        if not all(1 <= number <= self.number for number in found):
            raise ValueError(
                f"{self} is for likelihoods that take so few linear combinations of "
                "several latent functions at each row of X, and no AutoSparseGP found that "
                "of this one. Leave the expectation out, or use GaussHermite(10) or "
                "MonteCarlo(num_samples)."
            )


def _basis(slopes) -> Array:
    """
    Orthonormal vectors over all K functions at each row, of shape ``(P, K, N)``, whose span
    has the slopes ``(K, P, N)`` in it.
    """
    least = 1e2 * float(jnp.finfo(slopes.dtype).eps)
    basis: list[Array] = []
    for vector in jnp.moveaxis(slopes, 1, 0):
        left = _apart(_unit(vector), basis)
        is_known = jnp.sum(left**2, axis=0) > least**2
        basis.append(_unit(jnp.where(is_known, left, _away_from(basis, vector))))
    return jnp.stack(basis)


def _unit(vector):
    """A vector of each column divided by its length; zero where it is."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(vector), axis=0))
    vector = vector / jnp.where(largest > 0.0, largest, 1.0)
    square = jnp.sum(vector**2, axis=0)
    return vector / jnp.sqrt(jnp.where(square > 0.0, square, 1.0))


def _apart(vector, basis):
    """What is left of a vector ``(K, N)`` beside a basis; twice, for its rounding."""
    for unit in 2 * basis:
        vector = vector - jnp.sum(vector * unit, axis=0) * unit
    return vector


def _away_from(basis, like):
    """What is left beside a basis of the function that has least to do with it."""
    taken = sum((unit**2 for unit in basis), start=jnp.zeros_like(like))
    chosen = jax.nn.one_hot(jnp.argmin(taken, axis=0), len(like), axis=0, dtype=like.dtype)
    return _apart(chosen, basis)


def default_expectation(
    shapes: dict[str, tuple[int, ...]],
    couples_rows: bool = False,
    combines_rows: bool = False,
    kinked: bool = False,
    predictors: int = 0,
    axes: tuple[tuple[int, ...], ...] = (),
) -> Expectation:
    """
    The rule of :class:`~numpyro_sgp.TraceGP_ELBO` where none is given.

    :param shapes: ``batch_shape + (N,)`` of each GP site.
    :param couples_rows: whether the likelihood ties rows of X together.
    :param combines_rows: whether rows of one site become one row of another.
    :param kinked: whether the likelihood has kinks.
    :param predictors: of how many linear combinations of functions it is at each row, 0
        where that is not known.
    :param axes: by site an axis of nodes for each function, where those that are in no term
        together share one; empty where that is not known.
    """
    if couples_rows:
        return MonteCarlo(10, joint=True)
    if combines_rows:
        return MonteCarlo(10)
    total = sum(int(np.prod(shape[:-1])) for shape in shapes.values())
    number = predictors or total
    shared = sum(axes, ()) if number > 2 else ()
    if len(shared) == total and max(shared, default=2) < 2:
        number = 1 + max(shared)
    if number > 2:
        # A third to a seventh of the noise of ten independent draws, in the same time.
        return MonteCarlo(16, antithetic=True, sequence="sobol")
    rule: GaussHermite | Trapezoid = GaussHermite(20 if number == 1 else 10)
    if kinked:
        rows = max(shape[-1] for shape in shapes.values())
        rule = Trapezoid(nodes_at_kinks(number, rows))
    if shared:
        return SharedAxes(rule, shared)
    return AlongPredictors(rule, number) if number < total else rule
