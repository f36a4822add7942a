"""From a model, an approximation and data to a trained guide, with nothing to tune."""

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.svi import SVIState
from tqdm import tqdm

from numpyro_sgp._programs import on_data, split
from numpyro_sgp._threads import alone
from numpyro_sgp.diagnostics.bound import bound_of, differs_from_training
from numpyro_sgp.elbo import Expectation, TraceGP_ELBO
from numpyro_sgp.fitting import hierarchies, still, unbounded
from numpyro_sgp.fitting.arguments import (
    JOINT_GUIDES,
    check_arguments,
    check_joint,
    check_numbers,
    check_sites,
    guide_of,
)
from numpyro_sgp.fitting.batches import train_best
from numpyro_sgp.fitting.common_draws import with_common_draws
from numpyro_sgp.fitting.fitted import Fitted
from numpyro_sgp.fitting.float32 import stopped_as, with_true_slopes
from numpyro_sgp.fitting.gaussian_first import train_from_gaussian
from numpyro_sgp.fitting.grow import grow, most_points, with_points
from numpyro_sgp.fitting.other_data import check_joint_data, guide_for, inside
from numpyro_sgp.fitting.problem import (
    Problem,
    as_plain_arrays,
    check_same_rows,
    constrained,
    data_as_arguments,
    unconstrained,
)
from numpyro_sgp.fitting.progress import AT_EDGE, Limits
from numpyro_sgp.fitting.race import Race, Settling
from numpyro_sgp.fitting.starts import (
    generator,
    lengthscale_starts,
    random_starts,
    with_drawn_means,
    with_narrow_q,
)
from numpyro_sgp.fitting.stepper import Stepper
from numpyro_sgp.fitting.whole import descent_of, train_whole
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.base import check_approximations
from numpyro_sgp.guides.checks import check_reach, check_support_stays
from numpyro_sgp.training.checks import check_keywords
from numpyro_sgp.training.descent import warn_of_edge
from numpyro_sgp.training.padding import Padded

#: Products of all rows with M x M matrices up to which training sees all rows at once,
#: in numbers multiplied.
WHOLE = 4e8
#: The same number, times that of starts, up to which these are all trained to the end (up
#: to three).
SEVERAL = 4e6
#: Rows of a batch above that.
BATCH = 1024


