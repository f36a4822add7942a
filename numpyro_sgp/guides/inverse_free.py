"""Inverse-free approximations: training steps of products alone."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import constraints
from numpyro.primitives import mutable

from numpyro_sgp.distributions import GaussianProcess, InverseFreePosterior
from numpyro_sgp.distributions.inverse_free_posterior import BOUNDS
from numpyro_sgp.distributions.relaxation import Diagonal, Relaxation, Scalar
from numpyro_sgp.families import Param
from numpyro_sgp.families.constraint import lower_triangular
from numpyro_sgp.guides.approximations import SVGP, Inducing
from numpyro_sgp.guides.points import points_of
from numpyro_sgp.inducing.covariances import inducing_covariance
from numpyro_sgp.linalg import (
    inverse_root,
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
      starts from a multiple of I and takes more steps. (NumPyro's own ELBOs drop such state
      where ``num_particles`` is above one, and then fail in ``svi.run``; ``TraceGP_ELBO``
      keeps it.)
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
        M numbers, a restricted family where Z are not data points.
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
    :param jitter: relative jitter of K; if None, zero for ``"relaxed"``, where the
        pseudo-noise does its work, and by dtype for the others.
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

    _covariances = ("full", "diagonal")

    def __init__(
        self,
        num_inducing: int | None = None,
        inducing: Inducing = "kmeans",
        *,
        bound: Literal["relaxed", "lc", "fr"] = "relaxed",
        covariance: Literal["full", "diagonal"] = "full",
        precondition: bool = True,
        tol: float = 1e-3,
        max_steps: int = 100,
        T_start: Literal["inverse", "scaled", "small", "random"] | Array = "inverse",
        kl: Literal["exact", "stochastic"] = "exact",
        num_probes: int = 16,
        train_inducing: bool = True,
        share_inducing: bool = True,
        tight: Literal["none", "diagonal", "scalar"] | Relaxation = "none",
        jitter: float | None = None,
        seed: int = 0,
    ):
        self.bound = bound
        self.precondition = precondition
        self.tol = tol
        self.max_steps = max_steps
        self.T_start = T_start
        self.kl = kl
        self.num_probes = num_probes
        super().__init__(
            num_inducing,
            inducing,
            whiten=False,
            covariance=covariance,
            train_inducing=train_inducing,
            share_inducing=share_inducing,
            tight=tight,
            jitter=0.0 if jitter is None and bound == "relaxed" else jitter,
            seed=seed,
        )

    @property
    def needs_log_concave(self) -> bool:
        """See the base class."""
        return self.bound == "lc"

    @property
    def _mean_name(self):
        """Of other meaning, and so by another name, where it is preconditioned."""
        relaxed = self.bound == "relaxed" and self.precondition
        return "qu_pseudo" if relaxed else "qu_weights"

    @property
    def _relaxations(self):
        return (Diagonal, Scalar)

    def _check(self, name):
        if self.bound not in BOUNDS:
            raise ValueError(
                f"InverseFreeSVGP: bound must be one of {BOUNDS}, got {self.bound!r}."
            )
        if self.bound != "lc" and self.tight is not None:
            raise ValueError(
                f"InverseFreeSVGP: tight={self.tight.name!r} is for bound='lc'. With bound="
                f"{self.bound!r} the variance that T leaves too much is part of q(u), and "
                "products alone do not tell it from what the inducing points leave. Use "
                "tight='none', or SVGP(num_inducing, tight=...)."
            )
        super()._check(name)
        if self.kl not in KL:
            raise ValueError(f"InverseFreeSVGP: kl must be one of {KL}, got {self.kl!r}.")
        for name in ("num_probes", "max_steps"):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or value < 1:
                raise ValueError(
                    f"InverseFreeSVGP: {name} must be a positive whole number, got "
                    f"{value!r}."
                )
        if not isinstance(self.tol, int | float | np.number) or not 0 < self.tol <= 0.1:
            raise ValueError(
                "InverseFreeSVGP: tol must be a Python number above 0 and at most 0.1 "
                f"(beyond that variances are far too large), got {self.tol!r}."
            )
        if not isinstance(self.precondition, bool):
            raise ValueError(
                "InverseFreeSVGP: precondition must be True or False, got "
                f"{self.precondition!r}."
            )
        if self.bound == "relaxed":
            if not _is_default(self.T_start):
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
        if isinstance(self.T_start, str) and self.T_start not in STARTS:
            raise ValueError(
                f"InverseFreeSVGP: T_start must be one of {STARTS} or an array, got "
                f"{self.T_start!r}."
            )
        if not isinstance(self.T_start, str):
            _check_T(self.T_start, self.num_points)

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
        K = with_jitter(inducing_covariance(prior.kernel, points), self.jitter)
        if self.bound == "relaxed":
            # Of the mean variance: that at a single point may be zero.
            noise = _NOISE * jnp.mean(jnp.diagonal(K, axis1=-2, axis2=-1), axis=-1)
            noise = jnp.broadcast_to(noise[..., None], K.shape[:-1])
            if self.covariance == "full":
                noise = jnp.sqrt(noise)[..., None] * jnp.eye(size, dtype=dtype)
            square = (size, size) if self.covariance == "full" else (size,)
            noise = jnp.broadcast_to(noise, (*batch, *square))
            full = self.covariance == "full"
            params["qu_noise"] = Param(
                noise, lower_triangular if full else constraints.positive
            )
            return params
        root = _inverse_root(inducing_covariance(prior.kernel, points), self.jitter)
        root_now = jnp.broadcast_to(root, (*batch, size, size))
        params["qu_root"] = Param(root_now, lower_triangular)
        # Not a positive diagonal: where that of a root goes to zero, so does the gradient
        # by it, and T would never have full rank again.
        params["qu_T"] = Param(self._start(K, root, batch))
        if self.tight is not None:
            params |= self.tight.start(batch, dtype)
        return params

    def _start(self, K, root, batch):
        """Root of the first T, of the shape of K or with the batch shape of the site."""
        eye = jnp.eye(K.shape[-1], dtype=K.dtype)
        if not isinstance(self.T_start, str):
            L = jnp.linalg.cholesky(jnp.asarray(self.T_start, K.dtype))
            if L.ndim > 2 and L.shape[:-2] != batch:
                raise ValueError(
                    f"T_start has the shape {L.shape}, but the latent functions have the "
                    f"batch shape {batch}: give one matrix, or one for each of them."
                )
            return jnp.broadcast_to(L, (*batch, *K.shape[-2:]))
        if self.T_start == "inverse":
            return root
        if self.T_start == "small":
            return jnp.broadcast_to(jnp.sqrt(_SMALL).astype(K.dtype) * eye, K.shape)
        if self.T_start == "random":
            A = jax.random.normal(jax.random.key(self.seed), K.shape, K.dtype)
            eye = jnp.linalg.cholesky(A @ A.mT / K.shape[-1])
        size = jnp.max(jnp.sum(jnp.abs(K), axis=-1), axis=-1)
        return eye / jnp.sqrt(size)[..., None, None]

    def declare(self, prefix, initial):
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
            there, is where the iteration starts, and is told where it ended.
        """
        num_probes = self.num_probes if self.kl == "stochastic" else None
        Z, weights = self._inducing(0, params["Z"]), params[self._mean_name]
        if self.bound != "relaxed":
            factors = _positive(jnp.tril(params["qu_T"])), params["qu_root"]
            posterior = InverseFreePosterior(
                prior, Z, weights, *factors, self.bound, num_probes, self.jitter
            )
            if self.tight is None:
                return posterior
            return posterior.relaxed(self.tight.at(params))
        R = params["qu_noise"]
        if self.covariance == "diagonal":
            S = R[..., None] * jnp.eye(R.shape[-1], dtype=R.dtype)
            R = jnp.sqrt(R)
        else:
            S = matmul(R, R.mT)
        K = with_jitter(inducing_covariance(prior.kernel, (Z,)), self.jitter) + S
        state = params.get("T", {})
        found = inverse_root(K, state.get("root"), self.tol, self.max_steps)
        state.update(found._asdict())
        L = found.root
        if self.precondition:
            mu = weights[..., None]
            T_mu = matmul(L, matmul(L.mT, mu))
            weights = 2.0 * T_mu - matmul(L, matmul(L.mT, matmul(K, T_mu)))
            weights = weights[..., 0]
        return InverseFreePosterior(
            prior,
            Z,
            weights,
            L,
            R,
            "relaxed",
            num_probes,
            self.jitter,
            residual=found.residual,
        )


