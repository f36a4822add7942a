"""What a fit loses to float32: the same bound, at the same parameters, in float64."""

import copy
import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.svi import SVIState
from numpyro.primitives import Messenger

from numpyro_sgp.distributions.arguments import in_float64
from numpyro_sgp.fitting.problem import Problem
from numpyro_sgp.fitting.progress import CONVERGED, INTERRUPTED, NO_HIGHER, Limits, Trained
from numpyro_sgp.fitting.rounds import descent_of
from numpyro_sgp.fitting.verdict import ENOUGH_NATS, FLOAT32, Cause, unknown
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.prepared import guide_in_float64
from numpyro_sgp.training.descent import Descent
from numpyro_sgp.training.lbfgs import suits_natural

_MOST = 50  # iterations in float64
_FURTHER = 200  # of a training that goes on in it
_EACH, _LITTLE = 10, 0.05  # of which so many that gain less than this are the last
_HARDLY = 0.1  # nats at a fit's parameters below which there are none
# Nats that rounding moves the bound by from which on, in eight fits of real data, float64
# reached 3 to 25 nats more, and below less than one.
_ROUNDED = 4e-3
#: Products of all rows with M x M matrices from which on that is not looked at.
DEAR = 5e8
_BEYOND_ROUNDING = 5.0  # sds of the bound's
# Nats over a short step by which slopes are wrong, from which on float64 goes on.
_ASKEW = 0.1


def begin_float32(problem: Problem, steps: int) -> Callable[..., Cause] | None:
    """
    What tells how many nats float32 costs, to be called with a :class:`Descent` of the
    same problem in float32, if there is one, and with the row of the other parameters;
    compiles beside.

    The model is traced anew with data and parameters of 64 bits, at which the bound is
    looked at with q(u) at its optimum, and where that is another one again after some
    iterations of L-BFGS: what float32 hides from a training that has arrived there. The
    guide stays as it is.

    :param problem: what was trained, at the fit's parameters.
    :param steps: iterations that are affordable; 0 for none.
    :return: None in float64, and where the bound is random or too dear.
    """
    if jax.config.jax_enable_x64 or problem.random or not steps:  # type: ignore[attr-defined]
        return None
    if not isinstance(problem.guide, AutoSparseGP):
        return None
    wide = None
    try:
        with of_64_bits():
            wide = _in_float64(problem)
            wide.prepare(slopes=False)
    except Exception as error:  # a model that knows of 32 bits, or a device
        return lambda descent, others, failed=error: _unknown(failed)

    def finish(descent: Descent | None, others: Cause) -> Cause:
        try:
            descent = descent or descent_of(problem, jax.random.key(0))
            descent.start_at(problem.free)
            with of_64_bits():
                wide.step_scale = descent.step_scale
                found = _gained(wide, descent.loss, min(steps, _MOST))
        except Exception as error:
            return _unknown(error)
        return _told(*found, others, problem.guide)

    return finish


class Wide(Messenger):
    """
    Distributions of 64 bits where a model made them, outside of itself, of arrays of 32:
    their arithmetic may not mix the two.
    """

    def process_message(self, msg):
        if msg["type"] == "sample":
            msg["fn"] = jax.tree.map(_wide, msg["fn"])


def _wide(leaf):
    if not isinstance(leaf, jax.core.Tracer):
        return in_float64(leaf)
    return leaf.astype(jnp.float64) if leaf.dtype == jnp.float32 else leaf


def stopped_as(found: Trained, problem: Problem) -> str:
    """Why a training ended; and whether float32 may hide that it did not converge."""
    descent = found.descent
    if not found.stopped.startswith(CONVERGED) or descent is None:
        return found.stopped
    if descent.dtype == np.float64 or problem.work(problem.num_rows) > DEAR:
        return found.stopped
    moved = 0.0
    with suppress(ValueError):  # not finite any more
        descent.start_at(found.free)
        moved = descent.rounding()
    if not moved > _ROUNDED:
        return found.stopped
    return (
        f"{found.stopped}, as far as float32 goes: rounding moves the bound by {moved:.2g} "
        f"nats, and may hide many that {_wider()} would find"
    )


