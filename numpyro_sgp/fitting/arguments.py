"""What :func:`~numpyro_sgp.fit` takes, and what is wrong with it."""

import inspect
from typing import Any

import numpy as np

from numpyro_sgp._checks import check_key, check_model, check_positive
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.base import check_approximations
from numpyro_sgp.guides.checks import put_inside, scaled_alone, scaled_with_all
from numpyro_sgp.training.padding import Padded

_MOST_STARTS = 1000
#: Classes of guides of ``joint=True``, of one Gaussian over all sites, of a room above this
#: one; their results are those of their method ``fitted``.
JOINT_GUIDES: list[type] = []


def guide_of(approximation):
    """A guide, or that of a fit; else what there is."""
    svi = getattr(approximation, "svi", None)
    if isinstance(getattr(svi, "guide", None), tuple(JOINT_GUIDES)):
        return svi.guide
    is_class = isinstance(approximation, type)  # one that is not called yet
    return approximation if is_class else getattr(approximation, "guide", approximation)


def check_joint(approximation, is_joint, expectation, pad):
    """
    :raises ValueError: of what one Gaussian over all sites does not go with.
    """
    if expectation is not None:
        raise ValueError(
            "joint=True integrates the likelihood over linear predictors, by quadrature "
            "where there are up to three in a row. Leave the expectation out."
        )
    if pad:
        raise ValueError("joint=True is not for pad=True. Leave pad out.")
    if is_joint:
        return
    if hasattr(approximation, "field") and not hasattr(approximation, "svi"):
        raise ValueError(
            "A result of sgp.nested is no start for fit: give fit the approximation, such "
            "as SVGP(50)."
        )
    others = isinstance(approximation, AutoSparseGP) or hasattr(approximation, "field")
    if others or hasattr(approximation, "guide"):
        raise ValueError(
            "joint=True goes on from fits with joint=True of this process only, not from "
            "others, copies, files or a guide with a q for each site: give fit the "
            "approximation, such as SVGP(50)."
        )
    if any(option.is_auto for option in check_approximations(approximation)):
        raise ValueError(
            "joint=True needs the number of inducing points, as in SVGP(50), in the place "
            "of 'auto'."
        )


def check_arguments(model, approximation, data, rng_key, base_guide):
    """
    :raises TypeError: if one of them is something else.
    :raises ValueError: if a guide is of another model, or comes with a base guide.
    """
    check_model(model)
    guide = guide_of(approximation)
    if isinstance(guide, (AutoSparseGP, *JOINT_GUIDES)):
        if base_guide is not None:
            raise ValueError(
                "A guide has its base guide: leave out base_guide, or give fit the "
                "approximation in place of the guide."
            )
        own = guide.model.model if isinstance(guide.model, Padded) else guide.model
        # A bound method is another object each time that it is asked for.
        if own is not model and not (inspect.ismethod(own) and own == model):
            raise ValueError(
                "The guide is of another model than the one that is fitted. Make it of "
                "this one: AutoSparseGP(model, SVGP(50))."
            )
    elif guide is approximation:
        check_approximations(approximation)
    check_data(data)
    check_key(rng_key)
    if not (base_guide is None or callable(base_guide)):
        raise TypeError(
            "base_guide must be a class such as AutoNormal, or a function from a model to "
            f"a guide, got {base_guide!r}."
        )


def check_sites(guide) -> None:
    """
    :raises ValueError: if the model of a guide that is set up puts a latent at a value by
        itself, or a GP site is scaled, on its own or with all others.
    """
    if not isinstance(guide, AutoSparseGP):
        return
    if told := put_inside(guide.known().trace):
        raise ValueError(told)
    if told := scaled_alone(guide.known().trace):
        raise ValueError(
            f"{told} That is no prior of a Gaussian process with this kernel, and NUTS has "
            "another posterior. Scale observed sites alone."
        )
    if told := scaled_with_all(guide.known().trace):
        raise ValueError(
            f"{told} Steps and what is left to gain would be of that part of a nat: leave "
            "numpyro.handlers.scale out, fit needs no mean over rows."
        )


def check_data(data) -> None:
    """
    :raises TypeError: if data are no tuple (or list).
    """
    if not isinstance(data, tuple | list):
        raise TypeError(
            "data must be a tuple of the model's arguments, such as (X, y), got "
            f"{type(data).__name__}."
        )


def check_numbers(steps, seconds, batch_size, restarts, tolerance):
    """
    :raises ValueError: if one is not positive, or not whole where it has to be.
    """
    whole: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "restarts": restarts}
    for name, value in whole.items():
        if value is None and name != "restarts":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be a positive whole number, got {value!r}.")
    if restarts > _MOST_STARTS:
        raise ValueError(f"restarts must be at most {_MOST_STARTS}, got {restarts}.")
    for name, value in {"seconds": seconds, "tolerance": tolerance}.items():
        if value is not None or name == "tolerance":
            check_positive(value, name)
