"""What a guide does at a GP site: SVGP, VGP, SOLVE-GP and ODVGP on one core."""

import math
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro.distributions import constraints

from numpyro_sgp.distributions import (
    CoupledPosterior,
    DecoupledPosterior,
    GaussianProcess,
    GPPosterior,
    SparsePosterior,
)
from numpyro_sgp.distributions.relaxation import Relaxation
from numpyro_sgp.families import Block, BlockGaussian, DualGaussian, SiteGaussian
from numpyro_sgp.guides.constraint import lower_triangular
from numpyro_sgp.inducing import InducingStart, InducingVariables, initial_inducing
from numpyro_sgp.inducing.covariances import inducing_covariance
from numpyro_sgp.inducing.variables import PointKernel
from numpyro_sgp.linalg import jittered_cholesky, solve_lower

Inducing = Literal["kmeans", "greedy", "random"] | Array | np.ndarray | InducingVariables
METHODS = ("kmeans", "greedy", "random")
Covariance = Literal["full", "diagonal", "prior"]
Tight = Literal["none", "diagonal", "block", "scalar"]


class _BlockApproximation:
    """Options that SVGP, SOLVEGP and ODVGP share, and what a guide asks of them."""

    _covariances: tuple[str, ...] = ("full", "diagonal")
    _tights: tuple[str, ...] = ("none", "diagonal", "block", "scalar")

    #: Whether the set-up must see all rows of the data, and not minibatches.
    needs_all_rows = False

    def __init__(
        self,
        *,
        whiten: bool = True,
        covariance: Literal["full", "diagonal"] = "full",
        train_inducing: bool = True,
        share_inducing: bool = True,
        tight: Tight = "none",
        block_size: int | None = None,
        initial_scale: float = 1.0,
        jitter: float | None = None,
        seed: int = 0,
    ):
        self.whiten = whiten
        self.covariance = covariance
        self.train_inducing = train_inducing
        self.share_inducing = share_inducing
        self.tight = tight
        self.block_size = block_size
        self.initial_scale = initial_scale
        self.jitter = jitter
        self.seed = seed
        self._check()

    def _sets(self) -> list[tuple[int | None, Inducing, Covariance]]:
        """Size, start and kind of covariance of each set."""
        raise NotImplementedError

    def _check(self):
        name = type(self).__name__
        if self.covariance not in self._covariances:
            raise ValueError(
                f"{name}: covariance must be one of {self._covariances}, got "
                f"{self.covariance!r}."
            )
        is_number = isinstance(self.jitter, int | float | np.number)
        if self.jitter is not None and not (is_number and 0 <= self.jitter < 1):
            raise ValueError(
                f"{name}: jitter is relative to the mean variance, a number from 0 to 1, "
                f"or None, got {self.jitter!r}."
            )
        scale = self.initial_scale
        number = isinstance(scale, int | float | np.number) and not isinstance(scale, bool)
        if not (number and 0 < scale < np.inf):
            raise ValueError(
                f"{name}: initial_scale must be a positive number, got {scale!r}."
            )
        if scale != 1 and self.covariance in ("sites", "dual"):
            raise ValueError(
                f"{name}: q(u) with covariance={self.covariance!r} starts at the prior, "
                "whose covariance it has no parameter for; leave initial_scale=1, or use "
                "covariance='full'."
            )
        if self.tight not in self._tights:
            raise ValueError(
                f"{name}: tight must be one of {self._tights}, got {self.tight!r}."
            )
        if self.tight != "none" and self.covariance == "coupled":
            raise ValueError(
                f"{name}: tight={self.tight!r} is for independent latent functions; use "
                "tight='none' with covariance='coupled'."
            )
        if self.block_size is not None and self.tight != "block":
            raise ValueError(
                f"{name}: block_size is for tight='block', but tight={self.tight!r}."
            )
        for i, (size, start, _) in enumerate(self._sets()):
            what, start = _point_name(i), points_of(start)
            if np.ndim(size) > 0:
                raise TypeError(
                    f"{name}: the number of inducing points {what} is an array. Pass "
                    f"points by name: {'inducing' if i == 0 else 'orthogonal'}=..."
                )
            if size is not None and (
                isinstance(size, bool) or not isinstance(size, int | np.integer)
            ):
                raise TypeError(
                    f"{name}: the number of inducing points {what} must be a whole number, "
                    f"got {size!r}."
                )
            if isinstance(start, str) and start not in METHODS:
                raise ValueError(
                    f"{name}: inducing points {what} start by one of {METHODS} or from an "
                    f"array, got {start!r}."
                )
            if isinstance(start, str):
                if size is None:
                    raise ValueError(
                        f"{name}: give the number of inducing points {what}, or the "
                        "points themselves as an array."
                    )
            elif np.ndim(start) < 2:
                raise ValueError(
                    f"{name}: the inducing points {what} must have the shape (M, D), got "
                    f"{np.shape(start)}."
                )
            elif size is not None and size != np.shape(start)[-2]:
                raise ValueError(
                    f"{name}: {size} inducing points {what} were asked for, but the "
                    f"array given has {np.shape(start)[-2]} rows."
                )
            if size is not None and size < 1:
                raise ValueError(
                    f"{name}: the number of inducing points {what} must be positive, "
                    f"got {size}."
                )

    def __repr__(self):
        options = {k: v for k, v in vars(self).items() if np.ndim(v) == 0 or len(v) < 5}
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in options.items())})"

    @property
    def num_points(self) -> int:
        """Number of inducing points in all sets."""
        return sum(
            np.shape(points_of(start))[-2] if size is None else size
            for size, start, _ in self._sets()
        )

    @property
    def inter_domain(self) -> bool:
        """Whether a set is of inducing variables that are not values of f."""
        return any(isinstance(start, InducingVariables) for _, start, _ in self._sets())

    def initial_points(self, prior: GaussianProcess, X: np.ndarray) -> tuple[Array, ...]:
        """
        Starting inducing points of each set.

        :param prior: the process at the site with its initial hyperparameters.
        :param X: inputs to choose from, shape ``(N, D)``.
        :return: arrays of shape ``(M_l, D)``, or ``(*batch, M_l, D)`` where each latent
            function has its own; inter-domain sets as their objects.
        :raises ValueError: if X has fewer distinct rows than points asked for, or a given
            array has another number of columns.
        """
        sets = self._sets()
        points: list = [points_of(start) for _, start, _ in sets]
        kinds = [_kind(start) for _, start, _ in sets]
        # Sets of one kind are chosen together, so that they differ.
        for kind in dict.fromkeys(kinds):
            chosen = [
                i for i, p in enumerate(points) if kinds[i] == kind and isinstance(p, str)
            ]
            methods = {points[i] for i in chosen}
            if not chosen:
                continue
            if len(methods) > 1:
                raise ValueError(
                    f"Choose all sets of inducing points by one method, got {methods}."
                )
            rows, kernel = X, MeanKernel(prior.kernel)
            if kind is not None:
                example = sets[chosen[0]][1]
                rng = np.random.default_rng(self.seed)
                rows = example.candidates(prior.kernel, X, rng)
                kernel = PointKernel(prior.kernel, example)
            start = initial_inducing(
                rows,
                sets[chosen[0]][0],
                methods.pop(),
                kernel=kernel,
                num_orthogonal=tuple(sets[i][0] for i in chosen[1:]),
                seed=self.seed,
            )
            for i, new in zip(chosen, (start.Z, *start.O), strict=True):
                points[i] = new
        dim = prior.X.shape[-1]
        for i, given in enumerate(points):
            if kinds[i] is None and np.shape(given)[-1] != dim:
                raise ValueError(
                    f"the inducing points {_point_name(i)} have {np.shape(given)[-1]} "
                    f"columns, but the inputs X have {dim}."
                )
        points = [jnp.asarray(p, prior.X.dtype) for p in points]
        if not self.share_inducing:
            batch = prior.batch_shape
            points = [jnp.broadcast_to(p, (*batch, *p.shape[-2:])) for p in points]
        return tuple(self._inducing(i, p) for i, p in enumerate(points))

    def _inducing(self, index: int, points: Array) -> Array | InducingVariables:
        """The points of a set as inducing variables of its kind."""
        start = self._sets()[index][1]
        if isinstance(start, InducingVariables):
            return start.with_points(points)
        return points

    def points_in(self, params: dict) -> tuple[Array, ...]:
        """
        The inducing points of each set, as in :meth:`initial_points`.

        :param params: values by name, as :meth:`initial_params` returns them.
        """
        return tuple(
            self._inducing(i, params[_point_name(i)]) for i in range(len(self._sets()))
        )

    def constants(self, X: np.ndarray) -> dict[str, Array]:
        """
        What :meth:`posterior` needs beside parameters.

        :param X: the inputs of the data, shape ``(N, D)``.
        """
        del X
        return {}

    def factorised(self, points: tuple[Array, ...]) -> tuple[Array, ...]:
        """
        The sets whose covariance is factorised.

        :param points: inducing points of each set.
        """
        return points

    def initial_params(
        self, prior: GaussianProcess, points: tuple[Array, ...]
    ) -> dict[str, Array]:
        """
        Starting values of the parameters at a site, with q(u) at the prior, but for its
        scale.

        :param prior: the process at the site with its initial hyperparameters.
        :param points: inducing points of each set.
        """
        kernel_factor = None
        if not self.whiten:
            kernel_factor, _ = jittered_cholesky(
                inducing_covariance(prior.kernel, points), self.jitter
            )
        params, end = {}, 0
        for i, (_, _, kind) in enumerate(self._sets()):
            size, dtype = points[i].shape[-2], points[i].dtype
            start, end = end, end + size
            factor = None
            if kernel_factor is not None:
                factor = kernel_factor[..., start:end, start:end]
            params[_point_name(i)] = points_of(points[i])
            params[f"{_block_name(i)}_mu"] = jnp.zeros((*prior.batch_shape, size), dtype)
            if kind != "prior":
                sqrt = self.initial_scale * _prior_sqrt(size, kind, factor, dtype)
                shape = (
                    *prior.batch_shape,
                    *sqrt.shape[-1 if kind == "diagonal" else -2 :],
                )
                params[f"{_block_name(i)}_sqrt"] = jnp.broadcast_to(sqrt, shape)
        if self.tight == "scalar":
            params["qf_scale"] = jnp.ones(prior.batch_shape, points[0].dtype)
        return params

    def _constraint(self, name):
        if name == "qf_scale":
            return constraints.softplus_positive
        if not name.endswith("_sqrt"):
            return constraints.real
        if self.covariance == "diagonal":
            return constraints.softplus_positive
        return lower_triangular

    def declare(self, prefix: str, initial: dict[str, Array]) -> dict:
        """
        The parameters of a site, as :func:`numpyro.param` statements.

        :param prefix: put before each name.
        :param initial: what :meth:`initial_params` returned.
        :return: their values.
        """
        values = {}
        for name, value in initial.items():
            if name.startswith("q") or self.train_inducing:
                constraint = self._constraint(name)
                value = numpyro.param(f"{prefix}_{name}", value, constraint=constraint)
            values[name] = value
        return values

    def relaxation(self, params: dict) -> Relaxation | None:
        """
        How q(f | u) is relaxed in the bound.

        :param params: values by name, as :meth:`declare` returns them.
        """
        if self.tight == "none":
            return None
        return Relaxation(self.tight, params.get("qf_scale"), self.block_size)

    def check_likelihood(self, site: str, trace_at, priors: dict, couples_rows: bool):
        """
        Refuses what the bound is not for, when a guide is set up.

        :param site: name of the GP site.
        :param trace_at: from values of the GP sites to the model's trace.
        :param priors: the process at each GP site, at its starting hyperparameters.
        :param couples_rows: whether the likelihood ties rows of X together.
        """

    def keep_state(self, values: dict, posterior: GPPosterior) -> None:
        """Puts what the next step starts from into the mutable part of ``values``."""

    def report(self, site: str, posterior: GPPosterior) -> None:
        """Warns of what is wrong with a posterior of known numbers."""

    def posterior(self, prior: GaussianProcess, params: dict) -> GPPosterior:
        """
        q(f(X)) at a site.

        :param prior: the process at the site.
        :param params: values by name, as :meth:`declare` returns them, and
            :meth:`constants`.
        """
        names = [_block_name(i) for i in range(len(self._sets()))]
        blocks = (Block(params[f"{k}_mu"], params.get(f"{k}_sqrt")) for k in names)
        q = BlockGaussian(tuple(blocks), self.whiten)
        return SparsePosterior(prior, self.points_in(params), q, self.jitter)


