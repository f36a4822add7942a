"""Training on minibatches from data that need not fit into memory."""

import time
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpyro.infer.svi import SVI, SVIState
from tqdm import tqdm

from numpyro_sgp._checks import check_key
from numpyro_sgp._kept import program
from numpyro_sgp._programs import join_static, split_static
from numpyro_sgp._threads import alone
from numpyro_sgp.predictive.densities import by_site_and_row
from numpyro_sgp.tracing.given_rows import GivenRows
from numpyro_sgp.tracing.state import state_of
from numpyro_sgp.training.checkpoint import Checkpoints, checksum, is_key, shapes_of
from numpyro_sgp.training.checks import (
    check_batch,
    check_keywords,
    check_options,
    check_validation,
)
from numpyro_sgp.training.devices import Devices, copied
from numpyro_sgp.training.results import FitInterrupted, TrainResult, cause
from numpyro_sgp.training.rows import (
    Rows,
    check_like,
    make_source,
    read_ahead,
    steps_between,
    whole_batches,
)

_VALIDATION_DRAWS = 20  # of the inner layers of a deep GP
_MEND = (
    "Lower the learning rate, clip gradients (optax.clip_by_global_norm), or, in float32, "
    "try numpyro.enable_x64() or more jitter."
)
_SMOOTH = 0.1  # weight of the latest block in the ELBO shown


