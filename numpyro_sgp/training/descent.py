"""The loss of an SVI as a function of one vector, which L-BFGS minimises."""

import warnings
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.svi import SVIRunResult, SVIState
from numpyro.primitives import Messenger
from scipy.optimize import OptimizeResult, minimize

from numpyro_sgp._flat import Flat
from numpyro_sgp._programs import NEEDS_KNOWN_DATA, Data, shared, split
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.tracing import checks, supports
from numpyro_sgp.training.closed_form import gaussian_optimum
from numpyro_sgp.training.natural_gradients import (
    natural_descent,
    natural_families,
    natural_steps,
    pseudo_data_names,
)

_NATURAL_STEPS = 50  # before each evaluation, at most
_NATURAL_TOL = 1e-11  # of the loss
_NATURAL_NATS = 1e-6  # what a step gains where q(u) has arrived
_NO_SLOPES = "Or its slopes by q(u) are not finite there, which count as such. "
_CORRECTIONS = 50  # pairs of steps that L-BFGS remembers
_ABNORMAL = 2  # SciPy's status where a line search failed
_NEARBY = 1e-2  # how far away the curvature is looked at, in units of the scales
_APART = 0.05  # and the slope, where differences of the loss are more than its rounding

#: Where to look if a likelihood is not finite at values of f that a posterior has.
LOOK_FOR = (
    "Look for NaN in the data and in what numpyro.factor or the model's own arithmetic "
    "takes (a mask leaves their derivatives NaN: put a number in its place), for overflow, "
    "as of exp(f), and for logs of zero, as of a difference of two cdfs far from the data "
    "(clip it, or take an IntervalCensoredDistribution)"
)


