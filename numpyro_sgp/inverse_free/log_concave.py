"""Whether a model's likelihood is log-concave, as far as curvature tells."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import shared
from numpyro_sgp.distributions import GaussianProcess
from numpyro_sgp.tracing.coupling import feeding, log_likelihood
from numpyro_sgp.tracing.curvature import row_precisions

# Where it looks: sds from the prior mean, levels in between, and how often at each.
_MOST_SDS, _NUM_LEVELS, _ROUNDS = 4.0, 33, 3


def check_log_concave(
    site: str,
    trace_at: Callable[[dict[str, Array]], dict],
    priors: dict[str, GaussianProcess],
    couples_rows: bool,
) -> None:
    """
    Looks for positive curvature of the log likelihood at values of f up to
    ``_MOST_SDS`` prior standard deviations from the prior mean; finds no other.

    :param site: the GP site in whose values it must be log-concave, row by row.
    :param trace_at: from values of the GP sites to the model's trace.
    :param priors: the process at each GP site, at its starting hyperparameters.
    :param couples_rows: whether the likelihood ties rows together.
    :raises ValueError: if it is not, or cannot be judged.
    """
    shapes = {name: prior.shape() for name, prior in priors.items()}
    dtype = jnp.result_type(*(prior.X.dtype for prior in priors.values()))
    feeds = len(shapes) > 1 and site in feeding(trace_at, shapes, dtype)
    if feeds or couples_rows:
        why = ": the likelihood ties rows of X together"
        why = " feeds another GP site" if feeds else why
        raise ValueError(
            f"GP site '{site}'{why}, so that bound='lc', for log-concave likelihoods of "
            "one row at a time, may not be a bound. Use bound='relaxed' or bound='fr'."
        )
    precisions = shared(
        lambda f: row_precisions(lambda f: log_likelihood(trace_at(f), shapes), f, [site])
    )
    rng, found, moments, orders = np.random.default_rng(0), [], {}, {}
    # Each row and function goes through the levels in an order of its own, so that others
    # are anywhere in the same range, several times.
    levels = np.tile(np.linspace(-_MOST_SDS, _MOST_SDS, _NUM_LEVELS), _ROUNDS)
    for name, prior in priors.items():
        sd = jnp.sqrt(prior.kernel.diag(prior.X))
        moments[name] = [jnp.broadcast_to(v, shapes[name]) for v in (prior.mean, sd)]
        order = np.broadcast_to(levels, (*shapes[name], len(levels)))
        orders[name] = rng.permuted(order, axis=-1).astype(sd.dtype)
    for i in range(len(levels)):
        f = {k: mean + sd * orders[k][..., i] for k, (mean, sd) in moments.items()}
        try:
            found.append(np.asarray(precisions(f)[site]))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"bound='lc' at GP site '{site}' needs a log-concave likelihood, which is "
                "looked for by derivatives, but JAX cannot differentiate this one. Use "
                "bound='fr' or bound='relaxed'."
            ) from error
    values = np.stack(found)
    values = np.where(np.isfinite(values), values, 0.0)
    tolerance = 1e4 * float(jnp.finfo(values.dtype).eps)
    if np.any(values < -tolerance * np.max(np.abs(values), axis=0)):
        raise ValueError(
            f"GP site '{site}': the log likelihood has positive curvature in f, so "
            "bound='lc', for log-concave likelihoods, is not a bound. Use bound='fr' "
            "or bound='relaxed'."
        )
