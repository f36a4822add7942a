"""Moments and distribution functions of NumPyro, and what values lie between."""

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import betainc, gammainc, ndtr

from numpyro_sgp.distributions import truncated
from numpyro_sgp.tracing import messages

_TRUNCATED = dist.LeftTruncatedDistribution, dist.TwoSidedTruncatedDistribution
_CENSORED = (
    dist.IntervalCensoredDistribution,
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
)
_BINOMIAL = dist.BinomialLogits, dist.BinomialProbs
#: Counts above which JAX's incomplete gamma and beta functions are wrong in float32.
_MANY = 2e3
_FEW = 100.0


def innermost(fn):
    """
    The distribution inside of all wrappers; inside of a censored one, whose draws are of
    what would be seen without a limit, too.
    """
    fn = messages.innermost(fn)
    while isinstance(fn, _CENSORED):
        fn = messages.innermost(fn.base_dist)
    return fn


def moments(fn) -> tuple:
    """
    Mean and variance. Those of NumPyro's truncated normal distributions are infinite or NaN
    where nearly all of the normal one is outside.

    :raises NotImplementedError: if it has none.
    """
    inner = innermost(fn)
    if truncated.is_truncated_normal(inner):
        mean, variance = truncated.moments(inner)
    elif isinstance(messages.innermost(fn), _CENSORED):
        mean, variance = inner.mean, inner.variance
    else:
        return fn.mean, fn.variance
    return jnp.broadcast_to(mean, fn.shape()), jnp.broadcast_to(variance, fn.shape())


def cdf(fn, y):
    """
    The cdf of a distribution of numbers, 0 or 1 outside of its support: NumPyro's are for
    values inside, and may be anything elsewhere.

    :raises NotImplementedError: if it has none.
    """
    fn = innermost(fn)
    if type(fn).cdf is dist.TransformedDistribution.cdf:  # as that does
        sign, value = 1, y
        for transform in reversed(fn.transforms):
            sign, value = sign * transform.sign, transform.inv(value)
        found = cdf(fn.base_dist, value)
        found = jnp.where(sign < 0, 1.0 - found, found)
    elif isinstance(fn, dist.MixtureGeneral):  # whose parts may have other supports
        parts = jnp.stack([cdf(part, y) for part in fn.component_distributions], axis=-1)
        found = jnp.sum(fn.mixing_distribution.probs * parts, axis=-1)
    elif truncated.is_truncated_normal(fn):
        found = truncated.cdf(fn, jnp.clip(y, *bounds(fn)))
    elif isinstance(fn, _TRUNCATED):
        found = _of_truncated(fn, y)
    elif isinstance(fn, _BINOMIAL):
        wrong, number = 1.0 - fn.probs, fn.total_count
        count = jnp.floor(y)
        left = jnp.maximum(number - count, 1e-3)
        found = _betainc(left, jnp.maximum(count, 0.0) + 1.0, wrong, fn.probs)
    elif isinstance(fn, dist.GammaPoisson):
        count = jnp.maximum(jnp.floor(y), 0.0)
        of_rate = fn.rate / (1.0 + fn.rate), 1.0 / (1.0 + fn.rate)
        found = _betainc(fn.concentration, count + 1.0, *of_rate)
    elif type(fn) is dist.Poisson:
        found = _of_poisson(fn, y)
    else:
        found = fn.cdf(y)
    lower, upper = bounds(fn)
    found = jnp.clip(found, 0.0, 1.0)
    return jnp.where(y < lower, 0.0, jnp.where(y >= upper, 1.0, found))


def _of_truncated(fn, y):
    """Where all of it is in the upper tail, by the lower one, which keeps its digits."""
    base, low, high = fn.base_dist, fn.low, getattr(fn, "high", None)
    is_above = base.loc < low

    def below(value):
        return base.cdf(jnp.where(is_above, 2.0 * base.loc - value, value))

    least = below(low)
    most = jnp.where(is_above, 0.0, 1.0) if high is None else below(high)
    return (below(y) - least) / (most - least)


def _of_poisson(fn, y):
    """In float32 by the cube root of the gamma distribution, where counts are large."""
    found, shape = fn.cdf(y), jnp.maximum(jnp.floor(y), 0.0) + 1.0
    if found.dtype != jnp.float32:
        return found
    many = jnp.maximum(shape, fn.rate) > _MANY
    return jnp.where(many, ndtr(-_cube_root(fn.rate / shape, shape)), found)


def _cube_root(ratio, shape):
    """
    Wilson and Hilferty's normal number of ``ratio``, a gamma variable of this shape over
    its mean; levels are right to some 0.1 / shape.
    """
    return 3.0 * jnp.sqrt(shape) * (jnp.cbrt(ratio) - 1.0 + 1.0 / (9.0 * shape))


def _betainc(a, b, x, rest):
    """
    The regularised incomplete beta function. In float32, where ``a`` or ``b`` is large, by
    a gamma variable in the place of the one with the larger number (A&S 26.5.20), or by
    cube roots of both (26.5.22).

    :param rest: ``1 - x``.
    """
    found = betainc(a, b, jnp.clip(x, 0.0, 1.0))
    if found.dtype != jnp.float32:
        return found
    a, b, x, rest = jnp.broadcast_arrays(
        *(jnp.asarray(v, found.dtype) for v in (a, b, x, rest))
    )
    swap = a > b
    small, large = jnp.minimum(a, b), jnp.maximum(a, b)
    x, rest = jnp.where(swap, rest, x), jnp.where(swap, x, rest)
    tiny = jnp.finfo(found.dtype).tiny
    minus_log = jnp.where(
        rest > 0.5, -jnp.log1p(-jnp.minimum(x, 0.9)), -jnp.log(rest + tiny)
    )
    few = jnp.minimum(small, _FEW)
    by_gamma = gammainc(few, minus_log * (large + 0.5 * (few - 1.0)))
    one, two = jnp.cbrt(large * x), jnp.cbrt(small * rest)
    away = one * (1.0 - 1.0 / (9.0 * large)) - two * (1.0 - 1.0 / (9.0 * small))
    by_roots = ndtr(3.0 * away / jnp.sqrt(one**2 / large + two**2 / small + tiny))
    other = jnp.where(small < _FEW, by_gamma, by_roots)
    other = jnp.where(swap, 1.0 - other, other)
    return jnp.where(large > _MANY, other, found)


def bounds(fn) -> tuple:
    """Least and largest value, of single numbers: arrays where they depend on arguments."""
    support = _of_numbers(fn)
    lower = getattr(support, "lower_bound", -jnp.inf)
    return lower, getattr(support, "upper_bound", jnp.inf)


def is_circular(fn) -> bool:
    """Whether values are angles, whose moments are none of numbers in NumPyro."""
    return isinstance(_of_numbers(fn), type(dist.constraints.circular))


def _of_numbers(fn):
    """The support of single numbers."""
    support = innermost(fn).support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support
