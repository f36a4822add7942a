"""Truncated and censored distributions whose limits are far away, beside SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special, stats
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import truncnorm

import numpyro_sgp as sgp
from numpyro_sgp.distributions.gamma_tails import log_gammainc, log_gammaincc
from numpyro_sgp.distributions.tails import _log1mexp, tails
from numpyro_sgp.distributions.truncated import moments, with_digits
from numpyro_sgp.predictive import cumulative
from tests.helpers import slow

#: Mode, scale, limits, and a value.
CASES = [
    (0.0, 1.0, 0.0, None, 0.5),
    (-5.0, 0.1, 0.0, None, 0.001),
    (3.0, 0.1, 0.0, None, 2.9),
    (5.0, 0.1, None, 0.0, -0.002),
    (0.5, 0.1, 0.0, 1.0, 0.4),
    (-1.0, 0.1, 0.0, 1.0, 0.01),
    (3.0, 0.1, 0.0, 1.0, 0.99),
    (3.0, 1.0, 0.0, 1.0, 0.5),
    (0.0, 10.0, 0.0, 1.0, 0.3),
]


def both(loc, scale, low, high):
    """NumPyro's, and SciPy's."""
    given = {k: v for k, v in {"low": low, "high": high}.items() if v is not None}
    ends = [-np.inf if low is None else low, np.inf if high is None else high]
    a, b = ((end - loc) / scale for end in ends)
    fn = dist.TruncatedNormal(jnp.array([loc]), scale, **given)
    return fn, truncnorm(a, b, loc=loc, scale=scale)


@pytest.mark.parametrize(("loc", "scale", "low", "high", "value"), CASES)
def test_densities_and_levels_are_those_of_scipy(loc, scale, low, high, value):
    fn, exact = both(loc, scale, low, high)
    found = with_digits(fn).log_prob(jnp.array([value]))
    np.testing.assert_allclose(found, exact.logpdf([value]), rtol=1e-7)
    level = cumulative.cdf(fn, jnp.array([value]))
    np.testing.assert_allclose(level, exact.cdf([value]), rtol=1e-6)


@pytest.mark.parametrize(("loc", "scale", "low", "high", "value"), CASES)
def test_moments_are_integrals(loc, scale, low, high, value):
    """Of the density over where it is not next to nothing, by adaptive quadrature."""
    fn, exact = both(loc, scale, low, high)
    ends = exact.ppf([1e-14, 1 - 1e-14])
    ends = [e if np.isfinite(e) else loc for e in ends]

    def integral(g):
        return quad(lambda y: g(y) * np.exp(exact.logpdf(y)), *ends, epsabs=0, limit=200)[0]

    mean = integral(lambda y: y)
    variance = integral(lambda y: (y - mean) ** 2)
    found = cumulative.moments(fn)
    # Quadrature's own errors, and of variances 15 scales outside 5e-5 of a series.
    np.testing.assert_allclose(found[0], mean, rtol=1e-6)
    np.testing.assert_allclose(found[1], variance, rtol=1e-4)


@pytest.mark.slow
def test_infinite_limits_are_none():
    """Of arrays some may be."""

    def density(loc, low, high):
        fn = dist.TruncatedNormal(loc, 2.0, low=low, high=high)
        return with_digits(fn).log_prob(0.5)

    for low, high in ((0.0, jnp.inf), (-jnp.inf, 1.0), (-jnp.inf, jnp.inf)):
        for loc in (-9.0, 0.3, 40.0):
            given = dist.TruncatedNormal(jnp.array(loc), 2.0, low=low, high=high)
            exact = truncnorm((low - loc) / 2.0, (high - loc) / 2.0, loc=loc, scale=2.0)
            np.testing.assert_allclose(
                density(loc, low, high), exact.logpdf(0.5), rtol=1e-7
            )
            assert np.isfinite(jax.grad(density)(loc, low, high))
            mean, variance = cumulative.moments(given)
            np.testing.assert_allclose(mean, exact.mean(), rtol=1e-5)
            np.testing.assert_allclose(variance, exact.var(), rtol=1e-3)


@pytest.mark.slow
def test_wrappers_stay_and_gradients_are_finite():
    fn, _ = both(-30.0, 1.0, 0.0, None)
    wrapped = with_digits(
        fn.expand([3, 1]).to_event(1).mask(jnp.array([True, False, True]))
    )
    found = wrapped.log_prob(jnp.full((3, 1), 0.01))
    assert found.shape == (3,) and found[1] == 0.0 and np.isfinite(found).all()

    def density(loc, **limits):
        return with_digits(dist.TruncatedNormal(loc, 1.0, **limits)).log_prob(0.5)

    for limits in ({"low": 0.0}, {"high": 1.0}, {"low": 0.0, "high": 1.0}):
        slope = jax.vmap(jax.grad(lambda loc, limits=limits: density(loc, **limits)))
        assert np.isfinite(slope(jnp.array([-60.0, -1.0, 0.5, 2.0, 60.0]))).all()
    other = dist.Normal(0.0, 1.0).expand([2])
    assert with_digits(other) is other


#: Mode and scale, of an interval from 0 to .01: outside of it, inside, far.
NARROW = [(-8.0, 0.5), (60.0, 2.0), (-3.0, 2.0), (9.0, 2.0), (0.004, 0.02), (0.0, 50.0)]


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(("loc", "scale"), NARROW)
def test_moments_between_near_limits_are_integrals(loc, scale, x64):
    """They were differences of numbers that are nearly the same."""

    def weight(y):
        return np.exp(-((y - loc) ** 2 - loc**2) / (2 * scale**2))

    total = quad(weight, 0.0, 0.01)[0]
    mean = quad(lambda y: y * weight(y), 0.0, 0.01)[0] / total
    variance = quad(lambda y: (y - mean) ** 2 * weight(y), 0.0, 0.01)[0] / total
    with jax.enable_x64(x64):
        fn = dist.TruncatedNormal(jnp.array(loc), scale, low=0.0, high=0.01)
        found = cumulative.moments(fn)
    np.testing.assert_allclose(found, (mean, variance), rtol=1e-7 if x64 else 1e-5)


#: A base of NumPyro, the same of SciPy, and how to be off by some scales.
BASES = {
    "Normal": (lambda m: dist.Normal(m, 0.3), lambda m: stats.norm(m, 0.3)),
    "Laplace": (lambda m: dist.Laplace(m, 0.3), lambda m: stats.laplace(m, 0.3)),
    "Logistic": (lambda m: dist.Logistic(m, 0.3), lambda m: stats.logistic(m, 0.3)),
    "SoftLaplace": (lambda m: dist.SoftLaplace(m, 0.3), lambda m: stats.hypsecant(m, 0.3)),
    "LogNormal": (
        lambda m: dist.LogNormal(m, 0.3),
        lambda m: stats.lognorm(0.3, scale=np.exp(m)),
    ),
    "Exponential": (
        lambda m: dist.Exponential(jnp.exp(-m)),
        lambda m: stats.expon(scale=np.exp(m)),
    ),
    "Weibull": (
        lambda m: dist.Weibull(jnp.exp(m), 1.5),
        lambda m: stats.weibull_min(1.5, scale=np.exp(m)),
    ),
    "Gamma": (
        lambda m: dist.Gamma(2.5, jnp.exp(-m)),
        lambda m: stats.gamma(2.5, scale=np.exp(m)),
    ),
    "InverseGamma": (
        lambda m: dist.InverseGamma(2.5, jnp.exp(m)),
        lambda m: stats.invgamma(2.5, scale=np.exp(m)),
    ),
    "Gompertz": (
        lambda m: dist.Gompertz(0.7 * jnp.exp(-m), 1.0),
        lambda m: stats.gompertz(0.7 * np.exp(-m)),
    ),
    "Gumbel": (lambda m: dist.Gumbel(m, 0.6), lambda m: stats.gumbel_r(m, 0.6)),
    "Cauchy": (lambda m: dist.Cauchy(m, 0.3), lambda m: stats.cauchy(m, 0.3)),
    "StudentT": (lambda m: dist.StudentT(4.0, m, 0.3), lambda m: stats.t(4.0, m, 0.3)),
    "HalfNormal": (
        lambda m: dist.HalfNormal(jnp.exp(m)),
        lambda m: stats.halfnorm(scale=np.exp(m)),
    ),
    "HalfCauchy": (
        lambda m: dist.HalfCauchy(jnp.exp(m)),
        lambda m: stats.halfcauchy(scale=np.exp(m)),
    ),
    "Pareto": (
        lambda m: dist.Pareto(0.1, jnp.exp(m)),
        lambda m: stats.pareto(np.exp(m), scale=0.1),
    ),
    "Dagum": (
        lambda m: dist.Dagum(1.5, 3.0, jnp.exp(m)),
        lambda m: stats.burr(3.0, 1.5, scale=np.exp(m)),
    ),
}
CENSORED = np.array([True, False])


@pytest.mark.quick(8)
@pytest.mark.parametrize("mode", [-4.0, slow(-0.5), slow(0.4), 3.0])
@pytest.mark.parametrize("name", BASES)
def test_censored_densities_are_those_of_scipy(name, mode):
    """To the left, the right, both sides of an interval, and what is seen."""
    make, exact = BASES[name][0], BASES[name][1](mode)
    base, y = make(jnp.full(2, mode)), jnp.array([0.6, 0.6])
    seen = exact.logpdf(0.6)
    found = with_digits(dist.LeftCensoredDistribution(base, CENSORED)).log_prob(y)
    near = {"rtol": 1e-6, "atol": 2e-7}  # JAX's log_ndtr where it is nearly zero
    np.testing.assert_allclose(found, [exact.logcdf(0.6), seen], **near)
    found = with_digits(dist.RightCensoredDistribution(base, CENSORED)).log_prob(y)
    np.testing.assert_allclose(found, [exact.logsf(0.6), seen], **near)
    kinds = np.array([[True, False], [False, True], [False, False], [True, True]])
    fn = dist.IntervalCensoredDistribution(
        make(jnp.full(4, mode)), kinds[:, 0], kinds[:, 1]
    )
    found = with_digits(fn).log_prob(jnp.tile(jnp.array([0.6, 0.9]), (4, 1)))
    between = quad(exact.pdf, 0.6, 0.9, epsabs=0.0, epsrel=1e-11)[0]
    outside = np.logaddexp(exact.logcdf(0.6), exact.logsf(0.9))
    expected = [exact.logcdf(0.9), exact.logsf(0.6), np.log(between), outside]
    np.testing.assert_allclose(found, expected, **near)


SOME = "LogNormal", "Gamma"


@pytest.mark.slow
@pytest.mark.parametrize("name", [b if b in SOME else slow(b) for b in BASES])
def test_slopes_of_censored_densities_are_finite(name):
    """In float32, of infinite values too, where NumPyro's are without a slope."""
    with jax.enable_x64(False):
        y = jnp.array([0.0, 1e-6, 0.5, 3.0, jnp.inf])
        pairs = jnp.stack([y, y + 0.3], axis=-1)
        for m in (-9.0, 0.0, 9.0):

            def of(m):
                base, few = (BASES[name][0](m * jnp.ones(n)) for n in (5, 4))
                none = np.zeros(5, bool)
                found = [
                    with_digits(dist.LeftCensoredDistribution(base, ~none)).log_prob(y),
                    with_digits(dist.RightCensoredDistribution(base, ~none)).log_prob(y),
                    with_digits(
                        dist.IntervalCensoredDistribution(few, none[:4], none[:4])
                    ).log_prob(pairs[:4]),
                ]
                return jnp.concatenate(found)

            assert np.isfinite(jax.jacobian(of)(jnp.float32(m))).all()


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_second_derivatives_are_finite(x64):
    """Natural steps of nested inference are of these."""
    with jax.enable_x64(x64):
        x = jnp.array([-1e-10, -0.7, -50.0, -100.0, -1e4])
        found = jax.vmap(jax.grad(jax.grad(_log1mexp)))(x)
        assert np.isfinite(found).all()

        def density(m):
            fn = dist.TruncatedNormal(m, 0.2, low=-10.0, high=10.0)
            return with_digits(fn).log_prob(0.5)

        assert np.isfinite(jax.grad(jax.grad(density))(0.3))


