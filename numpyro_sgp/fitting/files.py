"""Fits as files: what makes the guide again, its parameters, and a few rows."""

import functools
import os
import warnings
from typing import Any

import jax
import numpy as np
from numpyro.distributions import biject_to
from numpyro.infer import autoguide
from numpyro.util import find_stack_level

from numpyro_sgp._checks import check_path
from numpyro_sgp.fitting.encoding import NotInFile, decode, encode
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.predictive.row_batches import first_rows
from numpyro_sgp.tracing import messages
from numpyro_sgp.training.archive import read_archive, write_archive
from numpyro_sgp.training.padding import Padded

_KEYS = {"guide", "params", "setup", "fit", "num_rows", "arguments", "more"}
_NUMBERS = ("bound", "bound_se", "seconds")
_NOT_KEPT = {"init_loc_fn", "prefix"}  # options of a base guide
#: NumPyro's guides for the latents beside f that a file may name.
_BASE_GUIDES = {
    name: getattr(autoguide, name)
    for name in (
        "AutoBatchedLowRankMultivariateNormal",
        "AutoBatchedMultivariateNormal",
        "AutoBNAFNormal",
        "AutoDelta",
        "AutoDiagonalNormal",
        "AutoIAFNormal",
        "AutoLowRankMultivariateNormal",
        "AutoMultivariateNormal",
        "AutoNormal",
    )
}


def write(path: str | os.PathLike, fitted: Any) -> None:
    """See :meth:`~numpyro_sgp.Fitted.save`."""
    guide, path, arrays = fitted.guide, check_path(path), {}
    guide.check_params(fitted.params)
    base_guide = _named(guide, arrays)
    arguments = {"absent": "it was saved without arguments of the model"}
    if fitted.examples is not None or fitted.args is not None:
        arguments = _examples(path, fitted, base_guide, arrays)
    losses = None if fitted.losses is None else np.asarray(fitted.losses)
    coupling = guide.known().coupling
    header = {
        "guide": {
            "description": guide.known().description,
            "prefix": guide.prefix,
            "approximation": encode(guide.approximation, "approximation", arrays),
            "base_guide": base_guide,
            "coupling": [
                int(coupling.couples),
                int(coupling.combines),
                int(coupling.kinked),
                coupling.predictors,
            ],
            "axes": coupling.axes,
            "loss": encode(fitted.loss, "loss", arrays),
            "computes": _computed(guide.model, arguments, arrays),
        },
        "params": encode(fitted.params, "params", arrays, strict=True),
        "setup": encode(guide.setup_state(), "setup", arrays, strict=True),
        "fit": {
            **{name: float(getattr(fitted, name)) for name in _NUMBERS},
            "apart": float(fitted.apart),
            "stopped": str(fitted.stopped),
            "verdict": None if fitted._verdict is None else str(fitted._verdict),
            "losses": encode(losses, "losses", arrays),
        },
        "num_rows": fitted.num_rows,
        "arguments": arguments,
        "more": encode(fitted.more, "more", arrays),
    }
    write_archive(path, header, arrays)


def read(path: str | os.PathLike, model: Any, given: dict) -> dict[str, Any]:
    """
    See :func:`~numpyro_sgp.load`.

    :param given: what takes the place of what is in the file, None where nothing does:
        ``arguments`` (``(args, kwargs)`` of the model), ``approximation``, ``base_guide``
        and ``loss``.
    :return: what the attributes of a :class:`~numpyro_sgp.Fitted` are.
    """
    path = check_path(path)
    header, arrays = read_archive(path, _KEYS)
    recipe, fit, num_rows = header["guide"], header["fit"], header["num_rows"]

    def chosen(option, structure, decode=decode):
        return decode(structure, arrays) if given[option] is None else given[option]

    try:
        found: dict[str, Any] = {name: float(fit[name]) for name in _NUMBERS}
        found["apart"] = float(fit.get("apart", 0.0))  # files of former versions have none
        found["losses"] = decode(fit["losses"], arrays)
        for name, value, kinds in (
            ("stopped", fit["stopped"], (str,)),
            ("_verdict", fit["verdict"], (str, type(None))),
            ("num_rows", num_rows, (int, type(None))),
        ):
            if type(value) not in kinds:
                raise ValueError(f"{name} is {value!r}")
            found[name] = value
        found["params"] = decode(header["params"], arrays)
        found["more"] = decode(header["more"], arrays)
        setup = decode(header["setup"], arrays)
        try:
            found["loss"] = chosen("loss", recipe["loss"])
        except NotInFile:  # predictions do without it
            found["loss"] = None
        approximation = chosen("approximation", recipe["approximation"])
        base_guide = chosen("base_guide", recipe["base_guide"], _base_guide)
        found["examples"] = args, kwargs = chosen("arguments", header["arguments"])
        description, prefix = recipe["description"], recipe["prefix"]
        if coupling := recipe.get("coupling"):  # files of former versions have none
            axes = tuple(tuple(map(int, axes)) for axes in recipe.get("axes", ()))
            coupling = *map(int, coupling), axes
    except NotInFile as error:
        raise ValueError(
            f"{path} does not have all that makes the guide: {error}. Give it: "
            "numpyro_sgp.load(path, model, approximation=..., base_guide=..., "
            "args=(X, y)), of these what is missing."
        ) from None
    except Exception as error:  # what has the right checksum may be no fit all the same
        raise ValueError(f"{path}: {type(error).__name__}: {error}.") from error
    try:
        guide = AutoSparseGP(model, approximation, base_guide, prefix=prefix)
        _set_up(guide, setup, description, args, kwargs)
        guide.remember(given["arguments"], coupling)
        guide.check_params(found["params"])
    except Exception as error:  # of the model's code, which may raise anything
        raise ValueError(
            f"{path} is of another model or guide, or the arguments of the model are bad "
            f"({type(error).__name__}: {error})"
        ) from error
    before = recipe.get("computes")  # files of former versions have none
    now = _computed(model, header["arguments"], arrays)
    if isinstance(before, dict) and now and not _are_alike(before, now):
        warnings.warn(
            f"The model computes something else than that of which {path} is: a number or "
            "an object that it reads is another one. Predictions are by the fit's "
            "parameters in the model as it is now.",
            stacklevel=find_stack_level(),
        )
    return {**found, "guide": guide}


