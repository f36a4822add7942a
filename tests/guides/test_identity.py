"""Parameters are taken by the guide that they belong to, and by no other."""

import pickle

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_sgp as sgp

X = jnp.linspace(-1.0, 1.0, 6)[:, None]
Y = jnp.sin(X[:, 0])


def model(X, y=None, kernel=sgp.kernels.RBF, name="f"):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([1]))
    noise = numpyro.param("noise", 0.3, constraint=constraints.positive)
    kernel = 2.0 * kernel(1.0, lengthscale[0]) + sgp.kernels.Constant()
    f = numpyro.sample(name, sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def made(approximation=None, *, rows=slice(None), base=AutoNormal, **options):
    """A guide that is set up, and starting parameters."""
    guide = sgp.AutoSparseGP(model, approximation or sgp.SVGP(3), base)
    svi = SVI(model, guide, optax.sgd(0.1), sgp.TraceGP_ELBO(), **options)
    state = svi.init(random.key(0), X[rows], Y[rows])
    return guide, svi.get_params(state)


@pytest.fixture(scope="module")
def fitted():
    return made()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"f_auto_Z": None}, r"\['f_auto_Z'\] are missing.*another guide"),
        ({"lengthscale_auto_scale": None}, r"\['lengthscale_auto_scale'\] are missing"),
        ({"noise": None}, r"\['noise'\] are missing"),
        ({"g_auto_Z": jnp.ones(2)}, r"\['g_auto_Z'\] are unknown.*another guide"),
        ({"nugget": 0.1}, r"\['nugget'\] are unknown"),
        ({"f_auto_qu_mu": jnp.zeros(4)}, r"'f_auto_qu_mu' has shape \(4,\).* has \(3,\)"),
        ({"lengthscale_auto_loc": 0.0}, r"'lengthscale_auto_loc' has shape \(\).* \(1,\)"),
        ({"noise": jnp.ones(6)}, r"'noise' has shape \(6,\)"),
        ({"noise": 0.3j}, "'noise' has the dtype complex128"),
        ({"noise": "0.3"}, "'noise' is no array of numbers: '0.3'"),
        ({"noise": {"a": 0.3}}, "'noise' is another tree"),
        ({"lengthscale_auto_loc": jnp.array([jnp.nan])}, "'lengthscale_auto_loc' is not"),
        ({"noise": jnp.inf}, "'noise' is not finite"),
    ],
)
def test_params_that_are_not_the_guides_are_refused(fitted, change, message):
    guide, params = fitted
    bad = {name: v for name, v in {**params, **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        guide.posterior(bad, X)
    with pytest.raises(ValueError, match=message):
        guide.others_at(bad, (X,), {})
    with pytest.raises(ValueError, match=message):
        guide.sample_posterior(random.key(0), bad, X)


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", ["median", "quantiles", "assess", "log density"])
def test_every_result_checks_its_params(fitted, method):
    guide, params = fitted
    bad = {**params, "nugget": 0.1}
    with pytest.raises(ValueError, match=r"\['nugget'\] are unknown"):
        if method == "quantiles":
            guide.quantiles(bad, [0.5], X)
        elif method == "log density":
            sgp.log_predictive_density(guide, bad, X, Y)
        else:
            getattr(guide, method)(bad, X)


@pytest.mark.parametrize("name", ["f_auto_qu_mu", "lengthscale_auto_loc", "noise"])
def test_a_shape_of_another_guide_is_named_in_predictive(fitted, name):
    guide, params = fitted
    bad = {**params, name: jnp.ones(5)}
    predictive = Predictive(model, guide=guide, params=bad, num_samples=2)
    with pytest.raises(ValueError, match=f"'{name}' has shape .*5.*another guide"):
        predictive(random.key(0), X)


def test_params_of_another_precision_or_as_numbers_are_taken(fitted):
    guide, params = fitted
    given = {name: np.asarray(v, np.float32) for name, v in params.items()}
    given["noise"] = 1
    expected = guide.posterior({**params, "noise": 1.0}, X)["f"].mean
    assert_allclose(guide.posterior(given, X)["f"].mean, expected, atol=1e-6)


def test_points_that_are_not_trained_must_be_those_of_the_set_up():
    guide, params = made(sgp.SVGP(3, train_inducing=False))
    Z = guide.setup_state()["initial"]["f"]["Z"]
    assert_allclose(
        guide.posterior({**params, "f_auto_Z": Z}, X)["f"].mean,
        guide.posterior(params, X)["f"].mean,
    )
    with pytest.raises(ValueError, match="'f_auto_Z' is not trained.*inducing="):
        guide.posterior({**params, "f_auto_Z": Z + 0.1}, X)


@pytest.mark.slow
def test_a_fingerprint_keeps_at_other_rows_starts_and_values(fitted):
    guide, _ = fitted
    expected = guide.fingerprint()
    assert len(expected) == 16 and int(expected, 16) >= 0
    assert pickle.loads(pickle.dumps(guide)).fingerprint() == expected
    assert made(rows=slice(4))[0].fingerprint() == expected
    starts = sgp.SVGP(inducing=jnp.ones((3, 1)) * X[:3] + 0.2, initial_scale=0.1, seed=3)
    assert made(starts)[0].fingerprint() == expected


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "change",
    [
        {"approximation": sgp.SVGP(4)},
        {"approximation": sgp.SVGP(3, whiten=False)},
        {"approximation": sgp.SVGP(3, jitter=1e-3)},
        {"approximation": sgp.SVGP(3, train_inducing=False)},
        {"approximation": sgp.SVGP(3, covariance="diagonal")},
        {"approximation": sgp.MixtureSVGP(3, 1)},
        {"base": AutoDelta},
        {"kernel": sgp.kernels.Matern52},
        {"name": "g"},
    ],
)
def test_a_fingerprint_tells_another_structure(fitted, change):
    assert made(**change)[0].fingerprint() != fitted[0].fingerprint()


@pytest.mark.slow
def test_a_fingerprint_looks_into_kernels_of_other_classes():
    class Mine:
        def __call__(self, X1, X2):
            return sgp.kernels.RBF()(X1, X2)

        def diag(self, X):
            return jnp.ones(X.shape[0])

    class Theirs(Mine):
        pass

    def fingerprint(kernel, mean=None):
        def of_kernel(X, y):
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, mean))
            numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

        guide = sgp.AutoSparseGP(of_kernel, sgp.SVGP(3))
        guide.setup(X, Y)
        return guide.fingerprint()

    assert fingerprint(Mine()) == fingerprint(Mine())
    rbf, constant = sgp.kernels.RBF, sgp.kernels.Constant
    linear = sgp.means.Linear(jnp.ones(1))
    others = [
        fingerprint(Mine()),
        fingerprint(Theirs()),
        fingerprint(rbf()),
        fingerprint(rbf(active_dims=[0])),
        fingerprint(rbf() + constant()),
        fingerprint(constant() + rbf()),
        fingerprint(rbf() * constant()),
        fingerprint(rbf(), linear),
    ]
    assert len(set(others)) == len(others)
    assert fingerprint(rbf(2.0, 0.1)) == fingerprint(rbf())


def test_no_fingerprint_before_the_set_up():
    with pytest.raises(ValueError, match="not been set up"):
        sgp.AutoSparseGP(model, sgp.SVGP(3)).fingerprint()
