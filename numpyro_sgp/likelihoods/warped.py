"""Warped Gaussian processes: the warp, the likelihood, and moments of predictions."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.scipy.special import ndtr, ndtri
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.distributions.util import array_equiv, validate_sample

from numpyro_sgp._checks import floating
from numpyro_sgp.linalg import einsum, gauss_hermite

_MAX_ITERATIONS = 200
_UPPER_DECILE = 1.2815515655446004  # of the standard normal distribution


@jax.jit
def _warp(y: Array, a: Array, b: Array, c: Array) -> Array:
    """t(y): y of shape ``(*batch,)``, the parameters broadcast to ``(*batch, I)``."""
    return y + jnp.sum(a * jnp.tanh(b * (y[..., None] + c)), axis=-1)


@jax.jit
def _excess_slope(y: Array, a: Array, b: Array, c: Array) -> Array:
    """t'(y) - 1, shapes as in `_warp`."""
    tanh = jnp.tanh(b * (y[..., None] + c))
    return jnp.sum(a * b * (1 - tanh) * (1 + tanh), axis=-1)


@jax.jit
def _log_density(y: Array, loc: Array, scale: Array, *warp: Array) -> Array:
    """log N(t(y); loc, scale^2) + log t'(y)."""
    log_slope = jnp.log1p(_excess_slope(y, *warp))
    return dist.Normal(loc, scale).log_prob(_warp(y, *warp)) + log_slope


@jax.custom_jvp
@jax.jit
def _unwarp(z: Array, a: Array, b: Array, c: Array) -> Array:
    r"""
    The y with t(y) = z, by Newton's method kept inside a bracket.

    :math:`|t(y) - y| \le A = \sum_i |a_i|`, so that the root lies in z - A .. z + A.
    Where a Newton step would leave the bracket, or is not half the step before it, the
    bracket is halved instead; so about twice as many evaluations as bisection at worst.
    """
    reach = jnp.sum(jnp.abs(a) + jnp.zeros_like(b * c), axis=-1)
    z = jnp.broadcast_to(z, jnp.broadcast_shapes(z.shape, reach.shape))
    reach = jnp.broadcast_to(reach, z.shape)
    # t' >= 1: an error of rounding in t(y) is no larger in y.
    tolerance = 4 * jnp.finfo(z.dtype).eps * (jnp.abs(z) + reach)

    def unfinished(state):
        iteration, *_, done = state
        return (iteration < _MAX_ITERATIONS) & ~jnp.all(done)

    def advance(state):
        iteration, y, low, high, last, done = state
        residual = _warp(y, a, b, c) - z
        low = jnp.where(residual < 0, y, low)
        high = jnp.where(residual > 0, y, high)
        newton = -residual / (1 + _excess_slope(y, a, b, c))
        settled = ~(jnp.abs(newton) > tolerance)  # a NaN settles too
        outside = (y + newton <= low) | (y + newton >= high)
        slow = jnp.abs(newton) > jnp.abs(last) / 2
        bisect = ~settled & (outside | slow)
        step = jnp.where(bisect, (low + high) / 2 - y, newton)
        y = jnp.where(done, y, y + step)
        return iteration + 1, y, low, high, step, done | settled

    start = (0, z, z - reach, z + reach, 2 * reach, ~jnp.isfinite(z))
    return lax.while_loop(unfinished, advance, start)[1]


@_unwarp.defjvp
def _unwarp_jvp(primals, tangents):
    """dy = (dz - dt) / t'(y), with dt the change of t at y from its parameters."""
    _, *parameters = primals
    z_dot, *parameters_dot = tangents
    y = _unwarp(*primals)
    _, t_dot = jax.jvp(lambda *p: _warp(y, *p), tuple(parameters), tuple(parameters_dot))
    return y, (z_dot - t_dot) / (1 + _excess_slope(y, *parameters))