class SVGP(_BlockApproximation):
    r"""
    One set of inducing points Z with a Gaussian q(u) [1, 2].

    :param num_inducing: number M of points; may be left out where ``inducing`` is an
        array.
    :param inducing: how Z starts: ``"kmeans"``, ``"greedy"`` (largest conditional
        variance under the initial kernel), ``"random"`` rows of X, an array of shape
        ``(M, D)`` (``(Q, M, D)``: points for each of Q latent functions), what
        :func:`~numpyro_sgp.initial_inducing` returns, or inter-domain inducing variables
        (:class:`~numpyro_sgp.InducingVariables`), with points or with such a method.
    :param whiten: whether q is over :math:`L^{-1}u` with :math:`L L^T = K_{uu}`, which
        most often trains better, or over u itself.
    :param covariance: that of q(u), in its coordinates:

        - ``"full"`` for each latent function, or ``"diagonal"``;
        - ``"coupled"``: one full covariance over all latent functions of the site
          together, ``(QM, QM)``, for posteriors in which they are correlated;
        - ``"sites"``: q(u) is the posterior under one Gaussian pseudo-observation of each
          data point, two parameters each (eq. 34-35 and Theorem 2 of [3]). It contains the
          optimum for likelihoods that factorise over the data, follows the kernel's
          hyperparameters and suits :func:`~numpyro_sgp.fit_lbfgs`; it needs all data in
          every step. See :class:`~numpyro_sgp.families.SiteGaussian`;
        - ``"dual"``: full, as the prior times a Gaussian site on u [6], for minibatches
          and :func:`~numpyro_sgp.natural_gradients`. Hyperparameters are trained at a
          fixed site, so that q(u) follows them. The "gradients" of its two parameters are
          *natural* ones, not for other optimisers: ``fit_lbfgs`` refuses it, and so do
          derivatives unless ``natural_gradients`` was made with the guide. See
          :class:`~numpyro_sgp.families.DualGaussian`.
    :param train_inducing: whether Z is a parameter or stays where it starts.
    :param share_inducing: whether latent functions share Z or start with a copy each.
    :param tight: a tighter bound with the same posterior, by a relaxed q(f | u) [4, 5], at
        (nearly) the same cost:

        - ``"none"``;
        - ``"diagonal"``, for Gaussian likelihoods:
          :math:`\frac12 \sum_n \log(1 + d_n / s^2)` in place of
          :math:`\frac12 \sum_n d_n / s^2`, with :math:`d_n` what the inducing points
          leave of the prior variance;
        - ``"block"``, for Gaussian likelihoods: tighter still, by
          :math:`\frac12 \sum_b \log |I + D_{bb} / s^2|`, O(b^3) for each block of b rows;
        - ``"scalar"``, for any likelihood: one learned number for each latent function,
          ``{site}_auto_qf_scale``; at 1 the bound is the plain one.
    :param block_size: for ``tight="block"``, rows in a block, in their order; all rows of
        the (mini)batch if None. Blocks of neighbours are tightest
        (:func:`~numpyro_sgp.neighbour_blocks`).
    :param initial_scale: what the standard deviations of q(u) start at, relative to the
        prior's; small for the inner layers of a deep GP (1e-5 in [7]), so that what is fed
        to the next layer starts near the mean function, with little noise.
    :param jitter: relative jitter of K_uu; by dtype if None.
    :param seed: of the initialiser.
    :raises ValueError: if the options contradict each other.

    **References:**

    1. Titsias (2009). Variational Learning of Inducing Variables in Sparse Gaussian
       Processes. AISTATS.
    2. Hensman, Matthews, Ghahramani (2015). Scalable Variational Gaussian Process
       Classification. AISTATS. https://arxiv.org/abs/1411.2005
    3. Bonilla, Krauth, Dezfouli (2018). Generic Inference in Latent Gaussian Process
       Models. https://arxiv.org/abs/1609.00577
    4. Titsias (2025). New Bounds for Sparse Variational Gaussian Processes. ICML.
       https://arxiv.org/abs/2502.08730
    5. Bui, Titsias (2025). Sparse Gaussian Processes: Structured Approximations and
       Power-EP Revisited. https://arxiv.org/abs/2507.02377
    6. Adam, Chang, Khan, Solin (2021). Dual Parameterization of Sparse Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/2111.03412
    7. Salimbeni, Deisenroth (2017). Doubly Stochastic Variational Inference for Deep
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/1705.08933

    >>> import numpyro_sgp as sgp
    >>> sgp.SVGP(20, inducing="greedy").num_points
    20
    """

    _covariances = ("full", "diagonal", "coupled", "sites", "dual")

    def __init__(
        self,
        num_inducing: int | None = None,
        inducing: Inducing = "kmeans",
        *,
        whiten: bool = True,
        covariance: Literal["full", "diagonal", "coupled", "sites", "dual"] = "full",
        train_inducing: bool = True,
        share_inducing: bool = True,
        tight: Tight = "none",
        block_size: int | None = None,
        initial_scale: float = 1.0,
        jitter: float | None = None,
        seed: int = 0,
    ):
        self.num_inducing = num_inducing
        self.inducing = inducing.Z if isinstance(inducing, InducingStart) else inducing
        super().__init__(
            whiten=whiten,
            covariance=covariance,
            train_inducing=train_inducing,
            share_inducing=share_inducing,
            tight=tight,
            block_size=block_size,
            initial_scale=initial_scale,
            jitter=jitter,
            seed=seed,
        )

    def _sets(self):
        # These covariances are parameters of their own, beside the set's mean.
        own = self.covariance in ("coupled", "sites", "dual")
        return [(self.num_inducing, self.inducing, "prior" if own else self.covariance)]

    def _check(self):
        super()._check()
        if self.covariance in ("coupled", "sites", "dual") and not self.whiten:
            raise ValueError(
                f"{type(self).__name__}: covariance='{self.covariance}' is whitened; leave "
                "whiten=True."
            )

    @property
    def needs_all_rows(self) -> bool:
        """Whether the set-up must see all rows of the data."""
        return self.covariance == "sites"

    def constants(self, X):
        """See the base class."""
        return {"X": jnp.asarray(X)} if self.covariance == "sites" else {}

    def initial_params(self, prior, points):
        """See the base class."""
        params = super().initial_params(prior, points)
        mu = params["qu_mu"]
        if self.covariance == "coupled":
            eye = jnp.eye(math.prod(mu.shape), dtype=mu.dtype)
            params["qu_sqrt"] = self.initial_scale * eye
        elif self.covariance == "sites":
            del params["qu_mu"]
            params["qu_linear"] = params["qu_precision"] = jnp.zeros(
                prior.shape(), mu.dtype
            )
        elif self.covariance == "dual":
            params["qu_linear"] = params.pop("qu_mu")
            params["qu_precision"] = jnp.zeros((*mu.shape, mu.shape[-1]), mu.dtype)
        return params

    def posterior(self, prior, params):
        """See the base class."""
        if self.covariance == "coupled":
            Z = self._inducing(0, params["Z"])
            return CoupledPosterior(
                prior, Z, params["qu_mu"], params["qu_sqrt"], self.jitter
            )
        if self.covariance == "sites":
            X = params["X"].astype(prior.X.dtype)
            num_inducing = params["Z"].shape[-2]
            q = SiteGaussian(params["qu_linear"], params["qu_precision"], X, num_inducing)
            return SparsePosterior(prior, (self._inducing(0, params["Z"]),), q, self.jitter)
        if self.covariance == "dual":
            sites = params["qu_linear"], params["qu_precision"]
            q = DualGaussian(*sites, params.get("natural_rate"))
            return SparsePosterior(prior, (self._inducing(0, params["Z"]),), q, self.jitter)
        return super().posterior(prior, params)


