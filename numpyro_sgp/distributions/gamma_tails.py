r"""
Logs of the regularised incomplete gamma functions, far into the tails.

Those of JAX are zero there. What is summed has as many terms in every row; derivatives by
the second argument are in closed form, those by the first, if there are any, go through the
sums.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.scipy.special import gammainc, gammaincc, gammaln

_SMALL = 1e-8  # below it these are of use
_TERMS = 200  # right to rounding where a is up to 10,000


@jax.custom_jvp
def log_gammaincc(a: Array, x: Array) -> Array:
    r""":math:`\log Q(a, x)`, by a continued fraction (DLMF 8.9.2) where it is small."""
    return _log_gammaincc(a, x)


@jax.custom_jvp
def log_gammainc(a: Array, x: Array) -> Array:
    r""":math:`\log P(a, x)`, by its series (DLMF 8.7.1) where it is small."""
    return _log_gammainc(a, x)


def _log_gammaincc(a, x):
    a, x = jnp.broadcast_arrays(a, x)
    known = gammaincc(a, x)
    far = jax.lax.stop_gradient(known < _SMALL)
    near_a, far_x = jnp.where(far, a, 1.0), jnp.where(far, x, 20.0)

    def term(i, rest):
        k = _TERMS - i
        return far_x + (2 * k - 1) - near_a - k * (k - near_a) / rest

    rest = jax.lax.fori_loop(0, _TERMS, term, far_x + 2 * _TERMS + 1 - near_a)
    found = near_a * jnp.log(far_x) - far_x - gammaln(near_a) - jnp.log(rest)
    return jnp.where(far, found, jnp.log(jnp.where(far, 1.0, known)))


def _log_gammainc(a, x):
    a, x = jnp.broadcast_arrays(a, x)
    known = gammainc(a, x)
    far = jax.lax.stop_gradient(known < _SMALL)
    near_a, far_x = jnp.where(far, a, 20.0), jnp.where(far, x, 1.0)

    def term(k, state):
        total, last = state
        last = last * far_x / (near_a + k)
        return total + last, last

    first = jnp.ones_like(far_x)
    total, _ = jax.lax.fori_loop(1, _TERMS, term, (first, first))
    found = near_a * jnp.log(far_x) - far_x - gammaln(near_a + 1.0) + jnp.log(total)
    return jnp.where(far, found, jnp.log(jnp.where(far, 1.0, known)))


def _jvp(of, plain, sign, primals, tangents):
    a, x = primals
    da, dx = tangents
    found = of(a, x)
    change = jnp.zeros_like(found)
    if not isinstance(dx, SymbolicZero):
        slope = sign * jnp.exp((a - 1.0) * jnp.log(x) - x - gammaln(a) - found)
        change = change + slope * dx
    if not isinstance(da, SymbolicZero):
        change = change + jax.jvp(lambda a: plain(a, x), (a,), (da,))[1]
    return found, change


for _of, _plain, _sign in (
    (log_gammaincc, _log_gammaincc, -1.0),
    (log_gammainc, _log_gammainc, 1.0),
):
    _of.defjvp(partial(_jvp, _of, _plain, _sign), symbolic_zeros=True)