class TanhWarp(Transform):
    r"""
    The warp :math:`t(y) = y + \sum_{i=1}^I a_i \tanh(b_i (y + c_i))` of warped Gaussian
    processes [1], from the data to the scale on which they are Gaussian.

    It increases everywhere if no :math:`a_i b_i` is negative, with a slope of at least 1.
    The inverse has no closed form: it is found by Newton's method, safeguarded by
    bisection, and has the derivatives of an implicit function, in ``a``, ``b`` and ``c``
    too. Units are those of y, but for b, which has one over them.

    :param a: heights of the steps, a number or shape ``(*batch, I)``.
    :param b: their steepness, likewise.
    :param c: minus their places, likewise.
    :raises ValueError: if some ``a * b`` is negative, or the shapes do not broadcast.
        Traced values cannot be looked at: give learnable ``a`` and ``b`` positive priors.

    >>> import jax.numpy as jnp
    >>> warp = TanhWarp(a=[1.0, 0.5], b=[2.0, 1.0], c=[0.0, -1.0])
    >>> z = warp(jnp.array([-1.0, 0.0, 2.0]))
    >>> print(z)
    [-2.446 -0.381 3.380]
    >>> print(warp.inv(z))
    [-1.000 0.000 2.000]

    **References:**

    1. Snelson, E., Rasmussen, C. E., Ghahramani, Z. (2004). Warped Gaussian processes.
       NIPS 16.
    """

    domain = constraints.real
    codomain = constraints.real
    sign = 1

    def __init__(self, a: ArrayLike, b: ArrayLike, c: ArrayLike):
        self.a, self.b, self.c = _terms(a, b, c)
        _check_increases(a, b)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of a batch of warps, ``()`` for one."""
        shapes = (value.shape[:-1] for value in (self.a, self.b, self.c))
        return jnp.broadcast_shapes(*shapes)

    def __call__(self, x: ArrayLike) -> Array:
        """t(x), of the shape of ``x`` broadcast with ``batch_shape``."""
        return _warp(*self._common_dtype(x))

    def _inverse(self, y: ArrayLike) -> Array:
        """The x with t(x) = y; infinities and NaN stay themselves."""
        return _unwarp(*self._common_dtype(y))

    def log_abs_det_jacobian(self, x: ArrayLike, y: Any, intermediates=None) -> Array:
        """log t'(x); ``y`` is not used."""
        return jnp.log1p(_excess_slope(*self._common_dtype(x)))

    def forward_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """``shape`` broadcast with ``batch_shape``."""
        return jnp.broadcast_shapes(shape, self.batch_shape)

    def inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As :meth:`forward_shape`."""
        return self.forward_shape(shape)

    def tree_flatten(self) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
        """``a``, ``b`` and ``c`` are the leaves."""
        return (self.a, self.b, self.c), (("a", "b", "c"), {})

    def eq(self, other: object, static: bool = False) -> ArrayLike:
        """Whether ``other`` is a warp with the same parameters."""
        if not isinstance(other, TanhWarp):
            return False
        pairs = zip(self.tree_flatten()[0], other.tree_flatten()[0], strict=True)
        equal = True
        for mine, theirs in pairs:
            equal = equal & array_equiv(mine, theirs, static=static)
        return equal

    def _common_dtype(self, value: ArrayLike) -> list[Array]:
        values = [floating(value), self.a, self.b, self.c]
        dtype = jnp.result_type(*values)
        return [jnp.asarray(value, dtype) for value in values]


def _terms(a, b, c):
    """Parameters of a warp as arrays with an axis of terms."""
    terms = [jnp.atleast_1d(floating(value)) for value in (a, b, c)]
    shapes = tuple(value.shape for value in terms)
    try:
        jnp.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"TanhWarp: a, b and c of shapes {shapes} do not broadcast; give each one "
            "value for each tanh term, in the last axis."
        ) from None
    return terms


def _check_increases(a, b):
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((a, b))):
        return
    # By NumPy, which also looks at constants while jit traces the model around them.
    if not (np.asarray(a) * np.asarray(b) >= 0).all():
        raise ValueError(
            "TanhWarp: the warp increases only if a * b >= 0 in every term, got "
            f"a = {np.asarray(a)} and b = {np.asarray(b)}. If they were stored as "
            "logarithms, give their exponentials."
        )


class WarpedNormal(dist.Distribution):
    r"""
    Likelihood of a warped Gaussian process [1]: :math:`t(y) \sim N(f, \sigma^2)`.

    .. math::
        \log p(y \mid f) = \log N(t(y); f, \sigma^2) + \log t'(y), \qquad
        t(y) = y + \sum_{i=1}^I a_i \tanh(b_i (y + c_i))

    as in Section 9.3.2 of [2]. Where f is Gaussian with a known mean and variance, the
    predictive density of y is exact by the same change of variables:
    ``WarpedNormal(mean, jnp.sqrt(variance + scale**2), a, b, c).log_prob(y)``. Its mean
    and variance need quadrature: :func:`warped_moments`.

    Learnable ``a`` and ``b`` need positive priors. All three may differ over the batch.

    :param loc: f, on the warped scale; broadcasts to ``batch_shape``.
    :param scale: standard deviation :math:`\sigma` of the noise, on the warped scale.
    :param a: heights of the steps of the warp, a number or shape ``(*batch, I)``.
    :param b: their steepness, likewise.
    :param c: minus their places, likewise.
    :raises ValueError: as :class:`TanhWarp`; without ``validate_args`` for shapes only.

    >>> import jax.numpy as jnp
    >>> warped = WarpedNormal(jnp.zeros(3), 0.5, a=1.0, b=2.0, c=0.0)
    >>> print(warped.log_prob(jnp.array([-0.5, 0.0, 1.0])).round(3))
    [-2.799 0.873 -7.808]
    >>> print(warped.icdf(jnp.array([0.1, 0.5, 0.9])).round(3))
    [-0.223 0.000 0.223]

    **References:**

    1. Snelson, E., Rasmussen, C. E., Ghahramani, Z. (2004). Warped Gaussian processes.
       NIPS 16.
    2. Bonilla, E. V., Krauth, K., Dezfouli, A. (2019). Generic inference in latent
       Gaussian process models. Journal of Machine Learning Research 20(117), 1-63.
    """

    arg_constraints = {
        "loc": constraints.real,
        "scale": constraints.positive,
        "a": constraints.real_vector,
        "b": constraints.real_vector,
        "c": constraints.real_vector,
    }
    support = constraints.real
    reparametrized_params = ["loc", "scale", "a", "b", "c"]

    def __init__(
        self,
        loc: ArrayLike,
        scale: ArrayLike,
        a: ArrayLike,
        b: ArrayLike,
        c: ArrayLike,
        *,
        validate_args: bool | None = None,
    ):
        terms = _terms(a, b, c)
        if self._validate_args if validate_args is None else validate_args:
            _check_increases(a, b)
        shapes = (jnp.shape(loc), jnp.shape(scale), *(x.shape[:-1] for x in terms))
        batch_shape = jnp.broadcast_shapes(*shapes)
        self.loc = jnp.broadcast_to(floating(loc), batch_shape)
        self.scale = jnp.broadcast_to(floating(scale), batch_shape)
        # As many axes as loc, so that a distribution that vmap returns stays in line.
        self.a, self.b, self.c = (
            value.reshape((1,) * (len(batch_shape) + 1 - value.ndim) + value.shape)
            for value in terms
        )
        super().__init__(batch_shape, validate_args=validate_args)

    @property
    def warp(self) -> TanhWarp:
        """The warp t, from y to the scale of f."""
        # Not by the constructor: vmap puts placeholders where arrays were.
        return TanhWarp.tree_unflatten((("a", "b", "c"), {}), (self.a, self.b, self.c))

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of y, of shape ``sample_shape + batch_shape``."""
        noise = jax.random.normal(key, sample_shape + self.batch_shape, self.loc.dtype)
        return self.warp.inv(self.loc + self.scale * noise)

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates=None) -> Array:
        """log N(t(value); loc, scale^2) + log t'(value)."""
        y, *warp = self.warp._common_dtype(value)
        return _log_density(y, self.loc, self.scale, *warp)

    def cdf(self, value: ArrayLike) -> Array:
        """Probability of a y of at most ``value``."""
        return ndtr((self.warp(value) - self.loc) / self.scale)

    def icdf(self, q: ArrayLike) -> Array:
        """The y below which the probability is ``q``."""
        return self.warp.inv(self.loc + self.scale * ndtri(floating(q)))

    @property
    def mean(self) -> Array:
        """By quadrature with 32 nodes; see :func:`warped_moments`."""
        return warped_moments(self.loc, self.scale**2, self.warp, 32).mean

    @property
    def variance(self) -> Array:
        """By quadrature with 32 nodes; see :func:`warped_moments`."""
        return warped_moments(self.loc, self.scale**2, self.warp, 32).variance


