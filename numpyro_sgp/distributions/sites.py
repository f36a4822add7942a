"""What a site of a trace tells about the Gaussian process in it."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions.util import scale_and_mask
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.util import not_jax_tracer

from numpyro_sgp._stacked import Stacked
from numpyro_sgp.distributions.arguments import as_numbers
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.posterior import GPPosterior
from numpyro_sgp.kernels.adapters import check_kernel
from numpyro_sgp.kernels.base import broadcasts_to


def unwrap(fn):
    """
    The distribution inside ``.to_event`` wrappers.

    :return: the innermost distribution, and how many batch dimensions were taken.
    """
    reinterpreted = 0
    while isinstance(fn, dist.Independent):
        reinterpreted += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    return fn, reinterpreted


def innermost(fn):
    """The distribution inside of all wrappers: events, expansions and masks."""
    wrappers = dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution
    while isinstance(fn, wrappers):
        fn = fn.base_dist
    return fn


def can_draw(fn) -> bool:
    """Whether a distribution can be drawn from; a black box without ``sample`` cannot."""
    if getattr(innermost(fn), "sampler", True) is None:
        return False
    try:
        jax.eval_shape(lambda key: fn(rng_key=key), jax.random.key(0))
    except NotImplementedError:
        return False
    return True


def is_response(site) -> bool:
    """Whether a site is observed, and not of :func:`numpyro.factor`."""
    if site["type"] != "sample" or not site["is_observed"]:
        return False
    is_factor = isinstance(innermost(site["fn"]), dist.Unit)
    return not is_factor and not site["infer"].get("is_auxiliary")


def rewrap(fn, reinterpreted: int):
    """The opposite of :func:`unwrap`."""
    return fn.to_event(reinterpreted) if reinterpreted else fn


def is_latent_gp(site) -> bool:
    """Whether ``site`` is an unobserved :class:`GaussianProcess`."""
    if site["type"] != "sample" or site["is_observed"]:
        return False
    fn, _ = unwrap(site["fn"])
    if isinstance(fn, dist.MaskedDistribution):
        if isinstance(unwrap(fn.base_dist)[0], GaussianProcess):
            raise ValueError(
                f"GP site '{site['name']}' is masked. Put numpyro.handlers.mask around "
                "the observed sites only: the prior of f does not depend on which "
                "observations are missing."
            )
    if isinstance(fn, Stacked) and isinstance(fn.base, GaussianProcess):
        raise ValueError(
            f"GP site '{site['name']}' is inside control_flow.scan (or vmap), where each "
            "step has a process of its own. Write the steps as a Python loop with a site "
            "name for each, or sample the model as it is by NUTS, without whiten or "
            "sparsify."
        )
    return isinstance(fn, GaussianProcess)


def is_observed_gp(site) -> bool:
    """Whether ``site`` is an observed :class:`GaussianProcess`."""
    return site["is_observed"] and isinstance(unwrap(site["fn"])[0], GaussianProcess)


def is_sparse_posterior(site) -> bool:
    """Whether ``site`` draws from a :class:`GPPosterior`."""
    return site["type"] == "sample" and isinstance(unwrap(site["fn"])[0], GPPosterior)


def log_prob(site, scaled: bool = True):
    """
    Log density of the value at a site, masked, of the site's batch shape.

    :param scaled: whether plates and :class:`numpyro.handlers.scale` scale it.
    """
    if site["intermediates"]:
        found = site["fn"].log_prob(site["value"], site["intermediates"])
    else:
        found = site["fn"].log_prob(site["value"])
    return scale_and_mask(found, site["scale"]) if scaled else found


def counted(site):
    """
    Whether each of the log densities of :func:`log_prob` counts: False where a mask leaves
    out all that it is of.
    """
    return jnp.broadcast_to(unmasked(site["fn"]), jnp.shape(log_prob(site, scaled=False)))


def unmasked(fn):
    """Which entries of its batch shape a distribution does not mask; of events, any."""
    if isinstance(fn, dist.MaskedDistribution):
        return jnp.logical_and(fn._mask, unmasked(fn.base_dist))
    if isinstance(fn, dist.Independent):
        inner = jnp.broadcast_to(unmasked(fn.base_dist), fn.base_dist.batch_shape)
        return jnp.any(inner, axis=tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    if isinstance(fn, dist.ExpandedDistribution):
        return jnp.broadcast_to(unmasked(fn.base_dist), fn.batch_shape)
    return jnp.ones(fn.batch_shape, bool)


def prior_mean(site):
    """The prior mean at a GP site, in the shape of its value."""
    prior, _ = unwrap(site["fn"])
    return jnp.reshape(prior.mean, site["fn"].shape())


def known_inside_jit():
    """Keeps known arrays known inside of jit; outside, it would only cost compilations."""
    inside_jit = not not_jax_tracer(jnp.zeros(()))
    return jax.ensure_compile_time_eval() if inside_jit else nullcontext()


def check_whole_plates(trace, why: str) -> None:
    """
    :param why: what needs all rows, the end of the message's first sentence.
    :raises ValueError: if a plate is subsampled.
    """
    for name, (size, subsample_size) in subsample_plate_sizes(trace).items():
        raise ValueError(
            f"With these arguments the model takes a minibatch of plate '{name}' "
            f"({subsample_size} of {size} rows), but {why}. Pass all of the data and no "
            "batch size (batch_size=None, say)."
        )


def check_inputs(name: str, prior: GaussianProcess) -> None:
    """
    :raises ValueError: if the inputs are known and not finite, or a kernel of another hand
        is known and does not agree with itself.
    """
    if not not_jax_tracer(prior.X):
        return
    bad = ~np.isfinite(np.asarray(prior.X)).all(axis=-1)
    if bad.any():
        rows = np.flatnonzero(bad.reshape(-1, bad.shape[-1]).any(axis=0))
        raise ValueError(
            f"The inputs X of GP site '{name}' have NaN or infinite values in "
            f"{rows.size} of {bad.shape[-1]} rows (first: {rows[:5].tolist()}). Drop or "
            "impute these rows before the model sees them."
        )
    if all(map(not_jax_tracer, jax.tree.leaves(prior.kernel))):
        with known_inside_jit():
            check_kernel(name, prior.kernel, prior.X)


def check_plates(trace) -> None:
    """
    A GP site inside a data plate would become one process for each row.

    :param trace: the trace of a model with its data.
    :raises ValueError: naming the site, the plate and the mend.
    """
    observed = [
        site for site in trace.values() if site["type"] == "sample" and site["is_observed"]
    ]

    def holds_rows(name, num_rows):
        """Whether the rows of an observed site lie along this plate and nowhere else."""
        for site in observed:
            sizes = {frame.name: frame.size for frame in site["cond_indep_stack"]}
            if name in sizes:
                del sizes[name]
                if num_rows not in (*sizes.values(), *site["fn"].event_shape):
                    return True
        return False

    full_size = {
        name: site["args"][0] for name, site in trace.items() if site["type"] == "plate"
    }
    for name, site in trace.items():
        if not is_latent_gp(site):
            continue
        prior, _ = unwrap(site["fn"])
        num_rows = prior.event_shape[0]
        _check_ard(name, site, prior)
        for frame in site["cond_indep_stack"]:
            subsampled = full_size.get(frame.name, frame.size) != frame.size
            data_plate = frame.size == num_rows and holds_rows(frame.name, num_rows)
            if subsampled or data_plate:
                raise ValueError(
                    f"GP site '{name}' is inside the data plate '{frame.name}', which "
                    f"makes {frame.size} independent processes of it. Sample it outside "
                    "the data plate, and put only the likelihood inside:\n"
                    f"    data = numpyro.plate('{frame.name}', N, subsample_size=B)\n"
                    "    with data as idx:\n"
                    "        X_batch, y_batch = X[idx], y[idx]\n"
                    f"    f = numpyro.sample('{name}', GaussianProcess(kernel, X_batch))\n"
                    "    with data:\n"
                    "        numpyro.sample('y', ..., obs=y_batch)\n"
                    "(If these are meant to be that many latent functions, use "
                    f".expand([{frame.size}]) on the process instead of a plate.)"
                )


def _check_ard(name, site, prior):
    """Refuses a lengthscale that may be meant for columns or for latent functions."""
    kernels = jax.tree.leaves(prior.kernel, is_leaf=lambda k: hasattr(k, "lengthscale"))
    for frame in site["cond_indep_stack"]:
        for kernel in kernels:
            shape = jnp.shape(getattr(kernel, "lengthscale", ()))
            variance = jnp.shape(getattr(kernel, "variance", ()))
            if shape == (frame.size,) and variance == () and frame.size > 1:
                Q = frame.size
                raise ValueError(
                    f"The kernel of GP site '{name}' in plate '{frame.name}' of {Q} latent "
                    f"functions has a lengthscale of shape ({Q},), which may be one for "
                    f"each function or one for each of {Q} columns of X. Give the variance "
                    f"the shape ({Q},) too: then ({Q},) is one for each function, and "
                    f"lengthscale[None, :] of shape (1, {Q}) one for each column."
                )


def check_observations(trace) -> None:
    """
    :raises ValueError: if a distribution does not broadcast to its observed value.
    """
    rows = {
        name: unwrap(site["fn"])[0].event_shape[0]
        for name, site in trace.items()
        if is_latent_gp(site)
    }
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        _check_finite(name, site)
        got, expected = jnp.shape(site["value"]), tuple(site["fn"].shape())
        if got == () or broadcasts_to(expected, got):
            continue
        gps = ", ".join(f"{n} rows at GP site '{gp}'" for gp, n in rows.items())
        raise ValueError(
            f"Observed site '{name}' has values of shape {got}, but its distribution has "
            f"the shape {expected} ({gps}). Give one observation for each row of X"
            + (" (use y[:, 0])." if len(got) > 1 and got[-1] == 1 else ".")
        )


def _check_finite(name, site):
    """Refuses known observations that are NaN and not masked."""
    value = as_numbers(site["value"], f"The value of observed site '{name}'")
    masked = isinstance(unwrap(site["fn"])[0], dist.MaskedDistribution)
    known = not_jax_tracer(value) and hasattr(value, "dtype") and not masked
    if known and value.size and jnp.issubdtype(value.dtype, jnp.floating):
        nan = np.isnan(np.atleast_1d(np.asarray(value)))
        bad = np.flatnonzero(nan.reshape(len(nan), -1).any(axis=1))
        if bad.size:
            raise ValueError(
                f"Observed site '{name}' has NaN in {bad.size} rows (first: "
                f"{bad[:5].tolist()}). Drop these rows, or leave them out "
                "with numpyro.handlers.mask(mask=...) around the site, with any number in "
                "place of NaN."
            )


def check_latents(trace) -> None:
    """
    :raises ValueError: if a latent site is discrete.
    """
    for name, site in trace.items():
        if site["type"] == "sample" and not site["is_observed"]:
            if site["fn"].support is not None and site["fn"].support.is_discrete:
                raise ValueError(
                    f"Latent site '{name}' is discrete ({type(site['fn']).__name__}); "
                    "variational inference needs continuous latents. Sum it out (a "
                    "mixture: numpyro.distributions.MixtureSameFamily), or observe it. "
                    "(If it is the response, pass its data: was the guide set up with "
                    "y=None?)"
                )
