"""Nested inference: one Gaussian over the field, and the hyperparameters integrated."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to
from tqdm import tqdm

from numpyro_sgp._programs import join_static, shared, split_static
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.nested.field import Field
from numpyro_sgp.nested.nodes import Search
from numpyro_sgp.nested.profile import Profile
from numpyro_sgp.nested.result import Nested
from numpyro_sgp.tracing import messages

_STARTS = 8


def nested(
    model: Callable,
    approximation: Any,
    data: tuple,
    rng_key: Array | None = None,
    *,
    max_nodes: int = 1000,
    seconds: float | None = None,
    progress_bar: bool = True,
    **kwargs,
) -> Nested:
    started = time.monotonic()
    if not isinstance(data, tuple | list):
        raise TypeError(
            "data must be the tuple of the model's arguments, such as (X, y), got "
            f"{type(data).__name__}."
        )
    if isinstance(max_nodes, bool) or not isinstance(max_nodes, int) or max_nodes < 1:
        raise ValueError(f"max_nodes must be a positive whole number, got {max_nodes!r}.")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}.")
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    args, kwargs = as_arrays(model, tuple(data), kwargs)
    guide = AutoSparseGP(model, approximation)
    guide.setup(*args, **kwargs)
    field = Field(guide, args, kwargs)
    starts = _starts(field, rng_key, args, kwargs)
    field.choose_layout(jnp.asarray(starts[0], field.dtype), args, kwargs)
    profile = Profile(field, args, kwargs)
    until = None if seconds is None else started + seconds
    with tqdm(disable=not progress_bar, bar_format="{desc} {elapsed}") as bar:

        def progress(what, number):
            shown = f"{number:.2f} nats" if what == "mode" else f"{number}"
            bar.set_description_str(f"{what}: {shown}", refresh=False)
            bar.update()

        nodes = Search(profile, max_nodes, until, progress).nodes(starts)
    took = time.monotonic() - started
    return Nested(field, nodes, args, kwargs, seconds=took)


def _starts(field, rng_key, args, kwargs) -> np.ndarray:
    """Unconstrained hyperparameters to begin from: medians and draws of the prior."""
    arrays, static = split_static((args, kwargs))

    def draw(arrays, keys):
        args, kwargs = join_static(arrays, static)

        def one(key):
            at_mean = messages.at_prior_mean
            trace = messages.trace_of(field.model, args, kwargs, key, at_site=at_mean)
            values = []
            for name in field.thetas:
                site = trace[name]
                free = biject_to(site["fn"].support).inv(site["value"])
                values.append(jnp.ravel(free))
            return jnp.concatenate([jnp.zeros(0), *values])

        return jax.lax.map(one, keys)

    keys = jax.random.split(rng_key, 15)
    draws = np.asarray(shared(draw, briefly=True)(arrays, keys), float)
    return np.concatenate([np.median(draws, axis=0)[None], draws[: _STARTS - 1]])
