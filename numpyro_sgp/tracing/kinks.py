"""Whether the slopes of a likelihood jump."""

from collections.abc import Callable

import numpy as np

_WIDTH, _WIDER = 6.0, 8  # of the first interval, and how often it is made four times wider
_LITTLE = 1e-3  # relative change of slopes over it that tells nothing
_PARTS = 16  # of the last one of these
_LOOK = 6  # halvings from one look to the next
_HALVINGS = {"float32": 18, "float64": 30}  # until the ends of an interval are rounding's
_JUMP = 0.3  # share of the largest change over an interval that is left over the last
_NATS = 12.0  # below the largest, from which on a log density is not looked at
_FUNCTIONS = 4  # that are moved
_FEW = 0.01  # share of rows that do not count


def has_kinks(
    slope: Callable[[np.ndarray], np.ndarray], shape: tuple[int, int], dtype
) -> bool:
    """
    Whether the log density of rows has kinks (a Laplace distribution, absolute values,
    rectified links), or changes as quickly: then few nodes do not do for its expectation,
    whose errors a fit goes after.

    Each row's interval is halved again and again, to the half over which its slope changes
    more. Of a smooth function the change becomes little; over a jump it stays.

    :param slope: from values of f to the slopes of the log density, of the same shape; rows
        are apart.
    :param shape: (J, N), of the values of J functions at N rows; a few of many are moved.
    :param dtype: of the values.
    """
    dtype = np.dtype(dtype)
    f = 0.3 * np.random.default_rng(2).normal(size=shape)
    with np.errstate(invalid="ignore", over="ignore"):
        return any(_jumps(slope, f, j, dtype) for j in range(min(shape[0], _FUNCTIONS)))


def _jumps(slope, f, j, dtype) -> bool:
    def at(x):
        moved = f.copy()
        moved[j] = x
        return np.asarray(slope(moved.astype(dtype)), float)[j]

    def change(a, b):
        return np.abs(b - a)

    half = np.full(f.shape[1], 0.5 * _WIDTH)
    left, right = at(f[j] - half), at(f[j] + half)
    for _ in range(_WIDER):
        size = np.maximum(np.abs(left), np.abs(right))
        flat = (change(left, right) <= _LITTLE * size) & (size > 0.0)
        if not flat.any():
            break
        half = np.where(flat, 4.0 * half, half)
        left, right = at(f[j] - half), at(f[j] + half)
    # The part of it over which the slope changes most: kinks may be small beside the rest.
    ends = f[j] + half * np.linspace(-1.0, 1.0, _PARTS + 1)[:, None]
    slopes = np.stack([left, *map(at, ends[1:-1]), right])
    changes = np.nan_to_num(change(slopes[:-1], slopes[1:]))
    # Where the density is next to nothing it may be clamped.
    rises = 0.5 * np.nan_to_num(slopes[:-1] + slopes[1:]) * np.diff(ends, axis=0)
    heights = np.concatenate([0.0 * rises[:1], np.cumsum(rises, axis=0)])
    there = heights > np.max(heights, axis=0) - _NATS
    changes = np.where(there[:-1] | there[1:], changes, 0.0)
    most = np.argmax(changes, axis=0)[None]
    low, left = (np.take_along_axis(a, most, 0)[0] for a in (ends, slopes))
    high, right = (np.take_along_axis(a, most + 1, 0)[0] for a in (ends, slopes))
    largest = change(left, right)
    size = np.max(np.abs(slopes), axis=0, initial=0.0, where=np.isfinite(slopes))
    open_ = largest > _LITTLE * size
    for count in range(1, _HALVINGS[dtype.name] + 1):
        middle = 0.5 * (low + high)
        here = at(middle)
        lower = change(left, here) > change(here, right)
        low, high = np.where(lower, low, middle), np.where(lower, middle, high)
        left, right = np.where(lower, left, here), np.where(lower, here, right)
        largest = np.maximum(largest, change(left, right))
        if count % _LOOK == 0:
            open_ &= change(left, right) > _JUMP * largest
            if open_.mean() <= _FEW:
                return False
    return True
