"""Inducing variables that are integrals of f under a Gaussian window, for RBF kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import real
from numpyro_sgp.inducing.variables import InducingVariables
from numpyro_sgp.kernels import RBF, Scaled, Sum
from numpyro_sgp.linalg import einsum

__all__ = ["FourierFeatures", "SmoothedPoints"]

_DRAWS = 2_000


class SmoothedPoints(InducingVariables):
    r"""
    Averages of f under a Gaussian window around each point, for :class:`RBF` kernels and
    their sums and multiples (Lazaro-Gredilla & Figueiras-Vidal 2009, section 3),

    .. math::

        u_m = \int f(x)\, N(x \mid z_m, \mathrm{diag}(s^2))\, dx .

    :param points: centres z, shape ``(*batch, M, D)``, or the method that chooses them.
    :param width: s, a number or shape ``(D,)``; zero for values of f.
    :raises TypeError: when used with another kernel.
    :raises ValueError: if the width is negative, not finite or of another shape.

    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> from numpyro_sgp.inducing.covariances import inducing_covariance
    >>> Z = sgp.SmoothedPoints(jnp.zeros((1, 1)), width=1.0)
    >>> print(inducing_covariance(sgp.kernels.RBF(), (Z,)).round(4))
    [[0.5774]]
    """

    width: ArrayLike = 1.0

    def __post_init__(self):
        super().__post_init__()
        _check_window(self, least=0.0)

    def covariance(self, kernel: Any, other: InducingVariables | Array) -> Array:
        _check_columns(self, self.shape[-1])
        own, points = self.points, other  # type: Any, Any
        if isinstance(other, SmoothedPoints):
            points = own if other is self else other.points
            squared = jnp.square(self.width) + jnp.square(other.width)
        elif isinstance(other, InducingVariables):
            return NotImplemented
        else:
            squared = jnp.square(self.width)
        parts = _rbf_parts(kernel, self.shape[-1], "SmoothedPoints")
        return reduce(jnp.add, (_smoothed(*part, squared)(own, points) for part in parts))


class FourierFeatures(InducingVariables):
    r"""
    Fourier features of f under a Gaussian window, for :class:`RBF` kernels and their sums
    and multiples (Lazaro-Gredilla & Figueiras-Vidal 2009, section 3),

    .. math::

        u_m = \int f(x)\, N(x \mid c, \mathrm{diag}(s^2))
            \cos(\omega_m^\top (x - c) + \phi_m)\, dx .

    They suit functions that are about as wiggly everywhere under the window, of which they
    need fewer than points. What lies more than a few :math:`s` from the centre, they do not
    see: choose a window as wide as the data.

    :param points: frequencies and phases, shape ``(*batch, M, D + 1)``, the phase in the
        last column; or the method that chooses them, from draws of the kernel's spectral
        density with phases of cosines and sines.
    :param width: s, a number or shape ``(D,)``: at least the standard deviation of X.
    :param centre: c, a number or shape ``(D,)``.
    :raises TypeError: when used with another kernel.
    :raises ValueError: if the width is not positive, width or centre are not finite or of
        another shape, or points have no column for the phase.

    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> from numpyro_sgp.inducing.covariances import inducing_covariance
    >>> Z = sgp.FourierFeatures(jnp.array([[0.0, 0.0], [2.0, 0.0]]))
    >>> print(inducing_covariance(sgp.kernels.RBF(), (Z,)).round(4))
    [[0.5774 0.1522]
     [0.1522 0.0814]]
    """

    width: ArrayLike = 1.0
    centre: ArrayLike = 0.0

    def __post_init__(self):
        super().__post_init__()
        _check_window(self, least=np.finfo(np.float32).tiny, centre=self.centre)

    def covariance(self, kernel: Any, other: InducingVariables | Array) -> Array:
        dim = self.shape[-1] - 1
        _check_columns(self, dim)
        parts = _rbf_parts(kernel, dim, "FourierFeatures")
        if isinstance(other, FourierFeatures):
            points = self.points if other is self else other.points
            return sum(self._between(*part, other, points) for part in parts)
        if isinstance(other, InducingVariables):
            return NotImplemented
        if dim != other.shape[-1]:
            raise ValueError(
                f"FourierFeatures of inputs with {other.shape[-1]} columns have points "
                f"with {other.shape[-1] + 1}, the phase in the last one; these have "
                f"{dim + 1}."
            )
        return sum(self._with_values(*part, other) for part in parts)

    def candidates(
        self, kernel: Any, X: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Draws of the spectral density, each with both phases."""
        dim = X.shape[-1]
        parts = list(_rbf_parts(kernel, dim, "FourierFeatures"))
        scales = np.concatenate([np.asarray(s, float).reshape(-1, dim) for _, s in parts])
        weights = np.concatenate([np.asarray(v, float).ravel() for v, _ in parts])
        scale = scales[rng.choice(len(scales), _DRAWS, p=weights / weights.sum())]
        frequencies = rng.normal(size=(_DRAWS, dim)) / scale
        phases = np.repeat([[0.0], [-0.5 * np.pi]], _DRAWS, axis=0)
        return np.hstack([np.tile(frequencies, (2, 1)), phases]).astype(X.dtype)

    def _with_values(self, variance, lengthscale, X):
        """
        K_uf, the integral of k(x, x_n) under the window with its cosine: a wider bump in
        X - c times a slower cosine.
        """
        squared, window = lengthscale**2, jnp.square(self.width)
        wide = squared + window
        away = X - self.centre
        bump = jnp.sum(away**2 / wide[..., None, :], axis=-1)[..., None, :]
        omega, phase = self.points[..., :-1], self.points[..., -1:]
        shrunk = omega * (window / wide)[..., None, :]
        angle = einsum("...md,...nd->...mn", shrunk, away) + phase
        damping = jnp.sum(omega**2 * (squared * window / wide)[..., None, :], axis=-1)
        size = variance * jnp.prod(jnp.sqrt(squared / wide), axis=-1)
        values = jnp.exp(-0.5 * (bump + damping[..., :, None])) * jnp.cos(angle)
        return size[..., None, None] * values

    def _between(self, variance, lengthscale, other, points):
        """K_uu: E[cos a cos b] = E[cos(a + b) + cos(a - b)] / 2, over both windows."""
        squared = lengthscale**2
        window1, window2 = jnp.square(self.width), jnp.square(other.width)
        wide = squared + window1 + window2
        between = jnp.subtract(other.centre, self.centre)
        # Moments of two places, one under each window, that the kernel draws together.
        own1, own2 = ((w * (wide - w) / wide)[..., None, :] for w in (window1, window2))
        shared = (window1 * window2 / wide)[..., None, :]
        move1, move2 = ((w * between / wide)[..., None, :] for w in (window1, window2))
        (w1, p1), (w2, p2) = ((p[..., :-1], p[..., -1]) for p in (self.points, points))
        p1 = (p1 + jnp.sum(w1 * move1, axis=-1))[..., :, None]
        p2 = (p2 - jnp.sum(w2 * move2, axis=-1))[..., None, :]
        spread = jnp.sum(own1 * w1**2, axis=-1)[..., :, None]
        spread = spread + jnp.sum(own2 * w2**2, axis=-1)[..., None, :]
        cross = 2 * einsum("...md,...nd->...mn", shared * w1, w2)
        values = jnp.cos(p1 + p2) * jnp.exp(-0.5 * (spread + cross))
        values = values + jnp.cos(p1 - p2) * jnp.exp(-0.5 * (spread - cross))
        near = jnp.sqrt(squared / wide) * jnp.exp(-0.5 * between**2 / wide)
        return 0.5 * (variance * jnp.prod(near, axis=-1))[..., None, None] * values


