"""Whether a likelihood ties the latent values at different rows together."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def couples_rows(
    log_density: Callable[[dict[str, Array]], Array], shapes: dict[str, tuple], dtype
) -> bool:
    r"""
    Whether ``log_density`` has a second derivative that mixes two rows of X.

    If it has none, it is a sum over rows, and its expectation needs only the marginals
    of f. With signs s for the rows, :math:`s \odot H (s \odot c)` does not depend on s
    exactly when the Hessian H mixes no rows, so two draws of s decide.

    :param log_density: from values of GP sites, of the given shapes, to a number.
    :param shapes: ``batch_shape + (N,)`` of each site.
    :param dtype: dtype of the values.
    :return: True if rows are mixed; False also where no derivative is to be had.
    """
    rng = np.random.default_rng(0)
    f = {k: jnp.asarray(0.3 * rng.normal(size=s), dtype) for k, s in shapes.items()}
    c = {k: jnp.asarray(rng.normal(size=(*s[:-1], 1)), dtype) for k, s in shapes.items()}
    rows = max(shape[-1] for shape in shapes.values())
    signs = jnp.asarray(rng.choice([-1.0, 1.0], size=(2, rows)), dtype)

    def signed(s, tree):
        return {
            k: s[: shapes[k][-1]] * jnp.broadcast_to(v, shapes[k]) for k, v in tree.items()
        }

    @jax.jit
    def curvature(s):
        _, Hd = jax.jvp(jax.grad(log_density), (f,), (signed(s, c),))
        return signed(s, Hd)

    try:
        first, second = (jax.tree.leaves(curvature(s)) for s in signs)
    except (TypeError, ValueError, NotImplementedError):
        return False  # not differentiable: a callback, integer code
    for a, b in zip(first, second, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        size = max(np.nanmax(np.abs(a)), np.nanmax(np.abs(b)))
        if np.nanmax(np.abs(a - b)) > 1e-3 * size:
            return True
    return False