def train(
    svi: SVI,
    rng_key: Array,
    data: Any,
    num_steps: int,
    *args,
    batch_size: int | None = None,
    shuffle: bool | int = True,
    validation: tuple | None = None,
    every: int = 1000,
    patience: int | None = None,
    checkpoint: str | Path | None = None,
    save_every: float = 60.0,
    init_params: dict | None = None,
    init_state: SVIState | None = None,
    init_rows: int = 10_000,
    chunk: int = 50,
    mesh: Mesh | None = None,
    progress_bar: bool = True,
    **kwargs,
) -> TrainResult:
    """
    Trains an :class:`~numpyro.infer.SVI` on minibatches of arrays, of files larger than
    memory, or of an iterator.

    The model is called on a batch, ``model(X_batch, y_batch, *args, **kwargs)``, and has
    to scale it to all rows by its plate,
    ``numpyro.plate("data", num_rows, subsample_size=X.shape[0])``; where ``data`` are
    arrays, it is checked that it does. Each step is that of ``svi.update``, so every loss,
    guide and optimiser will do, :func:`~numpyro_sgp.natural_gradients` too. Learning-rate
    schedules are those of optax
    (``optax.adam(optax.cosine_decay_schedule(0.01, num_steps))``).

    Steps run in chunks inside one compiled loop, while a thread reads the next two blocks
    of batches: those, and not the data, are what memory holds. The program is kept with
    ``svi``: calls with the same ``svi`` and shapes compile nothing, whatever the seed, the
    number of steps or the values (``init_params`` has other starting values for a guide
    that is set up).

    **Order.** Epochs follow one another without a gap, so a batch may have rows of two;
    each row is visited once in each. The order is a pseudo-random permutation, computed for
    each step by itself from ``rng_key``, without a table.

    **Checkpoints** are plain files, not orbax's: the state is one small tree on one host,
    and a renamed ``.npz`` file is all that it takes to write it at once or not at all, with
    a checksum for each array and no further dependency. A call with the same arguments
    goes on from the newest file that can be read, and its result is bit for bit that of a
    training that was never stopped, by the same programs on the same machine (GPUs need
    ``XLA_FLAGS=--xla_gpu_deterministic_ops=true``). A larger ``num_steps`` prolongs a
    training. Two trainings must not share a folder: one where another training is at work
    is refused, and shapes, the key, batches and some rows are compared, but neither the
    model's code nor rates, and where there is a checkpoint ``init_params`` and
    ``init_state`` are not looked at.

    :param svi: the inference problem.
    :param rng_key: random key, of starting values, random numbers and order.
    :param data: a tuple of arrays with a common first axis, such as ``(X, y)``: NumPy
        arrays, memory maps (``np.load(path, mmap_mode="r")``) or JAX arrays, which stay on
        their device. Or an iterable of batches, each a tuple of arrays of the same shapes
        (a grain ``DataLoader``, say), which is begun again at its end unless it is an
        iterator. Its owner sees to the order; to resume, as many batches as were trained
        on are left out. Up to three chunks that were read ahead are lost when training
        stops early, and one that is being read is waited for three seconds, or until
        Ctrl-C. It may ask fits, for the responses of a teacher, say.
    :param num_steps: number of steps, those before a resumption too.
    :param args: further arguments of the model, such as the number of rows.
    :param batch_size: rows of a batch; None for an iterable.
    :param shuffle: whether to shuffle. A number: blocks of so many neighbouring rows
        are shuffled, and rows within windows of 256 blocks. True: that with blocks of
        about 16 kB for large memory maps, which read random rows slowly, and single
        rows for all else.
    :param validation: held-out data like ``data``, for an
        :class:`~numpyro_sgp.AutoSparseGP`: the mean of the negative log predictive density
        (NLPD) over its rows, by :func:`~numpyro_sgp.log_predictive_density`, is taken
        ``every`` so many steps and at the end, and the result's parameters are the best.
        Rows that the model masks do not count; several observed sites have the sum of their
        means. Inner layers of a deep GP, and latents beside f of which the base guide is a
        distribution, are drawn 20 times for it.
    :param every: steps from one validation to the next.
    :param patience: training stops after so many validations without a new best.
    :param checkpoint: folder of checkpoints.
    :param save_every: seconds from one checkpoint to the next, at ends of chunks.
    :param init_params: starting values, as in ``svi.run``.
    :param init_state: state to start from, of ``svi.init`` or another result; steps and
        the order of the rows are counted from zero all the same.
    :param init_rows: a guide that is not set up gets so many rows at random to choose its
        inducing points from (of an iterable the first ones).
    :param chunk: steps in one go, between two looks at the bar, the clock, the checkpoints
        and Ctrl-C. Three blocks of ``chunk * batch_size`` rows are in memory.
    :param mesh: devices over which the rows of each batch are split, the same training to
        rounding: ``jax.sharding.Mesh(jax.devices(), ("data",))``. With devices of several
        hosts (``jax.distributed``) ``data`` are this host's own rows, of which each host
        must have as many, and ``batch_size`` counts those of all; ``validation`` is the
        same on each, and the folder of checkpoints shared. See ``docs/records/devices.md``.
    :param progress_bar: whether to show the ELBO (smoothed), steps per second and the time
        left.
    :raises ValueError: if arrays or options do not fit each other, the model does not scale
        its batch, the devices of ``mesh`` do not divide it, the checkpoints are of another
        training, or another one is in their folder.
    :raises TypeError: if ``mesh`` is not a mesh, ``data`` neither arrays nor an iterable,
        or ``validation`` without an :class:`~numpyro_sgp.AutoSparseGP`.
    :raises FitInterrupted: if a loss or a parameter is not finite, data cannot be
        read, or the user interrupts. Its ``result`` is a :class:`TrainResult` with the
        last good state, which is saved as well.

    >>> import jax, jax.numpy as jnp, numpy as np, numpyro, optax
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None, num_rows=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     size = num_rows or X.shape[0]
    ...     with numpyro.plate("data", size, subsample_size=X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> X = np.linspace(0.0, 6.0, 400, dtype=np.float32)[:, None]
    >>> y = np.sin(X[:, 0])
    >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(8))
    >>> rate = optax.cosine_decay_schedule(0.05, 200)
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(rate), sgp.TraceGP_ELBO())
    >>> result = sgp.train(
    ...     svi, jax.random.key(0), (X[::2], y[::2]), 200, num_rows=200, batch_size=50,
    ...     validation=(X[1::2], y[1::2]), every=50, progress_bar=False,
    ... )
    >>> result.losses.shape, result.nlpd.shape, bool(result.nlpd[-1] < 0.0)
    ((200,), (4,), True)
    """
    check_key(rng_key)
    check_options(svi, num_steps, batch_size, every, patience, chunk)
    started = time.monotonic()
    validation = check_validation(svi, validation, patience)
    if init_params is not None and init_state is not None:
        raise ValueError("Give init_params or init_state, not both.")
    key_data = np.asarray(jax.random.key_data(rng_key)).ravel()
    devices = Devices(mesh)
    source = make_source(data, batch_size, shuffle, tuple(key_data.tolist()), devices)
    if validation is not None:
        check_like(validation, source.shapes)
    state = _start(svi, rng_key, source, init_params, init_state, init_rows, args, kwargs)
    arrays, static = split_static((args, kwargs))
    training = _Training(svi, source, arrays, static, state, validation, devices)

    folder: Any = nullcontext()
    if checkpoint is not None:
        identity = {
            "parameters and state": shapes_of(training.record()),
            "rng_key": key_data.tolist(),
            "held-out data": [checksum(a) for a in validation or ()],
            **source.identity(),
        }
        folder = Checkpoints(checkpoint, identity, writes=devices.leads)
    chunk = min(chunk, num_steps)
    plan = _Plan(num_steps, chunk, every, patience, save_every, progress_bar, started)
    with folder as checkpoints:
        record = None if checkpoints is None else checkpoints.load(training.record())
        if record is not None:
            placed = {name: devices.copy(record[name]) for name in ("state", "best")}
            training.set(**{**record, **placed})
        return _run(training, plan, checkpoints)