@pytest.mark.parametrize("name", ["Laplace", "Logistic", "SoftLaplace"])
def test_other_bases_are_cut_off_far_away_too(name):
    for mode, value in ((-20.0, 0.1), (0.2, 0.5)):
        make, exact = (of(mode) for of in BASES[name])
        fn = dist.LeftTruncatedDistribution(make, low=0.0)
        known = exact.logpdf(value) - exact.logsf(0.0)
        np.testing.assert_allclose(with_digits(fn).log_prob(value), known, rtol=1e-6)
        level = -np.expm1(exact.logsf(value) - exact.logsf(0.0))
        np.testing.assert_allclose(cumulative.cdf(fn, value), level, rtol=1e-6)


@pytest.mark.slow
def test_gammas_are_cut_off_and_censored_far_away_in_single_precision():
    """Of NumPyro they had -15.94, whatever the rate, and no slope; cut off, -inf."""
    rates = np.exp([1.0, 3.0, 4.0, 5.0])
    exact = stats.gamma(2.0, scale=1.0 / rates)
    with jax.enable_x64(False):
        base = dist.Gamma(2.0, jnp.asarray(rates, jnp.float32))
        found = with_digits(dist.RightCensoredDistribution(base, np.ones(4))).log_prob(2.0)
        cut = with_digits(dist.LeftTruncatedDistribution(dist.Cauchy(-50.0, 0.1), 0.0))
        assert np.isfinite(cut.log_prob(0.5))

        def shape(a):
            fn = dist.RightCensoredDistribution(dist.Gamma(a, 100.0), True)
            return with_digits(fn).log_prob(2.0)

        slope = jax.grad(shape)(2.0)
    np.testing.assert_allclose(found, exact.logsf(2.0), rtol=1e-5)
    steps = [stats.gamma(2.0 + d, scale=0.01).logsf(2.0) for d in (1e-4, -1e-4)]
    np.testing.assert_allclose(slope, (steps[0] - steps[1]) / 2e-4, rtol=1e-3)


