"""Every product of the package is in full precision, whatever an accelerator's default."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from jax.extend.core import jaxprs_in_params
from numpyro.infer import SVI
from numpyro.infer.util import log_density

import numpyro_sgp as sgp
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.profile import Profile
from numpyro_sgp.linalg import factor_product, jittered_cholesky, whitened_solve
from tests import helpers
from tests.test_battery import CASES

ROOT = Path(sgp.__file__).parent
KEY = random.key(0)
X, Y = (array.astype(jnp.float32) for array in map(jnp.asarray, helpers.regression_data(8)))
Z, O = X[:3] + 0.1, X[3:5] - 0.2

#: What others nearly cover; run by `make slow`.
VARIANTS = (
    "SVGP coupled",
    "SVGP unwhitened",
    "SVGP tight block",
    "SVGP tight scalar",
    "VGP",
    "VGP pseudo-data",
    "SOLVE-GP unwhitened",
    "SOLVE-GP of three sets",
    "SOLVE-GP tight block",
    "ODVGP tight diagonal",
    "ODVGP by columns",
    "mixture of one",
    "inverse-free lc",
    "inverse-free fr",
)
#: Modules with ``@``, of arrays on the host alone: NumPy has no lower precision.
ON_THE_HOST = {
    "diagnostics/evidence.py",
    "diagnostics/optimality.py",
    "diagnostics/orthogonal_points.py",
    "distributions/kept_posterior.py",
    "inducing/exchange.py",
    "inducing/initialise.py",
    "inducing/verdict.py",
    "inverse_free/at_gaussian.py",
    "integrated/apart.py",
    "integrated/expectation.py",
    "integrated/nodes.py",
    "integrated/proposals.py",
    "integrated/search.py",
    "means.py",
    "training/descent.py",
}
PRODUCTS = {"dot", "einsum", "inner", "matmul", "matvec", "tensordot", "vdot", "vecdot"}
PRODUCTS |= {"convolve", "dot_general", "conv_general_dilated"}


def rounded(jaxpr):
    """Where a program has products of floats that an accelerator may round."""
    for eqn in jaxpr.eqns:
        floats = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars)
        if "precision" in eqn.params and floats and not is_full(eqn.params["precision"]):
            frames = eqn.source_info.traceback.frames
            own = [f for f in frames if Path(f.file_name).is_relative_to(ROOT)]
            where = [f"{f.file_name}:{f.line_num} {f.function_name}" for f in own[:2]]
            yield f"{eqn.primitive.name} {[v.aval.str_short() for v in eqn.invars]} {where}"
        for inner in jaxprs_in_params(eqn.params):
            yield from rounded(inner)


def is_full(precision):
    return precision in (lax.Precision.HIGHEST, (lax.Precision.HIGHEST,) * 2)


def products(jaxpr):
    """Number of products of a program."""
    inner = (j for eqn in jaxpr.eqns for j in jaxprs_in_params(eqn.params))
    return sum("precision" in eqn.params for eqn in jaxpr.eqns) + sum(map(products, inner))


def check(fn, *args, **kwargs):
    """Nothing is run: ``fn`` is traced alone."""
    jaxpr = jax.make_jaxpr(fn, **kwargs)(*args).jaxpr
    found = sorted(set(rounded(jaxpr)))
    assert not found, "\n".join(found)
    assert products(jaxpr)


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    kernel = sgp.kernels.RBF(1.3, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f + slope * X[:, 0], 0.4), obs=y)


# ---- what looks for them ----------------------------------------------------------------


def test_a_product_is_found_wherever_it_is():
    A = jnp.eye(3)

    def in_scan(a):
        return lax.scan(lambda c, _: (c @ a, None), A, None, length=2)[0]

    @jax.custom_jvp
    def own(a):
        return a

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0] @ A))
    for fn in (
        in_scan,
        jax.jit(in_scan),
        jax.vmap(lambda a: A @ a),
        jax.grad(lambda a: jnp.sum(own(a) ** 2)),
        lambda a: lax.cond(True, lambda: a @ a, lambda: a),
        lambda a: lax.fori_loop(0, 2, lambda _, c: c @ a, A),
        lambda a: jax.checkpoint(lambda b: jnp.vdot(b, b))(a),
    ):
        assert list(rounded(jax.make_jaxpr(fn)(A).jaxpr))


# ---- programs ---------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "case",
    [helpers.slow(c) if c in VARIANTS else c for c in CASES if c != "SVGP of one's own"],
)
def test_bounds_slopes_and_posteriors_are_in_full_precision(case):
    guide = sgp.AutoSparseGP(model, CASES[case](Z))
    guide.setup(X, Y)
    loss = sgp.TraceGP_ELBO()
    optimiser = optax.adam(0.01)
    if not any(word in case for word in ("pseudo", "mixture", "inverse")):
        optimiser = sgp.natural_gradients(guide, 0.5, optimiser)
    svi = SVI(model, guide, optimiser, loss)
    state = jax.eval_shape(svi.init, KEY, X, Y)
    check(svi.update, state, X, Y)

    params = jax.eval_shape(svi.get_params, state)
    check(jax.value_and_grad(lambda p: loss.loss(KEY, p, model, guide, X, Y)), params)

    def posterior(params):
        q = guide.posterior(params, X[:2])["f"]
        return q.mean, q.variance, q.covariance_matrix, q.prior_kl(KEY), q.sample(KEY, (2,))

    check(posterior, params)


@pytest.mark.parametrize(
    "make",
    [
        lambda kernel, noise: sgp.MarginalGP(kernel, X, noise),
        lambda kernel, noise: sgp.CollapsedSVGP(kernel, X, Z, noise),
        lambda kernel, noise: sgp.CollapsedSVGP(kernel, X, Z, noise, tight="diagonal"),
        lambda kernel, noise: sgp.CollapsedSOLVEGP(kernel, X, Z, O, noise),
        lambda kernel, noise: sgp.CollapsedODVGP(kernel, X, Z, O, noise),
        lambda kernel, noise: sgp.CollapsedCG(kernel, X, Z, noise),
    ],
    ids=["MarginalGP", "SVGP", "SVGP tight", "SOLVE-GP", "ODVGP", "CG"],
)
def test_collapsed_bounds_are_in_full_precision(make):
    def bound(noise, lengthscale):
        return make(sgp.kernels.Matern32(1.3, lengthscale), noise).log_prob(Y)

    check(jax.value_and_grad(bound, argnums=(0, 1)), jnp.float32(0.4), jnp.float32(0.8))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "of", [sgp.whiten, lambda model: sgp.sparsify(model, sgp.SVGP(inducing=Z))]
)
def test_densities_for_MCMC_are_in_full_precision(of):
    changed = of(model)
    with numpyro.handlers.seed(rng_seed=0):
        trace = numpyro.handlers.trace(changed).get_trace(X, Y)
    values = {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    check(jax.value_and_grad(lambda v: log_density(changed, (X, Y), {}, v)[0]), values)


def test_profiles_over_hyperparameters_are_in_full_precision():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    guide.setup(X, Y)
    profile = Profile(Field(guide, (X, Y), {}), (X, Y), {})
    free = jnp.zeros(profile.field.num_hyperparameters, profile.field.dtype)
    options = jnp.asarray(True), jnp.asarray(1e-3, free.dtype), jnp.asarray(True)
    given = KEY, profile.points, profile.rows.arrays
    check(profile._node, free, profile.start(), *options, *given)


def test_factors_of_large_matrices_are_in_full_precision():
    large = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    vector = jax.ShapeDtypeStruct((1024,), jnp.float32)

    def whitened(K, B):
        return jnp.sum(whitened_solve(K, B, 1e-5)[-1])

    check(jax.value_and_grad(whitened), large, large)
    check(jax.value_and_grad(lambda K: jnp.sum(jittered_cholesky(K)[0])), large)
    check(jax.value_and_grad(lambda K, v: jnp.sum(factor_product(K, v)[0])), large, vector)


@pytest.mark.parametrize("dim", [1, 20])
@pytest.mark.parametrize("kernel", ["RBF", "Matern32", "Linear", "Polynomial"])
def test_kernels_are_in_full_precision(kernel, dim):
    points = jax.ShapeDtypeStruct((5, dim), jnp.float32)
    kernel = getattr(sgp.kernels, kernel)()
    jaxpr = jax.make_jaxpr(jax.grad(lambda X: jnp.sum(kernel(X, X[:3]))))(points).jaxpr
    assert not list(rounded(jaxpr))
    check(lambda X: sgp.GaussianProcess(kernel, X).sample(KEY), points)


# ---- source -----------------------------------------------------------------------------


def sources():
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def test_no_product_of_JAX_is_called_but_in_linalg():
    found = [
        f"{name}:{node.lineno}"
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in PRODUCTS
        and ast.unparse(node.value) in ("jnp", "lax", "jax.lax", "jax.numpy")
    ]
    assert all(place.startswith("linalg/products.py") for place in found), found
    assert len(found) == 2


def test_the_operator_is_left_to_NumPy():
    found = {
        name
        for name, tree in sources()
        if any(isinstance(node, ast.MatMult) for node in ast.walk(tree))
    }
    assert found == ON_THE_HOST, (
        "`@` of JAX arrays is rounded on accelerators: use numpyro_sgp.linalg.matmul. Of "
        "NumPy arrays, add the module to ON_THE_HOST."
    )
