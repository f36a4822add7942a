"""Whether joint draws at all rows fit into memory."""

import os

import jax
import numpy as np

_MATRICES = 3  # of N x N numbers: a covariance, what is subtracted, a factor


def memory() -> float:
    """Bytes of the machine, or of the device where JAX runs on another one than a CPU."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit", np.inf)
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return np.inf


def check_joint(name: str, value) -> None:
    """
    :param name: of a GP site.
    :param value: its draw, perhaps traced.
    :raises ValueError: if covariances of all its rows cannot fit.
    """
    rows = value.shape[-1]
    needed, there = _MATRICES * value.dtype.itemsize * float(rows) ** 2, memory()
    if needed > there:
        raise ValueError(
            f"GP site '{name}': joint draws at {rows} rows take covariances of "
            f"{needed / 1e9:.2g} GB, and there are {there / 1e9:.2g}. Give fewer rows, "
            "such as X[:5000], or use what takes them one by one (predict, log_score, "
            "posterior(X)) or draws whole functions (functions(key), or "
            "posterior(X)[site].sample_functions)."
        )