class VGP(SVGP):
    """
    The dense posterior: inducing points at all (distinct) training inputs, so that nothing
    but the form of q is approximated (SAVIGP, section 6; Opper & Archambeau 2009).

    O(N^3) a step and O(N^2) memory. The marginals at the data are free parameters; with
    ``whiten=False`` the expected log likelihood does not depend on the hyperparameters,
    whose gradient then comes from the KL alone (eq. 109). ``covariance="sites"`` has 2N
    parameters for each latent function in place of N (N + 3) / 2, and the same optimum.

    :param covariance: as in :class:`SVGP`.
    :param whiten: as in :class:`SVGP`.
    :param jitter: relative jitter of K(X, X); by dtype if None.

    **References:**

    1. Opper, Archambeau (2009). The Variational Gaussian Approximation Revisited. Neural
       Computation.
    2. Bonilla, Krauth, Dezfouli (2018). Generic Inference in Latent Gaussian Process
       Models. https://arxiv.org/abs/1609.00577

    >>> import numpyro_sgp as sgp
    >>> sgp.VGP(covariance="sites").covariance
    'sites'
    """

    _covariances = ("full", "diagonal", "coupled", "sites")
    needs_all_rows = True

    def __init__(
        self,
        *,
        covariance: Literal["full", "diagonal", "coupled", "sites"] = "full",
        whiten: bool = True,
        jitter: float | None = None,
    ):
        super().__init__(
            1, covariance=covariance, whiten=whiten, jitter=jitter, train_inducing=False
        )

    def __repr__(self):
        return f"VGP(covariance={self.covariance!r}, whiten={self.whiten})"

    def initial_points(self, prior, X):
        """All distinct rows of X."""
        _, first = np.unique(X, axis=0, return_index=True)
        return (jnp.asarray(X[np.sort(first)], prior.X.dtype),)