class _Plan(NamedTuple):
    """Options of :func:`train` by the same names, and when it was called."""

    num_steps: int
    chunk: int
    every: int
    patience: int | None
    save_every: float
    progress_bar: bool
    started: float


def _run(training, plan, checkpoints):
    """The steps that are left, with what is saved on the way and after an error."""
    begin = training.step
    due = begin and (begin % plan.every == 0 or begin == plan.num_steps)
    if training.validation and due and begin not in training.nlpd_steps:
        training.validate()  # it was interrupted

    def result(stopped=None):
        if stopped is None:
            stopped = "all steps done"
            if training.step > plan.num_steps:
                stopped = f"{training.step} steps were done before"
            elif training.step < plan.num_steps:
                stopped = f"no better held-out NLPD in {plan.patience} validations"
        return training.result(time.monotonic() - plan.started, stopped)

    if begin >= plan.num_steps or training.out_of_patience(plan.patience):
        return result()
    saved = begin

    def save():
        nonlocal saved
        if checkpoints is not None and training.devices.leads and training.step > saved:
            checkpoints.save(training.step, training.record())
            saved = training.step

    try:
        _go(training, plan, save)
        save()
    except (Exception, KeyboardInterrupt) as error:
        if training.step == begin and not isinstance(error, FloatingPointError):
            raise
        with suppress(OSError):  # the result is more than its file
            save()
        is_saved = checkpoints is not None and saved == training.step
        kept, how = "", "go on from it with init_state=error.result.state."
        if is_saved:
            kept = " (and in the newest checkpoint)"
            how = "go on by the same call, or with init_state=error.result.state."
        raise FitInterrupted(
            f"Training stopped after {training.step} of {plan.num_steps} steps by "
            f"{cause(error)}\nThe last good state is in the attribute 'result' of this "
            f"error{kept}; {how}",
            result(f"interrupted by {type(error).__name__}"),
        ) from error
    return result()


def _go(training, plan, save):
    """Steps, a block of them at a time, while the next rows are read."""
    begin, num_steps, validation = training.step, plan.num_steps, training.validation
    source, last = training.source, time.monotonic()
    if begin and not isinstance(source, Rows):
        source.skip(begin)
    hidden = not (plan.progress_bar and training.devices.leads)
    with tqdm(total=num_steps, initial=begin, disable=hidden) as bar:
        until = plan.every if validation else num_steps
        steps = steps_between(begin, num_steps, plan.chunk, until)
        with closing(read_ahead(source, steps, plan.chunk)) as blocks:
            for start, stop, block in blocks:
                training.run(start, stop, block)
                if validation and (stop % plan.every == 0 or stop == num_steps):
                    if stop % plan.every:
                        save()  # as a longer training would be here, which has no such one
                    training.validate()
                bar.update(stop - start)
                bar.set_postfix_str(training.summary(), refresh=False)
                if training.out_of_patience(plan.patience):
                    break
                if time.monotonic() - last >= plan.save_every:
                    save()
                    last = time.monotonic()