class WarpedMoments(NamedTuple):
    """Moments of y on the scale of the data; see `warped_moments`."""

    mean: Array
    """E[y], by quadrature."""

    variance: Array
    """Var[y], by quadrature with the same nodes."""

    quantile_variance: Array
    """((90 % quantile - 10 % quantile) / 4)^2, what the SAVIGP paper's code reports."""


def warped_moments(
    mean: ArrayLike, variance: ArrayLike, warp: TanhWarp, num_points: int = 10
) -> WarpedMoments:
    r"""
    Predictive mean and variance of a warped GP on the scale of the data:
    :math:`E[y] = \int t^{-1}(z)\, N(z; m, v)\, dz` [1], and the variance likewise.

    :math:`m` and :math:`v` belong to the warped observation :math:`z = t(y)`: the noise
    :math:`\sigma^2` is part of :math:`v`. The quadrature is Gauss-Hermite, with 10 nodes
    as in [2]; steep warps need more. The quantiles are exact. Of a Gaussian,
    ``quantile_variance`` is 0.41 of the variance, 2.563 standard deviations lying between
    the two quantiles and not 4: it is here to compare with [2], and ``variance`` to use.

    :param mean: mean of f at the inputs, any shape.
    :param variance: variance of f there plus that of the noise; broadcasts with ``mean``.
    :param warp: the warp.
    :param num_points: number of nodes.
    :return: a :class:`WarpedMoments`, each of the broadcast shape.

    >>> warp = TanhWarp(a=1.0, b=2.0, c=0.0)
    >>> moments = warped_moments(1.0, 0.25, warp)
    >>> [round(float(moment), 3) for moment in moments]
    [0.406, 0.065, 0.024]

    **References:**

    1. Snelson, E., Rasmussen, C. E., Ghahramani, Z. (2004). Warped Gaussian processes.
       NIPS 16.
    2. Bonilla, E. V., Krauth, K., Dezfouli, A. (2019). Generic inference in latent
       Gaussian process models. Journal of Machine Learning Research 20(117), 1-63;
       the quadrature and the quantiles are those of its code,
       https://github.com/Karl-Krauth/Sparse-GP (``savigp/likelihood.py``).
    """
    mean, variance = jnp.broadcast_arrays(floating(mean), floating(variance))
    return _moments(mean, variance, warp, num_points)


@partial(jax.jit, static_argnums=3)
def _moments(mean: Array, variance: Array, warp: TanhWarp, num_points: int):
    nodes, weights = gauss_hermite(num_points)
    places = np.append(nodes, _UPPER_DECILE * np.array([1, -1]))
    # Places in the first axis, so that a batch of warps lines up with `mean`.
    shape = warp.forward_shape(mean.shape)
    mean, scale = jnp.broadcast_to(mean, shape), jnp.broadcast_to(variance**0.5, shape)
    places = places.reshape(-1, *[1] * len(shape)).astype(mean.dtype)
    *inverses, upper, lower = warp.inv(mean + scale * places)
    values, w = jnp.stack(inverses), jnp.asarray(weights, mean.dtype)
    centre = einsum("s,s...->...", w, values)
    spread = einsum("s,s...->...", w, (values - centre) ** 2)
    return WarpedMoments(centre, spread, ((upper - lower) / 4) ** 2)