class SOLVEGP(_BlockApproximation):
    r"""
    SOLVE-GP [1]: inducing points Z, and orthogonal inducing points O for what Z leaves
    unexplained, each with a Gaussian of its own.

    M + M inducing points cost about as much as two SVGPs with M points, where one SVGP
    with 2M costs up to eight times as much as one with M.

    :param num_inducing: number M of points Z; may be left out for an array.
    :param num_orthogonal: number of points O, or a sequence of numbers for several
        orthogonal sets O, O2, ... (section 4); may be left out for arrays.
    :param inducing: how Z starts, as in :class:`SVGP`. K-means centres are shared out
        among Z and O; the greedy method chooses O given Z.
    :param orthogonal: an array ``(M2, D)`` for O (a tuple of arrays for several sets),
        inter-domain inducing variables, or None to start O by the method of Z; where Z is
        an array, by k-means, blind to Z. None means variables of the kind of Z,
        ``"kmeans"`` (or another method) ordinary points.
    :param whiten: as in :class:`SVGP`, for every set (appendix F).
    :param covariance: as in :class:`SVGP`, for every set.
    :param train_inducing: whether Z and O are parameters or stay where they start.
    :param share_inducing: as in :class:`SVGP`.
    :param tight: as in :class:`SVGP`, for what all sets leave unexplained.
    :param block_size: as in :class:`SVGP`.
    :param initial_scale: as in :class:`SVGP`, for every set.
    :param jitter: relative jitter of the inducing covariance; by dtype if None.
    :param seed: of the initialiser.
    :raises ValueError: if the options contradict each other.

    **References:**

    1. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes. AISTATS. https://arxiv.org/abs/1910.10596

    >>> import numpyro_sgp as sgp
    >>> sgp.SOLVEGP(20, 20).num_points, sgp.SOLVEGP(20, (10, 10)).num_points
    (40, 40)
    """

    _orthogonal_covariance: Covariance | None = None

    def __init__(
        self,
        num_inducing: int | None = None,
        num_orthogonal: int | Sequence[int] | None = None,
        inducing: Inducing = "kmeans",
        orthogonal=None,
        *,
        whiten: bool = True,
        covariance: Literal["full", "diagonal"] = "full",
        train_inducing: bool = True,
        share_inducing: bool = True,
        tight: Tight = "none",
        block_size: int | None = None,
        initial_scale: float = 1.0,
        jitter: float | None = None,
        seed: int = 0,
    ):
        if isinstance(inducing, InducingStart):
            inducing, orthogonal = inducing.Z, orthogonal or inducing.O
        if orthogonal is not None and not isinstance(orthogonal, tuple | list):
            orthogonal = (orthogonal,)
        if isinstance(num_orthogonal, int | np.integer):
            num_orthogonal = (int(num_orthogonal),)
        if num_orthogonal is None:
            num_orthogonal = (None,) * (1 if orthogonal is None else len(orthogonal))
        if orthogonal is not None and len(orthogonal) != len(num_orthogonal):
            raise ValueError(
                f"{type(self).__name__}: {len(num_orthogonal)} orthogonal sets were asked "
                f"for, but {len(orthogonal)} arrays were given."
            )
        self.num_inducing = num_inducing
        self.num_orthogonal = tuple(num_orthogonal)
        self.inducing = inducing
        self.orthogonal = orthogonal
        super().__init__(
            whiten=whiten,
            covariance=covariance,
            train_inducing=train_inducing,
            share_inducing=share_inducing,
            tight=tight,
            block_size=block_size,
            initial_scale=initial_scale,
            jitter=jitter,
            seed=seed,
        )

    def _sets(self):
        method = self.inducing
        if isinstance(method, InducingVariables) and not isinstance(method.points, str):
            method = method.with_points("kmeans")
        elif not isinstance(method, InducingVariables | str):
            method = "kmeans"
        starts = self.orthogonal or (method,) * len(self.num_orthogonal)
        kind = self._orthogonal_covariance or self.covariance
        first = (self.num_inducing, self.inducing, self.covariance)
        rest = zip(self.num_orthogonal, starts, strict=True)
        return [first, *((size, start, kind) for size, start in rest)]


