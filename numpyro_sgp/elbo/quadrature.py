"""Quadrature over the latent functions at each row."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._checks import check_whole
from numpyro_sgp.elbo.expectation import Expectation, Nodes, Shapes
from numpyro_sgp.linalg import gauss_hermite, tensor_grid, trapezoid

_MAX_GRID_LATENTS = 3
# Nodes for each function where the likelihood has kinks, of one and of two functions, for
# up to so many rows: kinks of many are at other places, so that their errors average out.
_FINE = {2048: (400, 40), 20_000: (150, 24), np.inf: (60, 14)}


@dataclass(frozen=True)
class _Grid(Expectation):
    """A product of rules of one variable."""

    num_points: int = 20

    def __post_init__(self):
        check_whole(self.num_points, "num_points", least=1)

    def _rule(self) -> tuple[np.ndarray, np.ndarray]:
        """Nodes and weights for one standard normal."""
        raise NotImplementedError

    def nodes(self, rng_key: Array, shapes: Shapes, dtype) -> Nodes:
        """
        Standard normal nodes of shape ``(S, *batch_shape, 1)``; no key is used.

        :raises ValueError: for more than three latent functions.
        """
        counts = {name: int(np.prod(shape[:-1])) for name, shape in shapes.items()}
        total = sum(counts.values())
        if total > _MAX_GRID_LATENTS:
            sizes = ", ".join(f"'{name}': {count}" for name, count in counts.items())
            raise ValueError(
                f"{type(self).__name__} on {total} latent functions ({sizes}) would need "
                f"{self.num_points}**{total} nodes for each data point; it takes at most "
                f"{_MAX_GRID_LATENTS}. Use TraceGP_ELBO(MonteCarlo(num_samples))."
            )
        grid, weights = tensor_grid(*self._rule(), total)
        nodes, end = {}, 0
        for name, shape in shapes.items():
            start, end = end, end + counts[name]
            nodes[name] = jnp.asarray(grid[:, start:end].reshape(-1, *shape[:-1], 1), dtype)
        return nodes, jnp.asarray(weights, dtype)

    def check(self, sites):
        if any(s.coupling.combines or s.joint_rows > 1 for s in sites.values()):
            raise ValueError(
                "A GP site combines several rows of another one (an image of patches), or "
                "draws rows together (joint_rows), where one quadrature node for all rows "
                f"would be wrong. Use MonteCarlo(num_samples) in place of {self}."
            )
        super().check(sites)


@dataclass(frozen=True)
class GaussHermite(_Grid):
    """
    Gauss-Hermite quadrature over the latent functions at each data point.

    Deterministic; exact where the log likelihood is a polynomial of degree
    ``2 num_points - 1`` in f, so two points do for a Gaussian likelihood. Several latent
    functions need the grid ``num_points ** number``, so at most three are allowed.
    Sites that feed other GP sites are integrated in the order of the model.

    Every data point uses the same nodes. That is exact as long as no term of the log
    likelihood involves the latent values at two rows of X.

    Few nodes do not do for a likelihood with kinks in f (Laplace, absolute values,
    rectified links): use :class:`Trapezoid`, as the default does there.

    :param num_points: number of nodes for each latent function.

    >>> import numpyro_sgp as sgp
    >>> sgp.TraceGP_ELBO(sgp.GaussHermite(10)).expectation
    GaussHermite(num_points=10)
    """

    def _rule(self):
        return gauss_hermite(self.num_points)

    @property
    def exact_for_squares(self) -> bool:  # type: ignore[override]
        """See :attr:`Expectation.exact_for_squares`."""
        return self.num_points > 1


@dataclass(frozen=True)
class Trapezoid(_Grid):
    """
    The trapezoidal rule over eight standard deviations to either side, for likelihoods with
    kinks in f or that are narrow beside the posterior of f; else as :class:`GaussHermite`.

    At a kink, the error of the expectation is of the order of the square of the spacing,
    and that of its slopes, which move the posterior, of the spacing: 400 points are .04
    standard deviations apart, where 400 of :class:`GaussHermite` are .16. Of smooth
    functions all digits are right once a spacing is a fourth of what they vary over [1].

    :param num_points: number of nodes for each latent function, of at most three.
    :raises ValueError: if that is not a whole number, 1 or more.

    **References:**

    1. Trefethen, Weideman (2014). The Exponentially Convergent Trapezoidal Rule. SIAM
       Review 56(3).

    >>> import numpyro_sgp as sgp
    >>> sgp.TraceGP_ELBO(sgp.Trapezoid()).expectation
    Trapezoid(num_points=400)
    """

    num_points: int = 400

    def _rule(self):
        return trapezoid(self.num_points)


@dataclass(frozen=True)
class SharedAxes(Expectation):
    r"""
    Quadrature for likelihoods of any number of latent functions whose terms take one or two
    of them each, as those of several responses at each row, with a function of its own for
    the mean of each, or one for its mean and one for its scale:
    :math:`\log p(y_n \mid f_n) = \sum_t h_t(f_{i_t n}, f_{j_t n})`.

    An expectation of a term sees its own functions alone, so that functions that are in no
    term together may have the same nodes: 20 for any number of responses, where draws have
    noise. For independent functions.

    :param rule: of as many variables as there are axes.
    :param axes: the variable of each function, in the order of GP sites.
    """

    rule: GaussHermite | Trapezoid
    axes: tuple[int, ...]

    def nodes(self, rng_key: Array, shapes: Shapes, dtype) -> Nodes:
        """Nodes of shape ``(S, *batch_shape, 1)``; no key is used."""
        axes = np.asarray(self.axes)
        x, weights = self.rule.nodes(rng_key, {"x": (1 + axes.max(), 1)}, dtype)
        nodes, end = {}, 0
        for name, shape in shapes.items():
            start, end = end, end + int(np.prod(shape[:-1]))
            chosen = x["x"][:, axes[start:end], 0]
            nodes[name] = chosen.reshape(-1, *shape[:-1], 1)
        return nodes, weights

    def check(self, sites):
        self.rule.check(sites)

    @property
    def exact_for_squares(self) -> bool:  # type: ignore[override]
        """See :attr:`Expectation.exact_for_squares`."""
        return self.rule.exact_for_squares


def nodes_at_kinks(number: int, num_rows: int) -> int:
    """
    Nodes for each function of a likelihood with kinks.

    :param number: of functions, one or two.
    :param num_rows: N.
    """
    return next(each for most, each in _FINE.items() if num_rows <= most)[number - 1]
