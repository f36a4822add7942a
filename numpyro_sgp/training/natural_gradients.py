"""Natural gradients of Gaussian q(u), as an optimiser that SVI takes."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from numpyro.distributions import biject_to, constraints

from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.constraint import lower_triangular

_HALVINGS = 20
_MOST_GROWTH = 4.0  # of a variance in one step


class _State(NamedTuple):
    count: Array
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
    one step with :math:`\rho = 1` is the optimum; with minibatches, rates around the
    batch's share of the data up to 0.5 do well. The step is halved where the new
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
    derivatives, natural ones, are what this optimiser alone can use: its start, in
    ``svi.init``, marks the guide for good (``guide.natural_rate``), and in a guide without
    that mark they are refused. Where the ELBO or the GP site is scaled
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
    :raises ValueError: if the rate is not in (0, 1]; at the first step, if a GP site has a
        mixture or sites, or all have an :class:`~numpyro_sgp.InverseFreeSVGP` (beside other
        sites, ``others`` trains it).

    **References:**

    1. Salimbeni, Eleftheriadis, Hensman (2018). Natural Gradients in Practice:
       Non-Conjugate Variational Inference in Gaussian Process Models. AISTATS.
       https://arxiv.org/abs/1803.09151
    2. Khan, Lin (2017). Conjugate-Computation Variational Inference. AISTATS.
       https://arxiv.org/abs/1703.04265
    3. Adam, Chang, Khan, Solin (2021). Dual Parameterization of Sparse Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/2111.03412

    **Example:**

    .. doctest::

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
    if not isinstance(guide, AutoSparseGP):
        raise TypeError(
            "natural_gradients needs the AutoSparseGP that SVI has, got "
            f"{type(guide).__name__}: natural_gradients(guide, 0.5, optax.adam(0.01))."
        )
    if not isinstance(others, optax.GradientTransformation):
        raise TypeError(
            "others must be an optax transformation, such as optax.adam(0.01), got "
            f"{type(others).__name__}."
        )
    if not callable(learning_rate) and not 0.0 < learning_rate <= 1.0:
        raise ValueError(
            "The learning rate of natural gradients must be in (0, 1], got "
            f"{learning_rate}: 1 goes to the optimum at once on all data of a Gaussian "
            "likelihood, less averages over minibatches. (That of the other parameters is "
            "an argument of their optimiser.)"
        )

    def split(params):
        if params is None:
            raise ValueError(optax.NO_PARAMS_MSG)
        pairs, sites = _gaussians(guide, params)
        taken = {name for pair in pairs for name in pair} | set(sites)
        return pairs, sites, {k: v for k, v in params.items() if k not in taken}

    def init(params):
        _, sites, rest = split(params)
        if sites:
            guide.natural_rate = _largest(learning_rate)
        return _State(jnp.zeros((), jnp.int32), others.init(rest))

    def update(gradients, state, params=None):
        pairs, sites, rest = split(params)
        *_, slopes = split(gradients)
        steps, other_state = others.update(slopes, state.others, rest)
        rate = learning_rate
        if callable(learning_rate):
            rate = jnp.clip(learning_rate(state.count), 0.0, 1.0)
        for mu, sqrt in pairs:
            steps[mu], steps[sqrt] = _natural_step(
                params[mu], params[sqrt], gradients[mu], gradients[sqrt], rate
            )
        for name in sites:  # whose gradients are natural already
            steps[name] = -jnp.asarray(rate, params[name].dtype) * gradients[name]
        return steps, _State(state.count + 1, other_state)

    return optax.GradientTransformation(init, update)


def _largest(learning_rate) -> float:
    """A rate, or about the largest that a schedule takes."""
    if not callable(learning_rate):
        return float(learning_rate)
    with jax.ensure_compile_time_eval():
        counts = np.unique(np.concatenate([np.arange(10_000), 2 ** np.arange(14, 21)]))
        rates = jax.vmap(learning_rate)(jnp.asarray(counts))
    return float(np.clip(np.max(rates), 1e-6, 1.0))


def _gaussians(guide, params) -> tuple[list[tuple[str, str]], list[str]]:
    """
    Names of the mean and factor of each Gaussian q(u) of a guide, and of the dual
    parameters of others.
    """
    pairs, duals, by_site = [], [], {}
    if guide.prototype_trace is not None:
        by_site = guide.parameter_names()
    own = [full for names in by_site.values() for k, full in names.items() if k[0] == "q"]
    if not own or any(full not in params for full in own):
        raise ValueError(
            "The guide of natural_gradients is not the one that SVI trains: its q(u) is "
            f"not among the parameters {sorted(params)}. Give natural_gradients(guide, "
            "...) and SVI(model, guide, ...) the same guide."
        )
    for site, names in by_site.items():
        if getattr(guide.approximations[site], "covariance", None) == "dual":
            duals += [names["qu_linear"], names["qu_precision"]]
            continue
        if "qu_logits" in names or "qu_precision" in names:
            what = "a mixture" if "qu_logits" in names else "covariance='sites'"
            mend = (
                "Train mixtures by Adam or fit_lbfgs."
                if "qu_logits" in names
                else "Train sites by fit_lbfgs, which takes natural gradients by itself."
            )
            raise ValueError(
                f"natural_gradients are for Gaussian q(u), but GP site '{site}' has "
                f"{what}. {mend}"
            )
        pairs += [
            (names[name.replace("_sqrt", "_mu")], full)
            for name, full in names.items()
            if name.endswith("_sqrt")
        ]
    if not pairs and not duals:
        raise ValueError(
            "natural_gradients are for Gaussian q(u) given by mean and factor, but GP "
            f"sites {sorted(by_site)} have an InverseFreeSVGP, whose q(u) has other "
            "parameters. Train them by Adam."
        )
    return pairs, duals


def _natural_step(mu, free, to_mu, to_free, rate):
    """
    Additive steps of mu and of the unconstrained factor of S.

    :param mu: shape ``(*batch, M)``; all functions together for coupled covariances.
    :param free: the factor, unconstrained, ``(*batch, M, M)``, or the standard deviations,
        ``(*batch, M)``; positive entries go through softplus.
    """
    rate = jnp.asarray(rate, free.dtype)
    if free.shape == mu.shape:
        transform = biject_to(constraints.softplus_positive)
        sqrt = transform(free)
        # As below, for each coordinate: phi + phi'.
        phi = sqrt * to_free / jax.nn.sigmoid(free)

        def shrunk(rate):
            return sqrt / jnp.sqrt(1.0 + rate * phi)

        rate, new = _safe(rate, sqrt, shrunk, jnp.square)
        return -rate * new**2 * to_mu, transform.inv(new) - free
    transform = biject_to(lower_triangular)
    P = transform(free)
    eye = jnp.eye(free.shape[-1], dtype=free.dtype)
    diagonal = jnp.diagonal(free, axis1=-2, axis2=-1)
    slope = jnp.diagonal(to_free, axis1=-2, axis2=-1) / jax.nn.sigmoid(diagonal)
    to_P = jnp.tril(to_free, -1) + slope[..., None] * eye
    # With P P' = S: P' (dL/dS) P = (phi + phi') / 2, phi the lower triangle of P' dL/dP
    # with half the diagonal, so the new precision is P^-T (I + rate (phi + phi')) P^-1.
    phi = jnp.tril(jnp.einsum("...km,...kn->...mn", P, to_P)) * (1.0 - 0.5 * eye)
    phi = phi + jnp.swapaxes(phi, -1, -2)

    def stepped(rate):
        """P U^-T with upper U U' = I + rate (phi + phi'): lower triangular again."""
        flipped = jnp.flip(eye + rate * phi, (-2, -1))
        U = jnp.flip(lax.linalg.cholesky(flipped, symmetrize_input=False), (-2, -1))
        return lax.linalg.triangular_solve(
            U, P, left_side=False, lower=False, transpose_a=True
        )

    rate, new = _safe(rate, P, stepped, lambda P: jnp.sum(P**2, axis=-1))
    to_mu = to_mu.reshape(free.shape[:-1])
    to_mu = jnp.einsum("...mk,...nk,...n->...m", new, new, to_mu)
    return -rate * to_mu.reshape(mu.shape), transform.inv(new) - free


def _safe(rate, sqrt, stepped, variance):
    """
    The rate, halved until the new variances are not too large (nor NaN), and the factor
    ``stepped(rate)``; zero and ``sqrt`` if that never is.

    :param variance: from a factor to variances.
    """

    def fits(new):
        return jnp.all(variance(new) <= _MOST_GROWTH * variance(sqrt))

    def go_on(carry):
        count, _, new = carry
        return (count < _HALVINGS) & ~fits(new)

    def halve(carry):
        count, rate, _ = carry
        return count + 1, 0.5 * rate, stepped(0.5 * rate)

    start = jnp.zeros((), jnp.int32), rate, stepped(rate)
    _, rate, new = lax.while_loop(go_on, halve, start)
    done = fits(new)
    return jnp.where(done, rate, 0.0), jnp.where(done, new, sqrt)
