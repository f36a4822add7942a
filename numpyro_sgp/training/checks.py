"""What a training on minibatches refuses before it begins."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches

import jax
import numpy as np
from numpyro import handlers
from numpyro.distributions import Unit
from numpyro.infer.autoguide import AutoGuide
from numpyro.util import not_jax_tracer

from numpyro_sgp.distributions.arguments import as_numbers
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.given_rows import GivenRows
from numpyro_sgp.training.rows import check_dtype, not_finite


def check_batch(svi, source, batch, args, kwargs) -> None:
    """
    Refuses a model that does not know that a batch is a part of the data. The guide is set
    up. What fails when the model runs is for the training to tell, which meets it too.
    """
    if source.total_rows is None:
        return
    found = {}

    def run(batch):
        with handlers.block(), handlers.trace() as trace, handlers.seed(rng_seed=0):
            with GivenRows(source.batch_size, source.total_rows):
                svi.model(*batch, *args, **kwargs, **svi.static_kwargs)
        found.update(trace)

    try:
        jax.eval_shape(run, batch)
    except Exception:
        return
    sizes = {k: site["args"][0] for k, site in found.items() if site["type"] == "plate"}
    _check_row_latents(svi.guide, source, found, sizes)
    _check_scale(source, found, sizes)


def _check_scale(source, trace, sizes):
    """
    Refuses a model that takes a batch for all of the data: its sum of expected log
    likelihoods must count N / B times (eq. 33 of Bonilla, Krauth and Dezfouli 2018).

    A plate that does so is enough: a likelihood in it may have weights too, or be tempered.
    """
    found, wanted = {}, source.total_rows / source.batch_size
    for name, site in trace.items():
        if site["type"] == "sample" and site["is_observed"]:
            found[name] = 1.0 if site["scale"] is None else site["scale"]
            frames = site["cond_indep_stack"]
            times = [sizes.get(frame.name, 0) / frame.size for frame in frames]
            # A factor may be scaled by hand.
            if isinstance(site["fn"], Unit) or np.isclose(times, wanted).any():
                found[name] = wanted
    known = {name: np.asarray(s) for name, s in found.items() if not_jax_tracer(s)}
    right = [np.isclose(scale, wanted).all() for scale in known.values()]
    if len(known) == len(found) and not any(right):
        told = {name: _in_words(scale) for name, scale in known.items()}
        raise ValueError(
            f"A batch has {source.batch_size} of {source.total_rows} rows, so the model "
            f"has to multiply their likelihood by {wanted:g}, but its observed sites are "
            f"scaled by {told}. Write the likelihood inside numpyro.plate('data', "
            "num_rows, subsample_size=X.shape[0]), and give train the model's argument "
            f"num_rows={source.total_rows}."
        )


def _check_row_latents(guide, source, trace, sizes):
    """
    Refuses a latent with an entry for each row of the data, in a plate that batches are
    given to from outside: which rows a batch has nobody knows there.
    """
    if not isinstance(getattr(guide, "base_guide", None), AutoGuide):
        return  # others may be amortised
    for name, site in messages.latents(trace).items():
        for frame in site["cond_indep_stack"]:
            if frame.size == source.batch_size < sizes.get(frame.name, 0):
                raise ValueError(
                    f"Latent '{name}' has an entry for each row of plate '{frame.name}', "
                    "and a batch that is given from outside does not say which rows it "
                    "has. Make it a part of the likelihood (a Normal latent: "
                    "dist.Normal(f, sqrt(s**2 + noise**2))), or let the plate draw the "
                    "rows: with plate as i: X[i], y[i], and svi.run with all of the data."
                )


def _in_words(scale) -> float | str:
    low, high = float(scale.min()), float(scale.max())
    return low if low == high else f"{low:g} to {high:g}"


#: Options of ``train`` that ``fit`` does not have.
_OF_TRAIN = "validation", "checkpoint", "every", "patience", "mesh"
#: What others call the number of steps.
_AS_STEPS = "num_steps", "num_iters", "epochs", "max_iter"


def check_keywords(model, kwargs, caller: Callable) -> None:
    """
    :param caller: the function that has been given them beside options of its own.
    :raises TypeError: if a model takes no argument of one of these names.
    """
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    own = inspect.signature(caller).parameters
    for name in [name for name in kwargs if name not in parameters]:
        near = get_close_matches(name, [*own, *parameters], 1)
        mend = f" Is {near[0]}=... meant?" if near else ""
        if name == "num_rows":
            mend = (
                " Give the model that argument, for the plate of its likelihood: "
                "numpyro.plate('data', num_rows, subsample_size=X.shape[0])."
            )
        elif name in _OF_TRAIN:
            mend = f" {', '.join(_OF_TRAIN)} are options of sgp.train."
        elif "steps" in own and name in _AS_STEPS:
            mend = " How many steps it takes at most is steps=...; without, it finds out."
        raise TypeError(
            f"{caller.__name__} was given {name}=..., which is no option of its own, so it "
            f"goes to the model, whose arguments are {', '.join(parameters)}.{mend}"
        )


def check_options(svi, num_steps, batch_size, every, patience, chunk):
    counts = {"num_steps": num_steps, "every": every, "chunk": chunk}
    optional = {"batch_size": batch_size, "patience": patience}
    counts |= {name: value for name, value in optional.items() if value is not None}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} must be a whole number, got {value!r}.")
        if value < 1 and name != "batch_size":  # of which the source says more
            raise ValueError(f"{name} must be positive, got {value}.")


def check_validation(svi, validation, patience):
    """Held-out data as arrays."""
    if validation is None:
        if patience is not None:
            raise ValueError("patience needs held-out data: validation=(X_val, y_val).")
        return None
    if not isinstance(svi.guide, AutoSparseGP):
        raise TypeError(
            "validation needs an AutoSparseGP as the guide, whose predictive density is "
            f"known, not {type(svi.guide).__name__}. Leave validation out."
        )
    arrays, shapes = (), None
    if isinstance(validation, tuple):
        numbered = enumerate(validation)
        arrays = [as_numbers(a, f"Array {i} of validation") for i, a in numbered]
        arrays = [a if isinstance(a, jax.Array) else np.asarray(a) for a in arrays]
        shapes = [a.shape for a in arrays]
    if not shapes or () in shapes or len({s[0] for s in shapes}) != 1 or not shapes[0][0]:
        raise ValueError(
            "validation must be a tuple of arrays with the same number of rows, such as "
            f"(X_val, y_val), got {shapes or type(validation).__name__}."
        )
    for i, array in enumerate(arrays):
        check_dtype(f"Array {i} of validation", array)
    if fault := not_finite(arrays, "validation"):
        raise ValueError(fault)
    return tuple(arrays)
