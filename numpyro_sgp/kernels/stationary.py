"""Stationary kernels: functions of a scaled distance."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from numpyro_sgp.kernels.base import (
    Features,
    InputKernel,
    Shape,
    append_axes,
    no_features,
)
from numpyro_sgp.kernels.distances import safe_sqrt, squared_distances
from numpyro_sgp.kernels.pytrees import frozen_pytree, static_field
from numpyro_sgp.linalg import einsum

__all__ = [
    "RBF",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "RationalQuadratic",
    "Stationary",
]


@frozen_pytree
class Stationary(InputKernel):
    r"""
    Base class of the kernels :math:`k(x, x') = \sigma^2 g(r^2)` of the scaled distance
    :math:`r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2`.

    A subclass is made a pytree by ``frozen_pytree`` and defines ``_of_r2``, the
    function :math:`g`, and, for random features, ``_frequencies``.

    **Batches.** The shape of ``variance`` is the batch shape: ``variance`` of shape
    ``(Q,)`` makes Q kernels. ``lengthscale`` is then a scalar, or has the shape
    ``batch`` (one for each kernel), or ``(*batch, D)`` (automatic relevance
    determination, ARD: one for each column). With a scalar ``variance``, a
    ``lengthscale`` of shape ``(D,)`` is ARD.

    :param variance: :math:`\sigma^2`, shape ``batch``.
    :param lengthscale: :math:`\ell`, a scalar or of shape ``batch`` or ``(*batch, D)``.
    :param active_dims: the columns of the inputs that the kernel sees: a tuple or list
        of ints, or a slice; None for all. ARD refers to these columns.
    """

    _per_column: ClassVar[tuple[str, ...]] = ("lengthscale",)
    _steep: ClassVar[bool] = True  # whether g may have an infinite slope at zero

    variance: ArrayLike = 1.0
    lengthscale: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static_field(default=None, kw_only=True)

    def _of_r2(self, r2: Array) -> Array:
        """:math:`g(r^2)`, with :math:`g(0) = 1`; ``r2`` ends in two axes of points."""
        raise NotImplementedError(f"{type(self).__name__} does not define _of_r2.")

    @property
    def is_isotropic(self) -> bool:
        """Whether all columns are seen, with one lengthscale."""
        return self.active_dims is None and np.ndim(self.lengthscale) <= np.ndim(
            self.variance
        )

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        if X2 is None or X2 is X1:
            X1, X2 = *self._inputs(X1), None
        else:
            X1, X2 = self._inputs(X1, X2)
        return append_axes(self.variance, 2) * self._of_r2(self._r2(X1, X2))

    def _r2(self, X1: Array, X2: Array | None) -> Array:
        return squared_distances(X1, X2, self._per_point("lengthscale"), self._steep)

    def _frequencies(self, rng_key: Array, shape: tuple[int, ...], dtype) -> Array:
        r"""
        Draws of :math:`\omega`, of shape ``shape``, the last axis that of the scaled
        columns, with :math:`E[\cos \omega^\top (x - x')] = g(\|x - x'\|^2)`.
        """
        raise no_features(self)

    def features(self, rng_key: Array, shape: Shape, dim: int, dtype: Any) -> Features:
        key, key_phase = jax.random.split(rng_key)
        frequency = self._frequencies(key, (*shape, self._num_scaled(dim, dtype)), dtype)
        phase = jax.random.uniform(key_phase, shape, dtype, maxval=2.0 * math.pi)
        return Partial(_cosines, self, frequency, phase)


def _cosines(kernel, frequency, phase, X):
    X = kernel._scaled(*kernel._inputs(X))
    angle = einsum("...fd,...nd->...fn", frequency, X)
    scale = jnp.sqrt(2.0 * append_axes(kernel.variance, 2))
    return scale * jnp.cos(angle + phase[..., None])


@jax.custom_jvp
def _matern32(r2):
    r = math.sqrt(3.0) * safe_sqrt(r2)
    return (1.0 + r) * jnp.exp(-r)


@_matern32.defjvp
def _matern32_jvp(primals, tangents):
    # By the rules of calculus, a difference of equal terms over a small distance.
    r = math.sqrt(3.0) * safe_sqrt(*primals)
    return _matern32(*primals), -1.5 * jnp.exp(-r) * tangents[0]


@jax.custom_jvp
def _matern52(r2):
    r = math.sqrt(5.0) * safe_sqrt(r2)
    return (1.0 + r + r**2 / 3.0) * jnp.exp(-r)


@_matern52.defjvp
def _matern52_jvp(primals, tangents):
    r = math.sqrt(5.0) * safe_sqrt(*primals)
    return _matern52(*primals), -5.0 / 6.0 * (1.0 + r) * jnp.exp(-r) * tangents[0]


def _student(rng_key, shape, dtype, degrees):
    """Multivariate Student draws, the spectrum of a Matérn kernel of half the order."""
    key, key_scale = jax.random.split(rng_key)
    # The mean of as many squares is what others draw as a gamma variable.
    squares = jax.random.normal(key_scale, (*shape[:-1], degrees), dtype) ** 2
    scale = jnp.sqrt(jnp.mean(squares, axis=-1, keepdims=True))
    return jax.random.normal(key, shape, dtype) / scale


@frozen_pytree
class RBF(Stationary):
    r"""
    The squared exponential (Gaussian) kernel

    .. math::

        k(x, x') = \sigma^2 \exp(-r^2 / 2) .

    Parameters are those of :class:`Stationary`.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.kernels import RBF
    >>> X = jnp.array([[0.0, 0.0], [1.0, 2.0]])
    >>> print(RBF(variance=2.0, lengthscale=jnp.array([1.0, 2.0]))(X).round(4))
    [[2.     0.7358]
     [0.7358 2.    ]]
    >>> three_kernels = RBF(jnp.ones(3), jnp.array([0.1, 1.0, 10.0]))
    >>> three_kernels(X).shape
    (3, 2, 2)
    """

    _steep: ClassVar[bool] = False

    def _of_r2(self, r2: Array) -> Array:
        return jnp.exp(-0.5 * r2)

    def _frequencies(self, rng_key, shape, dtype):
        return jax.random.normal(rng_key, shape, dtype)


@frozen_pytree
class Matern12(Stationary):
    r"""
    The Matérn kernel of order 1/2 (exponential; in one dimension Ornstein-Uhlenbeck)

    .. math::

        k(x, x') = \sigma^2 \exp(-r) .

    Parameters are those of :class:`Stationary`.

    >>> from numpyro_sgp.kernels import Matern12
    >>> print(Matern12(lengthscale=2.0)([[0.0], [2.0]]).round(4))
    [[1.     0.3679]
     [0.3679 1.    ]]
    """

    def _of_r2(self, r2: Array) -> Array:
        return jnp.exp(-safe_sqrt(r2))

    def _frequencies(self, rng_key, shape, dtype):
        return _student(rng_key, shape, dtype, 1)


@frozen_pytree
class Matern32(Stationary):
    r"""
    The Matérn kernel of order 3/2

    .. math::

        k(x, x') = \sigma^2 (1 + \sqrt{3}\, r) \exp(-\sqrt{3}\, r) .

    Parameters are those of :class:`Stationary`.

    >>> from numpyro_sgp.kernels import Matern32
    >>> print(Matern32(lengthscale=2.0)([[0.0], [2.0]]).round(4))
    [[1.     0.4834]
     [0.4834 1.    ]]
    """

    _steep: ClassVar[bool] = False

    def _of_r2(self, r2: Array) -> Array:
        return _matern32(r2)

    def _frequencies(self, rng_key, shape, dtype):
        return _student(rng_key, shape, dtype, 3)


@frozen_pytree
class Matern52(Stationary):
    r"""
    The Matérn kernel of order 5/2

    .. math::

        k(x, x') = \sigma^2 (1 + \sqrt{5}\, r + 5 r^2 / 3) \exp(-\sqrt{5}\, r) .

    Parameters are those of :class:`Stationary`.

    >>> from numpyro_sgp.kernels import Matern52
    >>> print(Matern52(lengthscale=2.0)([[0.0], [2.0]]).round(4))
    [[1.    0.524]
     [0.524 1.   ]]
    """

    _steep: ClassVar[bool] = False

    def _of_r2(self, r2: Array) -> Array:
        return _matern52(r2)

    def _frequencies(self, rng_key, shape, dtype):
        return _student(rng_key, shape, dtype, 5)


@frozen_pytree
class RationalQuadratic(Stationary):
    r"""
    The rational quadratic kernel, a scale mixture of :class:`RBF` kernels,

    .. math::

        k(x, x') = \sigma^2 \left(1 + \frac{r^2}{2 \alpha}\right)^{-\alpha} .

    The other parameters are those of :class:`Stationary`.

    :param alpha: :math:`\alpha`, a scalar or of shape ``batch``.

    >>> from numpyro_sgp.kernels import RationalQuadratic
    >>> print(RationalQuadratic(alpha=0.5)([[0.0], [1.0]]).round(4))
    [[1.     0.7071]
     [0.7071 1.    ]]
    """

    _steep: ClassVar[bool] = False

    _per_kernel: ClassVar[tuple[str, ...]] = ("alpha",)

    alpha: ArrayLike = 1.0

    def _of_r2(self, r2: Array) -> Array:
        alpha = append_axes(self.alpha, 2)
        # log1p keeps the limit alpha -> inf (the RBF kernel) in single precision.
        return jnp.exp(-alpha * jnp.log1p(r2 / (2.0 * alpha)))

    def _frequencies(self, rng_key, shape, dtype):
        key, key_scale = jax.random.split(rng_key)
        alpha = jnp.asarray(append_axes(self.alpha, 1), dtype)
        squared = jax.random.gamma(key_scale, alpha, shape[:-1], dtype) / alpha
        return jnp.sqrt(squared)[..., None] * jax.random.normal(key, shape, dtype)


@frozen_pytree
class Periodic(Stationary):
    r"""
    The periodic kernel

    .. math::

        k(x, x') = \sigma^2 \exp\left(-2 \sum_d
            \frac{\sin^2(\pi (x_d - x'_d) / p_d)}{\ell_d^2}\right) .

    It is the :class:`RBF` kernel of the points' places on circles,
    :math:`[\cos(2 \pi x_d / p_d), \sin(2 \pi x_d / p_d)] / \ell_d`, and computed so.
    Its lengthscale is relative to the period, not in the units of the inputs.

    The other parameters are those of :class:`Stationary`.

    :param period: :math:`p`, a scalar or of shape ``batch`` or ``(*batch, D)``.

    >>> from numpyro_sgp.kernels import Periodic
    >>> print(Periodic(period=2.0)([[0.0], [1.0]], [[2.0]]).round(4))
    [[1.    ]
     [0.1353]]
    """

    _steep: ClassVar[bool] = False

    _per_column: ClassVar[tuple[str, ...]] = ("lengthscale", "period")

    period: ArrayLike = 1.0

    def _on_circles(self, X: Array) -> Array:
        angle = 2.0 * math.pi * _turns(X, self._per_point("period"))
        return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)

    def _circle_lengthscale(self, D: int) -> Array:
        """The lengthscale of each column of :meth:`_on_circles`."""
        lengthscale = jnp.asarray(self._per_point("lengthscale"))
        if lengthscale.ndim == 0 or lengthscale.shape[-1] != D:
            return lengthscale
        return jnp.concatenate([lengthscale, lengthscale], axis=-1)

    def _scaled(self, X: Array) -> Array:
        return self._on_circles(X) / self._circle_lengthscale(X.shape[-1])

    def _r2(self, X1: Array, X2: Array | None) -> Array:
        # |cos a - cos b|² + |sin a - sin b|² = 4 sin²((a - b) / 2)
        return squared_distances(
            self._on_circles(X1),
            None if X2 is None else self._on_circles(X2),
            self._circle_lengthscale(X1.shape[-1]),
            self._steep,
        )

    _of_r2, _frequencies = RBF._of_r2, RBF._frequencies


@jax.custom_jvp
def _turns(X: Array, period: ArrayLike) -> Array:
    """
    ``X / period`` without its whole turns, of which no digit is lost where there are many.
    """
    # Not jnp.remainder, which adds a period to negative numbers and rounds.
    return jnp.fmod(X, period) / period


@_turns.defjvp
def _turns_jvp(primals, tangents):
    _, tangent = jax.jvp(jnp.divide, primals, tangents)
    return _turns(*primals), tangent