class Descent:
    """
    The loss as a function of one vector, the best point met, and the way there.

    :param svi: the inference problem.
    :param state: where to start.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model, the static ones too.
    :param natural: whether q(u) is at its optimum for the other parameters.
    :param families: those that natural steps are for, of
        :func:`~numpyro_sgp.training.natural_gradients.natural_families`; all if None.
    :param scales: what a step of length one is in each parameter, arrays (or trees of
        them) like the parameters, by name; ones where left out.
    :param briefly: whether the program is to be compiled soon rather than to run fast.
    :param often: whether it runs a thousand times for all that.
    """

    def __init__(
        self,
        svi,
        state,
        args,
        kwargs,
        natural=False,
        families=None,
        scales=None,
        briefly=False,
        often=False,
    ):
        self.svi, self.args, self.kwargs = svi, args, kwargs
        _check_fixed(svi, natural)
        self.free = svi.optim.get_params(state.optim_state)
        self._flat = Flat(self.free)
        self.x = self._flat.ravel(self.free).astype(np.float64)
        if self.x.size == 0:
            raise ValueError("Model and guide have no parameters to train.")
        self.dtype, self.loss, self.gradient = self._flat.dtype, np.inf, None
        self.losses, self.mutable, self.rng_key = [], state.mutable_state, state.rng_key
        #: Number of evaluations, those in natural steps counted.
        self.work = 0
        self._rejected = False
        #: Whether JAX had 64 bits, and what the model computed, where that is known.
        self.computed: tuple[bool, Any] = False, None
        #: Whether L-BFGS ended next to parameters at which the loss is not finite.
        self.at_edge = False
        ones = jax.tree.map(lambda p: np.ones(p.shape, p.dtype), self.free)
        #: What a step of length one is, in the order of ``x``.
        self.step_scale = self._ravelled({**ones, **(scales or {})})
        # As svi.evaluate does, so that it gives the same number.
        _, loss_key = split(state.rng_key, 2)

        given = Data(args, kwargs)
        self._data, filled = given.arrays, given.filled

        def at(free, data):
            args, kwargs = filled(data)
            given = (svi.model, svi.guide, *args)
            params = svi.constrain_fn(free)
            with _WholePlates():
                if not jax.tree.leaves(state.mutable_state):
                    out = svi.loss.loss(loss_key, params, *given, **kwargs)
                    return sum(jax.tree.leaves(out)), None  # by site, with sum_sites=False
                params.update(jax.lax.stop_gradient(state.mutable_state))
                out = svi.loss.loss_with_mutable_state(loss_key, params, *given, **kwargs)
                loss = sum(jax.tree.leaves(out["loss"]))
                return loss, out["mutable_state"]

        #: The loss and mutable state: traced once, however often the program has it.
        self._at, self._traced_anew = jax.jit(at), at
        self.profiled, to_optimum = [], None
        if natural:
            self.profiled, to_optimum = self._profile(loss_key, families, filled)

        def loss(flat, data):
            free, q, count, moves = self._flat.unravel(flat), {}, 0, True
            if natural:
                # At the optimum of q(u) the derivative by it is zero.
                q, count, moves = to_optimum(jax.lax.stop_gradient(free), data)
                q = jax.lax.stop_gradient(q)
            value, mutable = self._at({**free, **q}, data)
            # Where slopes by q(u) are not finite it is at no optimum, but where it was.
            return jnp.where(moves, value, jnp.inf), (mutable, q, count)

        self._value = shared(lambda x, data: loss(x, data)[0], briefly)
        self._value_and_grad_of = jax.value_and_grad(loss, has_aux=True)
        self._value_and_grad = shared(self._value_and_grad_of, briefly, often)

    def _profile(self, loss_key, families, filled):
        """
        Names of what q(u) is made of, and from unconstrained parameters and data to its
        optimum for the other parameters, how many steps led there, and whether any could.
        """
        svi, pairs = self.svi, None
        given = self.free, self._data, filled, _WholePlates
        if (closed := gaussian_optimum(svi, loss_key, *given)) is not None:
            names, to_optimum = closed

            def at_once(free, data):
                q, finite = to_optimum(free, data)
                return q, 0, finite

            return names, at_once
        with suppress(ValueError):
            pairs = pseudo_data_names(svi.guide).values()
        if pairs is not None:

            def on_pseudo_data(free, data):
                params, limits = svi.constrain_fn(free), (_NATURAL_STEPS, _NATURAL_TOL)
                with _WholePlates():
                    moved, count = natural_steps(
                        svi, loss_key, params, *limits, *filled(data)
                    )
                return {name: moved[name] for pair in pairs for name in pair}, count, True

            return [name for pair in pairs for name in pair], on_pseudo_data
        families = families or natural_families(svi.guide, self.free)

        def by_families(free, data):
            def loss(free):
                return self._at(free, data)[0]

            limits = _NATURAL_STEPS, _NATURAL_NATS
            q, found, count = natural_descent(loss, families, free, *limits)
            return q, count, jnp.isfinite(found)

        return [full for _, names in families for full in names.values()], by_families

    def prepare(self, slopes: bool = True) -> None:
        """
        Begins to compile beside what else is done.

        :param slopes: whether the loss with its gradient, or for :meth:`value` alone.
        """
        with suppress(*NEEDS_KNOWN_DATA):
            run = self._value_and_grad if slopes else self._value
            run.prepare(np.asarray(self.x, self.dtype), self._data)

    def value(self) -> float:
        """The loss at the best point, without a gradient."""
        return float(self._value(np.asarray(self.x, self.dtype), self._data))

    def rounding(self) -> float:
        """Sd of the loss where parameters differ in their last digits."""
        rng, eps, losses = np.random.default_rng(0), np.finfo(self.dtype).eps, []
        for _ in range(6):
            x = self.x * (1.0 + 3.0 * eps * rng.normal(size=self.x.shape))
            (loss, _), _ = self._value_and_grad(np.asarray(x, self.dtype), self._data)
            losses.append(float(loss))
        return float(np.std(losses))

    def slope_error(self, index) -> float:
        """
        How far the derivative along the slope at the best point is from what differences
        of the loss say, in nats over a step of length .05 in units of the scales.

        :param index: entries of the vector that move.
        """
        x, scale = self.x.copy(), self.step_scale[index]
        slope = self.gradient[index] * scale
        size = float(np.linalg.norm(slope))
        if size == 0.0:
            return 0.0
        step, losses = np.zeros_like(x), []
        step[index] = _APART * slope / size * scale
        for place in x + step, x - step:
            value, _ = self._value_and_grad(np.asarray(place, self.dtype), self._data)
            losses.append(float(value[0]))
        return abs(0.5 * (losses[0] - losses[1]) - _APART * size)

    @property
    def start_params(self) -> dict:
        """Constrained parameters at the start."""
        return self.svi.constrain_fn(self.free)

    def index(self, names) -> np.ndarray:
        """Where in the vector parameters are."""
        chosen = {
            name: jax.tree.map(lambda v, name=name: np.full(np.shape(v), name in names), p)
            for name, p in self.free.items()
        }
        return np.flatnonzero(self._ravelled(chosen))

    def start(self):
        """The first evaluation, with its errors."""
        try:
            value, gradient = self.evaluate(self.x)
        except NEEDS_KNOWN_DATA:  # a model that looks at its data, as it may in svi.run
            data, traced = self._data, self._value_and_grad_of
            self._data, self._at = [], self._traced_anew
            self._value_and_grad = shared(lambda x, _: traced(x, data))
            value, gradient = self.evaluate(self.x)
        if self.gradient is None:
            parts = self._flat.unravel(gradient)
            bad = [
                name
                for name, part in parts.items()
                if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(part))
            ]
            raise ValueError(
                f"L-BFGS cannot start: the loss is {value:g} at the starting parameters"
                + (f", and its gradient is not finite for {bad}. " if bad else ". ")
                + (_NO_SLOPES if value == np.inf and self.profiled else "")
                + supports.without_density(self.svi.model, self.args, self.kwargs)
                + f"{LOOK_FOR}. Or start elsewhere (init_params of svi.init, init_loc_fn "
                "of the guide), or, in float32, try numpyro.enable_x64()."
            )
        self.losses.append(self.loss)

    def start_at(self, free: dict):
        """Begins anew elsewhere, with the same program."""
        self.x = self._ravelled(free)
        self.loss, self.gradient, self.losses = np.inf, None, []
        self.start()

    def look_at(self, free: dict):
        """Evaluates another place, which is the best one then if it is better."""
        self.evaluate(self._ravelled(free))

    def evaluate(self, x):
        """Loss and gradient; where both are finite, perhaps the best point."""
        with np.errstate(over="ignore"):
            x = np.asarray(x, self.dtype)
        (value, (mutable, q, count)), gradient = self._value_and_grad(x, self._data)
        self.work += 1 + int(count)
        value, gradient = float(value), np.asarray(gradient, np.float64)
        if np.isfinite(value) and np.isfinite(gradient).all() and value < self.loss:
            if q:
                x = self._ravelled({**self._flat.unravel(x), **q})
            self.x, self.loss, self.gradient = np.array(x, np.float64), value, gradient
            self.mutable = mutable
        return value, gradient

    def run(self, index, max_iterations, tol, show) -> OptimizeResult:
        """
        L-BFGS over some entries of the vector, from the best point.

        :param index: which entries.
        :param max_iterations: how long at most.
        :param tol: relative decrease at which to stop.
        :param show: called with the loss after each iteration; may raise StopIteration.
        :return: what SciPy returned, of steps in units of the scales.
        """

        def callback(intermediate_result):
            self._rejected = False
            self.losses.append(self.loss)
            show(self.loss)

        self._rejected = False
        scale = self.step_scale[index]
        result = minimize(
            self._along(index),
            self.x[index] / scale,
            method="L-BFGS-B",
            jac=True,
            callback=callback,
            options={
                "maxiter": max_iterations,
                "maxfun": 20 * (max_iterations + 1),
                "maxcor": _CORRECTIONS,
                "ftol": max(tol, float(np.finfo(self.dtype).eps)),
            },
        )
        if self.loss < self.losses[-1]:  # met in a line search that went no further
            self.losses.append(self.loss)
        self.at_edge = self._rejected and result.status == _ABNORMAL
        return result

    def decrement(self, index, result) -> float:
        """
        What the loss would fall by to its minimum, were it a parabola: by the curvature
        that L-BFGS met on its way, or, where it found none, that along the slope.

        :param index: which entries.
        :param result: of :meth:`run`.
        """
        scale = self.step_scale[index]
        slope = self.gradient[index] * scale
        size = float(np.linalg.norm(slope))
        if result.hess_inv.n_corrs or size == 0.0:
            return 0.5 * float(slope @ (result.hess_inv @ slope))
        x = self.x.copy()
        x[index] -= _NEARBY * slope / size * scale
        value, gradient = self.evaluate(x)
        if not np.isfinite(value):
            return np.inf
        if self.loss < self.losses[-1]:
            self.losses.append(self.loss)
        bent = float((slope - gradient[index] * scale) @ slope) / (_NEARBY * size)
        return 0.5 * size**2 / bent if bent > 0.0 else np.inf

    def free_now(self) -> dict:
        """Unconstrained parameters at the best point."""
        free = self._flat.unravel(self.x.astype(self.dtype))
        return jax.device_put(free)

    def _ravelled(self, tree) -> np.ndarray:
        return self._flat.ravel(tree).astype(np.float64)

    def _along(self, index):
        """What SciPy minimises: the loss as a function of some entries."""

        scale = self.step_scale[index]

        def function(entries):
            x = self.x.copy()
            x[index] = entries * scale
            value, gradient = self.evaluate(x)
            if not (np.isfinite(value) and np.isfinite(gradient).all()):
                self._rejected = True
                value, gradient = self._wall(x)
            return value, gradient[index] * scale

        return function

    def _wall(self, x):
        """
        What to say of a point where the loss is not finite.

        At an infinite value, or a huge one, SciPy's line search interpolates a step of
        zero and calls that convergence. A parabola that has the slope of the loss at the
        best point and its minimum at a quarter of the way to x takes it there instead.
        """
        step = x - self.x
        rise = max(abs(self.gradient @ step), 1e-8 * max(abs(self.loss), 1.0))
        return self.loss + rise, 3.0 * rise * step / max(step @ step, 1e-300)

    def result(self) -> SVIRunResult:
        """The best point, as ``svi.run`` would return it."""
        state = SVIState(self.svi.optim.init(self.free_now()), self.mutable, self.rng_key)
        losses = jnp.asarray(self.losses, jnp.result_type(float))
        return SVIRunResult(self.svi.get_params(state), state, losses)


