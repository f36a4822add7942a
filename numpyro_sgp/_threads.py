"""Threads of the LAPACK that JAX calls on a CPU."""

import functools
import os

import jax
import scipy.linalg  # noqa: F401, whose library is looked for
from threadpoolctl import ThreadpoolController

#: Cores up to which one thread was faster (measured on two: docs/records/speed.md).
FEW_CORES = 4
_CHOSEN = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


@functools.cache
def one_thread() -> bool:
    """
    Has SciPy's OpenBLAS, by which JAX factorises and solves on a CPU, work with one thread
    from now on, on machines with up to :data:`FEW_CORES`: after each call its threads wait
    in a loop for the next one, on cores that JAX's own threads need. It stays so, since the
    steps of an SVI or MCMC are run by NumPyro. NumPy's library is another one and keeps its
    threads. Nothing is done where ``OPENBLAS_NUM_THREADS`` or ``OMP_NUM_THREADS`` is set,
    or JAX runs on something else.

    :return: whether it was done.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    many = (cores or os.cpu_count() or 1) > FEW_CORES
    if many or any(name in os.environ for name in _CHOSEN):
        return False
    if jax.default_backend() != "cpu":
        return False
    found = [
        library
        for library in ThreadpoolController().lib_controllers
        if library.internal_api == "openblas" and "scipy.libs" in library.filepath
    ]
    for library in found:
        library.set_num_threads(1)
    return bool(found)