@pytest.mark.parametrize("shape", [0.01, 0.5, 30.0, 2000.0, 1e4])
def test_logs_of_incomplete_gamma_functions(shape):
    above = shape + np.array([3, 5, 7, 10, 20]) * np.sqrt(shape)
    above = above + np.array([0, 3, 15, 30, 60])
    below = shape * np.array([0.9, 0.7, 0.5, 0.3, 0.1, 1e-2])
    for ours, known, x in (
        (log_gammaincc, special.gammaincc, above),
        (log_gammainc, special.gammainc, below),
    ):
        found = np.asarray(ours(jnp.asarray(shape), jnp.asarray(x)))
        exact = known(shape, x)
        seen = exact > 1e-300  # of SciPy
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found[seen], np.log(exact[seen]), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("df", [slow(4.0), 50.0, slow(300.0)])
def test_tails_of_student_t_have_slopes(df):
    """Where the incomplete beta function is zero in float32 too."""
    z = np.array([-300.0, -60.0, -20.0, -10.0, -3.0, -0.5, -0.011, 0.0, 0.5, 5.0, 30.0])
    exact = stats.t(df)
    fn = dist.StudentT(df, jnp.zeros(len(z)), 1.0)

    def found(x):
        return with_digits(dist.LeftCensoredDistribution(fn, True)).log_prob(x).sum()

    with jax.enable_x64(False):
        fn = dist.StudentT(df, jnp.zeros(len(z)), 1.0)
        x = jnp.asarray(z, jnp.float32)
        density = with_digits(dist.LeftCensoredDistribution(fn, True)).log_prob(x)
        slope = jax.grad(found)(x)
    seen = np.isfinite(exact.logcdf(z))
    np.testing.assert_allclose(density[seen], exact.logcdf(z)[seen], rtol=2e-5, atol=1e-6)
    slopes = np.exp(exact.logpdf(z) - exact.logcdf(z))
    np.testing.assert_allclose(slope[seen], slopes[seen], rtol=1e-3, atol=1e-30)
    assert np.isfinite(density).all() and np.isfinite(slope).all()