class ODVGP(SOLVEGP):
    """
    Orthogonally decoupled GPs [1]: SOLVE-GP whose second covariance is the prior's, so
    that the points O model the mean only (Shi, Titsias & Mnih 2020, section 5).

    Takes the arguments of :class:`SOLVEGP` (``tight`` relaxes all that Z leaves
    unexplained, ``initial_scale`` is of q(u) alone), and

    :param num_columns: None to hold q(v) in whitened coordinates, for which the covariance
        of all points is factorised in each step; a number for thousands of points O: then
        :math:`q(v) = N(C_{vv} a, C_{vv})` with a learned, nothing of the size of O is
        factorised, and the KL divergence is estimated from that many random columns of
        K_vv in each step (one orthogonal set only).
        See :class:`~numpyro_sgp.DecoupledPosterior`.

    **References:**

    1. Salimbeni, Cheng, Boots, Deisenroth (2018). Orthogonally Decoupled Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/1809.08820

    >>> import numpyro_sgp as sgp
    >>> sgp.ODVGP(5, 100).num_points
    105
    """

    _orthogonal_covariance = "prior"

    def __init__(self, *args, num_columns: int | None = None, **options):
        self.num_columns = num_columns
        super().__init__(*args, **options)

    def _check(self):
        super()._check()
        b = self.num_columns
        if b is None:
            return
        if isinstance(b, bool) or not isinstance(b, int | np.integer) or b < 1:
            raise ValueError(
                f"ODVGP: num_columns must be a positive whole number or None, got {b!r}."
            )
        if len(self._sets()) != 2:
            raise ValueError(
                "ODVGP: num_columns is for one orthogonal set; give one number or array, "
                "or leave num_columns out."
            )
        size, start, _ = self._sets()[1]
        if isinstance(start, InducingVariables):
            raise ValueError(
                "ODVGP: num_columns is for orthogonal points among the inputs, not for "
                f"{type(start).__name__}; leave num_columns out."
            )
        size = np.shape(start)[-2] if size is None else size
        if b > size:
            raise ValueError(
                f"ODVGP: {b} columns (num_columns) of {size} orthogonal points O were "
                "asked for."
            )

    def factorised(self, points):
        """See the base class; O is not, if columns are drawn."""
        return points if self.num_columns is None else points[:1]

    def initial_params(self, prior, points):
        """See the base class."""
        if self.num_columns is None:
            return super().initial_params(prior, points)
        first = SVGP(
            inducing=points[0],
            whiten=self.whiten,
            covariance=self.covariance,
            tight=self.tight,
            block_size=self.block_size,
            initial_scale=self.initial_scale,
            jitter=self.jitter,
        )
        params = first.initial_params(prior, points[:1])
        shape = (*prior.batch_shape, points[1].shape[-2])
        return {**params, "O": points[1], "qv_weights": jnp.zeros(shape, points[1].dtype)}

    def posterior(self, prior, params):
        """See the base class."""
        if self.num_columns is None:
            return super().posterior(prior, params)
        q = BlockGaussian((Block(params["qu_mu"], params["qu_sqrt"]),), self.whiten)
        return DecoupledPosterior(
            prior,
            self._inducing(0, params["Z"]),
            q,
            params["O"],
            params["qv_weights"],
            self.num_columns,
            self.jitter,
        )


