"""ODVGP at scale against the posterior that factorises all of its points."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.families import Block, BlockGaussian, DecoupledGaussian
from tests.helpers import gaussian_model, regression_data

KEY = jax.random.key(0)


def pair(batch=(), num_columns=None):
    """A decoupled posterior, and the same one in whitened coordinates."""
    rng = np.random.default_rng(0)
    X, Z, O = (jnp.asarray(rng.uniform(-2, 2, size=(n, 1))) for n in (7, 3, 5))
    kernel = sgp.kernels.RBF(jnp.full(batch, 1.3), 0.7)
    prior = sgp.GaussianProcess(kernel, X, 0.5)
    first = Block(
        jnp.asarray(rng.normal(size=(*batch, 3))),
        jnp.asarray(np.tril(rng.normal(size=(*batch, 3, 3)))),
    )
    a = jnp.asarray(rng.normal(size=(*batch, 5)))
    q = DecoupledGaussian(BlockGaussian((first,)), O, a, num_columns)
    posterior = sgp.SparsePosterior(prior, (Z,), q)
    empty = BlockGaussian((first, Block(jnp.zeros((*batch, 5)), None)))
    L = sgp.SparsePosterior(prior, (Z, O), empty).chol[..., 3:, 3:]  # of C_vv
    second = Block(jnp.einsum("...nm,...n->...m", L, a), None)
    q = BlockGaussian((first, second))
    return posterior, sgp.SparsePosterior(prior, (Z, O), q)


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_it_is_the_posterior_of_odvgp(batch):
    found, known = pair(batch)
    # The whitened form has jitter (1e-8) in C_vv.
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)  # noqa: E731
    close(found.mean, known.mean)
    close(found.variance, known.variance)
    close(found.prior_kl(), known.prior_kl())
    for part in ("parallel", "orthogonal"):
        a, b = getattr(found, part)(), getattr(known, part)()
        close(a.mean, b.mean)
        close(a.prior_kl(), b.prior_kl())
    close(found.parallel().mean + found.orthogonal().mean, known.mean)


@pytest.mark.slow
def test_random_columns_estimate_the_kl_without_bias():
    found, _ = pair()
    exact = found.prior_kl()
    found, _ = pair(num_columns=2)
    draws = jax.vmap(found.prior_kl)(jax.random.split(KEY, 4000))
    # Five standard errors: wrong once in two million.
    error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - exact) < 5 * error and error > 0
    np.testing.assert_allclose(found.prior_kl(), exact)  # without a key: all columns
    found, _ = pair(num_columns=5)
    np.testing.assert_allclose(found.prior_kl(KEY), exact, rtol=1e-9)


def test_function_samples_have_its_mean():
    found, _ = pair()
    functions = found.sample_functions(KEY, (4000,), num_features=16)(found.prior.X)
    error = functions.std(0) / len(functions) ** 0.5
    # Seven rows at five standard errors: wrong once in 250,000.
    assert jnp.all(jnp.abs(functions.mean(0) - found.mean) < 5 * error)


@pytest.mark.slow
def test_training_factorises_nothing_of_the_size_of_the_orthogonal_points():
    X, y = regression_data(40)
    option = sgp.ODVGP(5, orthogonal=X[:33], num_columns=8)
    guide = sgp.AutoSparseGP(gaussian_model, option)
    svi = SVI(gaussian_model, guide, optax.adam(0.05), sgp.TraceGP_ELBO(), batch_size=10)
    state = svi.init(KEY, X, y)
    program = jax.jit(svi.update).lower(state, X, y).as_text()
    sizes = [line for line in program.splitlines() if "potrf" in line]
    assert sizes and all("33x33" not in line and "38x38" not in line for line in sizes)
    result = svi.run(KEY, 300, X, y, init_state=state, progress_bar=False)
    start = svi.run(KEY, 1, X, y, progress_bar=False)
    loss = lambda params: sgp.TraceGP_ELBO().loss(KEY, params, gaussian_model, guide, X, y)  # noqa: E731
    assert loss(result.params) < loss(start.params) - 20


@pytest.mark.slow
def test_natural_gradients_and_tight_bounds_go_with_it():
    X, y = regression_data(20)
    option = sgp.ODVGP(4, orthogonal=X, num_columns=5, tight="diagonal", whiten=False)
    guide = sgp.AutoSparseGP(gaussian_model, option)
    optimiser = sgp.natural_gradients(guide, 0.5, optax.adam(0.01))
    svi = SVI(gaussian_model, guide, optimiser, sgp.TraceGP_ELBO())
    losses = svi.run(KEY, 30, X, y, progress_bar=False).losses
    assert losses[-1] < losses[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "option",
    [
        sgp.ODVGP(3, 12, num_columns=2),
        sgp.InverseFreeSVGP(4, bound="relaxed", kl="stochastic", num_probes=2),
    ],
    ids=["columns", "probes"],
)
def test_the_bound_that_is_told_has_the_exact_kl(option):
    X, y = regression_data(20)
    fitted = sgp.fit(gaussian_model, option, (X, y), steps=30, progress_bar=False)
    q, noise = fitted.posterior(X)["f"], 0.3
    density = jax.scipy.stats.norm.logpdf(y, q.mean, noise)
    expected = jnp.sum(density - 0.5 * q.variance / noise**2) - q.prior_kl()
    assert fitted.bound_se == 0.0
    np.testing.assert_allclose(fitted.bound, expected, rtol=1e-7)


@pytest.mark.slow
def test_check_knows_what_is_left_with_the_exact_kl():
    X, y = regression_data(20)
    option = sgp.ODVGP(3, 12, num_columns=2)
    fitted = sgp.fit(gaussian_model, option, (X, y), progress_bar=False)
    left = fitted.check().causes["other parameters"]
    assert 0.0 <= left.nats < 5.0 and "gained" in left.told


def test_bad_input_is_told():
    for columns in (0, 2.5, True):
        with pytest.raises(ValueError, match="positive whole number"):
            sgp.ODVGP(3, 5, num_columns=columns)
    with pytest.raises(ValueError, match="6 columns .* of 5 orthogonal points"):
        sgp.ODVGP(3, 5, num_columns=6)
    X, _ = regression_data(10)
    found, _ = pair()
    with pytest.raises(ValueError, match="the weights"):
        q = DecoupledGaussian(found.given_q.first, X, jnp.ones(3))
        sgp.SparsePosterior(found.prior, (X[:3],), q)
    with pytest.raises(ValueError, match="one orthogonal set"):
        sgp.ODVGP(3, (5, 5), num_columns=2)
