"""Full-batch training by L-BFGS, of all parameters together or of blocks in turn."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer.svi import SVI, SVIRunResult, SVIState
from numpyro.primitives import Messenger
from scipy.optimize import minimize
from tqdm import tqdm

from numpyro_sgp._programs import NEEDS_KNOWN_DATA
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.elbo import TraceGP_ELBO
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.parameters import GROUPS, parameter_blocks
from numpyro_sgp.tracing import checks
from numpyro_sgp.tracing.row_indices import check_row_indices
from numpyro_sgp.training.natural_gradients import (
    natural_descent,
    natural_families,
    natural_steps,
    pseudo_data_names,
)

_DATA_SIZE = 256  # numbers in an array of data, rather than an option
_NATURAL_STEPS = 50  # before each evaluation, at most
_NATURAL_TOL = 1e-11  # of the loss
_NATURAL_NATS = 1e-6  # what a step gains where q(u) has arrived
_CORRECTIONS = 20  # pairs of steps that L-BFGS remembers
_ABNORMAL = 2  # SciPy's status where a line search failed


class FitInterrupted(RuntimeError):
    """
    Training stopped half-way, by an error in the loss (of a likelihood that calls other
    software, say) or by the user; ``__cause__`` is what stopped it.

    :param message: what happened.
    :param result: the :class:`~numpyro.infer.svi.SVIRunResult` at the best parameters
        so far; go on with ``init_state=error.result.state``.

    >>> from numpyro_sgp import FitInterrupted
    >>> issubclass(FitInterrupted, RuntimeError)
    True
    """

    def __init__(self, message: str, result: SVIRunResult | None = None):
        super().__init__(message)
        self.result = result


def fit_lbfgs(
    svi: SVI,
    rng_key: jax.Array,
    *args,
    max_iterations: int | Mapping[str, int] = 1000,
    blocks: Sequence | None = None,
    sweeps: int = 50,
    tol: float = 1e-12,
    sweep_tol: float = 1e-6,
    natural: bool | None = None,
    init_params: dict | None = None,
    init_state: SVIState | None = None,
    progress_bar: bool = True,
    **kwargs,
) -> SVIRunResult:
    """
    Minimises the loss of an :class:`~numpyro.infer.SVI` on all data by L-BFGS.

    The loss uses the same random numbers at each evaluation, so that one that draws
    (:class:`~numpyro_sgp.MonteCarlo`, a base guide such as ``AutoNormal``) is a function
    without noise; with few draws its optimum fits these draws. Points where the loss or
    its gradient is not finite are stepped back from. SciPy's optimiser runs on the host in
    float64, whatever the dtype of the model.

    With ``blocks``, L-BFGS runs over one block of parameters at a time while the others
    stay as they are, as SAVIGP trains [1, section 8]; parameters in no block keep their
    values. Begin with ``"variational"``: at its start, where q(u) is the prior, the bound
    does not depend on kernel and inducing points. An evaluation costs as much as one for
    all parameters.

    :param svi: the inference problem; its optimiser is not used.
    :param rng_key: random key, of starting values as in ``svi.run``, and of the fixed
        random numbers (with ``init_state`` too: use the same key to go on with the same
        loss).
    :param args: arguments of model and guide, with all data.
    :param max_iterations: of L-BFGS; with blocks, in each visit of a block, or a dict of
        such numbers by block (a list of names under its names joined by ``"+"``).
    :param blocks: what to train in turn: each block is the name of a parameter, a group of
        :func:`~numpyro_sgp.guides.parameters.parameter_blocks` (``"variational"``,
        ``"inducing"``, ``"kernel"``, ``"likelihood"``, ``"other"``), or a list of those.
        The name of a parameter goes before that of a group; empty groups are left out.
        None for all parameters together.
    :param sweeps: how often to go through the blocks at most.
    :param tol: L-BFGS ends where an iteration lowers the loss by less than this,
        relative to the loss (or to 1, if larger); at least the resolution of the dtype.
    :param sweep_tol: the sweeps end where one lowers the loss by less than this, relative
        to the same.
    :param natural: whether q(u) goes to its optimum by natural gradients before each
        evaluation, so that L-BFGS sees the other parameters alone. It takes few iterations
        then, and most often far less time. For Gaussian q(u); the default for those given
        by ``covariance="pseudo_data"``. Not with ``blocks``.
    :param init_params: starting values, as in ``svi.run``.
    :param init_state: state to start from, of ``svi.init`` or another result.
    :param progress_bar: whether to show block, iteration and loss.
    :return: ``params`` as ``svi.run`` returns them, the best that were met; ``losses``, the
        loss at the start and after each iteration; and ``state``, with the optimiser of
        ``svi`` fresh at these parameters, from which ``svi.update`` and ``svi.run`` go on.
        ``svi.evaluate(result.state, ...)`` is ``losses[-1]``.
    :raises ValueError: if a plate is subsampled, the loss is not finite at the start, there
        are no parameters or none of a block's name, q(u) has ``covariance="dual"``, or
        options contradict each other.
    :raises FitInterrupted: where the loss raises an error after the first evaluation, or
        the user interrupts: its ``result`` is the best so far. (Errors in the first
        evaluation are raised as they are.)

    **References:**

    1. Bonilla, Krauth, Dezfouli (2018). Generic inference in latent Gaussian process
       models. https://arxiv.org/abs/1609.00577

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, optax
        >>> import numpyro.distributions as dist
        >>> import numpyro_sgp as sgp
        >>> def model(X, y=None):
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        ...     with numpyro.plate("data", X.shape[0]):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
        >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(5, train_inducing=False))
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
        >>> result = sgp.fit_lbfgs(svi, jax.random.key(0), X, y, progress_bar=False)
        >>> print(f"{result.losses[0]:.2f} -> {result.losses[-1]:.2f}")
        12.81 -> 9.20
    """
    if init_params is not None and init_state is not None:
        raise ValueError("Give init_params or init_state, not both.")
    args, kwargs = as_arrays(svi.model, args, kwargs)
    check_row_indices(svi.model, args, {**kwargs, **svi.static_kwargs})
    state = init_state
    if state is None or svi.constrain_fn is None:  # which gives svi its transforms
        fresh = svi.init(rng_key, *args, init_params=init_params, **kwargs)
        state = fresh if state is None else state
    state = state._replace(rng_key=jax.random.split(rng_key, 3)[0])
    if natural is None:
        natural = blocks is None and _suits_natural(svi)
    if natural and not isinstance(svi.loss, TraceGP_ELBO):
        raise ValueError(
            f"natural=True needs TraceGP_ELBO as the loss, not {type(svi.loss).__name__}."
        )
    if natural and blocks is not None:
        raise ValueError("natural=True trains q(u) by itself; leave out blocks.")
    descent = Descent(svi, state, args, {**kwargs, **svi.static_kwargs}, natural)
    visits = _visits(descent, blocks, max_iterations)
    if blocks is None:
        sweeps = 1
    elif sweeps < 1:
        raise ValueError(f"sweeps must be positive, got {sweeps}.")
    descent.start()
    try:
        total = visits[0][2] if blocks is None else None
        with tqdm(total=total, disable=not progress_bar) as bar:
            for sweep in range(sweeps):
                before = descent.loss
                for label, index, iterations in visits:
                    where = f"sweep {sweep + 1}, {label}, " if blocks is not None else ""
                    descent.run(index, iterations, tol, _show(bar, where))
                if before - descent.loss <= sweep_tol * max(abs(descent.loss), 1.0):
                    break
            bar.total = bar.n  # it converged, or the bar is full anyway
            bar.refresh()
    except (Exception, KeyboardInterrupt) as error:
        raise FitInterrupted(
            f"Training stopped after {len(descent.losses) - 1} iterations by "
            f"{cause(error)}\nThe best parameters so far (loss "
            f"{descent.loss:.6g}) are in the attribute 'result' of this error; go on from "
            "them with init_state=error.result.state.",
            descent.result(),
        ) from error
    return descent.result()


def cause(error: BaseException) -> str:
    """What stopped a training, the end of a sentence."""
    if isinstance(error, KeyboardInterrupt):
        return "the user (Ctrl-C)."
    return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__}."


class Descent:
    """
    The loss as a function of one vector, the best point met, and the way there.

    :param svi: the inference problem.
    :param state: where to start.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model, the static ones too.
    :param natural: whether q(u) is at its optimum for the other parameters.
    :param scales: what a step of length one is in each parameter, by name; 1 if left out.
    """

    def __init__(self, svi, state, args, kwargs, natural=False, scales=None):
        self.svi, self.args, self.kwargs = svi, args, kwargs
        _check_fixed(svi.guide, natural)
        self.free = svi.optim.get_params(state.optim_state)
        flat, self._unravel = ravel_pytree(self.free)
        if flat.size == 0:
            raise ValueError("Model and guide have no parameters to train.")
        self._dtype = flat.dtype
        self.x, self.loss, self.gradient = np.asarray(flat, np.float64), np.inf, None
        self.losses, self.mutable, self.rng_key = [], state.mutable_state, state.rng_key
        self._rejected = False
        scales, sizes = scales or {}, {}
        for name, value in self.free.items():
            scale = jnp.asarray(scales.get(name, 1.0))
            sizes[name] = jax.tree.map(partial(_like, scale), value)
        self.step_scale = np.asarray(ravel_pytree(sizes)[0], np.float64)
        # As svi.evaluate does, so that it gives the same number.
        _, loss_key = jax.random.split(state.rng_key)

        self.profiled, to_optimum = [], None
        if natural:
            self.profiled, to_optimum = _inner(svi, self.free, loss_key)

        # Data are arguments of the compiled program: as constants they slow compilation.
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _is_data(leaf)]
        self._data = [leaves[i] for i in places]

        def loss(flat, data):
            filled = dict(enumerate(leaves)) | dict(zip(places, data, strict=True))
            args, kwargs = jax.tree.unflatten(structure, filled.values())
            given = (svi.model, svi.guide, *args)
            free, q = self._unravel(flat), {}
            with _WholePlates():
                if natural:
                    # At the optimum of q(u) the derivative by it is zero.
                    q = to_optimum(jax.lax.stop_gradient(free), args, kwargs)
                    q = jax.lax.stop_gradient(q)
                params = svi.constrain_fn({**free, **q})
                if not jax.tree.leaves(state.mutable_state):
                    loss = svi.loss.loss(loss_key, params, *given, **kwargs)
                    return loss, (None, q)
                params.update(jax.lax.stop_gradient(state.mutable_state))
                out = svi.loss.loss_with_mutable_state(loss_key, params, *given, **kwargs)
                return out["loss"], (out["mutable_state"], q)

        self._value_and_grad_of = jax.value_and_grad(loss, has_aux=True)
        self._value_and_grad = jax.jit(self._value_and_grad_of)

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
        return np.flatnonzero(np.asarray(ravel_pytree(chosen)[0]))

    def start(self):
        """The first evaluation, with its errors."""
        try:
            value, gradient = self.evaluate(self.x)
        except NEEDS_KNOWN_DATA:  # a model that looks at its data, as it may in svi.run
            data, traced = self._data, self._value_and_grad_of
            self._data = []
            self._value_and_grad = jax.jit(lambda x, _: traced(x, data))
            value, gradient = self.evaluate(self.x)
        if self.gradient is None:
            parts = self._unravel(jnp.asarray(gradient, self._dtype))
            bad = [
                name
                for name, part in parts.items()
                if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(part))
            ]
            raise ValueError(
                f"L-BFGS cannot start: the loss is {value:g} at the starting parameters, "
                f"and its gradient is not finite for {bad or 'none of them'}. Start "
                "elsewhere (init_params, or init_loc_fn of the guide), look for NaN in the "
                "data, or, in float32, try numpyro.enable_x64()."
            )
        self.losses.append(self.loss)

    def start_at(self, free: dict):
        """Begins anew elsewhere, with the same program."""
        self.x = np.asarray(ravel_pytree(free)[0], np.float64)
        self.loss, self.gradient, self.losses = np.inf, None, []
        self.start()

    def evaluate(self, x):
        """Loss and gradient; where both are finite, perhaps the best point."""
        with np.errstate(over="ignore"):
            x = np.asarray(x, self._dtype)
        (value, (mutable, q)), gradient = self._value_and_grad(x, self._data)
        value, gradient = float(value), np.asarray(gradient, np.float64)
        if np.isfinite(value) and np.isfinite(gradient).all() and value < self.loss:
            if q:
                x = ravel_pytree({**self._unravel(jnp.asarray(x)), **q})[0]
            self.x, self.loss, self.gradient = np.asarray(x, np.float64), value, gradient
            self.mutable = mutable
        return value, gradient

    def run(self, index, max_iterations, tol, show):
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
                "ftol": max(tol, float(np.finfo(self._dtype).eps)),
            },
        )
        if self.loss < self.losses[-1]:  # met in a line search that went no further
            self.losses.append(self.loss)
        if self._rejected and result.status == _ABNORMAL:
            warnings.warn(
                "L-BFGS stopped where it found no lower loss next to parameters at which "
                "the loss or its gradient is not finite. Look at result.params for one at "
                "the edge of its range, or, in float32, try numpyro.enable_x64().",
                stacklevel=3,
            )
        return result

    def free_now(self) -> dict:
        """Unconstrained parameters at the best point."""
        return self._unravel(jnp.asarray(self.x, self._dtype))

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


def _inner(svi, free, loss_key):
    """
    Names of what q(u) is made of, and from unconstrained parameters and the model's
    arguments to its optimum for the other parameters.
    """
    with suppress(ValueError):
        pairs = pseudo_data_names(svi.guide).values()

        def on_pseudo_data(free, args, kwargs):
            params, limits = svi.constrain_fn(free), (_NATURAL_STEPS, _NATURAL_TOL)
            moved = natural_steps(svi, loss_key, params, *limits, args, kwargs)
            return {name: moved[name] for pair in pairs for name in pair}

        return [name for pair in pairs for name in pair], on_pseudo_data
    families = natural_families(svi.guide, free)

    def by_families(free, args, kwargs):
        def loss(free):
            params = svi.constrain_fn(free)
            return svi.loss.loss(loss_key, params, svi.model, svi.guide, *args, **kwargs)

        return natural_descent(loss, families, free, _NATURAL_STEPS, _NATURAL_NATS)[0]

    return [full for _, names in families for full in names.values()], by_families


def _like(scale, value):
    return jnp.broadcast_to(scale, jnp.shape(value))


def _is_data(leaf) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and np.size(leaf) >= _DATA_SIZE


def _suits_natural(svi) -> bool:
    """Whether natural gradients can train q(u) of a guide."""
    loss = svi.loss
    if not isinstance(loss, TraceGP_ELBO) or getattr(loss.expectation, "joint", False):
        return False
    with suppress(ValueError):
        pseudo_data_names(svi.guide)
        return loss.num_particles == 1 and loss.sum_sites and not svi.guide.couples_rows
    return False


def _visits(descent, blocks, max_iterations):
    """Label, place in the vector and iterations of each block."""
    if blocks is None:
        if isinstance(max_iterations, Mapping):
            raise ValueError("max_iterations is a dict by block, but blocks is None.")
        # Where there are but sites, natural gradients alone find the optimum.
        others = set(descent.free) - set(descent.profiled) or set(descent.free)
        visits = [("all", descent.index(others), max_iterations)]
    else:
        if isinstance(blocks, str):
            raise ValueError(f"blocks is a sequence of blocks: blocks=[{blocks!r}].")
        blocks = [[b] if isinstance(b, str) else list(b) for b in blocks]
        names = _names(descent, [name for block in blocks for name in block])
        labels = ["+".join(block) for block in blocks]
        limits = max_iterations
        if not isinstance(limits, Mapping):
            limits = dict.fromkeys(labels, limits)
        if set(limits) != set(labels):
            raise ValueError(
                f"max_iterations is given for {sorted(limits)}, but the blocks are "
                f"{sorted(set(labels))}. Give one number, or one for each block."
            )
        visits = []
        for label, block in zip(labels, blocks, strict=True):
            index = descent.index({name for part in block for name in names[part]})
            if index.size:
                visits.append((label, index, limits[label]))
        if not visits:
            raise ValueError(f"No parameter is in any of the blocks {labels}.")
    for label, _, limit in visits:
        if limit < 1:
            raise ValueError(f"max_iterations must be positive, got {limit} for '{label}'.")
    return visits


def _names(descent, parts):
    """The parameters that names of parameters and of groups stand for."""
    params, guide = descent.start_params, descent.svi.guide
    found = {name: [name] for name in params}
    is_sparse = isinstance(guide, AutoSparseGP)
    if is_sparse and any(part not in found for part in parts):
        groups = parameter_blocks(guide, params, *descent.args, **descent.kwargs)
        found = {**groups, **found}
    unknown = sorted({part for part in parts if part not in found})
    if unknown:
        groups = f"the groups {list(GROUPS)}" if is_sparse else "no groups"
        raise ValueError(
            f"blocks has {unknown}, but there are {groups} (groups need an AutoSparseGP) "
            f"and the parameters {sorted(params)}."
        )
    return found


def _check_fixed(guide, natural):
    """
    Refuses a KL by random numbers, which has no minimum with these fixed, and what has no
    plain gradient.
    """
    if not isinstance(guide, AutoSparseGP):
        return
    for name, option in guide.approximations.items():
        if getattr(option, "num_columns", None) is not None:
            raise ValueError(
                f"GP site '{name}' has {option}, whose KL divergence is estimated from "
                "random columns, and L-BFGS keeps its random numbers. Use "
                "num_columns=None, or train by SVI."
            )
        if getattr(option, "kl", None) == "stochastic":
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


def _show(bar, where):
    def show(loss):
        bar.update()
        bar.set_postfix_str(f"{where}loss: {loss:.4f}", refresh=False)

    return show
