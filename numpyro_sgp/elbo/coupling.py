"""Whether a likelihood ties the latent values at different rows together."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def couples_rows(
    log_density: Callable[[dict[str, Array]], Array],
    shapes: dict[str, tuple],
    dtype,
    coupled=frozenset(),
) -> bool:
    r"""
    Whether ``log_density`` has a second derivative that mixes two rows of X in one latent
    function.

    If it has none, its expectation needs only the marginals of f: values of different
    functions are independent anyhow. With signs s for the rows and the Hessian H of one
    function, :math:`s \odot H s` does not depend on s exactly when H is diagonal, so two
    draws of s decide. Each row is judged by its own curvature.

    :param log_density: from values of GP sites, of the given shapes, to a number.
    :param shapes: ``batch_shape + (N,)`` of each site.
    :param dtype: dtype of the values.
    :param coupled: sites whose latent functions are dependent, so that rows of different
        functions must not be mixed either.
    :return: True if rows are mixed; False also where no derivative is to be had.
    """
    rng = np.random.default_rng(0)
    f = {k: jnp.asarray(0.3 * rng.normal(size=s), dtype) for k, s in shapes.items()}
    tolerance = max(1e3 * float(jnp.finfo(dtype).eps), 1e-9)
    for name, shape in shapes.items():
        num_functions, rows = int(np.prod(shape[:-1])), shape[-1]
        together = name in coupled

        @jax.jit
        def curvature(
            s, name=name, shape=shape, num_functions=num_functions, together=together
        ):
            def along(function):
                direction = jnp.reshape(function[:, None] * s, shape)

                def slope(value):
                    return jax.grad(lambda v: log_density({**f, name: v}))(value)

                _, Hs = jax.jvp(slope, (f[name],), (direction,))
                Hs = jnp.reshape(Hs, (num_functions, -1))
                return s * (Hs if together else function @ Hs)

            if together:
                return along(jnp.ones(num_functions, dtype))
            return jax.vmap(along)(jnp.eye(num_functions, dtype=dtype))

        try:
            signs = rng.choice([-1.0, 1.0], size=(2, rows))
            a, b = (np.asarray(curvature(jnp.asarray(s, dtype))) for s in signs)
        except (TypeError, ValueError, NotImplementedError):
            return False  # not differentiable: a callback, integer code
        size = np.maximum(np.abs(a), np.abs(b))
        if np.any(np.abs(a - b) > tolerance * size):
            return True
    return False
