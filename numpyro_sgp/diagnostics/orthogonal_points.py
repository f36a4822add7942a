"""Orthogonal inducing points added to a fit, and the best Gaussian there."""

from typing import NamedTuple

import jax
import numpy as np

from numpyro_sgp._programs import split
from numpyro_sgp.diagnostics.moved_bound import Field, MovedBound
from numpyro_sgp.distributions.relaxation import Diagonal

_ENOUGH = 1e-3  # nats for the sake of which no step is made
_MOST_STEPS = 30
_SMALLEST_STEP = 1 / 64
_NUM_KEYS = 8  # by which q(v) is chosen where the bound is random; twice as many score it


class Gaussians(NamedTuple):
    """
    Gaussians of whitened v by site, in natural parameters.

    :param P: precisions, ``(Q, k, k)``.
    :param h: precisions times means, ``(Q, k)``.
    """

    P: dict[str, np.ndarray]
    h: dict[str, np.ndarray]

    @staticmethod
    def none(fields: dict[str, Field]) -> "Gaussians":
        """Of no point."""
        Q = {name: len(field.prior) for name, field in fields.items()}
        zeros = {name: np.zeros((q, 0)) for name, q in Q.items()}
        return Gaussians({name: np.zeros((q, 0, 0)) for name, q in Q.items()}, zeros)

    def extended(self, sizes: dict[str, int]) -> "Gaussians":
        """The same with further points, at which they are the prior."""
        P, h = {}, {}
        for name, old in self.P.items():
            k, more = old.shape[-1], sizes[name] - old.shape[-1]
            P[name] = np.broadcast_to(np.eye(k + more), (len(old), k + more, k + more))
            P[name] = P[name].copy()
            P[name][:, :k, :k] = old
            h[name] = np.pad(self.h[name], ((0, 0), (0, more)))
        return Gaussians(P, h)

    def mean(self, name) -> np.ndarray:
        """Means at one site, ``(Q, k)``."""
        return np.linalg.solve(self.P[name], self.h[name][..., None])[..., 0]

    def kl(self) -> float:
        """From the prior, summed."""
        total = 0.0
        for name, P in self.P.items():
            trace = np.trace(np.linalg.inv(P), axis1=-2, axis2=-1)
            square = np.sum(self.mean(name) ** 2, axis=-1)
            log_det = np.linalg.slogdet(P)[1]
            total += 0.5 * np.sum(trace + square - P.shape[-1] + log_det)
        return float(total)

    def moved(self, rows: dict[str, np.ndarray], fields: dict[str, Field]) -> dict:
        """What they add to the marginals of f, for :meth:`MovedBound.as_shift`."""
        found = {}
        for name, P in self.P.items():
            R, field = rows[name][:, : P.shape[-1]], fields[name]
            mean = np.einsum("qkn,qk->qn", R, self.mean(name).astype(R.dtype))
            # Together, for the sake of rounding, where nothing is relaxed.
            less = np.linalg.inv(P) - np.eye(P.shape[-1])
            variance = np.einsum("qkn,qkn->qn", R, np.matmul(less.astype(R.dtype), R))
            variance = variance + (1.0 - field.factor) * np.sum(R**2, axis=1)
            # Rounding must not leave a variance below zero.
            floor = 4 * np.finfo(R.dtype).eps * field.prior - field.factor * field.left
            found[name] = mean, np.maximum(variance, np.minimum(floor, 0.0))
        return found

    def gap(self, name, P, h) -> float:
        """KL to another Gaussian at one site, about what a step there would gain."""
        S = np.linalg.inv(self.P[name])
        away = self.mean(name) - np.linalg.solve(P, h[..., None])[..., 0]
        PS = P @ S
        trace = np.trace(PS, axis1=-2, axis2=-1) - P.shape[-1]
        square = np.einsum("qk,qkl,ql->q", away, P, away)
        return 0.5 * float(np.sum(trace + square - np.linalg.slogdet(PS)[1]))

    def towards(self, name, P, h, rate) -> "Gaussians":
        """A natural step at one site."""
        mixed = [(1 - rate) * a[name] + rate * b for a, b in ((self.P, P), (self.h, h))]
        return Gaussians({**self.P, name: mixed[0]}, {**self.h, name: mixed[1]})


def settle(q: Gaussians, look, rows: list[dict]) -> tuple[Gaussians, float]:
    """
    Natural steps of q(v) on the bound, site after site, each halved until the bound rises.

    :param look: from q to the bound with its KL, and slopes by site for each key.
    :param rows: of the points by site, for each key.
    :return: q, and the bound with it.
    """
    value, slopes = look(q)
    for _ in range(_MOST_STEPS):
        before = value
        for name in q.P:
            P, h = _target(q, name, slopes, rows)
            if not np.isfinite(P).all() or q.gap(name, P, h) < _ENOUGH:
                continue
            rate = 1.0
            while rate >= _SMALLEST_STEP:
                new = q.towards(name, P, h, rate)
                new_value, new_slopes = look(new)
                if new_value > value:
                    q, value, slopes = new, new_value, new_slopes
                    break
                rate *= 0.5
        if not value - before > _ENOUGH:
            break
    return q, value