def _computed(model, arguments, arrays) -> dict[str, list] | None:
    """
    Numbers that a model computes at the rows of a file, by site, with latents at some
    values: densities, and the kernel matrix; None where that cannot be.
    """
    if "absent" in arguments or isinstance(model, Padded):
        return None
    anywhere = messages.Anywhere(model)
    found: dict[str, list] = {}
    try:
        args, kwargs = decode(arguments, arrays)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trace = messages.trace_of(
                anywhere, args, kwargs, at_site=messages.at_prior_mean
            )
            for name, site in trace.items():
                parts: tuple = ()
                if messages.is_latent_gp(site):
                    prior = messages.unwrap(site["fn"])[0]
                    K = np.asarray(prior.kernel(prior.X, prior.X))
                    parts = K, K * np.arange(1.0, 1.0 + K.shape[-1]), prior.mean
                elif site["type"] == "sample":
                    parts = (messages.log_prob(site),)
                sums = [float(np.sum(np.asarray(part, float))) for part in parts]
                if sums:
                    found[name] = [x if np.isfinite(x) else None for x in sums]
    except Exception:  # of the model's code, which may raise anything
        return None
    return None if anywhere.drawn else found


def _are_alike(before: dict, now: dict) -> bool:
    """Whether two models compute the same, one in float32 maybe."""
    if before.keys() != now.keys():
        return False
    try:
        pairs = [[np.asarray(of[name], float) for of in (before, now)] for name in now]
    except (TypeError, ValueError):  # what has the right checksum may be no numbers
        return False
    return all(
        a.shape == b.shape and np.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)
        for a, b in pairs
    )


def _examples(path, fitted, base_guide, arrays) -> dict:
    """Arguments to set the guide up with again, after a try; their absence if in vain."""
    guide, found = fitted.guide, {}
    given = guide.base_guide_given
    try:
        examples = fitted.examples
        if examples is None:
            kwargs = dict(fitted.kwargs)
            if isinstance(guide.model, Padded):  # all of these rows count
                kwargs.pop("rows_that_count", None)
            examples = first_rows(guide.model, fitted.args, kwargs)
        structure = encode(list(examples), "arguments", found)
        args, kwargs = decode(structure, found)
        base = given if "absent" in base_guide else _base_guide(base_guide, arrays)
        new = AutoSparseGP(guide.model, guide.approximation, base, prefix=guide.prefix)
        _set_up(new, guide.setup_state(), guide.known().description, args, kwargs)
        _check_same(guide.known(), new.known())
    except Exception as error:  # of the model's code, which may raise anything
        warnings.warn(
            f"{path} can be loaded with the training data alone, "
            "numpyro_sgp.load(path, model, args=(X, y)), since the guide cannot be set up "
            f"with their first two rows ({type(error).__name__}: {error})",
            stacklevel=find_stack_level(),
        )
        return {"absent": "two rows of the model's arguments do not do"}
    arrays |= found
    return structure


def _check_same(setup, of_few) -> None:
    """
    :raises ValueError: if a few rows say something else of a model than all of them.
    """
    for name in setup.latents:
        supports = (s.trace[name]["fn"].support for s in (setup, of_few))
        leaves = [jax.tree.leaves(biject_to(support)) for support in supports]
        for a, b in zip(*leaves, strict=True):
            if np.shape(a) == np.shape(b) and not np.allclose(a, b, rtol=1e-5, atol=0.0):
                raise ValueError(f"the support of '{name}' is another one")


def _set_up(guide, state, description, args, kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two rows where a minibatch has more, say
        guide.setup_from(state, description, *args, **kwargs)


def _named(guide, arrays) -> dict:
    """The base guide by its name and options."""
    given = guide.base_guide_given
    if guide.base_guide is None:
        given = autoguide.AutoDelta  # it is not used
    if not isinstance(given, functools.partial):
        given = functools.partial(given)
    names = [name for name, known in _BASE_GUIDES.items() if known is given.func]
    if not names or given.args:
        text = getattr(given.func, "__name__", type(given.func).__name__)
        return {"absent": f"base_guide is {text}, which is none of NumPyro's"}
    options = {
        key: encode(value, f"base_guide/{key}", arrays)
        for key, value in given.keywords.items()
        if key not in _NOT_KEPT
    }
    return {"name": names[0], "options": options}


def _base_guide(named, arrays):
    """The inverse of :func:`_named`."""
    if "absent" in named:
        raise NotInFile(named["absent"])
    options = {key: decode(part, arrays) for key, part in named["options"].items()}
    return functools.partial(_BASE_GUIDES[named["name"]], **options)
