"""Moments and distribution functions of NumPyro, and what values lie between."""

from functools import partial

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.custom_derivatives import SymbolicZero
from jax.scipy.special import gammainc, gammaincc, ndtr

from numpyro_sgp.distributions import truncated
from numpyro_sgp.predictive.incomplete_beta import betainc
from numpyro_sgp.tracing import messages

_TWO_SIDED = dist.TwoSidedTruncatedDistribution
_TRUNCATED = dist.LeftTruncatedDistribution, _TWO_SIDED
_CENSORED = (
    dist.IntervalCensoredDistribution,
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
)
_MULTINOMIAL = dist.MultinomialLogits, dist.MultinomialProbs
_ZERO_OR = dist.HurdleProbs, dist.ZeroInflatedProbs
_BINOMIAL = dist.BinomialLogits, dist.BinomialProbs
#: Shapes above which JAX's incomplete gamma function is wrong, or takes very long.
_MANY = {"float32": 5e2, "float64": 1e8}


def innermost(fn):
    """
    The distribution inside of all wrappers; inside of a censored one, whose draws are of
    what would be seen without a limit, too.
    """
    fn = messages.innermost(fn)
    while isinstance(fn, _CENSORED):
        fn = messages.innermost(fn.base_dist)
    return fn


def marginal(fn):
    """The distribution of each entry of a vector, where it is known; else ``fn`` itself."""
    inner = innermost(fn)
    if isinstance(messages.innermost(fn), dist.IntervalCensoredDistribution):
        return inner.expand(fn.shape()[:-1])  # of which two limits are observed
    if isinstance(inner, _MULTINOMIAL):
        one = dist.BinomialProbs(inner.probs, jnp.expand_dims(inner.total_count, -1))
    elif isinstance(inner, dist.DirichletMultinomial):
        number = jnp.expand_dims(inner.total_count, -1)
        one = dist.BetaBinomial(*_and_others(inner.concentration), number)
    elif isinstance(inner, dist.Dirichlet):
        one = dist.Beta(*_and_others(inner.concentration))
    elif isinstance(inner, dist.MultivariateNormal):
        one = dist.Normal(inner.mean, jnp.sqrt(inner.variance))
    else:
        return fn
    return one.expand(fn.shape())


def _and_others(concentration):
    """Of one entry, and of the others together."""
    return concentration, jnp.sum(concentration, axis=-1, keepdims=True) - concentration


def moments(fn) -> tuple:
    """
    Mean and variance. Those of NumPyro's truncated normal distributions are infinite or NaN
    where nearly all of the normal one is outside.

    :raises NotImplementedError: if it has none.
    """
    inner = innermost(fn)
    if truncated.is_truncated_normal(inner):
        mean, variance = truncated.moments(inner)
    elif truncated.is_truncated_student(inner):
        mean, variance = truncated.student_moments(inner)
    elif isinstance(inner, _TWO_SIDED) and isinstance(inner.base_dist, dist.Cauchy):
        mean, variance = truncated.cauchy_moments(inner)
    elif isinstance(inner, dist.HurdleProbs):
        mean, variance = _of_hurdle(inner)
    elif isinstance(inner, dist.MixtureGeneral):
        parts = [moments(part) for part in inner.component_distributions]
        shape = inner.shape()
        means, variances = (
            jnp.stack([jnp.broadcast_to(part, shape) for part in of_parts], axis=-1)
            for of_parts in zip(*parts, strict=True)
        )
        probs = inner.mixing_distribution.probs
        *shape, number = probs.shape
        probs = probs.reshape(*shape, *(1,) * len(inner.event_shape), number)
        mean = jnp.sum(probs * means, axis=-1)
        variances = variances + (means - mean[..., None]) ** 2
        variance = jnp.sum(probs * variances, axis=-1)
    elif type(inner) is dist.TransformedDistribution:
        mean, variance = _of_transformed(inner)
    elif isinstance(messages.innermost(fn), _CENSORED):
        mean, variance = inner.mean, inner.variance
    else:
        return fn.mean, fn.variance
    return jnp.broadcast_to(mean, fn.shape()), jnp.broadcast_to(variance, fn.shape())


def _of_hurdle(fn):
    """Of positive numbers, and of zeros in their place."""
    mean, variance = moments(fn.base_dist)
    positive = 1.0 - fn.gate
    if fn._is_discrete:
        positive = positive / _share_above_zero(fn.base_dist)
    return positive * mean, positive * (variance + (1.0 - positive) * mean**2)


