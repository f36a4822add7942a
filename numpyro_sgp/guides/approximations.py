"""What a guide does at a GP site: sets of inducing points, a family, a relaxation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array

from numpyro_sgp._checks import check_whole, shown
from numpyro_sgp.distributions import GaussianProcess, GPPosterior, SparsePosterior
from numpyro_sgp.distributions.relaxation import (
    Blocks,
    Diagonal,
    Relaxation,
    Scalar,
    relaxation_of,
)
from numpyro_sgp.families import (
    Coupled,
    Decoupled,
    Dual,
    Family,
    Full,
    Mixture,
    Param,
    PriorAfterFirst,
    PseudoData,
    Start,
)
from numpyro_sgp.families import Diagonal as DiagonalCovariance
from numpyro_sgp.families.mixture import ENTROPIES
from numpyro_sgp.guides.points import (
    AUTO,
    check_set,
    choose_points,
    of_kind,
    point_name,
    points_of,
)
from numpyro_sgp.inducing import InducingStart, InducingVariables
from numpyro_sgp.inducing.covariances import inducing_covariance
from numpyro_sgp.linalg import jittered_cholesky

Inducing = Literal["kmeans", "greedy", "random"] | Array | np.ndarray | InducingVariables
Covariance = Literal["full", "diagonal", "coupled", "pseudo_data", "dual"]
Tight = Literal["none", "diagonal", "block", "scalar"] | Relaxation

#: The families by the names that ``covariance=...`` takes: an entry for each.
FAMILIES: dict[str, Family] = {
    family.name: family()
    for family in (Full, DiagonalCovariance, Coupled, PseudoData, Dual)
}


@dataclass(eq=False, repr=False, kw_only=True)
class _Approximation:
    """
    Sets of inducing points, a family q(u) over them and a relaxation of q(f | u): what a
    guide asks of :class:`SVGP`, :class:`SOLVEGP` and the others.
    """

    #: Names of families that ``covariance`` takes.
    _covariances: ClassVar[tuple[str, ...]] = ("full", "diagonal")
    #: Relaxations that ``tight`` takes.
    _relaxations: ClassVar[tuple[type[Relaxation], ...]] = (Diagonal, Blocks, Scalar)

    whiten: bool = True
    covariance: Covariance | Family = "full"
    train_inducing: bool = True
    share_inducing: bool = True
    tight: Tight = "none"
    initial_scale: float = 1.0
    jitter: float | None = None
    seed: int = 0

    def __post_init__(self):
        name = type(self).__name__
        #: How q(f | u) is relaxed, one of :mod:`numpyro_sgp.relaxation`, or None.
        self.relaxation = relaxation_of(self.tight, name, self._relaxations)
        #: The q(u), one of :mod:`numpyro_sgp.families`.
        self.family = self._family(name, self.covariance)
        self._check(name)

    def _family(self, name, covariance) -> Family:
        if isinstance(covariance, str) and covariance in self._covariances:
            return FAMILIES[covariance]
        refused = (type(FAMILIES[k]) for k in FAMILIES.keys() - {*self._covariances})
        if isinstance(covariance, Family) and type(covariance) not in refused:
            return covariance
        raise ValueError(
            f"{name}: covariance must be one of {self._covariances} (or a family of one's "
            f"own), got {covariance!r}."
        )

    def _sets(self) -> list[tuple[Any, Inducing]]:
        """Size and start of each set."""
        raise NotImplementedError

    def _check(self, name):
        is_number = isinstance(self.jitter, int | float | np.number)
        if self.jitter is not None and not (is_number and 0 <= self.jitter < 1):
            raise ValueError(
                f"{name}: jitter is relative to the mean variance, a number from 0 to 1, "
                f"or None, got {self.jitter!r}."
            )
        if not isinstance(self.whiten, bool):
            told = shown(self.whiten)
            raise TypeError(f"{name}: whiten must be True or False, got {told}.")
        check_whole(self.seed, f"{name}: seed")
        scale = self.initial_scale
        number = isinstance(scale, int | float | np.number) and not isinstance(scale, bool)
        if not (number and 0 < scale < np.inf):
            raise ValueError(
                f"{name}: initial_scale must be a positive number, got {scale!r}."
            )
        family = self.family
        if scale != 1 and not family.has_scale:
            raise ValueError(
                f"{name}: q(u) with covariance={family.name!r} starts at the prior, "
                "whose covariance it has no parameter for; leave initial_scale=1, or use "
                "covariance='full'."
            )
        if self.relaxation is not None and not family.independent_latents:
            raise ValueError(
                f"{name}: tight={self.relaxation.name!r} is for independent latent "
                f"functions; use tight='none' with covariance={family.name!r}."
            )
        if family.whitened_only and not self.whiten:
            raise ValueError(
                f"{name}: covariance={family.name!r} is whitened; leave whiten=True."
            )
        sets = self._sets()
        if len(sets) > 1 and not family.several_sets:
            raise ValueError(
                f"{name}: covariance={family.name!r} is for one set of inducing points, "
                f"not {len(sets)}."
            )
        for i, (size, start) in enumerate(sets):
            check_set(name, i, size, points_of(start))

    def __repr__(self):
        shown = []
        for option in sorted(fields(self), key=lambda f: f.kw_only):
            value = getattr(self, option.name)
            several = isinstance(value, tuple | list)
            texts = [_shown(v) for v in (value if several else [value])]
            if several or np.ndim(value) > 1 or value not in (None, option.default):
                text = f"({', '.join(texts)},)" if several else texts[0]
                shown.append(f"{option.name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def needs_all_rows(self) -> bool:
        """Whether the set-up must see all rows of the data, and not minibatches."""
        return self.family.needs_all_rows

    @property
    def num_points(self) -> int:
        """Number of inducing points in all sets, each of a number that is known."""
        return sum(
            np.shape(points_of(start))[-2] if size is None else size
            for size, start in self._sets()
        )

    @property
    def is_auto(self) -> bool:
        """Whether the number of inducing points is to be chosen."""
        return any(isinstance(size, str) for size, _ in self._sets())

    def with_points(self, number: int) -> "_Approximation":
        """The same with a number in the place of ``"auto"``, in each set that has it."""
        chosen: dict[str, Any] = {}
        for name in ("num_inducing", "num_orthogonal"):
            size = getattr(self, name, None)
            if isinstance(size, tuple):
                chosen[name] = tuple(number if one == AUTO else one for one in size)
            elif isinstance(size, str):
                chosen[name] = number
        return replace(self, **chosen)

    @property
    def inter_domain(self) -> bool:
        """Whether a set is of inducing variables that are not values of f."""
        return any(isinstance(start, InducingVariables) for _, start in self._sets())

    def initial_points(self, prior: GaussianProcess, X: np.ndarray) -> tuple:
        """
        Starting inducing points of each set; see :func:`choose_points`.

        :param prior: the process at the site with its initial hyperparameters.
        :param X: inputs to choose from, shape ``(N, D)``.
        """
        return choose_points(self._sets(), prior, X, self.share_inducing, self.seed)

    def points_in(self, params: dict) -> tuple:
        """
        The inducing points of each set, as in :meth:`initial_points`.

        :param params: values by name.
        """
        return tuple(
            of_kind(start, params[point_name(i)])
            for i, (_, start) in enumerate(self._sets())
        )

    def constants(self, X: np.ndarray) -> dict[str, Array]:
        """
        What :meth:`posterior` needs beside parameters.

        :param X: the inputs of the data, shape ``(N, D)``.
        """
        return {"X": jnp.asarray(X)} if self.family.needs_all_rows else {}

    def factorised(self, points: tuple[Array, ...]) -> tuple[Array, ...]:
        """
        The sets whose covariance is factorised.

        :param points: inducing points of each set.
        """
        return points

    def inducing_factor(self, kernel: Any, points: tuple[Array, ...]) -> Array:
        """
        The Cholesky factor of K_uu over the sets that are factorised; NaN without one.

        :param kernel: a kernel.
        :param points: inducing points of each set.
        """
        Kuu = inducing_covariance(kernel, self.factorised(points))
        return jittered_cholesky(Kuu, self.jitter)[0]

    def start(self, prior: GaussianProcess, points: tuple[Array, ...]) -> dict[str, Param]:
        """
        The parameters at a site as they start, with q(u) at the prior, but for its scale.

        :param prior: the process at the site with its initial hyperparameters.
        :param points: inducing points of each set.
        """

        def factor():
            return self.inducing_factor(prior.kernel, points)

        at = Start(
            prior.batch_shape,
            points,
            self.whiten,
            factor,
            self.initial_scale,
            prior.event_shape[0],
        )
        params = {
            point_name(i): Param(points_of(p), role="inducing")
            for i, p in enumerate(points)
        }
        params |= self.family.start(at)
        if self.relaxation is not None:
            params |= self.relaxation.start(prior.batch_shape, at.dtype)
        return params

    def is_trained(self, param: Param) -> bool:
        """Whether a value of a site is a parameter, and not fixed at its start."""
        return param.role != "inducing" or self.train_inducing

    def declare(self, prefix: str, initial: dict[str, Param]) -> dict:
        """
        The parameters of a site, as :func:`numpyro.param` statements.

        :param prefix: put before each name.
        :param initial: what :meth:`start` returned.
        :return: their values.
        """
        return {
            name: numpyro.param(
                f"{prefix}_{name}", param.value, constraint=param.constraint
            )
            if self.is_trained(param)
            else param.value
            for name, param in initial.items()
        }

    def check_likelihood(
        self, site: str, trace_at: Callable, priors: dict, couples_rows: bool
    ) -> None:
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
        q(f(X)) at a site, relaxed as the bound is.

        :param prior: the process at the site.
        :param params: values by name, as :meth:`declare` returns them, and
            :meth:`constants`.
        """
        points = self.factorised(self.points_in(params))
        q = self.family.build(params, self.whiten)
        posterior = SparsePosterior(prior, points, q, self.jitter)
        if self.relaxation is None:
            return posterior
        return posterior.relaxed(self.relaxation.at(params))


