"""From a model, an approximation and data to a trained guide, with nothing to tune."""

import time
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from numpyro.infer.autoguide import AutoDelta

from numpyro_sgp._threads import alone
from numpyro_sgp.elbo import Expectation, TraceGP_ELBO
from numpyro_sgp.fitting import hierarchies, still, unbounded
from numpyro_sgp.fitting.arguments import (
    JOINT_GUIDES,
    check_arguments,
    check_joint,
    check_numbers,
    guide_of,
)
from numpyro_sgp.fitting.problem import as_plain_arrays, check_same_rows
from numpyro_sgp.fitting.progress import AT_EDGE, Limits
from numpyro_sgp.fitting.routes import Routes
from numpyro_sgp.fitting.training import Training
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.base import check_approximations
from numpyro_sgp.training.checks import check_keywords
from numpyro_sgp.training.descent import warn_of_edge
from numpyro_sgp.training.padding import Padded


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

    Layers with one inner function are trained by ten nodes of each, and by draws where 60
    of them tell in the end that the bound is half a nat too high.

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

    Ctrl-C ends the training with the best that there is, which says so; in the set-up and
    the race, which have nothing yet, it is Python's ``KeyboardInterrupt``.

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
    check_same_rows(guide_of(approximation), data, kwargs)
    loss = TraceGP_ELBO(expectation)
    known = getattr(approximation, "loss", None)
    if isinstance(known, TraceGP_ELBO) and expectation is None:
        loss = known
    train = Training(
        data,
        kwargs,
        rng_key,
        loss=loss,
        limits=Limits(tolerance, steps, until),
        batch_size=batch_size,
        restarts=restarts,
        progress_bar=progress_bar,
    )
    routes = Routes(train, model, base_guide or AutoDelta, joint)
    fitted = routes.fit(approximation, keeps_loss=expectation is None)
    fitted.seconds = time.monotonic() - started
    is_at_edge = fitted.stopped.startswith(AT_EDGE)
    where = fitted.guide, fitted.params, fitted.args, fitted.kwargs
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
