"""What every approximation at a GP site offers, and the families by their names."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array

from numpyro_sgp._checks import check_positive, check_whole, shown
from numpyro_sgp.distributions import GaussianProcess, GPPosterior, SparsePosterior
from numpyro_sgp.distributions.relaxation import (
    Blocks,
    Diagonal,
    Relaxation,
    Scalar,
    relaxation_of,
)
from numpyro_sgp.families import Coupled, Dual, Family, Full, Param, PseudoData, Start
from numpyro_sgp.families import Diagonal as DiagonalCovariance
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

Inducing = (
    Literal["kmeans", "greedy", "explained", "random"]
    | Array
    | np.ndarray
    | InducingVariables
)
Covariance = Literal["full", "diagonal", "coupled", "pseudo_data", "dual"]
Tight = Literal["none", "diagonal", "block", "scalar"] | Relaxation

#: The families by the names that ``covariance=...`` takes: an entry for each.
FAMILIES: dict[str, Family] = {
    family.name: family()
    for family in (Full, DiagonalCovariance, Coupled, PseudoData, Dual)
}


@dataclass(eq=False, repr=False, kw_only=True)
class Approximation:
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
        name, start = type(self).__name__, getattr(self, "inducing", None)
        if isinstance(start, InducingStart):
            self.inducing = start.Z
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
        """Size and start of each set: of one, if no more is said."""
        return [(self.num_inducing, self.inducing)]  # type: ignore[attr-defined]

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
        check_positive(self.initial_scale, f"{name}: initial_scale")
        family = self.family
        if self.initial_scale != 1 and not family.has_scale:
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
    def draws_kl(self) -> bool:
        """Whether training estimates the KL by random numbers."""
        return False

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

    def with_points(self, number: int) -> "Approximation":
        """The same with a number in the place of ``"auto"``, in each set that has it."""
        chosen: dict[str, Any] = {}
        for name in ("num_inducing", "num_orthogonal"):
            size = getattr(self, name, None)
            if isinstance(size, tuple):
                chosen[name] = tuple(number if one == AUTO else one for one in size)
            elif isinstance(size, str):
                chosen[name] = number
        return replace(self, **chosen)

    def most_points(self, rows: int) -> int:
        """
        The largest number in the place of ``"auto"``, in each set that has it.

        :param rows: distinct rows of the inputs, among which sets are chosen that differ.
        """
        sizes = [size for size, at in self._sets() if isinstance(points_of(at), str)]
        known = [size for size in sizes if size != AUTO]
        return max((rows - sum(known)) // max(len(sizes) - len(known), 1), 1)

    @property
    def gaussian(self) -> "Approximation | None":
        """
        Where :func:`~numpyro_sgp.fit` begins, with the same inducing points: for a q(u)
        without natural gradients, one that has them; for variances alone, a full
        covariance, since they stay more often where all is noise (creep rupture, 80 points:
        700 nats below). None for no such one.
        """
        if not isinstance(self.family, DiagonalCovariance):
            return None
        full = copy.copy(self)  # whose class may be made of other arguments
        full.covariance = "full"
        full.__post_init__()
        return full

    def at_gaussian(
        self, modes: list[dict], bounds: list[float], factor: Callable[[], np.ndarray]
    ) -> dict:
        """
        Parameters at (or near) a :attr:`gaussian`, as far as they are not those of another
        start.

        :param modes: values of the Gaussian by name, NumPy arrays; and those of others that
            were found for the same hyperparameters, the best first.
        :param bounds: of each of these.
        :param factor: function that returns the lower factor of K_uu.
        """
        found = dict(modes[0])
        if isinstance(self.family, DiagonalCovariance):
            for name in (name for name in found if name.endswith("_sqrt")):
                root = jnp.asarray(found[name])
                found[name] = np.asarray(self.family.root(root.shape[-1], root, root.dtype))
        return found

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


def _shown(value):
    return f"<array of shape {np.shape(value)}>" if np.ndim(value) > 1 else repr(value)


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
                f"site, got {_named(option)}."
            )
    return list(given)


def _named(option) -> str:
    return f"the class {option.__name__}" if isinstance(option, type) else shown(option)


def check_blocks(name: str, family: Family) -> None:
    """
    :raises ValueError: if it is not ``"full"`` or ``"diagonal"``.
    """
    if not isinstance(family, Full):
        raise ValueError(
            f"{name}: covariance must be 'full' or 'diagonal', got {family!r}."
        )
