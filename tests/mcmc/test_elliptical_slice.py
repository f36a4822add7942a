"""Elliptical slice sampling against posteriors that are known exactly."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, Gibbs, init_to_feasible
from scipy.stats import multivariate_normal

from numpyro_sgp import EllipticalSlice, GaussianProcess, whiten
from numpyro_sgp.kernels import RBF

pytest.importorskip("blackjax")

N = 5
X = np.linspace(0.0, 3.0, N)[:, None]
Y = np.sin(2 * X[:, 0]) + 0.5
NOISE = 0.5
JITTER = 1e-4  # in every reference


def gp(variance=1.2, lengthscale=0.6, mean=0.5, inputs=X):
    return GaussianProcess(RBF(variance, lengthscale), inputs, mean, JITTER)


def dense(variance=1.2, lengthscale=0.6):
    K = np.exp(-0.5 * (X - X.T) ** 2 / lengthscale**2)
    return variance * (K + JITTER * np.eye(N))


def observe(f, y=Y, noise=NOISE):
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def known():
    observe(numpyro.sample("f", gp()))


def sampled():
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    numpyro.deterministic("level", 2.0 * lengthscale)
    observe(numpyro.sample("f", gp(lengthscale=lengthscale)))


def several():
    with numpyro.plate("latent", 2):
        f = numpyro.sample("f", gp(mean=0.0))
    g = numpyro.sample("g", gp(0.5, 1.0))
    observe(f[0] - 2.0 * f[1] + g, noise=2.0)


def run(
    kernel, num_samples, key=0, num_warmup=100, num_chains=2, method="vectorized", **kw
):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(key), **kw)
    return mcmc


def steps(kernel, num_steps, **kwargs):
    """States of a chain."""
    state = kernel.init(jax.random.key(0), 0, None, (), kwargs)
    states = jax.lax.scan(
        lambda state, _: (kernel.sample(state, (), kwargs),) * 2, state, length=num_steps
    )
    return states[1]


def assert_moments(draws, mean, variance):
    """
    Means and second moments of each coordinate of draws of shape (chains, samples, ...)
    are within five standard errors: were they normal, one key in 1e5 would fail.
    """
    centred = np.asarray(draws) - mean
    for got, sd in [
        (centred, np.sqrt(variance)),
        (centred**2 - variance, np.sqrt(2) * variance),
    ]:
        ess = effective_sample_size(got)
        assert (ess > 100).all()
        assert (np.abs(got.mean((0, 1))) < 5 * sd / np.sqrt(ess)).all()


# ---- exact posteriors -----------------------------------------------------------------


def test_known_hyperparameters():
    mcmc = run(EllipticalSlice(known), 1500, extra_fields=("num_evaluations",))
    draws = mcmc.get_samples(group_by_chain=True)
    assert set(draws) == {"f", "f_white"}
    inverse = np.linalg.inv(dense() + NOISE**2 * np.eye(N))
    mean = 0.5 + dense() @ inverse @ (Y - 0.5)
    variance = np.diag(dense() - dense() @ inverse @ dense())
    assert_moments(draws["f"], mean, variance)
    assert (np.abs(mean - 0.5) / np.sqrt(variance / 100)).max() > 5  # data were used
    white = np.linalg.solve(np.linalg.cholesky(dense()), (draws["f"] - 0.5)[..., None])
    assert_allclose(draws["f_white"], white[..., 0], rtol=1e-6, atol=1e-9)
    assert mcmc.get_extra_fields()["num_evaluations"].min() >= 1


def test_several_sites_and_latent_functions():
    mcmc = run(EllipticalSlice(whiten(several)), 3000, num_chains=1)
    draws = mcmc.get_samples(group_by_chain=True)
    # y is linear in the three functions a, b and c.
    prior = np.kron(np.diag([1.0, 1.0, 0.0]), dense())
    prior = prior + np.kron(np.diag([0.0, 0.0, 1.0]), dense(0.5, 1.0))
    H = np.kron([[1.0, -2.0, 1.0]], np.eye(N))
    gain = prior @ H.T @ np.linalg.inv(H @ prior @ H.T + 2.0**2 * np.eye(N))
    offset = np.repeat([0.0, 0.0, 0.5], N)
    mean = offset + gain @ (Y - H @ offset)
    variance = np.diag(prior - gain @ H @ prior)
    f = np.asarray(draws["f"]).reshape(1, -1, 2 * N)
    assert_moments(np.concatenate([f, draws["g"]], axis=-1), mean, variance)


@pytest.mark.slow
def test_gibbs_with_nuts_on_hyperparameters():
    white = whiten(sampled)
    kernel = Gibbs([(EllipticalSlice(white), ["f_white"]), (NUTS(white), None)])
    mcmc = run(kernel, 1500, num_warmup=200, method="sequential")
    draws = mcmc.get_samples(group_by_chain=True)
    assert set(draws) == {"f", "f_white", "lengthscale", "level"}
    grid = np.linspace(-3.0, 3.0, 121)  # of the log lengthscale, prior N(0, 0.5)
    evidence = [
        multivariate_normal(
            np.full(N, 0.5), dense(1.2, np.exp(t)) + NOISE**2 * np.eye(N)
        ).logpdf(Y)
        for t in grid
    ]
    weights = np.exp(np.asarray(evidence) - 0.5 * (grid / 0.5) ** 2)
    weights = weights / weights.sum()
    mean = weights @ grid
    moments = [weights @ (grid - mean) ** p for p in (2, 4)]
    log_l = np.log(np.asarray(draws["lengthscale"]))
    # As in assert_moments, with the kurtosis of the grid.
    for got, variance in [
        (log_l - mean, moments[0]),
        ((log_l - mean) ** 2 - moments[0], moments[1] - moments[0] ** 2),
    ]:
        ess = effective_sample_size(got)
        assert ess > 100
        assert abs(got.mean()) < 5 * np.sqrt(variance / ess)
    # f of each draw has its lengthscale: the two blocks saw each other's values.
    for i in (0, -1):
        L = np.linalg.cholesky(dense(1.2, np.exp(log_l[0, i])))
        assert_allclose(draws["f"][0, i], 0.5 + L @ draws["f_white"][0, i], rtol=1e-8)


# ---- likelihoods without a gradient, and worse -------------------------------------------


def callback(f):
    def on_host(f):
        return np.asarray(-0.5 * np.sum((Y - f) ** 2) / NOISE**2)

    shape = jax.ShapeDtypeStruct((), jnp.result_type(float))
    return jax.pure_callback(on_host, shape, f, vmap_method="sequential")


@pytest.mark.slow
def test_a_likelihood_without_a_derivative():
    def model(log_likelihood):
        numpyro.factor("y", log_likelihood(numpyro.sample("f", gp())))

    def plain(f):
        return -0.5 * jnp.sum((Y - f) ** 2) / NOISE**2

    with pytest.raises(ValueError, match="callbacks do not support JVP"):
        jax.grad(callback)(jnp.zeros(N))
    expected, got = (
        steps(EllipticalSlice(model), 20, log_likelihood=f).z["f_white"]
        for f in (plain, callback)
    )
    assert_allclose(got, expected, rtol=1e-8)
    assert len(np.unique(got[:, 0])) == 20


@pytest.mark.slow
def test_values_without_a_finite_likelihood_have_no_probability():
    def model():
        f = numpyro.sample("f", gp(1.0, mean=None, inputs=X[:1]))
        outside = jnp.where(f[0] > 1, jnp.inf, jnp.where(f[0] > 0.5, -jnp.inf, jnp.nan))
        numpyro.factor("negative", jnp.where(f[0] > 0, outside, 0.0))

    f = np.asarray(steps(EllipticalSlice(model), 2000).z["f_white"])[None]
    assert (f <= 0).all()
    half_normal = -np.sqrt(2 / np.pi)
    variance = 1 - half_normal**2
    ess = effective_sample_size(f)
    assert ess > 100
    assert abs(f.mean() - half_normal) < 5 * np.sqrt(variance / ess)


@pytest.mark.slow
def test_a_likelihood_lost_in_rounding_errors_ends():
    def model():
        f = numpyro.sample("f", gp(inputs=X.astype(np.float32)))
        numpyro.factor("flat", 1e18 + 0.0 * f[0])

    states = steps(EllipticalSlice(model), 3)
    assert np.isfinite(states.z["f_white"]).all()
    assert (states.log_likelihood == 1e18).all()


# ---- inside of MCMC -------------------------------------------------------------------


@pytest.mark.slow
def test_chain_methods_agree():
    draws = [
        run(EllipticalSlice(known), 5, num_warmup=3, method=method).get_samples()["f"]
        for method in ("sequential", "vectorized")
    ]
    assert_allclose(draws[0], draws[1], rtol=1e-8)


@pytest.mark.slow
def test_progress_bar_fields_and_going_on(capfd):
    kernel = EllipticalSlice(known, init_strategy=init_to_feasible)
    mcmc = MCMC(kernel, num_warmup=4, num_samples=6)
    mcmc.progress_bar = True  # pytest-xdist turns it off
    fields = ("log_likelihood", "num_evaluations", "mean_num_evaluations")
    mcmc.run(jax.random.key(0), extra_fields=fields)
    assert "likelihood evaluations a step" in capfd.readouterr().err
    f, extra = mcmc.get_samples()["f"], mcmc.get_extra_fields()
    expected = dist.Normal(f, NOISE).log_prob(Y).sum(-1)
    assert_allclose(extra["log_likelihood"], expected, rtol=1e-8)
    means = np.cumsum(extra["num_evaluations"]) / np.arange(1, 7)
    assert_allclose(extra["mean_num_evaluations"], means)
    mcmc.progress_bar = False
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key)
    assert mcmc.get_samples()["f"].shape == (6, N)
    assert mcmc.last_state.i == 16


def test_it_starts_where_it_is_told():
    start = {"f_white": jnp.arange(N, dtype=float)}
    state = EllipticalSlice(known).init(jax.random.key(0), 0, start)
    assert_array_equal(state.z["f_white"], start["f_white"])
    f = 0.5 + np.linalg.cholesky(dense()) @ np.arange(N)
    assert_allclose(state.log_likelihood, dist.Normal(f, NOISE).log_prob(Y).sum())
    feasible = EllipticalSlice(known, init_strategy=init_to_feasible)
    assert not feasible.init(jax.random.key(0), 0).z["f_white"].any()


@pytest.mark.slow
@pytest.mark.parametrize("x64", [True, False])
def test_float32_stays_float32(x64):
    def model():
        f = numpyro.sample("f", gp(inputs=X.astype(np.float32)))
        observe(f, Y.astype(np.float32))

    kernel = EllipticalSlice(model)
    with jax.enable_x64(x64):
        state = kernel.init(jax.random.key(0), 0)
        state = state._replace(z={"f_white": jnp.zeros(N, jnp.float32)})
        new = jax.jit(lambda state: kernel.sample(state, (), {}))(state)
        for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
            assert before.dtype == after.dtype
        white = new.z["f_white"]
        assert white.dtype == jnp.float32 and (np.abs(white) > 0).all()


def loops(jaxpr, in_loop=False):
    """Names of primitives inside of loops."""
    for eqn in jaxpr.eqns:
        if in_loop:
            yield eqn.primitive.name
        # The search for a jitter is a loop too, and not one over slices.
        inside = in_loop or (
            eqn.primitive.name == "while" and not str(eqn.params).count("cholesky")
        )
        leaves = jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        for x in leaves:
            if hasattr(x, "eqns"):
                yield from loops(getattr(x, "jaxpr", x), inside)


def test_the_covariance_is_factorised_once_a_step():
    white = whiten(sampled)
    kernel = Gibbs([(EllipticalSlice(white), ["f_white"]), (NUTS(white), None)])
    ess, _ = kernel.blocks[0]

    def step(state, lengthscale):
        kwargs = {"_gibbs_sites": {"lengthscale": lengthscale}}
        return ess.sample(state, (), kwargs)

    kwargs = {"_gibbs_sites": {"lengthscale": jnp.asarray(0.7)}}
    state = ess.init(jax.random.key(0), 0, None, (), kwargs)
    jaxpr = jax.make_jaxpr(step)(state, 0.7).jaxpr
    assert "cholesky" in str(jaxpr)
    (while_loop,) = [e for e in jaxpr.eqns if e.primitive.name == "while"]
    assert "cholesky" not in str(while_loop) and "exp" not in loops(jaxpr)


# ---- errors ---------------------------------------------------------------------------


def test_other_latents_are_left_to_another_kernel():
    message = (
        r"\['lengthscale'\] is latent too.*response: pass its data.*"
        r"handlers.condition\(model, data=\{'lengthscale': ...\}\).*\n.*\n"
        r".*\(EllipticalSlice\(white\), \['f_white'\]\), \(NUTS\(white\), None\)"
    )
    with pytest.raises(ValueError, match=message):
        EllipticalSlice(sampled).init(jax.random.key(0), 0)
    fixed = handlers.condition(sampled, data={"lengthscale": 0.7})
    state = EllipticalSlice(fixed).init(jax.random.key(0), 0)
    assert set(state.z) == {"f_white"}


def test_a_model_without_its_data():
    def unobserved(y=None):
        numpyro.sample("y", dist.Normal(numpyro.sample("f", gp()), 1.0), obs=y)

    with pytest.raises(ValueError, match=r"no data were given, and \['y'\] is latent"):
        EllipticalSlice(unobserved).init(jax.random.key(0), 0)


def shifted():
    observe(numpyro.sample("f", gp()) + numpyro.sample("b_white", dist.Normal(1.0, 1.0)))


def masked():
    with handlers.mask(mask=False):
        b = numpyro.sample("b", dist.Normal().expand([N]).to_event(1))
    observe(b)


def scaled():
    with handlers.scale(scale=0.1):
        known()


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (shifted, "is latent too"),
        (masked, "is latent too"),
        (scaled, r"The prior of \['f_white'\] is scaled"),
    ],
)
def test_priors_other_than_standard_normal_are_refused(model, told):
    with pytest.raises(ValueError, match=told):
        EllipticalSlice(model).init(jax.random.key(0), 0)


def test_priors_that_jit_hides_are_told_by_a_mark():
    """As in parallel chains, where a name says nothing of the prior."""

    def model(scale, infer):
        observe(numpyro.sample("f", gp()))
        wide = dist.Normal(jnp.zeros(2), scale * jnp.ones(2)).to_event(1)
        numpyro.sample("level_white", wide, infer=infer)

    def start(key, model=model, scale=1.0, infer=None):
        kernel = EllipticalSlice(lambda: model(scale, infer))
        return jax.jit(lambda key: kernel.init(key, 0).z)(key)

    key = jax.random.key(0)
    with pytest.raises(ValueError, match="'level_white'.*infer={'whitened': True}"):
        start(key, scale=3.0)
    z = start(key, infer={"whitened": True})
    assert set(z) == {"f_white", "level_white"}


def test_a_model_that_is_not_whitened_in_gibbs():
    kernel = Gibbs([(EllipticalSlice(sampled), ["f"]), (NUTS(sampled), None)])
    with pytest.raises(ValueError, match=r"Build all .* on white = numpyro_sgp.whiten\("):
        kernel.init(jax.random.key(0), 0, None, (), {})


def test_bad_starts():
    kernel = EllipticalSlice(known)
    with pytest.raises(ValueError, match=r"samples the sites \['f_white'\], but .*\['f'\]"):
        kernel.init(jax.random.key(0), 0, {"f": jnp.zeros(N)})
    with pytest.raises(ValueError, match="at init_params, the last of which .*'y'"):
        kernel.init(jax.random.key(0), 0, {"f_white": jnp.full(N, 1e200)})


@pytest.mark.slow
def test_starts_are_draws_of_their_own():
    """By half of the draws; all began at one and the same, which the other half refuses."""

    def half(sign):
        def model():
            f = numpyro.sample("f", gp())
            numpyro.factor("half", jnp.where(sign * f[0] > 0.0, 0.0, -jnp.inf))

        return EllipticalSlice(model)

    keys = jax.random.split(jax.random.key(0), 8)
    for sign in (-1.0, 1.0):
        state = half(sign).init(keys, 0)
        assert len(np.unique(state.z["f_white"][:, 0])) == 8
        assert_array_equal(state.log_likelihood, 0.0)
        alone = half(sign).init(keys[0], 0).z["f_white"][0]
        assert alone != half(sign).init(keys[1], 0).z["f_white"][0]


@pytest.mark.parametrize("num_chains", [1, 2])
def test_a_likelihood_that_is_never_finite(num_chains):
    def model():
        f = numpyro.sample("f", gp())
        observe(f)
        numpyro.factor("penalty", jnp.log(-1.0 - f[0] ** 2))

    with pytest.raises(ValueError, match="100 draws from init_strategy.*'penalty'.*nan"):
        run(EllipticalSlice(model), 5, num_chains=num_chains)


def test_subsampled_data_are_refused():
    def model():
        f = numpyro.sample("f", gp())
        with numpyro.plate("data", N, subsample_size=2) as idx:
            numpyro.sample("y", dist.Normal(f[idx], NOISE), obs=Y[idx])

    with pytest.raises(ValueError, match="minibatch of plate 'data'"):
        EllipticalSlice(model).init(jax.random.key(0), 0)


def test_fields_and_keys_that_are_none():
    mcmc = MCMC(EllipticalSlice(known), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match="no field 'potential_energy'.*'log_likelihood'"):
        mcmc.run(jax.random.key(0), extra_fields=("potential_energy",))
    with pytest.raises(TypeError, match="one random key, such as .*, got 0"):
        mcmc.run(0)


def test_no_latent_site():
    with pytest.raises(ValueError, match="no latent GP site"):
        EllipticalSlice(lambda: observe(0.0)).init(jax.random.key(0), 0)


def test_no_blackjax(monkeypatch):
    monkeypatch.setitem(sys.modules, "blackjax.mcmc", None)
    with pytest.raises(ImportError, match="pip install blackjax"):
        EllipticalSlice(known)


def test_no_model():
    with pytest.raises(TypeError, match="must be a NumPyro model"):
        EllipticalSlice(None)


@pytest.mark.parametrize("value", [0.5, 1e200])
def test_starts_in_gibbs_are_kept_where_they_are_finite(value):
    """In a program, as in parallel chains, where that is not known before."""
    white = whiten(sampled)
    ess, _ = Gibbs([(EllipticalSlice(white), ["f_white"]), (NUTS(white), None)]).blocks[0]
    kwargs = {"_gibbs_sites": {"lengthscale": jnp.asarray(0.7)}}

    def start(key, z):
        state = ess.init(key, 0, {"f_white": z}, (), kwargs)
        return state.z["f_white"], state.log_likelihood

    z, log_likelihood = jax.jit(start)(jax.random.key(0), jnp.full(N, value))
    assert np.isfinite(log_likelihood) and np.all(z == value) == (value == 0.5)
