"""Kernels of other libraries, and kernels by protocol."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import SVI
from numpyro.infer.util import log_density

import numpyro_sgp as sgp
from numpyro_sgp.kernels import (
    RBF,
    Constant,
    GPJaxKernel,
    Kernel,
    Matern32,
    ObjectKernel,
    TinygpKernel,
    White,
    as_kernel,
)
from tests.helpers import slow

ELL = np.array([0.7, 1.3])


def points(N, D=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(N, D)))


class Brownian:
    """A kernel by protocol, with a hyperparameter, that JAX does not know."""

    def __init__(self, variance=1.0):
        self.variance = variance

    def __call__(self, X1, X2):
        return self.variance * jnp.minimum(X1[..., :1], X2[..., None, :, 0])

    def diag(self, X):
        return self.variance * X[..., 0]


class PlainKernel(Kernel):
    """Of the base class, and no pytree."""

    def __init__(self, lengthscale):
        self.lengthscale = lengthscale

    def __call__(self, X1, X2=None):
        return RBF(1.0, self.lengthscale)(X1, X2)

    def diag(self, X):
        return jnp.ones(X.shape[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("of", [slow(lambda k: k), lambda k: 2.0 * k + Constant(0.5)])
@pytest.mark.parametrize("sampled", [slow(False), True])
def test_a_subclass_of_kernel_that_is_no_pytree_is_one_by_protocol(of, sampled):
    """It trained, and ended in errors of JAX where it was to predict."""

    def model(X, y=None, kind=PlainKernel):
        ell = numpyro.sample("ell", dist.LogNormal(0.0, 1.0)) if sampled else 0.7
        f = numpyro.sample("f", sgp.GaussianProcess(of(kind(ell)), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    X = np.linspace(0.0, 5.0, 12)[:, None]
    data, options = (X, np.sin(2.0 * X[:, 0])), {"progress_bar": False}
    found = sgp.fit(model, sgp.SVGP(4), data, **options)
    known = sgp.fit(model, sgp.SVGP(4), (*data, lambda ell: RBF(1.0, ell)), **options)
    assert_allclose(found.bound, known.bound, atol=0.05)
    assert_allclose(found.predict(X)["y"].mean, known.predict(X)["y"].mean, atol=0.1)


class UnhashableBrownian(Brownian):
    def __eq__(self, other):
        return np.array([True, False])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeBrownian:
    """The same as a pytree."""

    variance: jax.Array

    __call__ = Brownian.__call__
    diag = Brownian.diag


def tinygp_matern(ell=ELL, variance=1.5):
    tinygp = pytest.importorskip("tinygp")
    kernel = tinygp.kernels.Matern32(distance=tinygp.kernels.distance.L2Distance())
    return variance * tinygp.transforms.Linear(1 / jnp.asarray(ell), kernel)


def gpjax_matern(ell=ELL, variance=1.5):
    gpjax = pytest.importorskip("gpjax")
    return gpjax.kernels.Matern32(
        lengthscale=jnp.asarray(ell), variance=jnp.asarray(variance)
    )


foreign = pytest.mark.parametrize(
    ("make", "wrapper"),
    [(tinygp_matern, TinygpKernel), (gpjax_matern, GPJaxKernel)],
    ids=["tinygp", "gpjax"],
)


@foreign
def test_foreign_kernel_is_the_same_kernel(make, wrapper):
    kernel = as_kernel(make())
    assert type(kernel) is wrapper
    assert isinstance(kernel, Kernel)
    assert kernel.batch_shape == ()
    ours, X1, X2 = Matern32(1.5, ELL), points(4), points(3, seed=1)
    assert_allclose(kernel(X1, X2), ours(X1, X2), rtol=1e-6)
    assert_allclose(kernel(X1), ours(X1), rtol=1e-6, atol=1e-9)
    assert_array_equal(kernel(X1, X1), kernel(X1))
    assert_allclose(kernel.diag(X1), np.full(4, 1.5), rtol=1e-9)


@pytest.mark.slow
def test_quasiseparable_kernels_of_tinygp_see_numbers():
    pytest.importorskip("tinygp")
    from tinygp.kernels import quasisep

    kernel = as_kernel(quasisep.Matern32(scale=0.7, sigma=1.2))
    X1, X2 = points(4)[:, :1], points(3, seed=1)[:, :1]
    ours = Matern32(1.44, 0.7)
    assert_allclose(kernel(X1, X2), ours(X1, X2), rtol=1e-6)
    assert_allclose(kernel(X1), ours(X1), rtol=1e-6, atol=1e-9)
    assert_allclose(kernel.diag(X1), np.full(4, 1.44), rtol=1e-6)
    with pytest.raises(ValueError, match="Matern32 of tinygp.* but these have 2"):
        kernel(points(4))


@pytest.mark.slow
@foreign
def test_foreign_kernel_takes_batches_of_inputs(make, wrapper):
    kernel = as_kernel(make())
    X1, X2 = points(8).reshape(2, 1, 4, 2), points(9, seed=1).reshape(3, 3, 2)
    K = kernel(X1, X2)
    assert K.shape == (2, 3, 4, 3)
    assert_allclose(K[1, 2], kernel(X1[1, 0], X2[2]), rtol=1e-12)
    assert kernel(X1).shape == (2, 1, 4, 4)
    assert kernel.diag(X1).shape == (2, 1, 4)


@foreign
def test_foreign_kernel_composes(make, wrapper):
    X = points(4)
    kernel = as_kernel(make()) + RBF() * as_kernel(make()) + 2.0 * as_kernel(make())
    theirs = Matern32(1.5, ELL)(X)
    expected = 3.0 * theirs + RBF()(X) * theirs
    assert_allclose(kernel(X), expected, rtol=1e-6, atol=1e-9)
    assert_allclose(kernel.diag(X), np.diag(expected), rtol=1e-6)
    assert_allclose((Constant(0.5) + make())(X), 0.5 + theirs, rtol=1e-6, atol=1e-9)


@foreign
def test_hyperparameters_of_a_foreign_kernel_are_leaves(make, wrapper):
    X = points(4)

    # Built inside from traced values, and passed in.
    def total(variance):
        return as_kernel(make(variance=variance)).diag(X).sum()

    assert_allclose(jax.grad(total)(1.5), 4.0, rtol=1e-9)
    grads = jax.jit(jax.grad(lambda k: k(X).sum()))(as_kernel(make()))
    leaves = jax.tree.leaves(grads)
    assert len(leaves) >= 2
    assert all(np.all(np.isfinite(g)) and np.any(g != 0.0) for g in leaves)


def test_own_kernel_is_returned_as_it_is():
    kernel = RBF() + White()
    assert as_kernel(kernel) is kernel


def test_pytree_with_the_protocol_is_returned_as_it_is():
    kernel = TreeBrownian(jnp.asarray(2.0))
    assert as_kernel(kernel) is kernel


@pytest.mark.parametrize("cls", [Brownian, UnhashableBrownian])
def test_object_with_the_protocol_is_wrapped_without_leaves(cls):
    theirs, X = cls(2.0), jnp.abs(points(4))
    kernel = as_kernel(theirs)
    assert type(kernel) is ObjectKernel
    assert jax.tree.leaves(kernel) == []
    assert_array_equal(kernel(X), theirs(X, X))
    assert_array_equal(kernel(X, X[:2]), theirs(X, X[:2]))
    assert_array_equal(kernel.diag(X), theirs.diag(X))


@pytest.mark.slow
@pytest.mark.parametrize("change", [sgp.whiten, lambda m: sgp.sparsify(m, sgp.SVGP(4))])
def test_sampled_hyperparameters_in_an_object_have_gradients(change):
    X = jnp.linspace(0.1, 2.0, 6)[:, None]

    def slope(cls):
        def model():
            variance = numpyro.sample("variance", dist.LogNormal())
            f = numpyro.sample("f", sgp.GaussianProcess(cls(variance), X))
            with numpyro.plate("data", 6):
                numpyro.sample("y", dist.Normal(f, 0.5), obs=jnp.sin(X[:, 0]))

        changed = change(model)
        values = {"f_white": jnp.arange(6.0), "f_u_white": jnp.arange(4.0)}

        def density(variance):
            return log_density(changed, (), {}, {**values, "variance": variance})[0]

        return jax.jit(jax.value_and_grad(density))(0.7)

    assert_allclose(slope(Brownian), slope(TreeBrownian), rtol=1e-6)


def test_wrapped_object_is_told_by_identity():
    theirs, traces = UnhashableBrownian(), []

    @jax.jit
    def diag(kernel, X):
        traces.append(kernel)
        return kernel.diag(X)

    X = points(4)
    for other in [theirs, theirs, UnhashableBrownian()]:
        assert_array_equal(diag(as_kernel(other), X), X[:, 0])
    assert len(traces) == 2


@pytest.mark.parametrize(
    "theirs", [Brownian(2.0), TreeBrownian(2.0)], ids=["object", "pytree"]
)
def test_kernels_by_protocol_compose(theirs):
    X = jnp.abs(points(4))
    for kernel in [as_kernel(theirs) + RBF(), RBF() + theirs]:
        assert_allclose(kernel(X), theirs(X, X) + RBF()(X), rtol=1e-12)
        assert_allclose(kernel.diag(X), theirs.diag(X) + 1.0, rtol=1e-12)
    for kernel in [theirs * RBF(np.ones(2)), RBF(np.ones(2)) * theirs]:
        assert kernel.batch_shape == (2,)
        expected = theirs(X, X) * RBF(np.ones(2))(X)
        assert_allclose(kernel(X), expected, rtol=1e-12)


def test_batch_shape_of_an_object_is_heard():
    theirs = Brownian()
    theirs.batch_shape = (3,)
    assert (as_kernel(theirs) + RBF()).batch_shape == (3,)
    with pytest.raises(ValueError, match="do not broadcast"):
        as_kernel(theirs) + RBF(np.ones(2))


class WithoutDiag:
    def __call__(self, X1, X2): ...


@pytest.mark.parametrize(
    ("stranger", "match"),
    [
        (lambda X1, X2: X1 @ X2.T, "Not a kernel: a function"),
        (WithoutDiag(), r"a WithoutDiag.*__call__\(X1, X2\).*diag\(X\)"),
        (np.eye(3), "Not a kernel: an array.*takes the kernel first"),
        (None, "a NoneType"),
        (RBF, "the class RBF.*Make an instance of it"),
        (Brownian, "the class Brownian"),
    ],
    ids=["function", "no diag", "array", "none", "class", "user class"],
)
def test_stranger_is_told_what_a_kernel_must_have(stranger, match):
    with pytest.raises(TypeError, match=match):
        as_kernel(stranger)


class Shaped:
    """A kernel by protocol that is right, but for what is changed."""

    def __init__(self, **changed):
        self.__dict__.update(changed)

    def __call__(self, X1, X2):
        return self.matrix(X1, X2)

    def matrix(self, X1, X2):
        return jnp.exp(-jnp.abs(X1[..., :1] - X2[..., None, :, 0]))

    def diag(self, X):
        return jnp.ones(X.shape[:-1])


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            {"diag": lambda X: jnp.full(X.shape[:-1], 0.1)},
            r"Shaped of GP site 'f': kernel.diag\(X\) is \[0.1.*diagonal .* is \[1.0",
        ),
        (
            {"matrix": lambda X1, X2: jnp.exp(X1[:, :1] - X2[None, :, 0])},
            "Shaped of GP site 'f' is not symmetric",
        ),
        (
            {"matrix": lambda X1, X2: jnp.exp(-jnp.abs(X1[:, 0] - X2[:1, 0]))},
            r"kernel\(X1, X2\) returned the shape \(4,\).*end in \(4, 3\)",
        ),
    ],
)
def test_a_kernel_that_does_not_agree_with_itself_is_refused_at_setup(changed, match):
    X = points(10)

    def model(kernel):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        numpyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=X[:, 0])

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    with pytest.raises(ValueError, match=match):
        svi.init(jax.random.key(0), RBF() + Shaped(**changed))
    with numpyro.handlers.seed(rng_seed=0), pytest.raises(ValueError, match=match):
        sgp.whiten(model)(Shaped(**changed))
    with numpyro.handlers.seed(rng_seed=0):
        sgp.whiten(model)(Shaped())


def test_a_diag_that_is_a_column_names_the_kernel():
    kernel = Shaped(diag=lambda X: jnp.ones((len(X), 1)))
    with pytest.raises(ValueError, match=r"kernel's diag .* shape \(10, 1\). Use \[:, 0\]"):
        sgp.GaussianProcess(kernel, points(10))