def _positive(L):
    """The root of the same matrix with a positive diagonal."""
    diagonal = jnp.diagonal(L, axis1=-2, axis2=-1)
    return L * jnp.where(diagonal < 0, -1.0, 1.0).astype(L.dtype)[..., None, :]


def _is_default(T_start):
    return isinstance(T_start, str) and T_start == "inverse"


def _check_T(T, num_points):
    T = np.asarray(T)
    if T.shape[-2:] != (num_points, num_points):
        raise ValueError(
            f"InverseFreeSVGP: T_start must have the shape ({num_points}, {num_points}) "
            f"for {num_points} inducing points, got {T.shape}."
        )
    known = np.isfinite(T).all() and np.allclose(T, np.swapaxes(T, -1, -2))
    if not known or np.linalg.eigvalsh(T).min() <= 0:
        raise ValueError(
            "InverseFreeSVGP: T_start must be symmetric and positive definite; "
            "T_start='scaled' is."
        )


def _inverse_root(K, jitter):
    """The lower factor of the inverse of K, from the upper factor of K."""
    L, _ = jittered_cholesky(jnp.flip(K, (-2, -1)), jitter)
    inverse = solve_lower(L, jnp.eye(K.shape[-1], dtype=K.dtype))
    return jnp.swapaxes(jnp.flip(inverse, (-2, -1)), -1, -2)
