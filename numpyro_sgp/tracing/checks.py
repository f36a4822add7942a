"""What the trace of a model is checked for."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.util import find_stack_level, not_jax_tracer

from numpyro_sgp._checks import numbers
from numpyro_sgp.distributions.arguments import as_numbers
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.kernels.adapters import check_kernel
from numpyro_sgp.kernels.base import InputKernel, broadcasts_to
from numpyro_sgp.likelihoods import RobustMax
from numpyro_sgp.tracing import messages

#: What to do where a site is to be positive.
POSITIVE = " Take jnp.exp(f), or jax.nn.softplus(f), of a GP site."
# What has values in a range, of a function f that has all real ones.
_IN_RANGE = (
    (constraints.positive, POSITIVE),
    (constraints.nonnegative, POSITIVE),
    (constraints.unit_interval, " Take jax.nn.sigmoid(f) of a GP site, or logits=f."),
    (
        constraints.real,
        " It is NaN or infinite there: look for logs and roots of what may be negative, "
        "and for exp(f) of large f.",
    ),
)


def check_whole_plates(trace, why: str) -> None:
    """
    :param why: what needs all rows, the end of the message's first sentence.
    :raises ValueError: if a plate is subsampled.
    """
    for name, (size, subsample_size) in subsample_plate_sizes(trace).items():
        raise ValueError(
            f"With these arguments the model takes a minibatch of plate '{name}' "
            f"({subsample_size} of {size} rows), but {why}. Pass all of the data and no "
            "batch size (batch_size=None, or what the model calls it)."
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
            "impute these rows before the model sees them; where data are finite, look at "
            "what the model makes of them (a log, X.std(0) of a single row)."
        )
    if all(map(not_jax_tracer, jax.tree.leaves(prior.kernel))):
        with messages.known_inside_jit():
            check_kernel(name, prior.kernel, prior.X)


def valid_arguments(trace) -> dict[str, dict[str, jax.Array]]:
    """
    Whether the arguments of the distributions of a trace are in their ranges, by site and
    argument: NumPyro's check, which passes over what is traced. Of sites that are checked.
    """
    found: dict[str, dict[str, jax.Array]] = {}
    for name, site in trace.items():
        if site["type"] != "sample":
            continue
        fn = messages.innermost(site["fn"])
        if not getattr(fn, "_validate_args", False):
            continue
        found[name] = {}
        for argument, value in fn.get_args().items():
            constraint = fn.arg_constraints[argument]
            if not dist.constraints.is_dependent(constraint):
                found[name][argument] = jnp.all(constraint(value))
    return found


def check_arguments(trace, valid) -> None:
    """
    :param valid: of :func:`valid_arguments`.
    :raises ValueError: naming a site and an argument that is out of range.
    """
    for name, of_site in valid.items():
        for argument, is_valid in of_site.items():
            if not_jax_tracer(is_valid) and not np.asarray(is_valid).all():
                fn = messages.innermost(trace[name]["fn"])
                constraint = fn.arg_constraints[argument]
                raise ValueError(
                    f"Site '{name}': the {argument} of {type(fn).__name__} is not in its "
                    f"range ({constraint}) at the starting values."
                    + next((m for c, m in _IN_RANGE if constraint is c), "")
                )


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
        if not messages.is_latent_gp(site):
            continue
        prior, _ = messages.unwrap(site["fn"])
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
        name: messages.unwrap(site["fn"])[0].event_shape[0]
        for name, site in trace.items()
        if messages.is_latent_gp(site)
    }
    shapes = {name: tuple(trace[name]["fn"].shape()) for name in rows}
    kinds = [site.get("infer", {}).get("enumerate") for site in trace.values()]
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        _check_finite(name, site)
        _check_labels(name, site)
        _warn_of_rows_as_classes(name, site, rows)
        got, expected = jnp.shape(site["value"]), tuple(site["fn"].shape())
        if "parallel" in kinds:  # values of discrete latents are along axes before
            expected = expected[max(len(expected) - len(got), 0) :]
        if got == () or broadcasts_to(expected, got):
            continue
        gps = ", ".join(f"{n} rows at GP site '{gp}'" for gp, n in rows.items())
        raise ValueError(
            f"Observed site '{name}' has values of shape {got}, but its distribution has "
            f"the shape {expected} ({gps}). Give one observation for each row of X"
            + (" (use y[:, 0])." if len(got) > 1 and got[-1] == 1 else ".")
            + "".join(
                f" Plates give '{gp}' the shape {shape}: put the one around it at dim=-1, "
                "or take out the axis of one (f[:, 0])."
                for gp, shape in shapes.items()
                if 1 in shape[1:-1]
            )
        )


def _check_finite(name, site):
    """Refuses known observations that are NaN and not masked."""
    what = f"The value of observed site '{name}'"
    value = as_numbers(site["value"], what)
    too_large = type(value) is int and not -(2**31) <= value < 2**31
    if too_large and not jax.config.jax_enable_x64:
        raise ValueError(
            f"{what} is {value}, which JAX does not hold as a whole number in 32 bits. "
            f"Give {float(value):g}, or call numpyro.enable_x64() first."
        )
    if not isinstance(value, np.ndarray):
        value = numbers(value, what)
    known = not_jax_tracer(value) and hasattr(value, "dtype")
    if not known or not value.size or not jnp.issubdtype(value.dtype, jnp.floating):
        return
    nan = np.isnan(np.atleast_1d(np.asarray(value)))
    if messages.is_masked(site["fn"]) and nan.any():
        if not all(map(not_jax_tracer, jax.tree.leaves(site["fn"]))):
            return
        with jax.ensure_compile_time_eval():
            nan = np.atleast_1d(np.asarray(messages.missing(site["fn"], value)))
    refuse_missing(name, nan)


def refuse_missing(name, nan) -> None:
    """
    :param nan: which rows or entries of an observed site are NaN, known.
    :raises ValueError: if there are any.
    """
    if nan.any():
        raise ValueError(
            f"Observed site '{name}' has NaN in {places_of(nan)}. Drop these rows, or "
            "leave what is missing out with numpyro.handlers.mask(mask=...) around the "
            "site, with any number in place of NaN."
        )


def places_of(bad) -> str:
    """Of which rows, or entries, something is told."""
    if bad.ndim == 1:
        return f"{bad.sum()} rows (first: {np.flatnonzero(bad)[:5].tolist()})"
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{bad.sum()} entries (first: {first})"


def _check_labels(name, site):
    """Refuses classes that are no whole numbers, by their type."""
    fn, value = messages.innermost(site["fn"]), site["value"]
    classes = dist.CategoricalProbs, dist.CategoricalLogits, RobustMax
    floats = jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.floating)
    if isinstance(fn, classes) and floats:
        raise ValueError(
            f"Observed site '{name}' ({type(fn).__name__}) has classes that are floats. "
            "They are whole numbers from 0: y.astype(int)."
        )


def _warn_of_rows_as_classes(name, site, rows: dict[str, int]) -> None:
    """Of one distribution for all rows, with classes that are rows, most never seen."""
    fn, value = messages.innermost(site["fn"]), site["value"]
    if not isinstance(fn, dist.CategoricalProbs | dist.CategoricalLogits):
        return
    num_classes = messages.support_of(fn).upper_bound + 1
    known = not_jax_tracer(value) and np.shape(value)[-1:] == (num_classes,)
    if fn.batch_shape == () and known and num_classes in rows.values():
        if 2 * (np.max(value) + 1) <= num_classes:
            warnings.warn(
                f"Observed site '{name}' has one distribution for all rows, in which each "
                f"of the {num_classes} rows of f is a class. For two classes write "
                "Bernoulli(logits=f); for K classes a GP site of K functions, and "
                "Categorical(logits=f.T).",
                stacklevel=find_stack_level(),
            )


def warn_of_single(trace, names) -> None:
    """
    Warns of a number for the observations of all rows of X, but for limits of what is
    censored, and whole ones.

    :param names: of observed sites whose values are arguments of the model.
    """
    sizes = {messages.unwrap(s["fn"])[0].event_shape[0] for s in _gp_sites(trace)}
    for name in names:
        site = trace[name]
        value, shape = site["value"], tuple(site["fn"].shape())
        is_limit = "Censored" in type(messages.innermost(site["fn"])).__name__
        if jnp.shape(value) or not sizes.intersection(shape) or is_limit:
            continue
        if isinstance(value, bool | int):  # the same object as another argument, maybe
            continue
        warnings.warn(
            f"Observed site '{name}' has one number, {value}, for observations of the "
            f"shape {shape}. Give one for each row of X (jnp.full({shape}, {value}) where "
            "all are the same).",
            stacklevel=find_stack_level(),
        )


def _gp_sites(trace):
    return [site for site in trace.values() if messages.is_latent_gp(site)]


def check_imputed(trace) -> None:
    """
    :raises ValueError: if a response has an ``obs_mask``: NumPyro makes missing values
        latents, which q takes to be independent of f, or of which it has the best value
        only. They then count as data, and there is no observed site to be predicted.
    """
    kinds = {name: site["type"] for name, site in trace.items()}
    after_gp = False  # what is before f, such as inputs, does not depend on it
    for latent, site in messages.latents(trace).items():
        after_gp = after_gp or messages.is_latent_gp(site)
        name = latent.removesuffix("_unobserved")
        made = {name: "deterministic", f"{name}_observed": "sample"}
        if after_gp and name != latent and made.items() <= kinds.items():
            raise ValueError(
                f"Site '{name}' has an obs_mask, which makes its missing values a latent "
                f"site '{latent}', and a guide would take them for data. Mask the site "
                "instead, with any number in place of a missing one:\n"
                "    with numpyro.handlers.mask(mask=mask):\n"
                f"        numpyro.sample('{name}', ..., obs=y)"
            )


def check_latents(trace) -> None:
    """
    :raises ValueError: if a latent site is discrete.
    """
    for name, site in trace.items():
        if site["type"] == "sample" and not site["is_observed"]:
            if site["fn"].support is not None and site["fn"].support.is_discrete:
                kind = type(messages.innermost(site["fn"])).__name__
                raise ValueError(
                    f"Latent site '{name}' is discrete ({kind}); variational inference "
                    "needs continuous latents. Sum it out (a mixture: "
                    "numpyro.distributions.MixtureSameFamily), observe it, or use NUTS of "
                    "sgp.whiten(model), where NumPyro sums it out or draws it. "
                    "(If it is the response, pass its data: was the guide set up with "
                    "y=None?)"
                )


def check_kernels(trace: dict) -> None:
    """
    :param trace: a model's, whose values are those of the run that kernels are of.
    :raises ValueError: if a hyperparameter of a kernel, which is positive, is a latent that
        may be negative.
    """
    found = messages.latents(trace).items()
    latents = {name: site for name, site in found if messages.is_real(site["fn"])}
    sites = {k: s for k, s in trace.items() if messages.is_latent_gp(s)}
    for name, site in sites.items() if latents else ():
        kernel = messages.unwrap(site["fn"])[0].kernel
        for part in jax.tree.leaves(kernel, is_leaf=lambda v: isinstance(v, InputKernel)):
            for hyper in getattr(part, "_hyperparameters", ()):
                value = getattr(part, hyper)
                own = [k for k, latent in latents.items() if latent["value"] is value]
                if own:
                    prior = type(messages.innermost(latents[own[0]]["fn"])).__name__
                    kind = type(part).__name__
                    raise ValueError(
                        f"GP site '{name}': the {hyper} of {kind} is the latent "
                        f"'{own[0]}', of which {prior} has negative values too. Give it a "
                        f"prior on positive numbers, such as numpyro.sample('{own[0]}', "
                        f"dist.LogNormal(0, 1)), or use jnp.exp({own[0]})."
                    )


def warn_of_params(trace: dict) -> None:
    """
    Warns of params without another value than their first one, which MCMC leaves as it is.

    :param trace: of a model that samples of MCMC are of.
    """
    held = [
        name
        for name, site in trace.items()
        if site["type"] == "param" and site["args"] and site["value"] is site["args"][0]
    ]
    if held:
        warnings.warn(
            f"MCMC does not sample {held}, which numpyro.param made: {_they(held)} at the "
            "first value here, and in MCMC unless another one was put there. Give it a "
            "prior (numpyro.sample), or say which value is meant, to MCMC and here: "
            "numpyro.handlers.substitute(model, fitted.params) in the place of the model.",
            stacklevel=find_stack_level(),
        )


def _they(names) -> str:
    return "it stays" if len(names) == 1 else "they stay"