class _Training:
    """
    State, losses and validations of a training, and how to go on.

    What runs the model is :func:`alone`, and not all of :func:`train`: a loader may ask a
    fit in the reader's thread, which would wait for the training that waits for it.
    """

    def __init__(self, svi, source, arrays, static, state, validation, devices):
        self.svi, self.source, self.validation = svi, source, validation
        self.arrays, self.static, self.devices = devices.copy(arrays), static, devices
        leaves, structure = jax.tree.flatten(state)
        # Without weak types, which a checkpoint has not: they would be another program.
        strong = [x if is_key(x) else jax.device_put(np.asarray(x)) for x in leaves]
        self.state = devices.copy(jax.tree.unflatten(structure, strong))
        self.losses = np.zeros(0, jnp.result_type(float))
        self.nlpd, self.nlpd_steps = np.zeros(0), np.zeros(0, int)
        self.best, self._smooth = svi.get_params(state), None
        self._computed = _computed(svi, source, *join_static(arrays, static))

    @property
    def step(self):
        return len(self.losses)

    @alone
    def run(self, start, stop, block):
        """Steps with the batches of a block, until one is not finite."""
        train = program(self.svi, _train)
        with self.devices.set():
            out = train(
                self.state,
                stop - start,
                block,
                self.source.on_device,
                self.arrays,
                static=(self.source.total_rows, self.static),
                state=self._computed,
            )
        state, done, losses, loss, finite = out
        done = int(done)
        losses = np.asarray(losses)[:done]
        self.set(state=state, losses=np.concatenate([self.losses, losses]))
        if done < stop - start:
            fault = self.source.fault(start + done, block, done)
            bad = [name for name, is_finite in finite.items() if not is_finite]
            also = f" and would have made {bad} not finite" if bad else ""
            raise FloatingPointError(
                f"step {start + done + 1} had the loss {float(loss):g}{also}. "
                f"{fault or _MEND}"
            )
        mean = losses.mean()
        old = mean if self._smooth is None else self._smooth
        self._smooth = old + _SMOOTH * (mean - old)

    @alone
    def validate(self):
        """The held-out NLPD now; keeps the best parameters."""
        params = self.svi.get_params(self.state)
        density = program(self.svi, _held_out)
        totals, size = {}, self.source.batch_size
        for batch, counts in whole_batches(self.validation, size, self.devices):
            with self.devices.set():
                told = {"static": self.static, "state": self._computed}
                found = density(params, batch, counts, self.arrays, **told)
            totals = jax.tree.map(jnp.add, totals, found) if totals else found
        if empty := [name for name, (_, rows) in totals.items() if not rows]:
            raise ValueError(
                f"All rows of validation are masked at the observed sites {empty}, so that "
                "they have no held-out density. Mask fewer, or leave validation out."
            )
        nlpd = -sum(float(total) / int(rows) for total, rows in totals.values())
        is_best = nlpd < np.min(self.nlpd, initial=np.inf, where=np.isfinite(self.nlpd))
        self.set(
            best=params if is_best else self.best,
            nlpd=np.append(self.nlpd, nlpd),
            nlpd_steps=np.append(self.nlpd_steps, self.step),
        )

    def out_of_patience(self, patience):
        if patience is None or not len(self.nlpd):
            return False
        known = np.where(np.isfinite(self.nlpd), self.nlpd, np.inf)
        return len(known) - 1 - np.argmin(known) >= patience

    def summary(self):
        told = f"ELBO: {-self._smooth:.5g}"
        return told + (f", NLPD: {self.nlpd[-1]:.4f}" if len(self.nlpd) else "")

    def record(self):
        """What a checkpoint holds."""
        names = ("state", "losses", "best", "nlpd", "nlpd_steps")
        return {name: getattr(self, name) for name in names}

    def set(self, **record):
        """Parts of the record, all at once: an interrupt finds all of them or none."""
        self.__dict__.update(record)

    def result(self, seconds, stopped):
        known = np.isfinite(self.nlpd).any()
        params = self.best if known else self.svi.get_params(self.state)
        losses, found = jax.device_put(self.losses), (self.nlpd, self.nlpd_steps)
        return TrainResult(params, self.state, losses, *found, seconds, stopped)