def _target(q, name, slopes, rows):
    """Where one whole natural step leads at a site; negative precisions count as none."""
    P, h = 0.0, 0.0
    for each, by_key in zip(slopes, rows, strict=True):
        to_mean, precision = each[name]
        R = by_key[name][:, : q.P[name].shape[-1]]
        precision = np.maximum(precision, 0.0)
        mean = np.einsum("qkn,qk->qn", R, q.mean(name).astype(R.dtype))
        weighted = R * precision.astype(R.dtype)[:, None, :]
        P = P + np.matmul(weighted, np.swapaxes(R, -1, -2)) / len(rows)
        pull = (to_mean + precision * mean).astype(R.dtype)
        h = h + np.einsum("qkn,qn->qk", R, pull) / len(rows)
    return np.eye(np.shape(P)[-1]) + P, h


class Added(NamedTuple):
    """
    Points added to a fit.

    :param orders: rows of X by site, ``(number, Q)``, in the order in which they came.
    :param sizes: numbers of points at which q(v) was settled, for each site.
    :param gains: what the bound gained at each, for each key that scores.
    :param all_chosen: whether no other row would gain anything, or there is none.
    :param q: q(v) at all of them.
    """

    orders: dict[str, np.ndarray]
    sizes: list[int]
    gains: np.ndarray
    all_chosen: bool
    q: Gaussians


def add_points(bound: MovedBound, params, rng_key, max_points=None) -> Added | None:
    """
    Orthogonal points at each GP site, 8, 16, 32 and so on, and the best q(v) there with
    q(u) as it is.

    :param max_points: most points at each site; :meth:`MovedBound.most_points` if None.
    :return: None if the bound or its slopes are not finite.
    """
    keys, still = split(rng_key, 3 * _NUM_KEYS), bound.no_shift()
    (value, slopes), (other, _) = (bound.look(key, params, still) for key in keys[:2])
    flat = [value, other, *(np.sum(s) for pair in slopes.values() for s in pair)]
    if not np.isfinite(flat).all():
        return None
    is_random = value != other
    train, score = keys[:1], keys[:1]
    if is_random:
        train, score = keys[:_NUM_KEYS], keys[_NUM_KEYS:]
    here = bound.fields(keys[0], params)
    looks = [bound.look(key, params, still)[1] for key in train]
    orders, rows, precisions, all_chosen = {}, {}, {}, True
    for name, field in here.items():
        precision = np.mean([look[name][1] for look in looks], axis=0)
        precisions[name] = precision = np.maximum(precision, 0.0)
        most = bound.most_points(field) if max_points is None else max_points
        most = min(most, field.prior.shape[-1])
        orders[name], rows[name] = bound.choose(
            keys[0], params, name, field, precision, most
        )
        all_chosen &= len(orders[name]) < most or most == field.prior.shape[-1]
    known = here, rows
    draws = _draws(bound, params, train, orders, known)
    scores = _draws(bound, params, score, orders, known) if is_random else draws

    tight = [name for name, kind in bound.relaxations.items() if kind is Diagonal]

    def one(q, draw):
        """The bound with q(v), and its slopes."""
        moved = q.moved(draw.rows, draw.fields)
        value, slopes = bound.look(draw.key, params, moved)
        for name in tight:
            left, R = draw.fields[name].left, draw.rows[name][:, : q.P[name].shape[-1]]
            now = np.maximum(left - np.sum(R**2, axis=1), 0.0)
            costs = (np.log1p(precisions[name] * d) for d in (left, now))
            value += 0.5 * float(np.sum(next(costs) - next(costs)))
        return value - q.kl(), slopes

    def look(q):
        values, slopes = zip(*(one(q, draw) for draw in draws), strict=True)
        return np.mean(values), slopes

    most = max(map(len, orders.values()))
    sizes = [8 * 2**i for i in range(most.bit_length()) if 8 * 2**i < most]
    sizes += [most] if most else []
    q, gains = Gaussians.none(here), []
    for size in sizes:
        q = q.extended({name: min(size, len(order)) for name, order in orders.items()})
        q, value = settle(q, look, [d.rows for d in draws])
        values = [one(q, draw)[0] for draw in scores] if is_random else [value]
        gains.append([v - d.value for v, d in zip(values, scores, strict=True)])
    gains = np.reshape(gains, (len(sizes), len(scores)))
    return Added(orders, sizes, gains, all_chosen, q)


class _Draw(NamedTuple):
    """The bound with one key, and what of it depends on the guide's draws."""

    key: jax.Array
    fields: dict[str, Field]
    rows: dict[str, np.ndarray]
    value: float


def _draws(bound, params, keys, orders, known) -> list[_Draw]:
    """
    :param known: fields, and the rows for them.
    """
    found = []
    for key in keys:
        fields, rows = bound.fields(key, params), known[1]
        if not jax.tree.all(jax.tree.map(np.array_equal, fields, known[0])):
            # The guide draws hyperparameters.
            rows = {
                name: bound.rows(key, params, name, fields[name], order)
                for name, order in orders.items()
            }
        value, _ = bound.look(key, params, bound.no_shift())
        found.append(_Draw(key, fields, rows, value))
    return found
