"""What a guide does at a GP site: sets of inducing points, a family, a relaxation."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._checks import shown
from numpyro_sgp.families import Decoupled, PriorAfterFirst, PseudoData
from numpyro_sgp.guides.base import Approximation, Inducing, check_blocks
from numpyro_sgp.inducing import InducingStart, InducingVariables


@dataclass(eq=False, repr=False)
class SVGP(Approximation):
    r"""
    One set of inducing points Z with a Gaussian q(u) [1, 2].

    :param num_inducing: number M of points; may be left out where ``inducing`` is an
        array. ``"auto"``: :func:`~numpyro_sgp.fit` makes it as large as pays.
    :param inducing: how Z starts: ``"kmeans"``, ``"greedy"`` (largest conditional
        variance under the initial kernel), ``"explained"`` (most of the variance of all
        rows, likewise), ``"random"`` rows of X, an array of shape
        ``(M, D)`` (``(Q, M, D)``: points for each of Q latent functions), what
        :func:`~numpyro_sgp.initial_inducing` returns, or inter-domain inducing variables
        (:class:`~numpyro_sgp.InducingVariables`), with points or with such a method.
    :param whiten: whether q is over :math:`L^{-1}u` with :math:`L L^T = K_{uu}`, which
        most often trains better, or over u itself, less its prior mean.
    :param covariance: that of q(u), in its coordinates; one of these, or a
        :class:`~numpyro_sgp.families.Family` of one's own:

        - ``"full"`` for each latent function, or ``"diagonal"``;
        - ``"coupled"``: one full covariance over all latent functions of the site
          together, ``(QM, QM)``, for posteriors in which they are correlated;
        - ``"pseudo_data"``: q(u) is the posterior under one Gaussian pseudo-observation of
          each data point, two parameters each (eq. 34-35 and Theorem 2 of [3]). It contains
          the optimum for likelihoods that factorise over the data, follows the kernel's
          hyperparameters and suits :func:`~numpyro_sgp.fit_lbfgs`; it needs all data in
          every step. See :class:`~numpyro_sgp.families.PseudoDataGaussian`;
        - ``"dual"``: full, as the prior times a Gaussian site on u [6], for minibatches
          and :func:`~numpyro_sgp.natural_gradients`. Hyperparameters are trained at a
          fixed site, so that q(u) follows them. The "gradients" of its two parameters are
          *natural* ones, not for other optimisers: ``fit_lbfgs`` refuses it, and so do
          derivatives unless ``natural_gradients`` was made with the guide. See
          :class:`~numpyro_sgp.families.DualGaussian`.
    :param train_inducing: whether Z is a parameter or stays where it starts.
    :param share_inducing: whether latent functions share Z or start with a copy each.
    :param tight: a tighter bound, with the same best q(u) where the likelihood is Gaussian,
        by a relaxed q(f | u) [4, 5], at (nearly) the same cost; one of
        :mod:`numpyro_sgp.relaxation` or its name:

        - ``"none"``;
        - ``"diagonal"``, for Gaussian likelihoods:
          :math:`\frac12 \sum_n \log(1 + d_n / s^2)` in place of
          :math:`\frac12 \sum_n d_n / s^2`, with :math:`d_n` what the inducing points
          leave of the prior variance;
        - ``"block"`` or ``Blocks(b)``, for Gaussian likelihoods: tighter still, by
          :math:`\frac12 \sum_b \log |I + D_{bb} / s^2|`, O(b^3) for each block of b rows,
          in their order (all of the batch if not said);
        - ``"scalar"``, for any likelihood: one learned number for each latent function,
          ``{site}_auto_qf_scale``; at 1 the bound is the plain one.
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

    _covariances: ClassVar[tuple[str, ...]] = (
        "full",
        "diagonal",
        "coupled",
        "pseudo_data",
        "dual",
    )

    num_inducing: int | Literal["auto"] | None = None
    inducing: Inducing = "kmeans"

    @property
    def gaussian(self) -> "SVGP | None":
        """Where it begins: without a part for each row, or with a full covariance."""
        found: Any = super().gaussian
        has_rows = isinstance(self.family, PseudoData)
        return replace(self, covariance="full") if has_rows else found


