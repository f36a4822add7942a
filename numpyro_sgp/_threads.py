"""Threads: those of the LAPACK that JAX calls on a CPU, and those of users."""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import TypeVar

import jax
import scipy.linalg  # noqa: F401, whose library is looked for
from threadpoolctl import ThreadpoolController

#: Cores up to which one thread was faster (measured on two: docs/records/speed.md).
FEW_CORES = 4
_Callable = TypeVar("_Callable", bound=Callable)
_Class = TypeVar("_Class", bound=type)
_ALONE = threading.RLock()
_CHOSEN = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


def few_cores() -> bool:
    """Whether JAX runs on a CPU with up to :data:`FEW_CORES`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return jax.default_backend() == "cpu" and (cores or os.cpu_count() or 1) <= FEW_CORES


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
    if any(name in os.environ for name in _CHOSEN) or not few_cores():
        return False
    found = [
        library
        for library in ThreadpoolController().lib_controllers
        if library.internal_api == "openblas" and "scipy.libs" in library.filepath
    ]
    for library in found:
        library.set_num_threads(1)
    return bool(found)


def alone(fn: _Callable) -> _Callable:
    """
    One thread at a time in ``fn`` and all others that are marked so: what runs a model in
    NumPyro puts its handlers on one stack for all threads. Programs are compiled inside of
    ``jax.disable_jit`` too; the model is run to trace them.
    """

    @functools.wraps(fn)
    def call(*args, **kwargs):
        with _ALONE, jax.disable_jit(False):
            return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


def methods_alone(cls: _Class) -> _Class:
    """The public methods of a class, each :func:`alone`."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, alone(method))
    return cls