def _wider() -> str:
    """What to do where a bound is of 32 bits."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return "data of float64 (JAX has 64 bits, and they 32)"
    return "numpyro.enable_x64()"


def is_rounded(descent: Descent | None) -> bool:
    """Whether float32 rounding moves a bound by more than hardly anything."""
    moved = 0.0
    if descent is not None and descent.dtype == np.float32:
        with suppress(ValueError):
            moved = descent.rounding()
    return bool(moved > _ROUNDED)


def with_true_slopes(found: Trained, problem: Problem, limits: Limits) -> Trained:
    """
    Goes on in float64 where the slopes of float32 are not those of the bound: of a dense
    q(f) of some hundred rows, 21 nats below the maximum.
    """
    descent, guide = found.descent, problem.guide
    if descent is None or descent.dtype == np.float64 or problem.random:
        return found
    if not isinstance(guide, AutoSparseGP) or problem.work(problem.num_rows) > DEAR:
        return found
    converged = found.stopped.startswith(CONVERGED)
    if not (converged or found.stopped == NO_HIGHER) or not problem.natural:
        return found
    index = descent.index(set(descent.free) - set(descent.profiled))
    if not index.size or limits.steps is not None or limits.reached(0):
        return found  # steps in float64 would be counted among the others
    try:
        descent.start_at(found.free)
        error = descent.slope_error(index)
        if not np.isfinite(error) or error < _ASKEW:
            return found
        if error < _BEYOND_ROUNDING * descent.rounding():
            return found
        with of_64_bits():
            wide = _in_float64(problem)
            wide.step_scale = descent.step_scale
            wide.start_at(in_float64(found.free))
            settled = _go_on(wide, _FURTHER, limits)
            ended = wide.free_now()
        descent.start_at({k: _like(ended[k], value) for k, value in found.free.items()})
    except KeyboardInterrupt:
        return replace(found, stopped=INTERRUPTED)
    except Exception:  # a model that knows of 32 bits, or what is not finite
        return found
    if descent.loss >= -found.bound:
        return found
    losses = np.append(found.losses, descent.loss)
    there = {"free": descent.free_now(), "bound": -descent.loss, "losses": losses}
    stopped = found.stopped if converged or not settled else CONVERGED
    return replace(found, **there, stopped=limits.reached(0) or stopped)


def _like(tree, other):
    return jax.tree.map(lambda a, b: jnp.asarray(np.asarray(a), b.dtype), tree, other)


@contextmanager
def of_64_bits():
    """JAX in 64 bits, in this thread; what a model warns of it has warned of before."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _unknown(error: Exception) -> Cause:
    return Cause(FLOAT32, np.nan, told=unknown(error))


def _wide_parts(problem: Problem):
    """Model and guide, parameters and data, of 64 bits."""
    svi = copy.copy(problem.svi)
    svi.guide = guide_in_float64(problem.guide)
    svi.model, svi.guide.model = Wide(svi.model), Wide(svi.guide.model)
    svi.optim = SimpleNamespace(get_params=lambda free: free)
    kwargs = {**svi.static_kwargs, **problem.kwargs}
    free, args, kwargs = in_float64((problem.free, problem.args, kwargs))
    return svi, SVIState(free, None, problem.state.rng_key), args, kwargs


def problem_in_float64(problem: Problem) -> Problem:
    """The same problem of 64 bits, for use within :func:`of_64_bits`."""
    return problem.in_place_of(*_wide_parts(problem))


def _in_float64(problem: Problem) -> Descent:
    """The loss of the same model, data and guide, of 64 bits."""
    svi, state, args, kwargs = _wide_parts(problem)
    natural = bool(problem.natural) or suits_natural(svi)
    options = {"natural": natural, "families": problem.natural, "briefly": True}
    return Descent(svi, state, args, kwargs, **options)


def _gained(wide: Descent, before: float, most: int) -> tuple[float, float, int]:
    """
    How much less a loss is in float64 at the same parameters and after more iterations,
    and how many these were.
    """
    here = before - wide.value()
    if here < _HARDLY:
        return here, here, 0
    wide.start()
    _go_on(wide, most)
    return before - wide.losses[0], before - wide.loss, len(wide.losses) - 1


def _go_on(wide: Descent, most: int, limits: Limits | None = None) -> bool:
    """Iterations of L-BFGS, until some of them gain little; whether that was the end."""
    losses, settled = wide.losses, False
    enough = _LITTLE if limits is None else min(_LITTLE, 0.5 * limits.tolerance)

    def show(_):
        nonlocal settled
        settled = len(losses) > _EACH and losses[-1 - _EACH] - losses[-1] < enough
        if settled or (limits is not None and limits.reached(0)):
            raise StopIteration

    index = wide.index(set(wide.free) - set(wide.profiled))
    if index.size:
        result = wide.run(index, most, 1e-15, show)
        settled = settled or wide.decrement(index, result) < enough
    return settled


def _told(here: float, after: float, number: int, others: Cause, guide) -> Cause:
    """The row; what more iterations in float32 would gain too is not of it."""
    beyond = after - max(others.nats, 0.0) if np.isfinite(others.nats) else here
    nats = float(max(here, beyond, 0.0))
    number_here, number_after = (Cause("", max(n, 0.0)).number for n in (here, after))
    told = f"in float64 the bound is {number_here} nats higher at these parameters"
    told += f", {number_after} after {number} more iterations" if number else ""
    mend = ""
    if here < -ENOUGH_NATS:  # q(u) is at its best there, so that it cannot be
        nats = -here
        told = f"in float64 the bound is {Cause('', nats).number} nats lower at these "
        told += "parameters: rounding has raised that of float32"
    if nats > ENOUGH_NATS:
        mend = wider_numbers(guide, "before the fit", jitter=here >= -ENOUGH_NATS)
    return Cause(FLOAT32, nats, told=told, mend=mend)


def wider_numbers(guide, when: str, jitter: bool = True) -> str:
    """
    What to do where float32 costs nats.

    :param when: when JAX is to be given 64 bits.
    :param jitter: whether a smaller jitter may help, where it is that of the dtype.
    """
    mend, options = f"numpyro.enable_x64() {when}", guide.approximations.values()
    by_dtype = [o for o in options if getattr(o, "jitter", 0.0) is None]
    if by_dtype and jitter:
        mend += f", or at least {type(by_dtype[0]).__name__}(..., jitter=1e-6)"
    return mend