def _share_above_zero(fn):
    """Of the log probability of zero, of which densities have lost the digits."""
    inner = messages.innermost(fn)
    if type(inner) is dist.Poisson:
        log_zero = -inner.rate
    elif isinstance(inner, dist.GammaPoisson):
        log_zero = -inner.concentration * jnp.log1p(1.0 / inner.rate)
    elif isinstance(inner, dist.NegativeBinomialLogits | dist.BinomialLogits):
        log_zero = -inner.total_count * jax.nn.softplus(inner.logits)
    elif isinstance(inner, dist.BinomialProbs):
        log_zero = inner.total_count * jnp.log1p(-inner.probs)
    else:
        log_zero = fn.log_prob(jnp.zeros((), int))
    return -jnp.expm1(log_zero)


def _of_transformed(fn):
    """
    :raises NotImplementedError: but for what is shifted and scaled, or log-normal then.
    """
    last = fn.transforms[-1]
    if isinstance(last, dist.transforms.AffineTransform) and not fn.event_shape:
        rest = fn.transforms[:-1]
        base = dist.TransformedDistribution(fn.base_dist, rest) if rest else fn.base_dist
        mean, variance = moments(base)
        return last.loc + last.scale * mean, last.scale**2 * variance
    base = innermost(fn.base_dist)
    is_exp = [type(part) for part in fn.transforms] == [dist.transforms.ExpTransform]
    if is_exp and isinstance(base, dist.Normal):
        found = dist.LogNormal(base.loc, base.scale)
        return found.mean, found.variance
    return fn.mean, fn.variance


def cdf(fn, y):
    """
    The cdf of a distribution of numbers, 0 or 1 outside of its support: NumPyro's are for
    values inside, and may be anything elsewhere.

    :raises NotImplementedError: if it has none.
    """
    fn = innermost(fn)
    if type(fn).cdf is dist.TransformedDistribution.cdf:  # as that does
        found = _of_transforms(fn, y)
    elif isinstance(fn, dist.MixtureGeneral):  # whose parts may have other supports
        parts = [cdf(part, y) for part in fn.component_distributions]
        parts = jnp.stack(jnp.broadcast_arrays(*parts), axis=-1)
        found = jnp.sum(fn.mixing_distribution.probs * parts, axis=-1)
    elif isinstance(fn, _ZERO_OR):
        below = cdf(fn.base_dist, y)
        if isinstance(fn, dist.HurdleProbs) and fn._is_discrete:
            below = 1.0 - (1.0 - below) / _share_above_zero(fn.base_dist)
            below = jnp.where(y < 1.0, 0.0, below)
        found = jnp.where(y < 0.0, 0.0, fn.gate + (1.0 - fn.gate) * below)
    elif truncated.has_digits(fn):
        found = truncated.cdf(fn, jnp.clip(y, *bounds(fn)))
    elif isinstance(fn, _TRUNCATED):
        found = _of_truncated(fn, y)
    elif isinstance(fn, _BINOMIAL):
        wrong, number = 1.0 - fn.probs, fn.total_count
        count = jnp.floor(y)
        left = jnp.maximum(number - count, 1e-3)
        found = betainc(left, jnp.maximum(count, 0.0) + 1.0, wrong, fn.probs)
    elif isinstance(fn, dist.StudentT):
        found = _of_student(*jnp.broadcast_arrays(fn.df, (y - fn.loc) / fn.scale))
    elif isinstance(fn, dist.Beta):
        inside = jnp.clip(y, 0.0, 1.0)
        found = betainc(fn.concentration1, fn.concentration0, inside, 1.0 - inside)
    elif isinstance(fn, dist.GammaPoisson):
        count = jnp.maximum(jnp.floor(y), 0.0)
        of_rate = fn.rate / (1.0 + fn.rate), 1.0 / (1.0 + fn.rate)
        found = betainc(fn.concentration, count + 1.0, *of_rate)
    elif type(fn) is dist.Poisson:
        found = _of_poisson(fn, y)
    elif isinstance(fn, dist.Gamma):
        found = _of_gamma(fn.concentration, fn.rate * jnp.maximum(y, 0.0))
    elif isinstance(fn, dist.InverseGamma):
        inside = jnp.where(y > 0.0, y, 1.0)
        found = 1.0 - _of_gamma(fn.concentration, fn.rate / inside)
    elif isinstance(fn, dist.Delta) and not fn.event_dim:
        found = jnp.where(y >= fn.v, 1.0, 0.0)
    else:
        found = fn.cdf(y)
    lower, upper = bounds(fn)
    found = jnp.clip(found, 0.0, 1.0)
    return jnp.where(y < lower, 0.0, jnp.where(y >= upper, 1.0, found))