@alone
def fit(
    model: Callable,
    approximation: Any,
    data: tuple,
    rng_key: Array | None = None,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    batch_size: int | None = None,
    base_guide: Callable | None = None,
    expectation: Expectation | None = None,
    joint: bool = False,
    restarts: int = 1,
    tolerance: float = 0.1,
    pad: bool = False,
    progress_bar: bool = True,
    **kwargs,
) -> Any:
    """
    Trains a sparse approximation of a model's posterior, with nothing to tune.

    A guide is made and set up; some starts (lengthscales by the spread of the inputs, and
    random ones) race for some hundred steps; and the best one is trained until less than
    ``tolerance`` is left to gain, or as little as can be told:

    * on all rows, where the bound is not random and there are few (N M (M + D) up to 4e8,
      D columns of the inputs): every Gaussian q(u) is at its optimum for the other
      parameters, by natural gradients [1], and L-BFGS goes over those (from other
      lengthscales too, with all else where it suits these, which may take as long again;
      time after time where that is cheap, from the best starts, and with some inducing
      points drawn anew). With three functions of f in a row or more (classes), and 16,384
      of their values at most, draws are the same at each step, so that the bound is not
      random; ``bound`` is by others;
    * else by natural gradients beside Adam, on batches of 1024 rows where there are more
      than 2048. Their rates go down, over two thirds of all steps, once the loss falls no
      more than its noise (or 1e-4 nats a row), and after 1000 steps (20 epochs, if more) at
      the latest; up to 2e9 and 200,000 rows as many evaluations of all follow, by L-BFGS,
      and up to eight times as many while the last quarter gains 0.1 % of all.
      What natural gradients do not train (means of ODVGP, inner layers of a deep GP) goes
      with the other parameters.

    What natural gradients do not train at all (mixtures, inverse-free ones, pseudo-data)
    begins at a Gaussian that they trained, with half of the ``steps`` and ``seconds``:
    components of a mixture at its modes, where it has several (as where f and -f explain
    the data alike), and else around it.

    Latents beside GP sites are at points (``AutoDelta``: their posterior mode given the
    bound), unless ``base_guide`` is a distribution of them.

    The guide has a q for each GP site and each latent. Where the data tie them together (a
    trend and a season, sites beside an intercept or effects of groups), ``joint=True`` has
    one Gaussian over all sites and all latents with normal priors that act beside them, of
    which :meth:`Fitted.check` says how much it mends ("sites apart"); the training is the
    same. :func:`~numpyro_sgp.nested` integrates the hyperparameters too.

    For batches the model needs no argument: where it has all observations in a plate of
    the length of the data, and one row of each GP site for each, a batch of rows takes
    their place and counts N / B times. (Models that tie rows together, or draw a latent for
    each row, see all rows.) For data that do not fit into memory, checkpoints or several
    devices there is :func:`~numpyro_sgp.train`.

    :param model: a NumPyro model with GP sites.
    :param approximation: what to put at GP sites, as :class:`~numpyro_sgp.AutoSparseGP`
        takes it, such as ``SVGP(50)``; or such a guide, or an
        :class:`~numpyro_sgp.AutoJointGP`; or a fit of this model, to go on from with these
        data, without a race between starts. ``SVGP("auto")`` starts from 32
        inducing points and has more until they lose less than a nat, or a further one
        gains less than 0.1 (at most 512), and twice as many, tried for some steps, gain
        less than a nat in all, and than 0.1 for each point beyond 128.
    :param data: the model's positional arguments with all of the data, such as ``(X, y)``.
    :param rng_key: key of starts, batches and draws; ``jax.random.key(0)`` if None.
    :param steps: steps of the training after the race, at most.
    :param seconds: time in all after which no step begins; of batches, less what the
        bound of all rows takes after them. The race between starts, and what comes before
        the training, take theirs all the same.
    :param batch_size: rows of a batch; chosen if None, all if there are no more.
    :param base_guide: guide for the latents beside f, as AutoSparseGP takes it;
        ``AutoDelta`` if None.
    :param expectation: rule for expectations over f, as :class:`~numpyro_sgp.TraceGP_ELBO`
        takes it.
    :param joint: whether there is one Gaussian over all GP sites and effects, as in an
        :class:`~numpyro_sgp.AutoJointGP`; the result is then a
        :class:`~numpyro_sgp.JointFit`.
    :param restarts: number of starts that are drawn at random, the first one excepted.
        Where training is on all rows several are trained to the end after the race (of a
        mixture, those of the Gaussian that it begins at): three where that is soon or
        ``restarts`` is five or more; with inducing points that stay all, until two more end
        at the same or it takes long. A guide that is set up and that natural gradients
        train nothing of has no race: training on all rows goes on from each to the end, on
        batches from the first alone.
    :param tolerance: nats that may be left.
    :param pad: whether to fill the data up to a power of two by rows that do not count, so
        that nothing is compiled anew for most of the rounds where data grow. Not for
        approximations with a part for each row (``VGP``, pseudo-data, tight bounds), nor
        for latents that have an entry for each.
    :param progress_bar: whether to show the bound while it rises.
    :param kwargs: keyword arguments of the model.
    :return: the result, a :class:`~numpyro_sgp.Fitted`: ``predict``, ``posterior``,
        ``sample``, ``check``, ``save``, ...
    :raises TypeError: if ``data`` is no tuple (or list), or ``approximation`` something
        else.
    :raises ValueError: if numbers are not positive, a GP site is scaled and the likelihood
        is not, a guide is of another model or comes with a ``base_guide``, ``joint`` comes
        with an ``expectation``, ``pad`` or ``SVGP("auto")`` or the model is none of one
        Gaussian field, and as the guide does.

    **References:**

    1. Salimbeni, Eleftheriadis, Hensman (2018). Natural Gradients in Practice:
       Non-Conjugate Variational Inference in Gaussian Process Models. AISTATS.
       https://arxiv.org/abs/1803.09151

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    ...     kernel = sgp.kernels.RBF(1.0, lengthscale)
    ...     f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X = jnp.linspace(0.0, 6.0, 40)[:, None]
    >>> y = jnp.round(jnp.exp(1.0 + jnp.sin(2.0 * X[:, 0])))
    >>> fitted = sgp.fit(model, sgp.SVGP(8), (X, y), progress_bar=False)
    >>> fitted.predict(X[:3])["y"].mean.shape
    (3,)
    """
    started = time.monotonic()
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    is_joint = isinstance(guide_of(approximation), tuple(JOINT_GUIDES))
    of_nodes = hasattr(approximation, "field")  # a result without a guide for each site
    if joint or is_joint or of_nodes:
        check_joint(approximation, is_joint, expectation, pad)
    check_arguments(model, approximation, data, rng_key, base_guide)
    check_keywords(model, kwargs, fit)
    check_numbers(steps, seconds, batch_size, restarts, tolerance)
    until = None if seconds is None else started + seconds
    data, kwargs = as_plain_arrays(model, tuple(data), kwargs)
    if pad:
        model = _padded(model, approximation)
        data, kwargs = model.fill(data, kwargs)

    limits = Limits(tolerance, steps, until)

    loss = TraceGP_ELBO(expectation)
    known = getattr(approximation, "loss", None)
    if isinstance(known, TraceGP_ELBO) and expectation is None:
        loss = known

    def train(guide, start=None, before=None, descent=None, limits=limits, raced=False):
        call = "fit(model, approximation, (X, group, y), num_groups=8)"
        with data_as_arguments(call):
            return _train(
                guide,
                data,
                kwargs,
                rng_key,
                loss=loss,
                limits=limits,
                batch_size=batch_size,
                restarts=restarts,
                start=start,
                raced=raced,
                before=before,
                descent=descent,
                progress_bar=progress_bar,
            )

    def make(approximation):
        kind = JOINT_GUIDES[0] if joint else AutoSparseGP
        return kind(model, approximation, base_guide or AutoDelta)

    def train_option(approximation, limits=limits):
        if not any(option.is_auto for option in check_approximations(approximation)):
            return train(make(approximation), limits=limits)
        first = make(with_points(approximation, 1))
        first.setup(*data, **kwargs)
        allowed = most_points(approximation, first)

        def begin(number, start, limits):
            guide = make(with_points(approximation, number, allowed))
            return train(guide, start, limits=limits)

        def go_on(fitted, limits):
            return train(fitted.guide, before=fitted, descent=fitted.descent, limits=limits)

        most = max(allowed.values())
        return grow(begin, go_on, most, data, kwargs, limits, progress_bar)

    def train_new(approximation, limits=limits):
        found = train_from_gaussian(approximation, train_new, make, train, limits)
        return found or train_option(approximation, limits)

    check_same_rows(guide_of(approximation), data, kwargs)
    if is_joint:
        before = None if approximation is guide_of(approximation) else approximation
        check_joint_data(guide_of(approximation), data, kwargs)
        fitted = train(guide_of(approximation), before=before)
    elif isinstance(approximation, Fitted):
        # Its own programs serve where they have the bound that is asked for.
        own, guide = getattr(approximation.svi, "loss", None), approximation.guide
        kwargs = {**getattr(approximation.svi, "static_kwargs", {}), **kwargs}
        if other := guide_for(guide, data, kwargs):
            fitted = train(other, start=approximation.params)
        elif isinstance(own, TraceGP_ELBO) and expectation is None:
            fitted = train(guide, before=approximation)
        else:
            fitted = train(guide, start=approximation.params)
    elif isinstance(approximation, AutoSparseGP):
        guide = guide_for(approximation, data, kwargs) or approximation

        def train_other(option, limits):
            found = train_from_gaussian(option, train_other, guide.instead, train, limits)
            return found or train(guide.instead(option), limits=limits)

        given = None if guide.is_set_up else guide.approximation
        fitted = train_from_gaussian(given, train_other, lambda _: guide, train, limits)
        fitted = fitted or train(guide)
    else:
        fitted = (train_option if joint else train_new)(approximation)
    fitted.seconds = time.monotonic() - started
    is_at_edge = fitted.stopped.startswith(AT_EDGE)
    where = fitted.guide, fitted.params, data, kwargs
    gone = hierarchies.vanished(*where)
    remarks: list[tuple[Any, Any]] = [(still, still.still(*where)), (hierarchies, gone)]
    if not gone and (endless := unbounded.unbounded(fitted)):
        fitted.stopped, remarks = "", [*remarks, (unbounded, endless)]
        is_at_edge = False
    for room, found in remarks:
        if found:
            fitted.stopped = "; ".join(filter(None, (room.told_of(found), fitted.stopped)))
            room.warn_of(found)
    if is_at_edge:
        warn_of_edge()
    return fitted


