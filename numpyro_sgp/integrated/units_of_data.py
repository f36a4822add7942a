"""Priors that are made of the data: with others, what is known of a latent is other."""

import warnings
from collections.abc import Callable
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.util import find_stack_level

from numpyro_sgp._programs import is_data, on_data
from numpyro_sgp.guides.row_latents import row_latents
from numpyro_sgp.integrated.effects import of_standardised
from numpyro_sgp.predictive.row_batches import first_rows
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.rows import origins


def check_units(field, known: tuple, args: tuple, kwargs: dict) -> None:
    """
    :param known: ``(args, kwargs)`` of the inference.
    :raises ValueError: if a prior is in other units with these arguments.
    """
    if name := in_other_units(field, known, args, kwargs):
        raise ValueError(
            f"The prior of '{name}' is made of the data, and is another one with these "
            "arguments than with those of the training. Compute what it is made of (a "
            "range, say) before, and give the model the number."
        )


def in_other_units(field, known: tuple, args: tuple, kwargs: dict) -> str:
    """
    A hyperparameter whose support, which is known without constraints, is another one with
    these arguments, or an effect whose location or scale is; empty if there is none.

    :param known: ``(args, kwargs)`` of the inference.
    """
    if field.of_data == ():  # so it is most often
        return ""
    parts = _parts_of(field, *known)
    if field.of_data is None:
        field.of_data = made_of_arguments(parts, *known)
    if not field.of_data:
        return ""
    before, here = (on_data(parts, *each) for each in (known, (args, kwargs)))
    for name in field.of_data:
        both = zip(before[name], here[name], strict=True)
        pairs = [(a, b) for a, b in both if np.shape(a) == np.shape(b)]
        size = max((np.max(np.abs(a), initial=0.0) for a, _ in pairs), default=0.0)
        if not all(np.allclose(*pair, rtol=1e-5, atol=1e-6 * size) for pair in pairs):
            return name
    return ""


def few_rows_do(field, args: tuple, kwargs: dict) -> bool:
    """Whether priors are those that they are with the two rows in files, else a warning."""
    name = ""
    with suppress(Exception):  # of a model that cannot be run with these
        few = first_rows(field.model, args, kwargs)
        name = in_other_units(field, (args, kwargs), *few)
    if name:
        warnings.warn(
            "The file can be loaded with the training data alone, numpyro_sgp.load(path, "
            f"model, args=(X, y)): the prior of '{name}' is made of more than their first "
            "two rows.",
            stacklevel=find_stack_level(),
        )
    return not name


def made_of_arguments(parts: Callable, args: tuple, kwargs: dict) -> tuple[str, ...]:
    """Names of the parts that depend on any number among the arguments."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    for of in (_is_number, is_data):  # a model may ask for the values of numbers

        def made(values):
            filled = [values.get(str(i), leaf) for i, leaf in enumerate(leaves)]
            return parts(*jax.tree.unflatten(structure, filled))

        values = {str(i): leaf for i, leaf in enumerate(leaves) if of(leaf)}
        with suppress(Exception):  # of the model's own code
            found = origins(made, values) if values else {}
            return tuple(name for name, names in found.items() if names)
    return ()


def _is_number(leaf) -> bool:
    return is_data(leaf) or isinstance(leaf, float | np.floating | np.ndarray | jax.Array)


def _parts_of(field, args, kwargs) -> Callable[[tuple, dict], dict[str, list]]:
    """
    From arguments to what latents are in units of, by name, given all latents as they are
    drawn with the first arguments: of a scale that is one of them nothing depends on data.
    """
    at_mean, of_rows = messages.at_prior_mean, row_latents(field.guide.known())
    names = [name for name in (*field.thetas, *field.effects) if name not in of_rows]

    def drawn(args, kwargs):
        trace = messages.trace_of(field.model, args, kwargs, at_site=at_mean)
        return {name: trace[name]["value"] for name in names}

    values = on_data(drawn, args, kwargs)

    def parts(args, kwargs):
        trace = messages.trace_of(field.model, args, kwargs, data=values, at_site=at_mean)
        found = {}
        for name in names:
            fn = trace[name]["fn"]
            if name in field.thetas:
                found[name] = jax.tree.leaves(biject_to(fn.support))
            else:
                value, scales = of_standardised(fn, jnp.zeros(fn.shape()))
                found[name] = [value, *scales]
        return found

    return parts
