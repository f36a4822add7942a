"""Worker of numpyro_sgp, and of the models of part ``mcmc``."""

import time

begin = time.perf_counter()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
import optax  # noqa: E402
from jax.scipy.special import ndtr  # noqa: E402
from numpyro.distributions import constraints  # noqa: E402
from numpyro.infer import MCMC, NUTS, SVI  # noqa: E402

import numpyro_sgp as sgp  # noqa: E402

IMPORT_S = time.perf_counter() - begin

from jax_steps import JaxModel  # noqa: E402
from serve import serve  # noqa: E402


def set_precision(dtype):
    """One for a process."""
    if dtype == "float64":
        numpyro.enable_x64()


def make_model(problem):
    """GP regression, or classification by a probit, of a batch of rows."""

    def positive(name, start):
        start = jnp.asarray(start, problem.dtype)
        return numpyro.param(name, start, constraint=constraints.softplus_positive)

    def model(X, y=None):
        lengthscale = positive("lengthscale", np.full(problem.D, problem.lengthscale))
        kernel = sgp.kernels.Matern32(positive("variance", 1.0), lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        if problem.likelihood == "gaussian":
            fn = dist.Normal(f, jnp.sqrt(positive("noise", problem.noise)))
        else:
            fn = dist.Bernoulli(probs=1e-3 + (1 - 2e-3) * ndtr(f))
        with numpyro.plate("data", problem.N, subsample_size=X.shape[0]):
            numpyro.sample("y", fn, obs=y)

    return model


def approximation(problem):
    """What a method puts at the GP site; "dual" and "tight" are options of it."""
    method, *words = problem.method.split()
    options = {"tight": "diagonal"} if "tight" in words else {}
    if "dual" in words:
        options["covariance"] = "dual"
    if method == "SVGP2":
        return sgp.SVGP(inducing=problem.Z2, **options)
    if method == "SVGP":
        return sgp.SVGP(inducing=problem.Z, **options)
    kind = {"SOLVE": sgp.SOLVEGP, "ODVGP": sgp.ODVGP}[method]
    return kind(inducing=problem.Z, orthogonal=problem.O, **options)


class Model(JaxModel):
    """SVGP, SOLVE-GP or ODVGP, trained by Adam or by natural gradients and Adam."""

    def __init__(self, problem):
        set_precision(problem.dtype)
        self.X, self.y = jnp.asarray(problem.X), jnp.asarray(problem.y)
        model = make_model(problem)
        self.guide = sgp.AutoSparseGP(model, approximation(problem))
        optimiser = optax.adam(rate(problem.rate, problem))
        if getattr(problem, "natural", 0.0):
            natural = rate(problem.natural, problem)
            optimiser = sgp.natural_gradients(self.guide, natural, optimiser)
        rule = sgp.GaussHermite(2 if problem.likelihood == "gaussian" else 20)
        self.svi = SVI(model, self.guide, optimiser, sgp.TraceGP_ELBO(rule))
        X, y = self.X[: problem.batch], self.y[: problem.batch]
        self.guide.setup(X, y)
        self.state = jax.jit(self.svi.init)(jax.random.key(0), X, y)  # one program
        self._predictor = None

        def train(state, rows, X, y):
            def step(state, rows):
                return self.svi.update(state, X[rows], y[rows])

            return jax.lax.scan(step, state, rows)

        self.compile(train)

    def steps(self, rows):
        """Trains; the last loss."""
        self._predictor = None
        return super().steps(rows)

    def predict(self, X):
        """Mean and variance of f."""
        if self._predictor is None:
            params = self.svi.get_params(self.state)
            self._predictor = sgp.Predictor(self.guide, params)
        return self._predictor(X)["f"]

    def noise_variance(self):
        """Of the Gaussian likelihood."""
        return self.svi.get_params(self.state).get("noise", np.nan)


def rate(value, problem):
    """A learning rate, falling to a tenth in ``problem.decay`` steps if that is given."""
    if not getattr(problem, "decay", 0):
        return value
    return optax.cosine_decay_schedule(value, problem.decay, 0.1)


def product(Model, M, dtype, times):
    """The unit: ``times`` products of M x M matrices a request, one after another."""
    set_precision(dtype)
    A = jax.random.normal(jax.random.key(0), (M, M), dtype) / M**0.5

    @jax.jit
    def many(A):
        return jax.lax.fori_loop(0, times, lambda i, B: A @ B, A)

    many(A).block_until_ready()
    answer = {}
    while True:
        yield answer
        begin = time.perf_counter()
        many(A).block_until_ready()
        answer = {"seconds": time.perf_counter() - begin, "steps": times}


def sampling(Model, method, bins, learn, warmup, samples):
    """One chain of an MCMC method on the coal-mining counts a request, and its ESS."""
    import arviz_base
    import arviz_stats
    from numpyro.infer import Gibbs

    numpyro.enable_x64()  # as the example does
    coal = sgp.datasets.coal_mining(bins)
    X, y = jnp.asarray(coal.bin_centre_day, float)[:, None], jnp.asarray(coal.count)
    if method == "hand-written, NUTS":
        kernel = NUTS(by_hand(X, learn))
    else:
        white = sgp.whiten(cox)
        if method == "whiten, NUTS":
            kernel = NUTS(white)
        elif learn:
            slices = (sgp.EllipticalSlice(white), ["f_white"])
            kernel = Gibbs([slices, (NUTS(white), None)])
        else:
            kernel = sgp.EllipticalSlice(cox)
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=samples, progress_bar=False)
    arguments = (X, y), {"learn": learn}

    @jax.jit
    def sample(state):
        def step(state, _):
            state = kernel.sample(state, *arguments)
            return state, getattr(state, kernel.sample_field)

        return jax.lax.scan(step, state, None, samples)

    answer = {}
    while True:
        request = yield answer
        begin = time.perf_counter()
        mcmc.warmup(jax.random.key(request["seed"]), X, y, learn=learn)
        state = jax.block_until_ready(mcmc.last_state)
        warmup_s = time.perf_counter() - begin
        if not answer:
            jax.block_until_ready(sample(state))  # MCMC.run would compile in each call
        begin = time.perf_counter()
        _, raw = jax.block_until_ready(sample(state))
        seconds = time.perf_counter() - begin
        draws = jax.jit(jax.vmap(kernel.postprocess_fn(*arguments)))(raw)
        names = ["f", "variance", "lengthscale"] if learn else ["f"]
        data = {k: np.asarray(draws[k], float)[None] for k in names}
        ess = arviz_stats.ess(arviz_base.from_dict({"posterior": data}), method="bulk")
        values = {k: np.ravel(ess[k].to_numpy()) for k in names}
        answer = {"warmup_s": warmup_s, "seconds": seconds}
        answer |= {
            f"{what} {k}": float(fn(v))
            for k, v in values.items()
            for what, fn in (("min", np.min), ("median", np.median))
        }
        answer["mean f"] = data["f"][0].mean(axis=0)[:: max(1, bins // 10)].tolist()


def prior_of(learn):
    """Hyperparameters of the coal-mining example."""
    if not learn:
        return 1.0, 13516.0
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(13516.0), 1.0))
    return variance, lengthscale


def cox(X, y=None, learn=False):
    """A log-Gaussian Cox process with this package."""
    kernel = sgp.kernels.RBF(*prior_of(learn))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("bins", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f) * 191 / X.shape[0]), obs=y)


def by_hand(X, learn):
    """The same in NumPyro alone; a factor that stays the same is made once."""

    def factor(variance, lengthscale):
        K = variance * jnp.exp(-0.5 * ((X - X.T) / lengthscale) ** 2)
        jitter = (1e-5 if K.dtype == jnp.float32 else 1e-8) * variance
        return jnp.linalg.cholesky(K + jitter * jnp.eye(len(X), dtype=K.dtype))

    known = None if learn else factor(*prior_of(False))

    def model(X, y=None, learn=False):
        L = factor(*prior_of(True)) if learn else known
        white = numpyro.sample("white", dist.Normal().expand([len(X)]).to_event(1))
        f = numpyro.deterministic("f", L @ white)
        with numpyro.plate("bins", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(f) * 191 / len(X)), obs=y)

    return model


if __name__ == "__main__":
    serve(Model, IMPORT_S, {"product": product, "sampling": sampling})
