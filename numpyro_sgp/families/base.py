"""What a family q(u) is made of: options, parameters and arrays, each in one object."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints

Shape = tuple[int, ...]
Sets = tuple[int, ...]  # numbers of sets of inducing variables


@dataclass(frozen=True)
class Param:
    """
    One parameter of a GP site, as it starts.

    :param value: starting value.
    :param constraint: of NumPyro, where the value lives.
    :param role: ``"inducing"`` for inducing points, which may be fixed; else
        ``"variational"``.
    """

    value: Array
    constraint: constraints.Constraint = field(default_factory=lambda: constraints.real)
    role: Literal["variational", "inducing"] = "variational"


class Factors(NamedTuple):
    """
    What a q(u) is put into whitened coordinates with.

    :param chol: lower factor L of K_uu over the union of the sets, ``(*batch, M, M)``.
    :param cross: from inputs X to K_uX.
    :param kernel: the kernel.
    """

    chol: Array
    cross: Any = None
    kernel: Any = None


class Start(NamedTuple):
    """
    Where a family starts.

    :param batch_shape: of the process.
    :param points: inducing points of each set.
    :param whiten: whether q is in whitened coordinates.
    :param factor: function that returns the lower factor of K_uu over the union of the
        sets, ``(*batch, M, M)``.
    :param scale: what standard deviations start at, relative to the prior's.
    :param num_rows: N, for a family with parameters for each row of the data.
    """

    batch_shape: tuple[int, ...]
    points: tuple
    whiten: bool
    factor: Callable[[], Array]
    scale: float
    num_rows: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing variables in each set."""
        return tuple(points.shape[-2] for points in self.points)

    @property
    def dtype(self) -> Any:
        """Of all parameters."""
        return self.points[0].dtype


class Family:
    """
    The options of a q(u), without arrays: a file of this room has one, with the
    :class:`QU` that it builds.
    """

    #: Its name as an option, ``covariance=...``.
    name: ClassVar[str]
    #: Whether there may be several sets of inducing points.
    several_sets: ClassVar[bool] = False
    #: Whether every Gaussian over the inducing variables of a latent function is one.
    has_all_gaussians: ClassVar[bool] = False
    #: Whether it must be in whitened coordinates.
    whitened_only: ClassVar[bool] = True
    #: Whether it has parameters for each row of the data, so that no row may be missing.
    needs_all_rows: ClassVar[bool] = False
    #: Whether it starts at another scale than the prior's.
    has_scale: ClassVar[bool] = True
    #: Whether latent functions are independent under q.
    independent_latents: ClassVar[bool] = True
    #: Whether derivatives by its parameters are natural gradients, for no other optimiser.
    is_natural: ClassVar[bool] = False
    #: Why it takes no natural gradients, as the end of "GP site 'f' has ...".
    no_natural_step: ClassVar[str | None] = None

    def start(self, at: Start) -> dict[str, Param]:
        """The starting parameters, q(u) at the prior but for its scale."""
        raise NotImplementedError

    def build(self, params: dict, whiten: bool) -> "QU":
        """
        q(u) from values of the parameters.

        :param params: values by name, those of the inducing points among them; with
            ``X``, the rows of the data, where :attr:`needs_all_rows`, and
            ``natural_rate`` where :attr:`is_natural`.
        :param whiten: whether they are in whitened coordinates.
        """
        raise NotImplementedError

    def takes_natural_steps(self, names: Iterable[str]) -> tuple[str, ...]:
        """Which of the parameters :meth:`natural_step` is for."""
        return ()

    def natural_step(self, free: dict, slopes: dict, rate: Array) -> dict:
        """
        What natural gradients add to the parameters of :meth:`takes_natural_steps`.

        :param free: unconstrained values by name.
        :param slopes: derivatives of the loss by them.
        :param rate: step size.
        """
        raise NotImplementedError

    def gaussian_optimum(
        self, free: dict, A: Array, linear: Array, precision: Array
    ) -> dict | None:
        r"""
        Parameters of q(u) at the optimum of the bound for a Gaussian likelihood, with the
        log density :math:`\ell_n g_n - \lambda_n g_n^2 / 2` of f less the prior's mean.

        :param free: unconstrained values by name, some others.
        :param A: whitened projection, ``(*batch, M, N)``.
        :param linear: :math:`\ell`, ``(*batch, N)``.
        :param precision: :math:`\lambda`, none negative, of that shape.
        :return: unconstrained values by name; None where it has no closed form.
        """
        return None


class QU:
    r"""
    A q(u) in arrays, over the union of the sets of inducing variables. The methods are of
    one in whitened coordinates, :math:`L^{-1} u`, which :meth:`whitened` gives; there it is
    a mixture of :attr:`num_components` Gaussians of independent blocks
    (:meth:`component`), most often of one.
    """

    independent_latents: bool = True

    @property
    def num_components(self) -> int:
        """Number K of components."""
        return 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing variables in each set."""
        raise NotImplementedError

    def check_batch(self, batch_shape: Shape) -> None:
        """
        :raises ValueError: if it is not one for a process of this batch shape.
        """

    def whitened(self, factors: Factors) -> "QU":
        """The same q in whitened coordinates."""
        raise NotImplementedError

    @property
    def log_weights(self) -> Array:
        """Log weights of the components, shape ``(K,)``."""
        return jnp.zeros(1)

    def component(self, k: Any) -> Any:
        """Component ``k``, which may be traced, as a ``BlockGaussian``."""
        return self

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where each set lies in the union."""
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
        return tuple(slice(e - m, e) for e, m in zip(ends, self.sizes, strict=True))

    def draw(self, key: Array, sample_shape: Shape, batch_shape: Shape) -> Array:
        """Draws of whitened u, shape ``sample_shape + batch_shape + (M,)``."""
        raise NotImplementedError

    def kl(self, rng_key: Array | None = None, sets: Sets | None = None) -> Array:
        r"""
        :math:`\mathrm{KL}[q(u) \| N(0, I)]`, ``(*batch,)``, or a bound of it.

        :param rng_key: for what is drawn.
        :param sets: numbers of the sets that it is of; all if None.
        """
        raise NotImplementedError

    @property
    def parts(self) -> tuple | None:
        """
        The Gaussians with a mean and a covariance of their own that q is made of,
        independent of each other; None where it is not.
        """
        return None

    def with_parts(self, parts: tuple) -> "QU":
        """The same with other Gaussians in the place of :attr:`parts`."""
        raise NotImplementedError

    def mean_shift(self, X: Array, A: Array) -> Array | float:
        """What is added to the mean at X beside what u explains; A is L^-1 K_uX."""
        return 0.0

    def kernel_functions(self, points: Array, weights: Array) -> tuple[Array, Array]:
        """Points and weights of kernel functions with those that all draws share."""
        return points, weights

    def keep(self, sets: Sets, residual: bool) -> "QU":
        """Of the sets only; ``residual``: with what they leave open."""
        return self
