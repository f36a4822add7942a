"""Non-centred GP sites, on which HMC and NUTS mix."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer.reparam import Reparam
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import check_model
from numpyro_sgp._threads import one_thread
from numpyro_sgp.distributions import GaussianProcess
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.distributions.truncated import with_digits
from numpyro_sgp.linalg import einsum, factor_product
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.row_indices import check_row_indices


class WhitenReparam(Reparam):
    r"""
    Writes :math:`f(X) = m(X) + L \epsilon` with :math:`L L^\top = K(X, X)` and draws
    :math:`\epsilon \sim N(0, I)` at the site ``{name}_white``; f becomes deterministic
    (Murray and Adams 2010, arXiv 1006.0868).

    Where kernel and inputs are known numbers, L is computed once, when the model is
    traced, and not in every leapfrog step; the program then holds its N x N numbers.

    >>> import jax.numpy as jnp, numpyro
    >>> from numpyro.handlers import reparam, seed, trace
    >>> import numpyro_sgp as sgp
    >>> def model(X):
    ...     numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    >>> white = reparam(model, config={"f": sgp.WhitenReparam()})
    >>> sites = trace(seed(white, 0)).get_trace(jnp.arange(5.0)[:, None])
    >>> {name: site["type"] for name, site in sites.items()}
    {'f_white': 'sample', 'f': 'deterministic'}
    """

    def __call__(
        self, name: str, fn: dist.Distribution, obs: Array | None
    ) -> tuple[None, Array]:
        """See :class:`numpyro.infer.reparam.Reparam`."""
        if obs is not None:
            raise ValueError(f"GP site '{name}' is observed, so it cannot be whitened.")
        prior, reinterpreted = messages.unwrap(fn)
        if not isinstance(prior, GaussianProcess):
            raise TypeError(
                f"WhitenReparam is for GP sites, but '{name}' is {type(prior).__name__}. "
                "For others there are numpyro.infer.reparam.LocScaleReparam and "
                "TransformReparam."
            )
        checks.check_inputs(name, prior)
        K, mean, L = _covariance(prior)
        white = dist.Normal(jnp.zeros((), K.dtype), jnp.ones((), K.dtype))
        white = white.expand(prior.shape()).to_event(1 + reinterpreted)
        eps = numpyro.sample(f"{name}_white", white, infer={"whitened": True})
        if jnp.shape(eps)[-len(prior.shape()) :] != prior.shape():
            raise ValueError(
                f"The value given to '{name}_white' has the shape {jnp.shape(eps)}, but "
                f"the whitened GP site '{name}' has {prior.shape()}. It goes with the "
                "inputs that it was sampled at, and no others; for new ones take "
                "numpyro_sgp.GPPredictive(model, samples, train_args=(X, y)), with the "
                "model that is not whitened."
            )
        if L is None:
            return None, mean + factor_product(K, eps, prior.jitter)
        return None, mean + einsum("...ij,...j->...i", L, eps)


def _covariance(prior: GaussianProcess):
    """K(X, X), the mean, and the factor of K with jitter where all are known numbers."""
    if all(not_jax_tracer(leaf) for leaf in jax.tree.leaves(prior)):
        with jax.ensure_compile_time_eval():
            K = prior.kernel(prior.X, prior.X)
            return K, prior.mean, prior.scale_tril()
    return prior.kernel(prior.X, prior.X), prior.mean, None


def whiten(model: Callable) -> Callable:
    """
    The model with every latent GP site whitened (:class:`WhitenReparam`), for HMC and
    NUTS with one or several chains.

    Samples are for predictions by :class:`~numpyro_sgp.GPPredictive`, of the model that is
    not whitened. ``numpyro.infer.Predictive`` would take the values at ``{site}_white``,
    which go with the training inputs row by row, to the new ones: another number of rows is
    refused, but the same number is not seen to be of other inputs.

    :param model: a NumPyro model with GP sites.
    :return: a model with the same arguments; it has a latent site ``{site}_white`` for
        each GP site, whose own value becomes deterministic. Under a
        :func:`numpyro.handlers.scope` in the model its prefix is there twice, as in names
        of NumPyro's reparametrisations.
    :raises ValueError: when run, if inputs are not finite, a GP site is inside a data
        plate or at the rows of a minibatch, or observations have another shape than their
        distribution.

    >>> import jax, jax.numpy as jnp, numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, NUTS
    >>> import numpyro_sgp as sgp
    >>> def model(X, y):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> kernel = NUTS(sgp.whiten(model))
    >>> mcmc = MCMC(kernel, num_warmup=10, num_samples=20, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y)
    >>> mcmc.get_samples()["f"].shape
    (20, 5)
    """

    one_thread()
    return _Whitened(model)


class _Whitened:
    """A model with its GP sites whitened."""

    def __init__(self, model):
        check_model(model)
        self.model = model

    def __call__(self, *args, **kwargs):
        args, kwargs = as_arrays(self.model, args, kwargs)
        found = check_row_indices(self.model, args, kwargs)
        if found.drawn and found.inputs:
            name, number, size = found.drawn[0]
            raise ValueError(
                f"The model has a GP site at a minibatch of plate '{name}' ({number} of "
                f"{size} rows), whose whitened values would be those of other rows in each "
                "step. Give all of the data and no batch size; or, for kernels that draw "
                "rows, sample f at all X and take f[idx] in the likelihood."
            )
        with handlers.reparam(config=_reparam), _Check():
            return self.model(*args, **kwargs)


def _reparam(site):
    return WhitenReparam() if messages.is_latent_gp(site) else None


class _Check(handlers.trace):
    """Refuses a GP site inside a data plate, and data of another shape than the model's."""

    def __enter__(self):
        self.gps = {}
        return super().__enter__()

    def process_message(self, msg):
        if messages.is_latent_gp(msg):  # before it is whitened
            self.gps[msg["name"]] = msg.copy()
        elif msg["type"] == "sample" and msg["is_observed"]:
            msg["fn"] = with_digits(msg["fn"])  # whose density is finite far away too

    def __exit__(self, exc_type, exc_value, traceback):
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None:
            trace = {**self.trace, **self.gps}
            checks.check_plates(trace)
            checks.check_observations(trace)
