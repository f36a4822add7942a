"""Random features: their second moments are the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_sgp.kernels import (
    RBF,
    Constant,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    RationalQuadratic,
    White,
    as_kernel,
)

N, D, S = 4, 2, 20_000
ELL = np.array([0.7, 1.3])
# Two kernels, one lengthscale for each column of each.
VARIANCES, ELLS = np.array([1.5, 0.6]), np.array([[0.7, 1.3], [1.1, 0.5]])
X = np.random.default_rng(0).normal(size=(N, D))

KERNELS = {
    "RBF": RBF(1.5, ELL),
    "RBF isotropic": RBF(1.5, 0.7),
    "RBF batch": RBF(VARIANCES, ELLS),
    "Matern12": Matern12(1.5, ELL),
    "Matern32": Matern32(1.5, ELL),
    "Matern52": Matern52(1.5, ELL),
    "Matern52 batch of isotropic": Matern52(VARIANCES, np.array([0.7, 1.3])),
    "RationalQuadratic": RationalQuadratic(1.5, ELL, alpha=0.6),
    "RationalQuadratic batch": RationalQuadratic(VARIANCES, ELLS, np.array([0.6, 2.0])),
    "Periodic": Periodic(1.5, ELL, np.array([1.7, 2.3])),
    "Periodic batch": Periodic(VARIANCES, 0.8, np.array([1.7, 2.3])),
    "Linear": Linear(1.5, ELL),
    "Linear batch": Linear(VARIANCES, ELLS),
    "Polynomial": Polynomial(1.5, ELL, offset=0.4, degree=3),
    "Polynomial batch": Polynomial(VARIANCES, ELLS, offset=np.array([0.4, 1.0])),
    "Constant": Constant(1.5),
    "Constant batch": Constant(VARIANCES),
    "columns": Matern32(1.5, 0.7, active_dims=(1,)),
    "sum": RBF(1.5, ELL) + Linear(0.5) + Constant(0.7),
    "sum of the same": Linear(0.5) + Linear(0.7),
    "product": Matern32(1.5, ELL[:1], active_dims=(0,)) * RBF(VARIANCES, active_dims=(1,)),
    "product of the same": RBF(1.5) * RBF(0.5),
    "scaled": 2.5 * Matern12(1.5, ELL),
    "scaled for each": VARIANCES * (RBF(1.5, ELL) + Linear(0.5) * Periodic()),
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_second_moments_are_the_kernel(kernel):
    # 310 numbers in all within five standard errors: one key in 5e3 fails.
    @jax.jit
    def moments(kernel, X):
        shape = (*kernel.batch_shape, S)
        phi = kernel.features(jax.random.key(0), shape, D, X.dtype)(X)
        products = phi[..., :, None] * phi[..., None, :]
        error = jnp.std(products, axis=-3) / np.sqrt(S)
        return phi, jnp.mean(products, axis=-3), error, kernel(X)

    phi, moment, error, K = moments(kernel, X)
    assert phi.shape == (*kernel.batch_shape, S, N)
    assert (np.abs(moment - K) < 5 * error + 1e-9).all()
    assert (error < 0.05 * np.abs(K).max()).all()  # a test that can fail


def test_batches_of_one_kernel_are_independent():
    phi = RBF().features(jax.random.key(0), (3, 2, 5), D, X.dtype)(X)
    assert phi.shape == (3, 2, 5, N)
    assert len(np.unique(np.asarray(phi).round(9))) == 30 * N


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_float32_stays_float32(kernel):
    def narrow(x):
        return x if isinstance(x, float) else np.asarray(x, np.float32)

    kernel = jax.tree.map(narrow, kernel)

    def values(X):
        shape = (*kernel.batch_shape, 3)
        return kernel.features(jax.random.key(0), shape, D, X.dtype)(X)

    assert jax.eval_shape(values, narrow(X)).dtype == jnp.float32


class Brownian:
    def __call__(self, X1, X2):
        return jnp.minimum(X1, jnp.swapaxes(X2, -1, -2))

    def diag(self, X):
        return X[..., 0]


@jax.tree_util.register_static
class BrownianTree(Brownian):
    pass


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (White(), "White has no random features: its"),
        (RBF() + White(0.1), "White"),
        (as_kernel(Brownian()) * RBF(), "^Brownian"),
        (2.0 * (RBF() + BrownianTree()), "BrownianTree"),
    ],
)
def test_kernels_without_features_are_refused(kernel, name):
    with pytest.raises(NotImplementedError, match=f"{name}.*RBF, Matern12"):
        kernel.features(jax.random.key(0), (3,), D, X.dtype)


def test_hyperparameters_and_columns_that_do_not_fit_are_refused():
    for kernel, match in [
        (RBF(1.0, np.ones(3)), "lengthscale has shape"),
        (Linear(active_dims=(2,)), "out of range"),
    ]:
        with pytest.raises(ValueError, match=match):
            kernel.features(jax.random.key(0), (3,), D, X.dtype)


def test_a_kernel_of_ones_own_may_have_features():
    class Own:
        """Not of the package, and not a pytree."""

        def __call__(self, X1, X2):
            return Linear()(X1, X2)

        def diag(self, X):
            return Linear().diag(X)

        def features(self, rng_key, shape, dim, dtype):
            return Linear().features(rng_key, shape, dim, dtype)

    args = jax.random.key(0), (3, 4), D, X.dtype
    got = as_kernel(Own()).features(*args)(X)
    assert_allclose(got, Linear().features(*args)(X))
    assert (RBF() + as_kernel(Own())).features(*args)(X).shape == got.shape
    with pytest.raises(NotImplementedError, match=r"posterior\(params, X\)\[site\].sample"):
        as_kernel(Brownian()).features(*args)
