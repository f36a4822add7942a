"""Other lengthscales to train from, where the race's ends all take a wiggle for noise."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.distributions import constraints
from scipy.optimize import minimize

import numpyro_sgp as sgp
from numpyro_sgp.fitting.problem import Problem, constrained
from numpyro_sgp.fitting.progress import Limits
from numpyro_sgp.fitting.rounds import descent_of
from numpyro_sgp.fitting.scales import MOVES, Scales
from numpyro_sgp.fitting.starts import APART, HELD, SCALES, lengthscale_starts

N, KEY = 90, jax.random.key(0)
RNG = np.random.default_rng(100)
X = np.sort(RNG.uniform(0.0, 10.0, N))[:, None]
Y = np.sin(0.7 * X[:, 0]) + 0.35 * np.sin(7.0 * X[:, 0]) + 0.1 * RNG.normal(size=N)


def positive(name, location=0.0):
    return numpyro.sample(name, dist.LogNormal(location, 1.0))


def one(X, y=None):
    kernel = sgp.kernels.RBF(positive("variance"), positive("lengthscale"))
    noise = positive("noise", -1.0)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def two(X, y=None):
    RBF = sgp.kernels.RBF
    kernel = RBF(positive("v1"), positive("l1")) + RBF(positive("v2"), positive("l2"))
    noise = positive("noise", -1.0)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def fixed(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, positive("noise")), obs=y)


def two_functions(X, y=None):
    """Alike but for the data: what is the same for both starts is a saddle."""
    RBF = sgp.kernels.RBF
    f = numpyro.sample("f", sgp.GaussianProcess(RBF(positive("v1"), positive("l1")), X))
    g = numpyro.sample("g", sgp.GaussianProcess(RBF(positive("v2"), positive("l2")), X))
    noise = positive("noise", -1.0)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + g, noise), obs=y)


def dense_mode(starts, kernels=1, X=X, Y=Y):
    """The largest log density of responses and hyperparameters, by SciPy."""
    squares, N = (X - X.T) ** 2, len(X)
    locations = np.array([0.0, 0.0] * kernels + [-1.0])

    def loss(logs):
        *pairs, noise = logs
        K = np.exp(2.0 * noise) * np.eye(N)
        for v, log_l in zip(pairs[::2], pairs[1::2], strict=True):
            K += np.exp(v - 0.5 * squares * np.exp(-2.0 * log_l))
        L = np.linalg.cholesky(K)
        white = np.linalg.solve(L, Y)
        likelihood = -0.5 * white @ white - np.log(np.diag(L)).sum()
        likelihood -= 0.5 * N * np.log(2 * np.pi)
        prior = -0.5 * (logs - locations) ** 2 - logs - 0.5 * np.log(2 * np.pi)
        return -likelihood - prior.sum()

    return max(-minimize(loss, np.array(s), method="L-BFGS-B").fun for s in starts)


@pytest.mark.slow
def test_a_wiggle_on_a_trend_is_no_noise():
    """It was, 30 nats below: from all starts of the race."""
    best = dense_mode([(0.0, np.log(ls), -2.0) for ls in (0.15, 0.3, 1.0, 3.0)])
    far = dense_mode([(0.0, np.log(3.0), -1.0)])
    assert best > far + 10.0  # so that there is something to find
    fitted = sgp.fit(one, sgp.VGP(), (X, Y), progress_bar=False)
    assert abs(fitted.bound - best) < 0.1  # the tolerance of fit


@pytest.mark.slow
def test_a_wiggle_is_no_noise_among_more_rows():
    """Of 500 rows there was time for one other lengthscale: 345 nats below, "converged"."""
    rng = np.random.default_rng(2)
    X = np.sort(rng.uniform(0.0, 10.0, 300))[:, None]
    Y = np.sin(0.7 * X[:, 0]) + 0.35 * np.sin(20.0 * X[:, 0]) + 0.1 * rng.normal(size=300)
    best = dense_mode([(0.0, np.log(0.15), -2.0)], X=X, Y=Y)
    assert best > dense_mode([(0.0, np.log(3.0), -1.0)], X=X, Y=Y) + 100.0
    fitted = sgp.fit(one, sgp.VGP(), (X, Y), progress_bar=False)
    assert abs(fitted.bound - best) < 0.1  # the tolerance of fit


@pytest.mark.slow
def test_one_gaussian_of_a_trend_and_a_wiggle_has_one_of_each():
    starts = [(0.0, 1.0, 0.0, -1.5, -2.0), (0.0, 0.0, 0.0, 0.0, -1.0)]
    fitted = sgp.fit(two_functions, sgp.VGP(), (X, Y), joint=True, progress_bar=False)
    assert abs(fitted.bound - dense_mode(starts, kernels=2)) < 0.1  # the tolerance of fit


@pytest.mark.slow
def test_functions_with_a_q_each_are_trained_to_the_end():
    """
    The bound of independent f and g is a dense formula; natural steps of their means
    side by side came within .7 nats of it, after minutes.
    """
    squares = (X - X.T) ** 2
    locations = np.array([0.0, 0.0, 0.0, 0.0, -1.0])

    def loss(logs):
        v1, l1, v2, l2, noise = logs
        s = np.exp(2.0 * noise)
        matrices = [
            np.exp(v - 0.5 * squares * np.exp(-2.0 * ls)) + 1e-8 * np.eye(N)
            for v, ls in ((v1, l1), (v2, l2))
        ]
        weights = np.linalg.solve(sum(matrices) + s * np.eye(N), Y)
        residual = Y - sum(K @ weights for K in matrices)
        bound = -0.5 * N * np.log(2 * np.pi * s) - 0.5 * residual @ residual / s
        for K in matrices:
            B = np.eye(N) + K / s
            bound -= 0.5 * np.trace(K @ np.linalg.inv(B)) / s
            bound -= 0.5 * (np.linalg.slogdet(B)[1] + np.trace(np.linalg.inv(B)) - N)
            bound -= 0.5 * weights @ K @ weights
        prior = -0.5 * (logs - locations) ** 2 - logs - 0.5 * np.log(2 * np.pi)
        return -bound - prior.sum()

    starts = (0.0, 1.0, 0.0, -1.5, -2.0), (0.0, 1.0, -1.0, -2.0, -2.0)
    best = max(-minimize(loss, np.array(s), method="L-BFGS-B").fun for s in starts)
    fitted = sgp.fit(two_functions, sgp.VGP(), (X, Y), progress_bar=False)
    assert fitted.bound > best - 0.1  # the tolerance of fit
    assert fitted.stopped == "converged" and len(fitted.losses) < 400


@pytest.mark.slow
def test_several_lengthscales_start_apart_too():
    given, _, _ = begun(two)
    starts, held = lengthscale_starts(given)
    last = starts[len(SCALES) + len(HELD) + 1 :]
    params = [constrained(given.svi, free) for free in last]
    ratios = [p["l1_auto_loc"] / p["l2_auto_loc"] for p in params]
    assert_allclose(ratios, [APART[0] / APART[1], APART[1] / APART[0]], rtol=1e-4)
    assert len(held) == len(HELD)


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("kind", ["param", "latent", "of a scale"])
def test_functions_of_one_site_begin_apart_too(kind, shape):
    columns = max(shape[-1], 2)  # as many as functions, for one
    positive, wide = constraints.positive, np.repeat(X, columns, axis=1)

    def model(X, y=None):
        if kind == "latent":
            each = dist.LogNormal(np.zeros(shape), 1.0).to_event(len(shape))
            lengthscale = numpyro.sample("l", each)
        else:
            lengthscale = numpyro.param("l", np.ones(shape), constraint=positive)
            lengthscale = lengthscale * (2.0 if kind == "of a scale" else 1.0)
        kernel = sgp.kernels.RBF(np.ones(2), lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[0], jnp.exp(f[1])), obs=y)

    given, _, _ = begun(model, wide)
    starts, held = lengthscale_starts(given)
    assert len(starts) == len(SCALES) + len(HELD) + 3 and len(held) == len(HELD)
    name = "l_auto_loc" if kind == "latent" else "l"
    for free, (first, second) in zip(starts[-2:], [APART, APART[::-1]], strict=True):
        found = constrained(given.svi, free)[name]
        assert found.shape == shape
        assert_allclose(found[0] / found[1], first / second, rtol=1e-4)


@pytest.mark.slow
def test_functions_that_share_their_lengthscale_begin_together():
    def model(X, y=None):
        lengthscale = positive("l") * jnp.ones(2)
        kernel = sgp.kernels.RBF(np.ones(2), lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[0], jnp.exp(f[1])), obs=y)

    given, _, _ = begun(model)
    number = len(lengthscale_starts(given)[0])
    assert number == len(SCALES) + len(HELD) + 2  # the last two would be alike


def test_kernels_of_columns_begin_by_the_spread_of_theirs():
    """Of lengthscales in one latent that of the last column was moved alone."""
    units = np.array([1.0, 30.0, 0.01])
    wide = np.random.default_rng(0).normal(size=(N, 3)) * units

    def model(X, y=None):
        with numpyro.plate("columns", 3):
            lengthscale = positive("l")
        kernels = [sgp.kernels.RBF(1.0, lengthscale[i], active_dims=[i]) for i in range(3)]
        f = numpyro.sample("f", sgp.GaussianProcess(sum(kernels[1:], kernels[0]), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    given, _, scales = begun(model, wide)
    starts, held = lengthscale_starts(given)
    found = [
        constrained(given.svi, free)["l_auto_loc"] / wide.std(0) for free in starts[1:]
    ]
    wanted = [np.full(3, scale) for scale in SCALES + HELD]
    wanted += [np.geomspace(*APART, 3), np.geomspace(*APART[::-1], 3)]
    assert_allclose(found, wanted, rtol=1e-4)
    assert list(held.values()) == 2 * [("l_auto_loc",)]
    assert len([*scales.moves()]) == sum(2 * alone + 1 for _, alone in MOVES)


def of_two_kernels(make, start):
    """Starts of a model with kernels of a parameter, and how many moves there are."""

    def model(X, y=None):
        support = constraints.interval(0.0, 500.0)  # whose transform is no exponential
        value = numpyro.param("l", jnp.asarray(start), constraint=support)
        f = numpyro.sample("f", sgp.GaussianProcess(make(value), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    given, _, scales = begun(model, np.concatenate([X, 30.0 * X], axis=1))
    starts, _ = lengthscale_starts(given)
    found = [constrained(given.svi, free)["l"] for free in starts[1:]]
    return np.array(found), len([*scales.moves()])


SDS = np.array([1.0, 30.0]) * X.std() * np.sqrt(2.0)
RBF, M32 = sgp.kernels.RBF, sgp.kernels.Matern32


@pytest.mark.slow
def test_a_lengthscale_that_kernels_share_begins_as_that_of_one():
    """Exactly, where a step of the unconstrained parameter would not lead."""
    found, number = of_two_kernels(lambda l: RBF(1.0, l) + M32(2.0, l), 9.0)
    wanted = np.array(SCALES + HELD) * np.sqrt(SDS.prod())
    assert_allclose(found, wanted, rtol=1e-4)
    assert number == sum(not alone for _, alone in MOVES)


@pytest.mark.slow
def test_a_lengthscale_that_nothing_moves_leaves_the_others():
    """All starts were lost, by a step of zero over zero."""
    found, number = of_two_kernels(
        lambda l: RBF(1.0, jnp.maximum(l[0], 9.0)) + RBF(1.0, l[1]), [2.0, 9.0]
    )
    assert len(found) == len(SCALES + HELD)
    assert_allclose(found[:, 0], 2.0, rtol=1e-6)
    assert len(np.unique(np.round(found[:, 1], 6))) == len({*SCALES, *HELD})
    assert number == sum(not alone for _, alone in MOVES)


@pytest.mark.slow
def test_lengthscales_of_columns_in_rows_begin_by_the_spread_of_theirs():
    """A step that is right for an exponential alone: latents, with a prior that has one."""

    def model(X, y=None):
        each = dist.LogNormal(jnp.zeros((2, 2)), 1.0).to_event(2)
        l = numpyro.sample("l", each)
        kernel = RBF(1.0, l[0]) + M32(1.0, l[1])
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    given, _, _ = begun(model, np.concatenate([X, 30.0 * X], axis=1))
    starts, _ = lengthscale_starts(given)
    found = [constrained(given.svi, free)["l_auto_loc"] for free in starts[1:]]
    number = len(SCALES + HELD)
    for scale, values in zip(SCALES + HELD, found[:number], strict=True):
        assert_allclose(values, np.tile(scale * SDS, (2, 1)), rtol=1e-4)


@pytest.mark.slow
def test_kernels_with_a_lengthscale_in_common_are_moved_together():
    def model(X, y=None):
        lengthscale, RBF = positive("l"), sgp.kernels.RBF
        kernel = RBF(1.0, lengthscale) + sgp.kernels.Matern32(1.0, 0.1 * lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    given, _, scales = begun(model)
    starts, _ = lengthscale_starts(given)
    assert len(starts) == len(SCALES) + len(HELD) + 1
    assert len([*scales.moves()]) == sum(not alone for _, alone in MOVES)
    found = [constrained(given.svi, free)["l_auto_loc"] for free in starts[1:]]
    assert_allclose(0.1 * np.array(found), np.array(SCALES + HELD) * X.std(), rtol=1e-4)


@pytest.mark.slow
def test_each_kernel_of_a_sum_finds_its_own():
    short, long = (-1.0, np.log(0.2)), (-0.5, np.log(1.7))
    best = dense_mode([(*short, *long, -2.3), (*long, *long, -1.0)], kernels=2)
    fitted = sgp.fit(two, sgp.VGP(), (X, Y), progress_bar=False)
    assert abs(fitted.bound - best) < 0.1


def begun(model, X=X):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(8))
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.01), sgp.TraceGP_ELBO())
    given = Problem(svi, svi.init(KEY, X, Y), (X, Y), {})
    descent = descent_of(given, KEY)
    descent.start()
    return given, descent, Scales(given, descent, seed=0)


@pytest.mark.slow
def test_a_move_holds_the_lengthscale_and_trains_the_rest():
    given, descent, scales = begun(one)
    before = constrained(given.svi, descent.free_now())
    moves = [*scales.moves()]
    together = [factor for factor, alone in MOVES if not alone]
    assert len(moves) == len(together)
    free, at = descent.free_now(), descent.loss
    assert moves[1](free, Limits(0.1, None, None)) > 0
    after = constrained(given.svi, descent.free_now())
    ratio = after["lengthscale_auto_loc"] / before["lengthscale_auto_loc"]
    assert_allclose(ratio, together[1], rtol=1e-6)
    assert abs(after["noise_auto_loc"] - before["noise_auto_loc"]) > 1e-3
    assert descent.losses[-1] < descent.losses[0] and descent.loss != at


@pytest.mark.slow
def test_kernels_of_a_sum_move_by_themselves_and_together():
    _, _, scales = begun(two)
    assert len([*scales.moves()]) == sum(1 + alone for _, alone in MOVES)


@pytest.mark.slow
def test_a_move_ends_with_the_steps():
    _, descent, scales = begun(one)
    (move, *_) = scales.moves()
    assert move(descent.free_now(), Limits(1e-9, 2, None)) == 2


@pytest.mark.slow
def test_a_model_without_trained_lengthscales_has_no_moves():
    _, _, scales = begun(fixed)
    assert [*scales.moves()] == []


@pytest.mark.slow
def test_steps_count_what_is_held():
    fitted = sgp.fit(one, sgp.SVGP(8), (X, Y), steps=6, progress_bar=False)
    assert len(fitted.losses) <= 6 and jnp.isfinite(fitted.bound)


@pytest.mark.parametrize("units", [3e4, pytest.param(1e6, marks=pytest.mark.slow)])
def test_a_response_in_units_of_its_own_is_not_all_noise(units):
    """All of it was, with a variance and a noise that begin at one."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 6.0, 40))[:, None]
    y = np.sin(X[:, 0]) + 0.3 * rng.normal(size=40)

    def model(X, y=None):
        values = {k: numpyro.param(k, 1.0, constraint=constraints.positive) for k in "vls"}
        kernel = sgp.kernels.RBF(values["v"], values["l"])
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, values["s"]), obs=y)

    def bound(y):
        approximation = sgp.SVGP(inducing=X[::6])
        return sgp.fit(model, approximation, (X, y), progress_bar=False).bound

    # The density of y in other units is that of y by the units of each row.
    assert_allclose(bound(units * y) + 40 * np.log(units), bound(y), atol=0.05)