@pytest.mark.slow
def test_what_is_seen_beside_censored_rows_has_a_slope():
    """At zero the density of these is zero, and its slope was NaN."""
    with jax.enable_x64(False):

        def density(loc):
            fn = dist.RightCensoredDistribution(dist.Gumbel(loc, 2.0), True)
            return with_digits(fn).log_prob(jnp.float32(311.0))

        step = [stats.gumbel_r(310.0 + d, 2.0).logsf(311.0) for d in (1e-4, -1e-4)]
        expected = (step[0] - step[1]) / 2e-4
        np.testing.assert_allclose(jax.grad(density)(310.0), expected, rtol=1e-4)


@pytest.mark.slow
def test_a_point_mass_has_a_cdf():
    parts = [dist.Delta(0.0), dist.Gamma(2.0, 1.0)]
    share, support = dist.Categorical(jnp.array([0.3, 0.7])), dist.constraints.nonnegative
    fn = dist.MixtureGeneral(share, parts, support=support)
    y = np.array([-1.0, 0.0, 1.5])
    expected = [0.0, 0.3, 0.3 + 0.7 * stats.gamma(2.0).cdf(1.5)]
    np.testing.assert_allclose(cumulative.cdf(fn, y), expected, rtol=1e-6)


INSIDE = {
    "hurdle": lambda f: dist.HurdleDistribution(
        dist.TruncatedNormal(f, 0.5, low=0.0), gate=0.3
    ),
    "affine": lambda f: dist.TransformedDistribution(
        dist.TruncatedNormal(f, 0.5, low=0.0),
        [dist.transforms.AffineTransform(1.0, 2.0)],
    ),
    "mixture": lambda f: dist.MixtureGeneral(
        dist.Categorical(jnp.array([0.4, 0.6])),
        [dist.TruncatedNormal(f, 0.5, low=0.0), dist.TruncatedNormal(0.0, low=0.0)],
    ),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", INSIDE)
def test_truncated_distributions_inside_of_others_have_their_digits(kind):
    """In float32, thirty scales off: +inf, of moments inf and NaN."""
    exact = truncnorm(16.0, np.inf, loc=-8.0, scale=0.5)
    mean, variance, log_density = exact.mean(), exact.var(), exact.logpdf(0.02)
    with jax.enable_x64(False):
        fn = INSIDE[kind](jnp.float32(-8.0))
        found = with_digits(fn).log_prob(1.04 if kind == "affine" else 0.02)
        moments = cumulative.moments(fn)
    if kind == "hurdle":
        log_density += np.log(0.7)
        mean, square = 0.7 * mean, 0.7 * (variance + mean**2)
        variance = square - mean**2
    elif kind == "affine":
        log_density -= np.log(2.0)
        mean, variance = 1.0 + 2.0 * mean, 4.0 * variance
    else:
        half = stats.halfnorm()
        parts = np.log([0.4, 0.6]) + [log_density, half.logpdf(0.02)]
        log_density = np.logaddexp(*parts)
        square = 0.4 * (variance + mean**2) + 0.6
        mean = 0.4 * mean + 0.6 * half.mean()
        variance = square - mean**2
    np.testing.assert_allclose(found, log_density, rtol=1e-5)
    np.testing.assert_allclose(moments, (mean, variance), rtol=1e-3)


@pytest.mark.slow
def test_levels_of_zeros_and_others():
    """Of hurdles and inflated zeros, in closed form: draws of the first took for ever."""
    y = np.array([-1.0, 0.0, 1.0, 2.5, 7.0])
    count = stats.poisson(0.02)
    base = dist.Poisson(jnp.array(0.02))
    found = cumulative.cdf(dist.HurdleDistribution(base, gate=0.3), y)
    positive = (count.cdf(y) - count.pmf(0)) / count.sf(0)
    np.testing.assert_allclose(found, np.where(y < 0, 0.0, 0.3 + 0.7 * positive), atol=1e-9)
    mean, variance = cumulative.moments(dist.HurdleDistribution(base, gate=0.3))
    k = np.arange(1, 30)
    pmf = 0.7 * count.pmf(k) / count.sf(0)
    np.testing.assert_allclose(mean, pmf @ k, rtol=1e-9)
    np.testing.assert_allclose(variance, pmf @ k**2 - (pmf @ k) ** 2, rtol=1e-8)
    found = cumulative.cdf(dist.ZeroInflatedDistribution(base, gate=0.3), y)
    np.testing.assert_allclose(found, np.where(y < 0, 0.0, 0.3 + 0.7 * count.cdf(y)))
    gamma = stats.gamma(2.0)
    found = cumulative.cdf(dist.HurdleGamma(jnp.array(0.3), 2.0, 1.0), y)
    np.testing.assert_allclose(found, np.where(y < 0, 0.0, 0.3 + 0.7 * gamma.cdf(y)))


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
def test_hurdles_of_small_rates_in_single_precision(rate):
    with jax.enable_x64(False):
        fn = dist.HurdleDistribution(dist.Poisson(jnp.float32(rate)), gate=0.5)
        mean, variance = cumulative.moments(fn)
        level = cumulative.cdf(fn, jnp.float32(0.0))
    positive = rate / -np.expm1(-rate)
    np.testing.assert_allclose((mean, level), (0.5 * positive, 0.5), rtol=1e-5)
    square = 0.5 * positive * (1.0 + rate)
    np.testing.assert_allclose(variance, square - (0.5 * positive) ** 2, rtol=1e-4)


def test_moments_of_mixtures_far_from_zero_and_of_vectors():
    with jax.enable_x64(False):
        shares = dist.Categorical(jnp.array([0.9, 0.1]))
        parts = [dist.Normal(jnp.float32(3000.0), 0.3), dist.Normal(3000.0, 1.0)]
        found = cumulative.moments(dist.MixtureGeneral(shares, parts))
    np.testing.assert_allclose(found, (3000.0, 0.9 * 0.09 + 0.1), rtol=1e-6)
    shares = dist.Categorical(jnp.array([[0.9, 0.1], [0.1, 0.9]]))
    parts = [dist.Normal(m * jnp.ones((2, 2)), 1.0).to_event(1) for m in (0.0, 1.0)]
    mean, _ = cumulative.moments(dist.MixtureGeneral(shares, parts))
    np.testing.assert_allclose(mean, [[0.1, 0.1], [0.9, 0.9]], rtol=1e-12)


@pytest.mark.slow
def test_shifted_and_scaled_distributions():
    """Of reaction times; below the shift the cdf was NaN."""
    transforms = [
        dist.transforms.ExpTransform(),
        dist.transforms.AffineTransform(1.0, 2.0),
    ]
    fn = dist.TransformedDistribution(dist.Normal(0.2, 0.5), transforms)
    exact = stats.lognorm(0.5, loc=1.0, scale=2.0 * np.exp(0.2))
    y = np.array([-3.0, 1.0, 1.5, 4.0, 50.0])
    np.testing.assert_allclose(cumulative.cdf(fn, y), exact.cdf(y), atol=1e-12)
    np.testing.assert_allclose(cumulative.moments(fn), (exact.mean(), exact.var()))
    down = dist.TransformedDistribution(
        dist.Normal(0.2, 0.5),
        [transforms[0], dist.transforms.AffineTransform(1.0, -2.0)],
    )
    np.testing.assert_allclose(cumulative.cdf(down, 2.0 - y), exact.sf(y), atol=1e-12)
    share = dist.TransformedDistribution(
        dist.Normal(0.0, 1.0),
        [dist.transforms.SigmoidTransform(), dist.transforms.AffineTransform(0.0, 10.0)],
    )
    found = cumulative.cdf(share, np.array([-1.0, 5.0, 11.0]))
    np.testing.assert_allclose(found, [0.0, 0.5, 1.0], atol=1e-12)


@pytest.mark.slow
def test_infinite_limits_are_none_where_the_scale_is_learned():
    """Its slope was NaN; limits of a million are no limits either."""
    X = np.linspace(-2.0, 2.0, 20)[:, None]
    y = np.clip(np.sin(X[:, 0]), -1.0, 1.0)

    def model(X, high, y=None):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            fn = dist.TruncatedNormal(f, s, low=-1.2, high=high)
            numpyro.sample("y", fn, obs=y)

    bounds = [
        sgp.fit(model, sgp.SVGP(5), (X, high, y), progress_bar=False).bound
        for high in (np.where(np.arange(20) % 2, none, 1.2) for none in (np.inf, 1e6))
    ]
    np.testing.assert_allclose(bounds[0], bounds[1], atol=1e-3)


@pytest.mark.slow
def test_a_censored_row_far_off_pulls():
    """In float32 1 - F is a multiple of 6e-8 in NumPyro, without a slope below."""
    with jax.enable_x64(False):

        def model(X, y=None):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
            fn = dist.RightCensoredDistribution(dist.Normal(f, 0.1), np.array([True]))
            numpyro.sample("y", fn, obs=y)

        X, y = np.zeros((1, 1), np.float32), np.array([3.0], np.float32)
        fitted = sgp.fit(model, sgp.SVGP(1), (X, y), progress_bar=False)

    z, w = np.polynomial.hermite_e.hermegauss(50)
    w = w / w.sum()

    def loss(at):
        mean, sd = at[0], np.exp(at[1])
        likelihood = w @ stats.norm.logsf((3.0 - mean - sd * z) / 0.1)
        return 0.5 * (mean**2 + sd**2 - 1.0) - at[1] - likelihood

    best = minimize(loss, [3.0, -1.0])
    np.testing.assert_allclose(fitted.bound, -best.fun, atol=0.02)  # by 20 nodes
    q = fitted.posterior(X)["f"]
    assert abs(q.mean[0] - best.x[0]) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("df", [2.0, 19.9, 30.0, 300.0])
def test_degrees_of_freedom_of_censored_rows_can_be_learned(df, single):
    """JAX has no derivative of the incomplete beta function by its first two arguments."""
    z = np.array([-40.0, -6.0, -2.0, -0.4, 0.0, 0.4, 3.0])

    def found(df):
        fn = dist.StudentT(df, jnp.zeros(len(z)), 1.0)
        return with_digits(dist.LeftCensoredDistribution(fn, True)).log_prob(z)

    with jax.enable_x64(not single):
        by_df, at = jax.jacfwd(found), jnp.asarray(df, float)
        slope, curve = by_df(at), jax.jacrev(by_df)(at)
    if single:  # right to rounding of the log cdf, by differences
        scale = np.maximum(1.0, np.abs(stats.t(df).logcdf(z)))
        with jax.enable_x64(True):
            assert np.all(np.abs(df * (slope - by_df(df))) < 1e-4 * scale)
            exact = jax.jacrev(by_df)(df)
            assert np.all(np.abs(df**2 * (curve - exact)) < 1e-3 * scale)
        return
    step = 1e-3 * df
    low, mid, high = (stats.t(df + k * step).logcdf(z) for k in (-1, 0, 1))
    # Of differences on both sides: 1e-6 of the third derivatives, and 1e-8 of the second.
    np.testing.assert_allclose(slope, (high - low) / (2 * step), rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(
        curve, (high - 2 * mid + low) / step**2, rtol=1e-2, atol=1e-6
    )


@pytest.mark.slow
def test_rows_near_the_start_of_their_support_keep_their_digits():
    """In float32 these were the log of the least number, without a slope."""
    with jax.enable_x64(False):
        for base, exact in (
            (dist.HalfNormal(jnp.ones(3)), stats.halfnorm.logcdf),
            (dist.HalfCauchy(jnp.ones(3)), stats.halfcauchy.logcdf),
            (dist.Weibull(jnp.ones(3), 1.7), lambda y: 1.7 * np.log(y)),
        ):
            y = jnp.array([1e-8, 1e-6, 1e-3], jnp.float32)
            fn = with_digits(dist.LeftCensoredDistribution(base, True))
            expected = exact(np.asarray(y, float))
            np.testing.assert_allclose(fn.log_prob(y), expected, rtol=1e-5)
            slope = jax.grad(lambda y, fn=fn: fn.log_prob(y).sum())(y)
            np.testing.assert_allclose(slope * y, slope[0] * y[0], rtol=1e-3)


@pytest.mark.slow
def test_censored_rows_of_small_units_have_slopes():
    """A value in the place of those that are not seen, at which nothing overflows."""

    def found(log_rate):
        fn = dist.Gompertz(0.1, 1000.0 * jnp.exp(log_rate))
        fn = with_digits(dist.RightCensoredDistribution(fn, jnp.array([1.0, 0.0])))
        return fn.log_prob(jnp.array([1e-3, 2e-3])).sum()

    def exact(log_rate):
        rate = 1000.0 * np.exp(log_rate)
        above, density = -0.1 * np.expm1(rate[0] * 1e-3), np.log(0.1 * rate[1])
        return above + density + rate[1] * 2e-3 - 0.1 * np.expm1(rate[1] * 2e-3)

    np.testing.assert_allclose(found(jnp.zeros(2)), exact(np.zeros(2)), rtol=1e-12)
    h = 1e-5 * np.eye(2)
    slope = [(exact(e) - exact(-e)) / 2e-5 for e in h]
    np.testing.assert_allclose(jax.grad(found)(jnp.zeros(2)), slope, rtol=1e-8)
    with jax.enable_x64(False):
        assert np.isfinite(jax.grad(found)(jnp.zeros(2, jnp.float32))).all()
    normal = dist.RightCensoredDistribution(dist.Normal(jnp.zeros((3, 4)), 1.0), 0)
    assert with_digits(normal).log_prob(jnp.zeros(4)).shape == (3, 4)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "base",
    [
        lambda f: dist.Exponential(jnp.exp(f)),
        lambda f: dist.Gamma(2.0, jnp.exp(f)),
        lambda f: dist.Gompertz(0.1, jnp.exp(f)),
    ],
)
def test_slopes_are_finite_where_rates_are_next_to_nothing(base):
    """At the outer nodes of a wide q(f): what stands in for a limit has no slope."""

    def found(f):
        fn = with_digits(dist.RightCensoredDistribution(base(f), jnp.array([1])))
        return fn.log_prob(jnp.array([2.0])).sum()

    with jax.enable_x64(False):
        for f in (-46.0, -60.0, -86.0, 86.0):
            assert np.isfinite(found(jnp.float32(f)))
            assert np.isfinite(jax.grad(found)(jnp.float32(f)))


def test_intervals_that_begin_before_a_pareto_distribution_does():
    def between(scale, low, high):
        return tails(dist.Pareto(scale, 2.0)).between(low, high)

    for low in (0.5, 1.0):
        np.testing.assert_allclose(between(1.0, low, 2.0), np.log(0.75))
        np.testing.assert_allclose(jax.grad(between)(1.0, low, 2.0), -2 / 3)
    assert between(1.0, 0.2, 0.5) < -150.0 or np.isneginf(between(1.0, 0.2, 0.5))


@pytest.mark.parametrize(
    "base",
    [
        lambda mean: dist.GammaPoisson(2.0, 2.0 / mean),
        lambda mean: dist.NegativeBinomialLogits(2.0, jnp.log(mean / 2.0)),
        lambda mean: dist.BinomialLogits(jnp.log(mean / 10.0), 10),
        lambda mean: dist.BinomialProbs(mean / 10.0, 10),
    ],
)
def test_counts_over_a_hurdle_are_ones_where_they_are_rare(base):
    """The share above zero is next to nothing, of which densities have no digits."""
    with jax.enable_x64(False):
        fn = dist.HurdleDistribution(base(jnp.float32(1e-7)), gate=0.3)
        mean, variance = cumulative.moments(fn)
        np.testing.assert_allclose(mean, 0.7, rtol=1e-5)
        np.testing.assert_allclose(variance, 0.21, rtol=1e-4)


def test_parts_of_a_mixture_may_be_of_one_number():
    """A contaminated normal distribution, whose second part is known."""
    means = jnp.array([0.0, 1.0, -2.0])
    parts = [dist.Normal(means, 0.2), dist.Normal(0.0, 5.0)]
    weights = np.array([0.9, 0.1])
    fn = dist.MixtureGeneral(dist.CategoricalProbs(weights), parts)
    mean, variance = cumulative.moments(fn)
    square = 0.9 * (means**2 + 0.04) + 0.1 * 25.0
    np.testing.assert_allclose(mean, 0.9 * means, rtol=1e-12)
    np.testing.assert_allclose(variance, square - mean**2, rtol=1e-10)
    y = np.array([0.3, -1.0, 2.0])
    expected = 0.9 * stats.norm.cdf(y, means, 0.2) + 0.1 * stats.norm.cdf(y, 0.0, 5.0)
    np.testing.assert_allclose(cumulative.cdf(fn, y), expected, rtol=1e-10)


@pytest.mark.parametrize("width", [None, 0.5, 3.0])
@pytest.mark.parametrize("low", [0.5, 1.5, 6.0, 9.0, 11.9, 50.0])
def test_moments_in_float32_have_digits_at_each_distance_of_the_limit(low, width):
    """Variances were differences of large numbers: 6 % off, at 11.9 scales."""
    with jax.enable_x64(False):
        ends = {"low": jnp.asarray(low)}
        if width is not None:
            ends["high"] = jnp.asarray(low + width)
        mean, variance = moments(dist.TruncatedNormal(0.0, 1.0, **ends))
    assert variance.dtype == jnp.float32
    t = np.linspace(0.0, min(width or np.inf, 60.0 / low), 400_001)
    weights = np.exp(-low * t - t**2 / 2)
    weights[[0, -1]] /= 2.0
    weights /= weights.sum()
    away = weights @ t
    expected = weights @ (t - away) ** 2
    np.testing.assert_allclose(variance, expected, rtol=1e-5)
    np.testing.assert_allclose(mean, low + away, rtol=1e-6)