def _of_transforms(fn, y):
    """By inverses of values that a transform may have; what is below and above has none."""
    sign, value = 1, y
    below = above = jnp.zeros(jnp.shape(y), bool)
    for transform in reversed(fn.transforms):
        ends = (
            getattr(transform.codomain, name, last)
            for name, last in (("lower_bound", -jnp.inf), ("upper_bound", jnp.inf))
        )
        low, high = (jnp.asarray(end, jnp.result_type(float)) for end in ends)
        under, over = value <= low, value >= high
        below |= jnp.where(sign > 0, under, over)
        above |= jnp.where(sign > 0, over, under)
        some = transform.codomain.feasible_like(value)
        value = transform.inv(jnp.where(under | over, some, value))
        sign = sign * transform.sign
    found = cdf(fn.base_dist, value)
    found = jnp.where(sign < 0, 1.0 - found, found)
    return jnp.where(below, 0.0, jnp.where(above, 1.0, found))


def _of_truncated(fn, y):
    """Where all of it is in the upper tail, by the lower one, which keeps its digits."""
    base, low, high = fn.base_dist, fn.low, getattr(fn, "high", None)
    is_above = base.loc < low

    def below(value):
        return base.cdf(jnp.where(is_above, 2.0 * base.loc - value, value))

    least = below(low)
    most = jnp.where(is_above, 0.0, 1.0) if high is None else below(high)
    return (below(y) - least) / (most - least)


@jax.custom_jvp
def _of_student(df, z):
    return _by_beta(df, z)


def _by_beta(df, z):
    square = jnp.minimum(z**2, jnp.finfo(jnp.result_type(z)).max / 4.0) / df
    tail = 0.5 * betainc(0.5 * df, 0.5, 1.0 / (1.0 + square), square / (1.0 + square))
    return jnp.where(z < 0.0, tail, 1.0 - tail)


@partial(_of_student.defjvp, symbolic_zeros=True)
def _slope_of_student(primals, tangents):
    """Its density, as the continued fraction has no derivatives backwards."""
    (df, z), (of_df, of_z) = primals, tangents
    found = _of_student(df, z)
    change = jnp.zeros_like(found)
    if not isinstance(of_z, SymbolicZero):
        change = change + jnp.exp(dist.StudentT(df).log_prob(z)) * of_z
    if not isinstance(of_df, SymbolicZero):
        change = change + jax.jvp(lambda df: _by_beta(df, z), (df,), (of_df,))[1]
    return found, change


def _of_poisson(fn, y):
    """By the cube root of the gamma distribution, where counts are large."""
    shape = jnp.maximum(jnp.floor(y), 0.0) + 1.0
    shape, rate = jnp.broadcast_arrays(shape, jnp.asarray(fn.rate, shape.dtype))
    many = jnp.maximum(shape, rate) > _MANY.get(shape.dtype.name, 5e2)
    few = (jnp.where(many, 1.0, v) for v in (shape, rate))
    return jnp.where(many, ndtr(-_cube_root(rate / shape, shape)), gammaincc(*few))


def _of_gamma(shape, x):
    """Of a variable of this shape and rate one; where shapes are large as above."""
    shape, x = jnp.broadcast_arrays(
        *(jnp.asarray(v, jnp.result_type(float)) for v in (shape, x))
    )
    many = shape > _MANY[x.dtype.name]
    by_root = ndtr(_cube_root(jnp.where(many, x / shape, 1.0), jnp.where(many, shape, 1.0)))
    few = (jnp.where(many, 1.0, v) for v in (shape, x))
    return jnp.where(many, by_root, gammainc(*few))


def _cube_root(ratio, shape):
    """
    Wilson and Hilferty's normal number of ``ratio``, a gamma variable of this shape over
    its mean; levels are right to some 0.1 / shape.
    """
    return 3.0 * jnp.sqrt(shape) * (jnp.cbrt(ratio) - 1.0 + 1.0 / (9.0 * shape))


def bounds(fn) -> tuple:
    """Least and largest value, of single numbers: arrays where they depend on arguments."""
    support = messages.support_of(innermost(fn))
    lower = getattr(support, "lower_bound", -jnp.inf)
    return lower, getattr(support, "upper_bound", jnp.inf)


def is_circular(fn) -> bool:
    """Whether values are angles, whose moments are none of numbers in NumPyro."""
    support = messages.support_of(innermost(fn))
    return isinstance(support, type(dist.constraints.circular))