def warn_of_edge() -> None:
    """What to say, to who called the caller, where a :class:`Descent` is at an edge."""
    warnings.warn(
        "L-BFGS stopped where it found no lower loss next to parameters at which "
        "the loss or its gradient is not finite. Look at the result's params for one "
        "at the edge of its range, or, in float32, try numpyro.enable_x64().",
        stacklevel=4,  # one is of the lock
    )


def _check_fixed(svi, natural):
    """
    Refuses a KL by random numbers, which has no minimum with these fixed, and what has no
    plain gradient.
    """
    if not isinstance(svi.guide, AutoSparseGP):
        return
    is_drawn = getattr(svi.loss, "draws_kl", True)
    for name, option in svi.guide.approximations.items():
        if is_drawn and getattr(option, "num_columns", None) is not None:
            raise ValueError(
                f"GP site '{name}' has {option}, whose KL divergence is estimated from "
                "random columns, and L-BFGS keeps its random numbers. Use "
                "num_columns=None, or train by SVI."
            )
        if is_drawn and getattr(option, "kl", None) == "stochastic":
            raise ValueError(
                f"GP site '{name}' estimates its KL by random vectors (kl='stochastic'), "
                "and with these fixed, as L-BFGS keeps them, it has no minimum. Use "
                "kl='exact', or train by SVI."
            )
        if option.family.is_natural and not natural:
            raise ValueError(
                f"GP site '{name}' has covariance='{option.family.name}', whose "
                "derivatives are natural gradients, which L-BFGS cannot use. Train it "
                "by SVI with natural_gradients, or use covariance='pseudo_data' here."
            )


class _WholePlates(Messenger):
    """Refuses subsampling: with its random numbers fixed, one minibatch would be all."""

    def process_message(self, msg):
        if msg["type"] == "plate":
            checks.check_whole_plates(
                {msg["name"]: msg},
                "L-BFGS keeps its random numbers, and so would see this one only",
            )