def check_approximations(approximation) -> list:
    """
    :param approximation: one, or a dict of them by site.
    :return: a list of them.
    :raises TypeError: if one is something else.
    """
    given = approximation.values() if isinstance(approximation, dict) else [approximation]
    for option in given:
        if isinstance(option, type) or not hasattr(option, "initial_points"):
            raise TypeError(
                "approximation must be an object such as SVGP(50), or a dict of them by "
                f"site, got {option!r}."
            )
    return list(given)


class MeanKernel:
    """
    The mean of a batch of kernels, for choosing points that serve all of them.

    :param kernel: a kernel of any batch shape.
    """

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, X1, X2=None):
        """Matrix of shape ``(N1, N2)``."""
        same = X2 is None or X2 is X1
        X1 = jnp.asarray(X1)
        K = self.kernel(X1, X1 if same else jnp.asarray(X2))
        return K.mean(axis=tuple(range(K.ndim - 2)))

    def diag(self, X):
        """Diagonal of shape ``(N,)``."""
        variance = self.kernel.diag(jnp.asarray(X))
        return variance.mean(axis=tuple(range(variance.ndim - 1)))


def points_of(start):
    """The points of a set, or the method that chooses them."""
    return start.points if isinstance(start, InducingVariables) else start


def _kind(start):
    """What sets of inducing variables that are chosen together share; None for points."""
    if not isinstance(start, InducingVariables):
        return None
    fixed = (f"{k}={v}" for k, v in sorted(vars(start).items()) if k != "points")
    return type(start), *fixed


def _point_name(index):
    return "Z" if index == 0 else "O" if index == 1 else f"O{index}"


def _block_name(index):
    return "qu" if index == 0 else "qv" if index == 1 else f"qv{index}"


def _prior_sqrt(size, kind, factor, dtype):
    """Square root of the prior covariance of a set, in the coordinates of q."""
    if kind == "full":
        return jnp.eye(size, dtype=dtype) if factor is None else factor
    if factor is None:
        return jnp.ones(size, dtype)
    # The diagonal Gaussian nearest to the prior has the variances 1 / (K^-1)_mm.
    inverse = solve_lower(factor, jnp.eye(size, dtype=dtype))
    return jnp.sum(inverse**2, axis=-2) ** -0.5