@dataclass(eq=False, repr=False)
class SVGP(_Approximation):
    r"""
    One set of inducing points Z with a Gaussian q(u) [1, 2].

    :param num_inducing: number M of points; may be left out where ``inducing`` is an
        array. ``"auto"``: :func:`~numpyro_sgp.fit` makes it as large as pays.
    :param inducing: how Z starts: ``"kmeans"``, ``"greedy"`` (largest conditional
        variance under the initial kernel), ``"random"`` rows of X, an array of shape
        ``(M, D)`` (``(Q, M, D)``: points for each of Q latent functions), what
        :func:`~numpyro_sgp.initial_inducing` returns, or inter-domain inducing variables
        (:class:`~numpyro_sgp.InducingVariables`), with points or with such a method.
    :param whiten: whether q is over :math:`L^{-1}u` with :math:`L L^T = K_{uu}`, which
        most often trains better, or over u itself.
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
    :param tight: a tighter bound with the same posterior, by a relaxed q(f | u) [4, 5], at
        (nearly) the same cost; one of :mod:`numpyro_sgp.relaxation` or its name:

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

    def __post_init__(self):
        if isinstance(self.inducing, InducingStart):
            self.inducing = self.inducing.Z
        super().__post_init__()

    def _sets(self):
        return [(self.num_inducing, self.inducing)]


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
class SOLVEGP(_Approximation):
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
        if isinstance(self.inducing, InducingStart):
            if self.orthogonal is None:
                self.orthogonal = self.inducing.O
            self.inducing = self.inducing.Z
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
        _check_blocks(name, first)
        if self.num_columns is None:
            return PriorAfterFirst(first)
        return Decoupled(first, self.num_columns)

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


@dataclass(eq=False, repr=False)
class MixtureSVGP(_Approximation):
    r"""
    One set of inducing points Z with a mixture of K Gaussians over the inducing variables
    of all latent functions of the site [1],
    :math:`q(u) = \sum_k \pi_k \prod_j N(u_j; m_{kj}, S_{kj})` (eq. 7), with learned
    weights.

    For :class:`~numpyro_sgp.TraceGP_ELBO` only: NumPyro's ELBOs would draw a component and
    lose the gradient of the weights, so they are refused.

    Where components have collapsed into one, ``guide.posterior`` warns.

    :param num_inducing: as in :class:`SVGP`.
    :param num_components: number K of components.
    :param inducing: as in :class:`SVGP`.
    :param covariance: ``"diagonal"`` or ``"full"`` for each component and latent function.
    :param entropy: how the KL is bounded: ``"pairwise"``, the tighter of two bounds;
        ``"jensen"``, the paper's (eq. 18); ``"monte_carlo"``, unbiased and noisy. All are
        exact for K = 1. See :func:`~numpyro_sgp.families.mixture.mixture_kl`.
    :param spread: how far apart components start: their means are the prior mean shifted by
        constants of about this many prior standard deviations (and some noise). Equal
        components would stay equal.
    :param whiten: as in :class:`SVGP`; the paper's is ``False``.
    :param train_inducing: as in :class:`SVGP`.
    :param share_inducing: as in :class:`SVGP`.
    :param tight: ``"none"`` or ``"scalar"``, as in :class:`SVGP`.
    :param jitter: relative jitter of K_uu; by dtype if None.
    :param seed: of the initialiser and of the starting means.
    :raises ValueError: if the options contradict each other.

    **References:**

    1. Bonilla, Krauth, Dezfouli (2018). Generic Inference in Latent Gaussian Process
       Models. https://arxiv.org/abs/1609.00577

    >>> import numpyro_sgp as sgp
    >>> sgp.MixtureSVGP(20, 2).num_components
    2
    """

    _covariances = ("diagonal", "full")
    _relaxations = (Scalar,)

    num_inducing: int | Literal["auto"] | None = None
    num_components: int = 2
    inducing: Inducing = "kmeans"
    covariance: Literal["diagonal", "full"] = field(default="diagonal", kw_only=True)
    entropy: Literal["pairwise", "jensen", "monte_carlo"] = field(
        default="pairwise", kw_only=True
    )
    spread: float = field(default=0.5, kw_only=True)

    def __post_init__(self):
        if (
            isinstance(self.num_components, bool)
            or not isinstance(self.num_components, int | np.integer)
            or self.num_components < 1
        ):
            raise ValueError(
                f"MixtureSVGP: num_components must be a positive whole number, got "
                f"{self.num_components!r}."
            )
        if self.entropy not in ENTROPIES:
            raise ValueError(
                f"MixtureSVGP: entropy must be one of {ENTROPIES}, got {self.entropy!r}."
            )
        if not self.spread > 0 and self.num_components > 1:
            raise ValueError(
                f"MixtureSVGP: spread must be positive, got {self.spread}: components that "
                "start equal stay equal."
            )
        if isinstance(self.inducing, InducingStart):
            self.inducing = self.inducing.Z
        super().__post_init__()

    def _family(self, name, covariance):
        each = super()._family(name, covariance)
        _check_blocks(name, each)
        return Mixture(self.num_components, each, self.entropy, self.spread, self.seed)

    def _sets(self):
        return [(self.num_inducing, self.inducing)]


def _shown(value):
    return f"<array of shape {np.shape(value)}>" if np.ndim(value) > 1 else repr(value)


def _check_blocks(name, family):
    if not isinstance(family, Full):
        raise ValueError(
            f"{name}: covariance must be 'full' or 'diagonal', got {family!r}."
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
