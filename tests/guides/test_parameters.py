"""Which parameters are q(u)'s, inducing points, the kernel's and the likelihood's."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal

import numpyro_sgp as sgp
from numpyro_sgp.guides.parameters import GROUPS, parameter_blocks
from tests import helpers

X, Y = helpers.regression_data(8)


def blocks_of(model, approximation=None, base_guide=AutoDelta, **options):
    """The groups at the start of SVI, as sets and without the empty ones."""
    approximation = approximation or sgp.SVGP(inducing=X[:3])
    guide = sgp.AutoSparseGP(model, approximation, base_guide, **options)
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(random.key(0), X, Y))
    blocks = parameter_blocks(guide, params)
    assert tuple(blocks) == GROUPS
    assert sorted(sum(blocks.values(), [])) == sorted(params)
    return {group: set(names) for group, names in blocks.items() if names}


def observe(f, noise, y):
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def both_latent(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    f = sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X)
    observe(numpyro.sample("f", f), noise, y)


SVGP = {"variational": {"f_auto_qu_mu", "f_auto_qu_sqrt"}, "inducing": {"f_auto_Z"}}


@pytest.mark.slow
def test_parameters_of_a_base_guide_go_with_their_latent():
    assert blocks_of(both_latent, base_guide=AutoNormal) == {
        **SVGP,
        "kernel": {"lengthscale_auto_loc", "lengthscale_auto_scale"},
        "likelihood": {"noise_auto_loc", "noise_auto_scale"},
    }


@pytest.mark.slow
def test_what_both_depend_on_is_the_kernels():
    blocks = blocks_of(both_latent, base_guide=AutoMultivariateNormal)
    assert blocks == {**SVGP, "kernel": {"auto_loc", "auto_scale_tril"}}


@pytest.mark.slow
def test_approximations_and_prefixes_of_several_sites():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), f[:, None]))
        observe(g, 0.1, y)

    fixed = sgp.SVGP(inducing=X[:3], train_inducing=False)
    both = {"f": sgp.SOLVEGP(None, (2, 2), X[:3], (X[3:5], X[5:7])), "g": fixed}
    blocks = blocks_of(model, both, prefix="q")
    f_names = {f"f_q_{q}_{part}" for q in ("qu", "qv", "qv2") for part in ("mu", "sqrt")}
    assert blocks == {
        "variational": f_names | {"g_q_qu_mu", "g_q_qu_sqrt"},
        "inducing": {"f_q_Z", "f_q_O", "f_q_O2"},
    }


@pytest.mark.slow
def test_every_way_into_a_prior_is_the_kernels():
    class OwnKernel:
        """JAX sees no leaves in it."""

        def __init__(self, scale):
            self.scale = scale

        def __call__(self, X1, X2):
            return self.scale * jnp.minimum(X1, jnp.swapaxes(X2, -1, -2))

        def diag(self, X):
            return self.scale * X[..., 0]

    def model(X, y=None):
        # Derivatives with respect to these are zero or do not exist at the start.
        scale = numpyro.param("scale", 1.0)
        slope = numpyro.param("slope", 0.0)
        net = numpyro.param("net", {"w": jnp.eye(1), "b": jnp.zeros(1)})
        centre = numpyro.param("centre", 0.0)
        noise = numpyro.param("noise", 0.5, constraint=constraints.positive)
        prior_scale = numpyro.param("prior_scale", 1.0, constraint=constraints.positive)
        numpyro.param("unused", 0.0)
        offset = numpyro.sample("offset", dist.Normal(0.0, prior_scale))
        kernel = sgp.kernels.as_kernel(OwnKernel(jnp.abs(scale))) + sgp.kernels.RBF()
        features = 5.0 + jnp.tanh((X - centre) @ net["w"] + net["b"])
        f = sgp.GaussianProcess(kernel, features, lambda x: slope**2 * x[..., 0])
        observe(numpyro.sample("f", f) + offset, noise, y)

    between = sgp.SVGP(inducing=jnp.array([[4.2], [5.0], [5.8]]))
    assert blocks_of(model, between) == {
        **SVGP,
        "kernel": {"scale", "slope", "net", "centre"},
        "likelihood": {"noise", "offset_auto_loc"},
        "other": {"prior_scale", "unused"},
    }


def test_more_than_ten_parameters_are_told_apart():
    def model(X, y=None):
        p = [numpyro.param(f"p{i}", 1.0) for i in range(12)]
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(p[2], p[3]), X))
        observe(f + p[10], p[11], y)

    found = blocks_of(model, sgp.SVGP(3))
    assert (found["kernel"], found["likelihood"]) == ({"p2", "p3"}, {"p10", "p11"})


def test_minibatches_need_the_models_arguments():
    guide = sgp.AutoSparseGP(helpers.gaussian_model, sgp.SVGP(3))
    with pytest.raises(ValueError, match="not been set up"):
        parameter_blocks(guide, {})
    guide.setup(X, Y, batch_size=4)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(ValueError, match="Say at which inputs"):
        parameter_blocks(guide, params)
    blocks = parameter_blocks(guide, params, X, Y, batch_size=4)
    assert set(blocks["variational"]) == SVGP["variational"]
    with pytest.raises(ValueError, match="of another guide"):
        parameter_blocks(guide, {"g_auto_Z": X[:3]}, X, Y)


SHAPES = {"f_auto_Z": (3, 1), "f_auto_qu_mu": (3,), "f_auto_qu_sqrt": (3, 3)}
