"""Inputs and kernel values as concrete NumPy arrays, checked at the border."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from numpyro_sgp._checks import real
from numpyro_sgp._programs import at_once


def host_inputs(X: Any, name: str) -> tuple[NDArray, np.dtype]:
    """
    Check inputs and bring them to the host.

    :param X: concrete inputs, shape ``(N, D)``.
    :param name: what the argument is called, for the messages.
    :return: the inputs in float64 (values as their own dtype holds them), and that
        dtype: of ``X``, or JAX's default floating one where ``X`` is not floating.
    """
    if isinstance(X, jax.core.Tracer):
        raise TypeError(
            f"{name} is traced, but inducing points are chosen from concrete inputs. "
            f"Choose them outside jax.jit, jax.vmap and jax.grad."
        )
    X = np.asarray(real(X, name))
    if X.ndim != 2 or X.shape[1] == 0:
        cure = f" Use {name}[:, None] for inputs of one column." if X.ndim == 1 else ""
        raise ValueError(
            f"{name} must have shape (N, D) with D at least 1, got {X.shape}.{cure}"
        )
    dtype = X.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = np.dtype(jnp.result_type(float))
    X = X.astype(dtype).astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(X).all(axis=1))
    if bad.size:
        first = ", ".join(str(row) for row in bad[:5])
        more = ", ..." if bad.size > 5 else ""
        raise ValueError(
            f"{name} has NaN or infinity in {bad.size} of {len(X)} rows: "
            f"{first}{more}. Drop or fill these rows first."
        )
    return X, dtype


def kernel_diagonal(kernel: Any, X: NDArray) -> tuple[NDArray, np.dtype]:
    """Values of ``kernel.diag(X)`` in float64, and the precision they came in."""
    # Within jax.jit, operations on concrete arrays would be staged out otherwise.
    with jax.ensure_compile_time_eval():
        values = _concrete(kernel.diag(jnp.asarray(X)))
    precision = np.dtype("float64" if values.dtype == np.float64 else "float32")
    return _checked(values, "kernel.diag(X)", X.shape[:1]), precision


def kernel_matrix(kernel: Any, X1: NDArray, X2: NDArray) -> NDArray:
    """Values of ``kernel(X1, X2)`` in float64, shape ``(N1, N2)``."""
    if X1.shape[0] == 0:  # so that kernels need not know of empty inputs
        return np.zeros((0, X2.shape[0]))
    with jax.ensure_compile_time_eval():
        given = kernel, jnp.asarray(X1), jnp.asarray(X2)
        values = _concrete(_matrix(*given, static=(X2 is X1,)))
    return _checked(values, "kernel(X1, X2)", (X1.shape[0], X2.shape[0]))


@at_once
def _matrix(kernel, X1, X2, same):
    return kernel(X1, X1 if same else X2)


def _concrete(values: Any) -> NDArray:
    if isinstance(values, jax.core.Tracer):
        raise TypeError(
            "The kernel's hyperparameters are traced, but inducing points are chosen "
            "and assessed at concrete ones. Build the kernel from numbers."
        )
    return np.asarray(values)


def _checked(values: NDArray, what: str, shape: tuple[int, ...]) -> NDArray:
    if values.shape != shape:
        raise ValueError(
            f"{what} must have shape {shape}, got {values.shape}. Give one kernel, "
            f"without batch dimensions."
        )
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError(
            f"{what} has values that are NaN or infinite. Check the kernel's "
            f"hyperparameters, and the scale of the inputs."
        )
    return values
