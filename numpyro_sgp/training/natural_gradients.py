"""Natural gradients: as an optimiser that SVI takes, and whole ones on pseudo-data."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from numpyro_sgp._checks import real
from numpyro_sgp.families import Family, PseudoData
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.training.mixing import Mixing, vector

_SMALLEST_STEP = 1e-3  # of whole steps on pseudo-data
_NOTHING = 0.1  # of the decrease at which to stop, next to which no step is tried
_MEANS = "means"  # beside what the steps of pseudo-data are made of


class _State(NamedTuple):
    step: Array
    others: optax.OptState


def natural_gradients(
    guide: AutoSparseGP,
    learning_rate: float | Callable[[Array], Array],
    others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    r"""
    Natural gradients for each Gaussian q(u) = N(mu, S) of a guide, and another optimiser
    for all other parameters, as one optimiser for :class:`numpyro.infer.SVI`.

    A step of size :math:`\rho` along the natural gradient is a step along the plain
    gradient by the expectation parameters [1, 2],

    .. math::

        S^{-1} \leftarrow S^{-1} + 2 \rho\, \frac{\partial L}{\partial S}, \qquad
        \mu \leftarrow \mu - \rho\, S_\text{new} \frac{\partial L}{\partial \mu},

    with L the loss; whatever estimates its gradient will do (quadrature, Monte Carlo,
    :class:`~numpyro_sgp.ScoreFunction`, minibatches). On all data of a Gaussian likelihood
    of one latent function (or several with ``covariance="coupled"``) one step of a full
    covariance with :math:`\rho = 1` is the optimum; functions and GP sites that add up
    are stepped side by side, each as if the others stood still: below 2 over their number,
    or means run away. With minibatches, rates around the batch's share of the data up to
    0.5 do well. The step is halved where the new
    precision would not be positive definite or a variance would grow more than
    fourfold, as may happen for likelihoods that are not log-concave, so that S is
    always a covariance. Costs about two products of M x M matrices. Losses that are scaled
    as a whole (by 1/N, say) scale the steps too; leave the ELBO as it is. Take
    :class:`~numpyro_sgp.TraceGP_ELBO` as the loss: the single joint draw of
    ``TraceMeanField_ELBO`` is too noisy for steps of this length. Clipping and the like
    belong into ``others``; around this optimiser they would change the natural step.

    For ``SVGP(M, covariance="dual")`` [3] the same step is an average of sites,

    .. math::

        \Lambda \leftarrow (1 - \rho) \Lambda + \rho \Lambda_\text{batch}, \qquad
        \lambda \leftarrow (1 - \rho) \lambda + \rho \lambda_\text{batch},

    and these sites are what stays fixed while hyperparameters and inducing points move, in
    place of the whitened mean and covariance: fewer steps in minibatches, most often. Its
    derivatives, natural ones, are what this optimiser alone can use: it tells the guide
    when it is made (:meth:`AutoSparseGP.take_natural_gradients`), and a guide that was not
    told refuses them. Where the ELBO or the GP site is scaled
    (:class:`numpyro.handlers.scale`), keep the rate times that scale at 1 or below. With
    random hyperparameters (a base guide such as ``AutoNormal``), targets are averages over
    their draws: take a rate of 0.05 or less, or several particles.

    Every q(u) with a full (or coupled) or a diagonal covariance takes part, whitened or
    not. The sets of SOLVE-GP are stepped side by side, each as if the others stood still:
    covariances arrive at once, means after some steps (with more than two sets keep the
    rate at 0.5 or below). The mean of ODVGP's second set, whose covariance is fixed, is
    left to ``others``.

    :param guide: the guide of the same SVI.
    :param learning_rate: :math:`\rho`, in (0, 1], or a function of the step number, whose
        values are clipped to that.
    :param others: optimiser of hyperparameters, inducing points and so on.
    :return: an optax transformation.
    :raises ValueError: if the rate is not in (0, 1], or the guide was given another one; at
        the first step, if a GP site has a mixture or pseudo-data, or all have an
        :class:`~numpyro_sgp.InverseFreeSVGP` (beside other sites, ``others`` trains it).

    **References:**

    1. Salimbeni, Eleftheriadis, Hensman (2018). Natural Gradients in Practice:
       Non-Conjugate Variational Inference in Gaussian Process Models. AISTATS.
       https://arxiv.org/abs/1803.09151
    2. Khan, Lin (2017). Conjugate-Computation Variational Inference. AISTATS.
       https://arxiv.org/abs/1703.04265
    3. Adam, Chang, Khan, Solin (2021). Dual Parameterization of Sparse Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/2111.03412

    >>> import jax, jax.numpy as jnp, numpyro, optax
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 40)[:, None]
    >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(8))
    >>> optimiser = sgp.natural_gradients(guide, 0.5, optax.adam(0.01))
    >>> svi = numpyro.infer.SVI(model, guide, optimiser, sgp.TraceGP_ELBO())
    >>> y = 1.0 * (X[:, 0] > 1.0)
    >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
    >>> bool(result.losses[-1] < result.losses[0])
    True
    """
    if not hasattr(guide, "take_natural_gradients"):
        raise TypeError(
            "natural_gradients needs the AutoSparseGP (or AutoJointGP) that SVI has, got "
            f"{type(guide).__name__}: natural_gradients(guide, 0.5, optax.adam(0.01))."
        )
    if not isinstance(others, optax.GradientTransformation):
        raise TypeError(
            "others must be an optax transformation, such as optax.adam(0.01), got "
            f"{type(others).__name__}."
        )
    if (
        not callable(learning_rate)
        and not 0.0 < real(learning_rate, "learning_rate") <= 1.0
    ):
        raise ValueError(
            "The learning rate of natural gradients must be in (0, 1], got "
            f"{learning_rate}: 1 goes to the optimum at once on all data of a Gaussian "
            "likelihood of one latent function, less averages over minibatches. (That of "
            "the other parameters is an argument of their optimiser.)"
        )

    guide.take_natural_gradients(_largest(learning_rate))
    others = optax.with_extra_args_support(others)

    def split(params):
        if params is None:
            raise ValueError(optax.NO_PARAMS_MSG)
        by_site = natural_families(guide, params)
        taken = {full for _, names in by_site for full in names.values()}
        return by_site, {k: v for k, v in params.items() if k not in taken}

    def init(params):
        _, rest = split(params)
        return _State(jnp.zeros((), jnp.int32), others.init(rest))

    def update(gradients, state, params=None, **given):
        by_site, rest = split(params)
        slopes = {name: gradients[name] for name in rest}
        steps, other_state = others.update(slopes, state.others, rest, **given)
        rate = learning_rate
        if callable(learning_rate):
            rate = jnp.clip(learning_rate(state.step), 0.0, 1.0)
        # Not in place: it may be the state of the other optimiser.
        steps = {**steps, **natural_update(by_site, params, gradients, rate)}
        return steps, _State(state.step + 1, other_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _largest(learning_rate) -> float:
    """A rate, or about the largest that a schedule takes."""
    if not callable(learning_rate):
        return float(learning_rate)
    with jax.ensure_compile_time_eval():
        counts = np.unique(np.concatenate([np.arange(10_000), 2 ** np.arange(14, 21)]))
        rates = jax.vmap(learning_rate)(jnp.asarray(counts))
    return float(np.clip(np.max(rates), 1e-6, 1.0))


def natural_update(by_site, free: dict, slopes: dict, rate: Array) -> dict:
    """
    What a natural step adds to the parameters of q(u), by full name.

    :param by_site: of :func:`natural_families`.
    :param free: unconstrained parameters.
    :param slopes: derivatives of the loss by them.
    :param rate: step size.
    """
    steps = {}
    for family, names in by_site:
        own, own_slopes = (
            {name: tree[full] for name, full in names.items()} for tree in (free, slopes)
        )
        new = family.natural_step(own, own_slopes, rate)
        steps |= {names[name]: step for name, step in new.items()}
    return steps


def natural_families(guide, params) -> list[tuple[Family, dict[str, str]]]:
    """
    The family of each GP site with a natural step, and the names of what it is for: in
    ``params`` by those in the family.

    :raises ValueError: if there is none, a GP site has a q(u) that takes none, or
        ``params`` are of another guide.
    """
    names, own = {}, []
    if guide.prototype_trace is not None:
        names, roles = guide.parameter_names(), guide.roles()
        own = [full for full, role in roles.items() if role == "variational"]
    if not own or any(full not in params for full in own):
        raise ValueError(
            "The guide of natural_gradients is not the one that SVI trains: its q(u) is "
            f"not among the parameters {sorted(params)}. Give natural_gradients(guide, "
            "...) and SVI(model, guide, ...) the same guide."
        )
    found = []
    for site, full in names.items():
        family = guide.approximations[site].family
        if family.no_natural_step is not None:
            raise ValueError(
                f"natural_gradients are for Gaussian q(u), but GP site '{site}' has "
                f"{family.no_natural_step}"
            )
        if taken := family.takes_natural_steps(full):
            found.append((family, {name: full[name] for name in taken}))
    if not found:
        raise ValueError(
            "natural_gradients are for Gaussian q(u) given by mean and factor, but GP "
            f"sites {sorted(names)} have other parameters ("
            f"{', '.join(sorted({str(guide.approximations[k]) for k in names}))}). Train "
            "them by Adam."
        )
    return found


# ---- on pseudo-data ------------------------------------------------------------------


def pseudo_data_names(guide) -> dict[str, tuple[str, str]]:
    """
    Names of the pseudo-data of each GP site of a guide that is set up.

    :raises ValueError: if a GP site of the guide has another q(u).
    """
    if not isinstance(guide, AutoSparseGP):
        raise ValueError("Natural gradients need an AutoSparseGP as the guide.")
    found = {}
    for site, names in guide.parameter_names().items():
        if not isinstance(guide.approximations[site].family, PseudoData):
            raise ValueError(
                f"Natural gradients need covariance='pseudo_data' at every GP site, but "
                f"'{site}' has the parameters {sorted(names)}. Use SVGP(M, "
                "covariance='pseudo_data') or VGP(covariance='pseudo_data')."
            )
        found[site] = names["qu_linear"], names["qu_precision"]
    return found


def natural_descent(
    loss: Callable, by_site, free: dict, max_steps: int, tol: float
) -> tuple[dict, Array, Array]:
    r"""
    Natural steps of :func:`natural_families` to the least loss in q(u), the other
    parameters fixed; for a Gaussian likelihood it is there at once.

    :param loss: from unconstrained parameters to a loss without noise.
    :param by_site: of :func:`natural_families`.
    :param free: unconstrained parameters.
    :param max_steps: how many at most.
    :param tol: decrease of the loss, in nats, at which to stop; at least about what the
        dtype resolves.
    :return: the parameters of q(u) by full name, the loss there, and how many steps were
        tried.
    """

    def look(q):
        return jax.value_and_grad(lambda q: loss({**free, **q}))(q)

    def move(q, slopes, rate):
        found = natural_update(by_site, q, slopes, rate)
        return {name: q[name] + found[name].astype(q[name].dtype) for name in q}

    q = {full: free[full] for _, names in by_site for full in names.values()}
    means = [full for full in q if full.endswith("_mu")]

    def dual(q, slopes):
        return vector(q, means), vector(slopes, means)

    def change(q, slopes, new):
        return sum(jnp.sum(jnp.abs(slopes[name] * (new[name] - q[name]))) for name in q)

    mixing = Mixing(means, dual) if _side_by_side(q, means) else None
    # Where derivatives are natural ones their products with steps are no nats.
    are_plain = not any(family.is_natural for family, _ in by_site)
    options = {"mixing": mixing, "change": change if are_plain else None}
    return _damped(look, move, q, max_steps, lambda loss: tol, **options)


def _side_by_side(params, means) -> bool:
    """Whether they are of several functions: a single one is not in the way of others."""
    return len(means) > 1 or any(params[name].ndim > 1 for name in means)


def _damped(
    look, move, start, max_steps, tol, other=None, mixing=None, change=None
) -> tuple[dict, Array, Array]:
    """
    Steps that lower a loss: one that does not, or ends where something is not finite, is
    halved, and the next one is then twice as long, up to 1.

    :param look: from parameters to the loss and what a step is made of.
    :param move: from these and a rate to parameters.
    :param tol: from the loss to the decrease at which to stop; at least about what the
        dtype resolves.
    :param other: where to begin if the start is not finite.
    :param change: from parameters, what a step is made of and where it goes to what the
        loss changes by in the first order, signs left out: where that is next to nothing,
        as after one step for a Gaussian likelihood, none is tried to see it.
    :return: the parameters, the loss, and how many steps were tried.
    """
    shapes = jax.eval_shape(look, start)
    eps, one = 8 * jnp.finfo(shapes[0].dtype).eps, jnp.ones((), shapes[0].dtype)

    def enough(loss):
        return jnp.where(jnp.isfinite(loss), jnp.maximum(tol(loss), eps * jnp.abs(loss)), 0)

    def go_on(carry):
        count, rate, fall, ahead, loss, *_ = carry
        goes = (count <= max_steps) & (rate > _SMALLEST_STEP) & (fall > enough(loss))
        # One that leads to no number is halved, as others are that do not lower the loss.
        return goes & ~(ahead <= _NOTHING * enough(loss))

    def step(carry):
        count, rate, fall, ahead, loss, given, slopes, new, places = carry
        new_loss, new_slopes = look(new)
        finite = [jnp.isfinite(a).all() for a in jax.tree.leaves((new_loss, new_slopes))]
        better = (new_loss < loss) & jnp.all(jnp.array(finite))
        # A step that changes nothing has arrived; one that raises the loss was too long.
        arrived = better | (new_loss - loss <= enough(loss))
        fall = jnp.where(arrived & jnp.isfinite(loss), loss - new_loss, jnp.inf)
        keep = lambda a, b: jnp.where(better, a, b)  # noqa: E731
        given, slopes = jax.tree.map(keep, (new, new_slopes), (given, slopes))
        rate = jnp.where(better, jnp.minimum(2.0 * rate, 1.0), 0.5 * rate)
        new = move(given, slopes, rate)
        if change is not None:
            ahead = change(given, slopes, new).astype(one.dtype) / rate
        if mixing is not None:
            places = places._replace(number=jnp.where(better, places.number, 0))
            new, places = mixing(places, given, slopes, new, rate)
        if other is not None:
            again = (count == 0) & ~better
            new = jax.tree.map(lambda a, b: jnp.where(again, a, b), other, new)
            if mixing is not None:  # that was no place on the way
                places = places._replace(number=jnp.where(again, 0, places.number))
        loss = jnp.where(better, new_loss, loss)
        return count + 1, rate, fall, ahead, loss, given, slopes, new, places

    slopes = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[1])
    # The first step leads to the start: `look` is in the program once.
    places = None if mixing is None else mixing.none_yet(start, slopes)
    never = jnp.zeros((), int), one, *3 * (one * jnp.inf,)
    begin = *never, start, slopes, start, places
    count, _, _, _, loss, given, *_ = jax.lax.while_loop(go_on, step, begin)
    return given, loss, count - 1


def natural_steps(svi, rng_key, params, max_steps, tol, args, kwargs):
    r"""
    Parameters with q(u) at its optimum for the others, by natural gradients.

    A step of size rho takes the pseudo-data to :math:`(1 - \rho)` times themselves plus
    :math:`\rho` times

    .. math::

        \lambda_n = -2\, \partial E_n / \partial \sigma_n^2, \qquad
        \ell_n = \partial E_n / \partial \mu_n + \lambda_n (\mu_n - m(x_n))

    [1, 2] with m the prior's mean, which for a Gaussian likelihood is the optimum at once.
    It is halved where the loss does not fall (or is not finite, where there is no such
    Gaussian).

    :param svi: the inference problem.
    :param rng_key: key of the loss.
    :param params: constrained parameters.
    :param max_steps: how many steps at most.
    :param tol: decrease of the loss, relative to the first or to 1, at which to stop.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model.
    :return: the parameters, with other pseudo-data, and how many steps were tried.

    **References:**

    1. Khan, Lin (2017). Conjugate-Computation Variational Inference. AISTATS.
       https://arxiv.org/abs/1703.04265
    2. Adam, Chang, Khan, Solin (2021). Dual Parameterization of Sparse Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/2111.03412
    """
    names = pseudo_data_names(svi.guide)

    def look(given):
        """Loss at these pseudo-data, and where a full step would take them."""
        loss, slopes = svi.loss.marginal_gradients(
            rng_key, {**params, **given}, svi.model, svi.guide, *args, **kwargs
        )
        target, means = {}, {}
        for site, (linear, precision) in names.items():
            at = slopes[site]
            mean = at.mean - at.prior_mean  # the Gaussian is that of f less this
            means[site] = mean.ravel()
            target[precision] = -2.0 * at.to_variance
            target[linear] = at.to_mean + target[precision] * mean
        return loss, {**target, _MEANS: means}

    def move(given, target, rate):  # slopes may have 64 bits where these have 32
        step = lambda a, b: ((1.0 - rate) * a + rate * b).astype(a.dtype)  # noqa: E731
        return {name: step(given[name], target[name]) for name in given}

    def dual(given, target):
        """Means at the rows; the slope by them, with the precisions as they are."""
        means = jnp.concatenate([*target[_MEANS].values()])
        change = {name: given[name] - target[name] for name in given}
        return means, vector(change, linear) - vector(change, precisions) * means

    linear, precisions = map(list, zip(*names.values(), strict=True))
    mixing = Mixing(linear, dual) if _side_by_side(params, linear) else None
    given = {name: params[name] for pair in names.values() for name in pair}
    # Where there is no Gaussian with these (any more), begin at the prior.
    zeros = jax.tree.map(jnp.zeros_like, given)
    moved, _, count = _damped(
        look,
        move,
        given,
        max_steps,
        lambda loss: tol * jnp.maximum(jnp.abs(loss), 1.0),
        zeros,
        mixing,
    )
    return {**params, **moved}, count