class VGP(SVGP):
    """
    The dense posterior: inducing points at all (distinct) training inputs, so that nothing
    but the form of q is approximated (SAVIGP, section 6; Opper & Archambeau 2009).

    O(N^3) a step and O(N^2) memory. The marginals at the data are free parameters; with
    ``whiten=False`` the expected log likelihood does not depend on the hyperparameters,
    whose gradient then comes from the KL alone (eq. 109). ``covariance="pseudo_data"`` has
    2N parameters for each latent function in place of N (N + 3) / 2, and the same optimum.

    :param covariance: as in :class:`SVGP`.
    :param whiten: as in :class:`SVGP`.
    :param jitter: relative jitter of K(X, X); by dtype if None.

    **References:**

    1. Opper, Archambeau (2009). The Variational Gaussian Approximation Revisited. Neural
       Computation.
    2. Bonilla, Krauth, Dezfouli (2018). Generic Inference in Latent Gaussian Process
       Models. https://arxiv.org/abs/1609.00577

    >>> import numpyro_sgp as sgp
    >>> sgp.VGP(covariance="pseudo_data").covariance
    'pseudo_data'
    """

    _covariances = ("full", "diagonal", "coupled", "pseudo_data")
    needs_all_rows = True

    @property
    def gaussian(self) -> SVGP | None:
        """None for a part for each row: its points stay where they are."""
        return None if isinstance(self.family, PseudoData) else super().gaussian

    def __init__(
        self,
        *,
        covariance: Literal["full", "diagonal", "coupled", "pseudo_data"] = "full",
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


@dataclass(eq=False, repr=False)
class SOLVEGP(Approximation):
    r"""
    SOLVE-GP [1]: inducing points Z, and orthogonal inducing points O for what Z leaves
    unexplained, each with a Gaussian of its own.

    The covariance of q(u) has half as many numbers as that of an SVGP with 2M points. A
    step costs 0.85 to 1.01 of its, as that of p(u) of both sets together is factorised.

    :param num_inducing: number M of points Z; may be left out for an array.
    :param num_orthogonal: number of points O, or a sequence of numbers for several
        orthogonal sets O, O2, ... (section 4); may be left out for arrays.
    :param inducing: how Z starts, as in :class:`SVGP`. K-means centres are shared out
        among Z and O; the greedy methods choose O given Z.
    :param orthogonal: an array ``(M2, D)`` for O (a tuple of arrays for several sets),
        inter-domain inducing variables, or None to start O by the method of Z; where Z is
        an array, by k-means, blind to Z. None means variables of the kind of Z,
        ``"kmeans"`` (or another method) ordinary points.
    :param whiten: as in :class:`SVGP`, for every set (appendix F).
    :param covariance: as in :class:`SVGP`, for every set.
    :param train_inducing: whether Z and O are parameters or stay where they start.
    :param share_inducing: as in :class:`SVGP`.
    :param tight: as in :class:`SVGP`, for what all sets leave unexplained.
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

    num_inducing: int | Literal["auto"] | None = None
    num_orthogonal: int | Sequence[int] | None = None
    inducing: Inducing = "kmeans"
    orthogonal: Inducing | Sequence[Inducing] | None = None

    def __post_init__(self):
        if isinstance(self.inducing, InducingStart) and self.orthogonal is None:
            self.orthogonal = self.inducing.O
        sets, sizes = self.orthogonal, self.num_orthogonal
        no_size = isinstance(sizes, bool | set | dict | jax.Array) or sizes == ""
        if no_size or np.shape(sizes)[:1] == (0,):
            raise ValueError(
                f"{type(self).__name__}: num_orthogonal must be a number of points, or "
                f"one for each set, got {shown(sizes)}."
            )
        if sets is not None and not isinstance(sets, tuple | list):
            sets = (sets,)
        if isinstance(sizes, int | np.integer):
            sizes = (int(sizes),)
        if sizes is None:
            sizes = (None,) * (1 if sets is None else len(sets))
        if sets is not None and len(sets) != len(sizes):
            raise ValueError(
                f"{type(self).__name__}: {len(sizes)} orthogonal sets were asked for, but "
                f"{len(sets)} arrays were given."
            )
        self.orthogonal, self.num_orthogonal = sets, tuple(sizes)
        super().__post_init__()

    def _sets(self):
        method = self.inducing
        if isinstance(method, InducingVariables) and not isinstance(method.points, str):
            method = method.with_points("kmeans")
        elif not isinstance(method, InducingVariables | str):
            method = "kmeans"
        starts = self.orthogonal or (method,) * len(self.num_orthogonal)
        rest = zip(self.num_orthogonal, starts, strict=True)
        return [(self.num_inducing, self.inducing), *rest]


@dataclass(eq=False, repr=False)
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
        See :class:`~numpyro_sgp.families.DecoupledGaussian`.

    **References:**

    1. Salimbeni, Cheng, Boots, Deisenroth (2018). Orthogonally Decoupled Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/1809.08820

    >>> import numpyro_sgp as sgp
    >>> sgp.ODVGP(5, 100).num_points
    105
    """

    num_columns: int | None = field(default=None, kw_only=True)

    def _family(self, name, covariance):
        first = super()._family(name, covariance)
        check_blocks(name, first)
        if self.num_columns is None:
            return PriorAfterFirst(first)
        return Decoupled(first, self.num_columns)

    @property
    def draws_kl(self) -> bool:
        return self.num_columns is not None

    def _check(self, name):
        b = self.num_columns
        super()._check(name)
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
        size, start = self._sets()[1]
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