@alone
def _computed(svi, source, args, kwargs):
    """What the model computes of a batch of the data."""
    batch, kwargs = source.sample(source.batch_size), {**kwargs, **svi.static_kwargs}
    with GivenRows(source.batch_size, source.total_rows):
        return state_of(svi.model, (*batch, *args), kwargs)


def _train(svi, state, length, block, data, arrays, *, static):
    """
    ``length`` steps of SVI, fewer if a loss or a parameter is not finite after one.

    :param block: batches, or row numbers of ``data``, shape ``(chunk, batch_size, ...)``.
    :return: the last good state, how many steps led to it, their losses, and of the step
        after it the loss and which parameters are finite.
    """
    num_rows, static = static
    args, kwargs = join_static(arrays, static)
    chunk, batch_size = jax.tree.leaves(block)[0].shape[:2]
    dtype = jnp.result_type(float)

    def go_on(carry):
        done, good, *_ = carry
        return good & (done < length)

    def step(carry):
        done, _, state, losses, _, _ = carry
        batch = jax.tree.map(lambda a: a[done], block)
        if data:
            batch = tuple(a[batch] for a in data)
        with GivenRows(batch_size, num_rows):
            new, loss = svi.update(state, *batch, *args, **kwargs)
        finite = _finite(svi.optim.get_params(new.optim_state))
        good = jnp.isfinite(loss) & jnp.all(jnp.array(list(finite.values())))
        state = copied(jax.tree.map(partial(jnp.where, good), new, state))
        losses = losses.at[done].set(loss.astype(dtype))
        return done + good, good, state, losses, loss.astype(dtype), finite

    finite = _finite(svi.optim.get_params(state.optim_state))
    finite = jax.tree.map(jnp.ones_like, finite)
    start = 0, True, state, jnp.zeros(chunk, dtype), jnp.zeros((), dtype), finite
    done, _, state, losses, loss, finite = jax.lax.while_loop(go_on, step, start)
    return state, *copied((done, losses, loss, finite))


def _finite(params):
    """Whether each parameter is finite, by name."""
    return {
        name: jnp.all(jnp.array([jnp.isfinite(a).all() for a in jax.tree.leaves(value)]))
        for name, value in params.items()
    }


def _held_out(svi, params, batch, counts, arrays, *, static):
    """
    Sums of the log predictive density over the rows that count, and numbers of these rows,
    by observed site.
    """
    args, kwargs = join_static(arrays, static)
    kwargs = {**kwargs, **svi.static_kwargs}
    options = None, None, _VALIDATION_DRAWS, False
    where = svi.guide, params, (*batch, *args), kwargs
    density, observed, *_ = by_site_and_row(*where, *options)
    found = {}
    for name, rows in density.items():
        counted = counts & observed[name]
        found[name] = jnp.sum(jnp.where(counted, rows, 0.0)), jnp.sum(counted)
    return copied(found)


def _start(svi, rng_key, source, init_params, init_state, init_rows, args, kwargs):
    """The state to start from, of a guide that is set up and a model that scales."""
    check_keywords(svi.model, kwargs, train)
    guide, rows = svi.guide, None
    # Of one Gaussian over all sites too, a guide that is none of these.
    if hasattr(guide, "setup") and guide.prototype_trace is None:
        rows = source.sample(max(init_rows, source.batch_size))
    batch = tuple(a[: source.batch_size] for a in source.sample(source.batch_size))
    return _begin(svi, rng_key, source, init_params, init_state, rows, batch, args, kwargs)


@alone
def _begin(svi, rng_key, source, init_params, init_state, rows, batch, args, kwargs):
    """The same from a batch, and from rows for the guide if there was no set-up."""
    if rows is not None and svi.guide.prototype_trace is None:
        try:
            svi.guide.setup(*rows, *args, **kwargs, **svi.static_kwargs)
        except (TypeError, ValueError) as error:
            if source.total_rows is not None:
                raise
            told = f"({len(rows[0])} rows set the guide up: of fewer, give init_rows.)"
            raise ValueError(f"{error} {told}") from error
    check_batch(svi, source, batch, args, kwargs)
    if init_state is not None and svi.constrain_fn is not None:
        return init_state
    with GivenRows(source.batch_size, source.total_rows):
        state = svi.init(rng_key, *batch, *args, init_params=init_params, **kwargs)
    return state if init_state is None else init_state
