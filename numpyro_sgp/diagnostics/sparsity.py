"""What the inducing points of a fit lose, in nats, and how many would do."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from numpyro_sgp._checks import check_whole
from numpyro_sgp.diagnostics.moved_bound import MAX_ROWS, MovedBound
from numpyro_sgp.diagnostics.optimality import begin_nats_left, check_fitted
from numpyro_sgp.diagnostics.orthogonal_points import add_points
from numpyro_sgp.distributions.relaxation import Diagonal, Scalar
from numpyro_sgp.elbo import TraceGP_ELBO
from numpyro_sgp.guides import VGP

#: Nats that a further point has to gain.
ENOUGH_PER_POINT = 0.1


@dataclass(frozen=True, repr=False)
class SparsityCurve:
    """
    What inducing points added to a fit gain, and so what those that it has lose.

    :param num_inducing: inducing points now, of all GP sites together.
    :param added: numbers of further points at each GP site.
    :param gained: nats that the bound gains by them.
    :param se: standard errors of ``gained``; zero where the bound is not random.
    :param lost: nats that are lost at least, at these hyperparameters and inducing points:
        the largest gain, less what q(u) has left to gain by itself. With hyperparameters
        that are trained again it may be several times as much: too few points make noise
        larger and lengthscales longer than they would be.
    :param needed: inducing points, of all GP sites together, from which on a further one
        gains less than 0.1 nat; None where ``added`` does not reach it.
    :param nats_left: what q(u) has left to gain; NaN where that is not known, and then
        counted as nothing.
    :param unknown: why nothing can be told (then numbers are NaN), or empty.
    """

    num_inducing: int
    added: tuple[int, ...] = ()
    gained: tuple[float, ...] = ()
    se: tuple[float, ...] = ()
    lost: float = float("nan")
    needed: int | None = None
    nats_left: float = float("nan")
    unknown: str = ""

    def __repr__(self):
        return f"<SparsityCurve: {self}>"

    def __str__(self):
        if self.unknown:
            return (
                f"what {self.num_inducing} inducing points lose is unknown: {self.unknown}"
            )
        if self.lost < 0.05:
            return f"{self.num_inducing} inducing points lose nothing that can be seen"
        text = f"{self.num_inducing} inducing points lose at least {self.lost:.1f} nats"
        if any(self.se):
            text += f" (± {self.se[-1]:.1g})"
        text += " at these hyperparameters, which would move with more of them"
        pairs = zip(self.added, self.gained, strict=True)
        text += "; " + ", ".join(f"{k} more gain {g:.1f}" for k, g in pairs)
        if self.needed is None:
            return f"{text}; still more would gain more than 0.1 each"
        return f"{text}; from about {self.needed} on a further one gains less than 0.1"


def sparsity_curve(
    guide, params: dict, *args, loss=None, rng_key=None, max_points=None, **kwargs
) -> SparsityCurve:
    r"""
    How many nats the inducing points of a fit lose, at its hyperparameters, from below; and
    how many points would do. For any likelihood.

    Orthogonal points O [1] are added to those of the guide, whose q(u) stays as it is:
    rows of X, one after another where :math:`\lambda_n d_n` is largest, the precision of
    the likelihood, :math:`-2\, \partial E_n / \partial \sigma_n^2`, times the prior
    variance that the points before leave. With :math:`A_v = L_v^{-1} C_{vX}`, q(v) =
    N(m, S) takes natural-gradient steps from the prior, of which the first leads to

    .. math::

        S^{-1} = I + A_v \Lambda A_v^\top, \qquad m = S A_v g ,

    and the bound is then evaluated with q(v): it is that of SOLVE-GP, so that a gain is a
    gain. Where q(u) is not at its optimum, what it has left to gain by itself
    (:func:`~numpyro_sgp.diagnostics.optimality.nats_left`) is not counted as lost.

    Costs some passes over all rows and O(N M m) for m points. Several latent functions get
    points of their own, several GP sites too, one after another.

    :param guide: an :class:`~numpyro_sgp.AutoSparseGP` that is set up.
    :param params: parameters, ``result.params`` of ``svi.run``.
    :param args: arguments of the model, with all of the data.
    :param loss: the loss that was minimised; ``TraceGP_ELBO()`` if None.
    :param rng_key: random key; ``jax.random.key(0)`` if None. Where the bound is random,
        q(v) is chosen with some keys and scored with others.
    :param max_points: most points to be added at each GP site; if None, the number that it
        has now, four times that where N M is at most 200,000, and 32 at least.
    :param kwargs: keyword arguments of the model.
    :return: the curve, ``unknown`` for deep GPs, inverse-free and decoupled approximations,
        ``tight="block"``, likelihoods that tie rows together, GP sites that are scaled, and
        more than 100,000 rows.
    :raises TypeError: if the guide is no AutoSparseGP.
    :raises ValueError: if it is not set up, ``params`` lack q(u), the model takes a
        minibatch, or ``max_points`` is not positive.

    **References:**

    1. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes. AISTATS. https://arxiv.org/abs/1910.10596

    >>> import jax, jax.numpy as jnp, numpyro, optax
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> from numpyro_sgp.diagnostics.sparsity import sparsity_curve
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.2), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.2), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 40)[:, None]
    >>> y = jnp.sin(5.0 * X[:, 0])
    >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(4, train_inducing=False))
    >>> step = sgp.natural_gradients(guide, 1.0, optax.sgd(0.0))  # at once
    >>> svi = numpyro.infer.SVI(model, guide, step, sgp.TraceGP_ELBO())
    >>> result = svi.run(jax.random.key(0), 1, X, y, progress_bar=False)
    >>> sparsity_curve(guide, result.params, X, y).lost > 50.0  # four are too few
    True
    """
    check_fitted(guide, params, "sparsity_curve")
    if max_points is not None:
        check_whole(max_points, "max_points", least=1)
    loss = TraceGP_ELBO() if loss is None else loss
    return begin_curve(guide, params, args, kwargs, loss, rng_key, max_points)()


def begin_curve(
    guide, params, args, kwargs, loss, rng_key, max_points=None, left=None
) -> Callable[[], SparsityCurve]:
    """
    What is to be called for :func:`sparsity_curve`; compiles beside.

    :param left: what is to be called for :func:`nats_left_and_why`, if it is there already.
    """
    bound = MovedBound(guide, loss, args, kwargs)
    if why := bound.why_unknown(params, MAX_ROWS):
        return partial(SparsityCurve, bound.num_inducing, unknown=why)
    if others := set(bound.relaxations.values()) - {Diagonal, Scalar}:
        why = f"the bound is tight by {others.pop().__name__}, not by rows"
        return partial(SparsityCurve, bound.num_inducing, unknown=why)
    if all(isinstance(a, VGP) for a in guide.approximations.values()):
        number = bound.num_inducing
        return partial(SparsityCurve, number, lost=0.0, needed=number)
    left = left or begin_nats_left(guide, params, args, kwargs, loss, rng_key)
    bound.prepare(params, rng_key)

    def finish():
        nats, _ = left()
        if np.isinf(nats):
            why = "q(u) is far from its optimum (nats_left is infinite)"
            return SparsityCurve(bound.num_inducing, nats_left=nats, unknown=why)
        return curve_of(bound, params, rng_key, max_points, nats)

    return finish


def curve_of(
    bound: MovedBound, params, rng_key=None, max_points=None, left: float = 0.0
) -> SparsityCurve:
    """
    The curve of a bound whose :meth:`MovedBound.why_unknown` is empty.

    :param left: nats that q(u) has left to gain; NaN where not known.
    """
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    found = add_points(bound, params, rng_key, max_points)
    if found is None:
        why = "the bound or its slopes are not finite"
        return SparsityCurve(bound.num_inducing, nats_left=left, unknown=why)
    sizes, gains, sites = found.sizes, found.gains, len(bound.shapes)
    gained = np.maximum.accumulate([0.0, *np.mean(gains, axis=1)])
    se = np.zeros(len(sizes))
    if gains.shape[1] > 1:
        se = np.std(gains, axis=1, ddof=1) / np.sqrt(gains.shape[1])
    few = np.diff(gained) / np.diff([0, *sizes]) < ENOUGH_PER_POINT * sites
    needed = None
    if few.any():
        needed = [0, *sizes][np.argmax(few)]
    elif found.all_chosen:  # no other row would gain anything
        needed = [0, *sizes][-1]
    return SparsityCurve(
        bound.num_inducing,
        tuple(sizes),
        tuple(map(float, gained[1:])),
        tuple(map(float, se)),
        float(max(gained[-1] - np.nan_to_num(left), 0.0)),
        None if needed is None else bound.num_inducing + sites * needed,
        left,
    )