def _check_window(kind, least, centre=0.0):
    """Refuses a known window that is none, or is narrower than ``least``."""
    width = real(kind.width, f"{type(kind).__name__}: width")
    if not isinstance(kind.width, float):
        object.__setattr__(kind, "width", width)
    if hasattr(kind, "centre"):
        centre = real(centre, f"{type(kind).__name__}: centre")
        if not isinstance(kind.centre, float):
            object.__setattr__(kind, "centre", centre)
    if not (not_jax_tracer(kind.width) and not_jax_tracer(centre)):
        return
    width, centre = np.asarray(kind.width), np.asarray(centre)
    finite = np.isfinite(width).all() and np.isfinite(centre).all()
    if not finite or np.any(width < least) or max(width.ndim, centre.ndim) > 1:
        raise ValueError(
            f"{type(kind).__name__}: width must be positive, and it and the centre finite, "
            f"numbers or of shape (D,), got {width} and {centre}."
        )


def _check_columns(kind, dim):
    """Refuses a window of another number of columns than the inputs have."""
    for name in ("width", "centre"):
        shape = np.shape(getattr(kind, name, 0.0))
        if shape not in ((), (1,), (dim,)):
            raise ValueError(
                f"{type(kind).__name__}: {name} must be a number or have the shape "
                f"({dim},), one for each column of the inputs, got {shape}."
            )


def _rbf_parts(kernel: Any, dim: int, kind: str) -> Iterator[tuple[Array, Array]]:
    """Variance, ``(*batch,)``, and lengthscales, ``(*batch, D)``, of each RBF summand."""
    if isinstance(kernel, Scaled):
        for variance, lengthscale in _rbf_parts(kernel.kernel, dim, kind):
            variance = jnp.multiply(kernel.scale, variance)
            yield variance, jnp.broadcast_to(lengthscale, (*variance.shape, dim))
    elif isinstance(kernel, Sum):
        yield from _rbf_parts(kernel.left, dim, kind)
        yield from _rbf_parts(kernel.right, dim, kind)
    elif type(kernel) is not RBF or kernel.active_dims is not None:
        raise TypeError(
            f"{kind} have closed forms for RBF kernels on all columns (no active_dims), "
            f"their sums and multiples by numbers, not for {type(kernel).__name__}. Use "
            "ordinary points."
        )
    else:
        batch, lengthscale = kernel.batch_shape, jnp.asarray(kernel.lengthscale)
        if lengthscale.ndim <= len(batch):
            lengthscale = lengthscale[..., None]
        variance = jnp.broadcast_to(kernel.variance, batch)
        yield variance, jnp.broadcast_to(lengthscale, (*batch, dim))


def _smoothed(variance: Array, lengthscale: Array, squared_width: ArrayLike) -> RBF:
    """An RBF kernel convolved with a Gaussian of the given variance(s)."""
    wide = lengthscale**2 + squared_width
    return RBF(variance * jnp.prod(lengthscale / jnp.sqrt(wide), axis=-1), jnp.sqrt(wide))