def _train(
    guide,
    args,
    kwargs,
    rng_key,
    *,
    loss,
    limits,
    batch_size,
    restarts,
    start,
    raced,
    before,
    descent,
    progress_bar,
) -> Any:
    """
    One training.

    :param start: values of parameters that are known already, in place of the race.
    :param raced: whether there is a race nevertheless, by all rows.
    :param before: a fit of this guide to go on from.
    :param descent: that of a fit with the same data, or None.
    """
    goes_on = before is not None and descent is not None  # with the same data
    for_init, for_guide, for_starts, for_race, for_training = split(rng_key, 5)
    if before is None:
        guide.take_natural_gradients(1.0)
        svi = SVI(guide.model, guide, optax.adam(0.01), loss)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"GP site '.*' is scaled by")
            state = _initial_state(svi, for_init, for_guide, args, kwargs)
        if isinstance(guide, AutoSparseGP):  # one Gaussian over all looks by itself
            check_support_stays(guide, args, kwargs)
            check_reach(guide, svi.get_params(state), args, kwargs)
    else:
        svi = before.svi
        kwargs = {**svi.static_kwargs, **kwargs}
        free = unconstrained(svi, before.params)
        state = SVIState(svi.optim.init(free), None, for_init)
    check_sites(guide)
    problem = with_common_draws(Problem(svi, state, args, kwargs), batch_size)
    svi = problem.svi
    size = _batch_size(problem, batch_size)
    whole = not problem.random and size is None
    stepper, race, settling = Stepper(problem, size), None, None
    raced = start is None or (raced and whole and bool(problem.natural))
    if before is None and raced and problem.natural:
        # Fast steps of Adam make components of a mixture, which has none, collapse.
        race = Race(stepper, whole)
        race.prepare(for_race)
        if whole and Settling.wanted(problem, limits):
            settling = Settling(stepper)
            settling.prepare(problem.free, for_race)
    if whole and descent is None:  # in the order in which they are needed
        descent = descent_of(problem, for_training)
        descent.prepare()
    held, known_start = {}, []
    if start is not None:
        known = {name: v for name, v in start.items() if name in problem.free}
        known_start = [{**problem.free, **inside(unconstrained(svi, known), problem.free)}]
    if before is not None:
        starts = [problem.free]
    elif not raced:
        starts = known_start
    else:
        starts, held = lengthscale_starts(problem)
        starts += random_starts(problem, for_starts, restarts - 1)
        if race is not None:
            starts.append(with_drawn_means(problem, problem.free, generator(for_race)))
    affordable = SEVERAL / problem.work(problem.num_rows)
    few = int(np.clip(affordable, 1, 3))
    number = least = max(few, min((restarts + 1) // 2, 3))
    if race is not None:
        keep = 2 if affordable < 1 else len(starts)
        starts = race(starts, for_race, keep, limits, held)
        # Where inducing points are trained there are other optima for each of these.
        roles = guide.roles()
        has_trained_points = any(roles.get(name) == "inducing" for name in problem.free)
        number = least if has_trained_points else len(starts) + len(known_start)
        # Another first, as that hardly moves and is what others are left for.
        starts[min(few - 1, 1) : 0] = known_start
    elif restarts > 1:  # that nothing else chooses from
        number = least = few = len(starts)
    early = np.zeros(0)
    if settling is not None:
        starts[0], early = settling(starts[0], for_race, limits)
        limits = limits.after(len(early))
    with tqdm(disable=not progress_bar) as bar:

        def show(count, loss):
            bar.update(len(early) + count - bar.n)
            bar.set_postfix_str(f"ELBO: {-loss:.6g}", refresh=False)

        rest = for_training, limits, show
        if not whole:
            number = few if restarts > 1 and size is None else 1
            found = train_best(stepper, starts[:number], *rest)
        else:
            numbers: dict[str, Any] = dict(least=least, number=min(number, len(starts)))
            starts = [*starts, problem.free, with_narrow_q(problem, starts[0])]
            found = train_whole(problem, starts, *rest, seed=0, descent=descent, **numbers)
    if whole:
        found = with_true_slopes(found, problem, limits.after(len(found.losses)))
    make = guide.fitted if hasattr(guide, "fitted") else functools.partial(Fitted, guide)
    params = constrained(svi, found.free)
    bound, bound_se = found.bound, found.bound_se
    if size is None and differs_from_training(svi):
        bound, bound_se = bound_of(svi, params, args, kwargs)
    return make(
        params,
        args,
        kwargs,
        loss=svi.loss,
        losses=np.append(early, found.losses),
        bound=bound,
        bound_se=bound_se,
        stopped=stopped_as(found, problem),
        svi=svi,
        descent=found.descent,
        apart=found.apart or (before.apart if goes_on else 0.0),
    )


def _padded(model, approximation) -> Padded:
    """The model with rows that do not count; that of a fit, if one is gone on from."""
    guide = getattr(approximation, "guide", None)
    if guide is not None and isinstance(guide.model, Padded):
        return guide.model
    if guide is not None or isinstance(approximation, AutoSparseGP):
        raise ValueError(
            "pad=True goes on from fits with pad=True only, and not from a guide: give fit "
            "the approximation, such as SVGP(50), first."
        )
    for option in check_approximations(approximation):
        if option.needs_all_rows or option.relaxation is not None:
            raise ValueError(
                f"{option} has a part for each row, whether or not it counts: pad=True is "
                "for other approximations, such as SVGP(50)."
            )
    return Padded(model)


def _initial_state(svi, init_key, guide_key, args, kwargs) -> SVIState:
    """``svi.init(init_key, *args, **kwargs)`` by a few programs."""
    starts = svi.guide.starts(guide_key, args, kwargs)

    def run(args, kwargs, key, starts):
        return svi.init(key, *args, init_params=starts, **kwargs)

    state = on_data(run, args, kwargs, init_key, starts)
    if any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(svi.constrain_fn.args)):
        return svi.init(init_key, *args, init_params=starts, **kwargs)
    return state


def _batch_size(problem, batch_size) -> int | None:
    """Rows of a batch; None for all rows."""
    N = problem.num_rows
    if batch_size is not None and problem.guide.known().subsampled:
        raise ValueError(
            f"batch_size={batch_size}, but a plate of the model draws batches of its own "
            "(subsample_size). Leave batch_size out; or leave subsample_size out, and fit "
            "takes batches of all rows by itself."
        )
    if batch_size is not None and batch_size < N and not problem.plates:
        raise ValueError(
            f"batch_size={batch_size}, but the model has no plate of the {N} rows of the "
            "data that has all observations (with one row of each GP site for each, and no "
            "other latents), so that a batch cannot stand for all; or rows are others in a "
            "batch, as where it standardises X by X.mean(). Write the likelihood inside "
            "numpyro.plate('data', X.shape[0]), give data that are standardised, or leave "
            "batch_size out."
        )
    if batch_size is not None:
        return batch_size if batch_size < N else None
    if N <= 2 * BATCH or not problem.plates:
        return None
    return BATCH if problem.random or problem.work(N) > WHOLE else None
