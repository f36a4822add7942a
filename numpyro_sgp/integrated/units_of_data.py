"""Priors that are made of the data: with others, what is known of a latent is other."""

from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to

from numpyro_sgp._programs import is_data, on_data
from numpyro_sgp.integrated.effects import of_standardised
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.rows import origins


def in_units_of_data(field, args: tuple, kwargs: dict) -> tuple[str, ...]:
    """
    The hyperparameters whose support depends on arguments of the model, and the effects
    whose location or scale does: known without constraints, or standardised.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    for of in (_is_number, is_data):  # a model may ask for the values of numbers

        def made(values):
            filled = [values.get(str(i), leaf) for i, leaf in enumerate(leaves)]
            return _parts(field, *jax.tree.unflatten(structure, filled))

        values = {str(i): leaf for i, leaf in enumerate(leaves) if of(leaf)}
        with suppress(Exception):  # of the model's own code
            found = origins(made, values) if values else {}
            return tuple(name for name, names in found.items() if names)
    return ()


def _is_number(leaf) -> bool:
    return is_data(leaf) or isinstance(leaf, float | np.floating | jax.Array)


def check_units(field, known: tuple, args: tuple, kwargs: dict) -> None:
    """
    :param known: ``(args, kwargs)`` of the inference.
    :raises ValueError: if a prior is in other units with these arguments.
    """
    if field.of_data is None:
        field.of_data = in_units_of_data(field, *known)
    if not field.of_data:
        return

    def parts(args, kwargs):
        found = _parts(field, args, kwargs)
        return {name: found[name] for name in field.of_data}

    before, here = (on_data(parts, *each) for each in (known, (args, kwargs)))
    for name in field.of_data:
        pairs = zip(before[name], here[name], strict=True)
        if not all(
            np.allclose(a, b, rtol=1e-5, atol=0.0)
            for a, b in pairs
            if np.shape(a) == np.shape(b)
        ):
            raise ValueError(
                f"The prior of '{name}' is made of the data, and is another one with these "
                "arguments than with those of the training. Compute what it is made of "
                "(a range, say) before, and give the model the number."
            )


def _parts(field, args, kwargs) -> dict[str, list]:
    trace = messages.trace_of(field.model, args, kwargs, at_site=messages.at_prior_mean)
    found = {}
    for name in field.effects:
        fn = trace[name]["fn"]
        value, scales = of_standardised(fn, jnp.zeros(fn.shape()))
        found[name] = [value, *scales]
    for name in field.thetas:
        found[name] = jax.tree.leaves(biject_to(trace[name]["fn"].support))
    return found
