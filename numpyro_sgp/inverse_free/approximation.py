"""Inverse-free approximations: training steps of products alone."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import constraints
from numpyro.primitives import mutable
from numpyro.util import find_stack_level, not_jax_tracer

from numpyro_sgp.distributions import GaussianProcess
from numpyro_sgp.distributions.relaxation import Diagonal, Scalar
from numpyro_sgp.families import Family, Param
from numpyro_sgp.families.constraint import lower_triangular
from numpyro_sgp.guides.approximations import SVGP
from numpyro_sgp.guides.points import points_of
from numpyro_sgp.inducing.covariances import inducing_covariance
from numpyro_sgp.inverse_free.at_gaussian import (
    precisions,
    pseudo_observations,
    with_diagonal_noise,
)
from numpyro_sgp.inverse_free.iterations import inverse_root
from numpyro_sgp.inverse_free.log_concave import check_log_concave
from numpyro_sgp.inverse_free.posterior import BOUNDS, InverseFreePosterior
from numpyro_sgp.linalg import (
    diagonal_of,
    jittered_cholesky,
    matmul,
    solve_lower,
    with_jitter,
)

KL = ("exact", "stochastic")
STARTS = ("inverse", "scaled", "small", "random")
_SMALL = 1e-6
# Where the pseudo-noise starts, relative to the prior variance.
_NOISE = 0.1


@dataclass(frozen=True)
class PseudoNoise(Family):
    """q(u) of the inverse-free bounds; :class:`InverseFreePosterior` has its arrays."""

    name = "inverse-free"
    whitened_only = False


@dataclass(eq=False, repr=False)
class InverseFreeSVGP(SVGP):
    r"""
    One set of inducing points Z with a Gaussian q(u), trained by matrix products alone: no
    Cholesky factor, inverse, triangular solve or determinant of :math:`K = K_{uu}` is
    taken in a step of :class:`~numpyro_sgp.TraceGP_ELBO` (the set-up, predictions that are
    joint over inputs, and the checks of ``guide.posterior`` do factorise K). With any
    values of its parameters each of the three bounds is valid; their posteriors are those
    of :class:`~numpyro_sgp.InverseFreePosterior`.

    - ``bound="relaxed"`` [2], for all likelihoods. q(u) is the prior times one Gaussian
      pseudo-observation of u with noise :math:`\tilde S`, and T, an approximate inverse of
      :math:`\tilde K = K + \tilde S`, is not a parameter: each step iterates it, from where
      the last step left it, until :math:`\|L_T^\top \tilde K L_T - I\|_F / \sqrt M` is
      below ``tol``, and takes it as a constant. (At its optimum the bound does not depend
      on T, so gradients are those of the bound with the inverse itself.) The root, its
      residual and the steps taken are the mutable site ``{site}_auto_T`` of the guide,
      which :class:`~numpyro.infer.SVI` keeps in ``state.mutable_state``. Where none is
      given, as in :class:`~numpyro.infer.Predictive` and ``guide.posterior``, the iteration
      starts from a multiple of I and takes more steps. For ``TraceGP_ELBO`` alone, as
      ``"lc"`` is: what they charge is no KL of the posterior, and is refused elsewhere.
    - ``bound="lc"`` [1], for log-concave likelihoods. T, :math:`\hat m = K^{-1} E[u]` and
      :math:`\hat S` are free parameters (the lower triangle of ``_qu_T`` is a root of T,
      whose diagonal may have any sign; ``_qu_root`` is the factor of :math:`\hat S`). The
      guide's set-up looks for positive curvature of the model's log likelihood in each row,
      at values of f up to four prior standard deviations from the prior mean and at the
      starting hyperparameters, and refuses what has it; a likelihood that is not
      log-concave elsewhere gets by. Sites that feed another GP site, and likelihoods that
      tie rows together, are refused.
    - ``bound="fr"`` [1], for all likelihoods: the same parameters with the KL of what
      predictions are made from. At the optimum T is not unique.

    The last two are the published ones of 2019. Their T must be learned, and where
    hyperparameters move faster than T follows, bounds fall and variances explode: with
    Adam take a rate of 0.003 or less, or begin with fixed hyperparameters; or use
    :func:`~numpyro_sgp.fit_lbfgs`. ``"relaxed"`` trains at any rate that SVGP does.

    :param num_inducing: number M of points; may be left out where ``inducing`` is an
        array.
    :param inducing: as in :class:`SVGP`.
    :param bound: ``"relaxed"``, ``"lc"`` or ``"fr"``.
    :param covariance: for ``"relaxed"``, that of the pseudo-noise (``_qu_noise``):
        ``"full"`` (a lower triangular factor), which contains all covariances of q(u)
        below the prior's, and so the best for log-concave likelihoods; or ``"diagonal"``,
        M variances, a restricted family where Z are not data points.
    :param precondition: for ``"relaxed"``, whether the parameter of the mean is that of the
        pseudo-observations, ``_qu_pseudo``, :math:`\hat m = (2 T - T \tilde K T) \mu`,
        which trains far better by Adam, or ``_qu_weights``, :math:`\hat m` itself.
    :param tol: for ``"relaxed"``, residual at which the iteration for T ends. What the
        bound loses by it is of second order.
    :param max_steps: for ``"relaxed"``, most steps of that iteration.
    :param T_start: for ``"lc"`` and ``"fr"``: ``"inverse"`` of the initial K; ``"scaled"``,
        :math:`I / \|K\|_\infty`; ``"small"``, :math:`10^{-6} I`; ``"random"``, a random
        positive definite matrix over :math:`\|K\|_\infty`; or T as an array, ``(M, M)`` or
        ``(*batch, M, M)``.
    :param kl: ``"exact"``, or ``"stochastic"`` to estimate traces and determinants by
        random vectors in each step, gradients without bias. The exact KL of ``"relaxed"``
        costs some products of M x M matrices; for ``"lc"`` and ``"fr"`` it factorises K.
    :param num_probes: number of random vectors for ``kl="stochastic"``.
    :param train_inducing: whether Z is a parameter or stays where it starts.
    :param share_inducing: whether latent functions share Z or start with a copy each.
    :param tight: for ``"lc"``, a tighter bound as in :class:`SVGP`, with eq. (5) of [1] in
        the place of :math:`d_n`: ``"none"``, ``"diagonal"`` (for Gaussian likelihoods) or
        ``"scalar"``.
    :param jitter: relative jitter of K; if None, zero for ``"relaxed"`` in float64, where
        the pseudo-noise does its work, and else by dtype: in float32 pseudo-noise goes to
        zero faster than rounding allows, and "bounds" were above what they bound.
    :param seed: of the initialiser, and of ``T_start="random"``.
    :raises ValueError: if the options contradict each other.

    **References:**

    1. van der Wilk, John, Artemev, Hensman (2019). Variational Gaussian Process Models
       without Matrix Inverses. AABI.
    2. Cortinovis, Aitchison, Eleftheriadis, van der Wilk (2026). Inverse-Free Sparse
       Variational Gaussian Processes. AISTATS. https://arxiv.org/abs/2604.00697

    >>> import numpyro_sgp as sgp
    >>> sgp.InverseFreeSVGP(20, bound="fr", kl="stochastic").num_points
    20
    """

    _relaxations = (Diagonal, Scalar)

    bound: Literal["relaxed", "lc", "fr"] = field(default="relaxed", kw_only=True)
    precondition: bool = field(default=True, kw_only=True)
    tol: float = field(default=1e-3, kw_only=True)
    max_steps: int = field(default=100, kw_only=True)
    T_start: Literal["inverse", "scaled", "small", "random"] | Array = field(
        default="inverse", kw_only=True
    )
    kl: Literal["exact", "stochastic"] = field(default="exact", kw_only=True)
    num_probes: int = field(default=16, kw_only=True)
    whiten: bool = field(default=False, init=False)
    initial_scale: float = field(default=1.0, init=False)

    def __post_init__(self):
        self._refuse_unless(self.bound in BOUNDS, "bound", f"one of {BOUNDS}")
        super().__post_init__()

    @property
    def draws_kl(self) -> bool:
        return self.kl == "stochastic"

    def _jitter(self, dtype) -> float | None:
        """The relative jitter of K; None for that by dtype."""
        pseudo_noise = self.jitter is None and self.bound == "relaxed"
        return 0.0 if pseudo_noise and dtype == jnp.float64 else self.jitter

    def _family(self, name, covariance):
        self._refuse_unless(
            covariance in ("full", "diagonal"), "covariance", "one of ('full', 'diagonal')"
        )
        return PseudoNoise()

    @property
    def gaussian(self) -> SVGP:
        """A q(u) of any covariance, by factors of K."""
        own = {f.name: getattr(self, f.name) for f in fields(SVGP)}
        return SVGP(**own | {"covariance": "full", "whiten": True})

    def at_gaussian(
        self, modes: list[dict], bounds: list[float], factor: Callable[[], np.ndarray]
    ) -> dict:
        """See the base class; at that Gaussian, or as near as pseudo-noise comes."""
        params = modes[0]
        found = {name: value for name, value in params.items() if name[:3] != "qu_"}
        mu, sqrt = params["qu_mu"], params["qu_sqrt"]
        if self.bound == "relaxed":
            noise, observed, weights = pseudo_observations(factor(), mu, sqrt)
            if self.covariance == "diagonal":
                noise, observed = with_diagonal_noise(factor(), noise, weights)
            found["qu_noise"] = noise
            found[self._mean_name] = observed if self.precondition else weights
        else:
            weights, found["qu_root"], found["qu_T"] = precisions(factor(), mu, sqrt)
            found[self._mean_name] = weights
        return {name: value.astype(mu.dtype) for name, value in found.items()}

    @property
    def _mean_name(self):
        """Of other meaning, and so by another name, where it is preconditioned."""
        relaxed = self.bound == "relaxed" and self.precondition
        return "qu_pseudo" if relaxed else "qu_weights"

    def _check(self, name):
        if self.bound != "lc" and self.relaxation is not None:
            raise ValueError(
                f"InverseFreeSVGP: tight={self.relaxation.name!r} is for bound='lc'. With "
                f"bound={self.bound!r} the variance that T leaves too much is part of "
                "q(u), and products alone do not tell it from what the inducing points "
                "leave. Use tight='none', or SVGP(num_inducing, tight=...)."
            )
        super()._check(name)
        check, named = self._refuse_unless, isinstance(self.T_start, str)
        check(self.kl in KL, "kl", f"one of {KL}")
        for name in ("num_probes", "max_steps"):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            check(whole and value > 0, name, "a positive whole number")
        small = isinstance(self.tol, int | float | np.number) and 0 < self.tol <= 0.1
        wanted = "a Python number above 0 and at most 0.1 (beyond it variances explode)"
        check(small, "tol", wanted)
        check(isinstance(self.precondition, bool), "precondition", "True or False")
        if self.bound == "relaxed":
            if not named or self.T_start != "inverse":
                raise ValueError(
                    "InverseFreeSVGP: T_start is for bound='lc' and bound='fr'; T of "
                    "bound='relaxed' is iterated in each step."
                )
            return
        if self.covariance != "full" or not self.precondition:
            raise ValueError(
                "InverseFreeSVGP: covariance='diagonal' and precondition=False are for "
                f"bound='relaxed', but bound={self.bound!r}."
            )
        if named:
            check(self.T_start in STARTS, "T_start", f"one of {STARTS} or an array")
            return
        T, M = np.asarray(self.T_start), self.num_points
        if T.shape[-2:] != (M, M):
            raise ValueError(
                f"InverseFreeSVGP: T_start must have the shape ({M}, {M}) for {M} inducing "
                f"points, got {T.shape}."
            )
        known = np.isfinite(T).all() and np.allclose(T, np.swapaxes(T, -1, -2))
        if not known or np.linalg.eigvalsh(T).min() <= 0:
            raise ValueError(
                "InverseFreeSVGP: T_start must be symmetric and positive definite; "
                "T_start='scaled' is."
            )

    def _refuse_unless(self, condition, name, wanted):
        if not condition:
            raise ValueError(
                f"InverseFreeSVGP: {name} must be {wanted}, got {getattr(self, name)!r}."
            )

    def start(self, prior: GaussianProcess, points: tuple[Array, ...]) -> dict[str, Param]:
        """
        Starting values of the parameters at a site.

        For ``"lc"`` and ``"fr"`` q(u) is at the prior; for ``"relaxed"`` the
        pseudo-observations are zero, with a tenth of the prior variance for their noise.

        :param prior: the process at the site with its initial hyperparameters.
        :param points: inducing points, of one set.
        """
        (Z,) = points
        batch, size, dtype = prior.batch_shape, Z.shape[-2], Z.dtype
        params = {
            "Z": Param(points_of(Z), role="inducing"),
            self._mean_name: Param(jnp.zeros((*batch, size), dtype)),
        }
        Kuu = inducing_covariance(prior.kernel, points)
        K = with_jitter(Kuu, self._jitter(dtype))
        if self.bound == "relaxed":
            # Of the mean variance: that at a single point may be zero.
            noise = _NOISE * jnp.mean(diagonal_of(K), axis=-1)
            noise, shape = noise[..., None], (*batch, size)
            if self.covariance == "full":
                noise = jnp.sqrt(noise)[..., None] * jnp.eye(size, dtype=dtype)
                shape = (*shape, size)
            noise = jnp.broadcast_to(noise, shape)
            full = self.covariance == "full"
            constraint = lower_triangular if full else constraints.positive
            return params | {"qu_noise": Param(noise, constraint)}
        root = _inverse_root(Kuu, self.jitter)
        factor = jnp.broadcast_to(root, (*batch, size, size))
        params["qu_root"] = Param(factor, lower_triangular)
        # Not a positive diagonal: where that of a root goes to zero, so does the gradient
        # by it, and T would never have full rank again.
        params["qu_T"] = Param(self._start(K, root, batch))
        if self.relaxation is not None:
            params |= self.relaxation.start(batch, dtype)
        return params

    def _start(self, K, root, batch):
        """Root of the first T, of the shape of K or with the batch shape of the site."""
        start, eye = self.T_start, jnp.eye(K.shape[-1], dtype=K.dtype)
        if not isinstance(start, str):
            L = jnp.linalg.cholesky(jnp.asarray(start, K.dtype))
            if L.ndim > 2 and L.shape[:-2] != batch:
                raise ValueError(
                    f"T_start has the shape {L.shape}, but the latent functions have the "
                    f"batch shape {batch}: give one matrix, or one for each of them."
                )
            return jnp.broadcast_to(L, (*batch, *K.shape[-2:]))
        if start == "inverse":
            return root
        if start == "small":
            return jnp.broadcast_to(jnp.sqrt(_SMALL).astype(K.dtype) * eye, K.shape)
        if start == "random":
            A = jax.random.normal(jax.random.key(self.seed), K.shape, K.dtype)
            eye = jnp.linalg.cholesky(matmul(A, A.mT) / K.shape[-1])
        size = jnp.max(jnp.sum(jnp.abs(K), axis=-1), axis=-1)
        return eye / jnp.sqrt(size)[..., None, None]

    def declare(self, prefix: str, initial: dict[str, Param]) -> dict:
        """See the base class; with the mutable site of T."""
        values = super().declare(prefix, initial)
        if self.bound == "relaxed":
            values["T"] = mutable(f"{prefix}_T", {})
        return values

    def posterior(self, prior: GaussianProcess, params: dict) -> InverseFreePosterior:
        """
        q(f(X)) at a site; for ``"relaxed"``, T is iterated here.

        :param prior: the process at the site.
        :param params: values by name, as :meth:`declare` returns them. The dict ``"T"``, if
            there, is where the iteration starts; where it ended is ``iteration`` of what is
            returned.
        """
        (Z,) = self.points_in(params)
        make = partial(
            InverseFreePosterior,
            prior,
            Z,
            bound=self.bound,
            num_probes=self.num_probes if self.kl == "stochastic" else None,
            jitter=self._jitter(Z.dtype),
        )
        weights = params[self._mean_name]
        if self.bound != "relaxed":
            factors = _positive(jnp.tril(params["qu_T"])), params["qu_root"]
            posterior = make(weights, *factors)
            if self.relaxation is None:
                return posterior
            return posterior.relaxed(self.relaxation.at(params))
        R = params["qu_noise"]
        if self.covariance == "diagonal":
            S = R[..., None] * jnp.eye(R.shape[-1], dtype=R.dtype)
            R = jnp.sqrt(R)
        else:
            S = matmul(R, R.mT)
        K = inducing_covariance(prior.kernel, (Z,))
        K = with_jitter(K, self._jitter(K.dtype)) + S
        start = params.get("T", {}).get("root")
        found = inverse_root(K, start, self.tol, self.max_steps)
        L = found.root
        if self.precondition:
            T_mu = matmul(L, matmul(L.mT, weights[..., None]))
            weights = 2.0 * T_mu - matmul(L, matmul(L.mT, matmul(K, T_mu)))
            weights = weights[..., 0]
        return make(weights, L, R, iteration=found)

    def keep_state(self, values: dict, posterior: InverseFreePosterior) -> None:
        """See the base class: where the next step's iteration starts."""
        if posterior.iteration is not None:
            values["T"].update(posterior.iteration._asdict())

    def check_likelihood(
        self, site: str, trace_at: Callable, priors: dict, couples_rows: bool
    ) -> None:
        """See the base class; ``"lc"`` is a bound for log-concave likelihoods only."""
        if self.bound == "lc":
            check_log_concave(site, trace_at, priors, couples_rows)

    def report(self, site: str, posterior: InverseFreePosterior) -> None:
        """Warns where the iteration for T has not converged."""
        found = posterior.iteration
        if found is None or not not_jax_tracer(found.residual):
            return
        residual = np.asarray(found.residual)
        rounding = 10 * found.root.shape[-1] * np.finfo(residual.dtype).eps
        if not np.all(residual < max(self.tol, rounding)):
            warnings.warn(
                f"The iteration for the inverse at GP site '{site}' ended at a residual of "
                f"{np.max(residual):.1e}, above tol={self.tol:.1e}: variances are too "
                "large and the bound is loose. Look for small pseudo-noise or near-by "
                "inducing points; give InverseFreeSVGP a jitter (1e-6, say), more "
                "max_steps or a larger tol; in float32, try numpyro.enable_x64().",
                stacklevel=find_stack_level(),
            )


def _positive(L):
    """The root of the same matrix with a positive diagonal."""
    diagonal = diagonal_of(L)
    return L * jnp.where(diagonal < 0, -1.0, 1.0).astype(L.dtype)[..., None, :]


def _inverse_root(K, jitter):
    """The lower factor of the inverse of K, from the upper factor of K."""
    L, _ = jittered_cholesky(jnp.flip(K, (-2, -1)), jitter)
    inverse = solve_lower(L, jnp.eye(K.shape[-1], dtype=K.dtype))
    return jnp.swapaxes(jnp.flip(inverse, (-2, -1)), -1, -2)
