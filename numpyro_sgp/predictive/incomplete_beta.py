"""
The regularised incomplete beta function, of which cdfs of counts and of Student's t are.

JAX's goes on to its last iteration wherever rounding errors stay above its tolerance (ten
times as long as need be, for nearly any array), and is wrong for large arguments.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import betaln, gammainc, gammaln, ndtr

#: Arguments above which normal approximations are better, whose errors are some .1 / a.
_MANY = {"float32": 2e3, "float64": 1e5}
_FEW = 100.0
#: Below it JAX's logs of beta functions are off by up to 2e-7.
_SMALL = {"float32": 10.0, "float64": 100.0}
_MOST = 1000  # iterations: they grow as the root of the arguments


def betainc(a, b, x, rest) -> Array:
    """
    By a continued fraction (DLMF 8.17.22). Where ``a`` or ``b`` is large, by a gamma
    variable in the place of the one with the larger number (A&S 26.5.20), or by cube roots
    of both (26.5.22).

    :param a: above zero.
    :param b: above zero.
    :param x: between 0 and 1.
    :param rest: ``1 - x``, with all of its digits.
    """
    a, b, x, rest = jnp.broadcast_arrays(
        *(jnp.asarray(v, jnp.result_type(float)) for v in (a, b, x, rest))
    )
    swap = x * (a + b + 2.0) > a + 1.0
    a, b = jnp.where(swap, b, a), jnp.where(swap, a, b)
    x, rest = jnp.where(swap, rest, x), jnp.where(swap, x, rest)
    many = jnp.maximum(a, b) > _MANY[a.dtype.name]
    given, easy = (a, b, x, rest), (1.0, 1.0, 0.5, 0.5)  # which takes few iterations
    of_many = (jnp.where(many, v, e) for v, e in zip(given, easy, strict=True))
    of_few = (jnp.where(many, e, v) for v, e in zip(given, easy, strict=True))
    found = jnp.where(many, _by_roots(*of_many), _by_fraction(*of_few))
    return jnp.where(swap, 1.0 - found, found)


def _by_fraction(a, b, x, rest):
    """Where ``x`` is not much above ``a / (a + b)``."""
    info = jnp.finfo(a.dtype)

    def away(v):
        return jnp.where(jnp.abs(v) < info.eps**2, info.eps**2, v)

    def go_on(state):
        m, *_, step = state
        return (m < _MOST) & jnp.any(jnp.abs(step - 1.0) > 16.0 * info.eps)

    def iterate(state):  # Lentz's, two terms at a time
        m, c, d, total, _ = state
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        c, d = away(1.0 + even / c), 1.0 / away(1.0 + even * d)
        total = total * c * d
        c, d = away(1.0 + odd / c), 1.0 / away(1.0 + odd * d)
        return m + 1.0, c, d, total * c * d, c * d

    first = 1.0 / away(1.0 - (a + b) * x / (a + 1.0))
    start = jnp.ones((), a.dtype), jnp.ones_like(a), first, first, jnp.zeros_like(a)
    total = jax.lax.while_loop(go_on, iterate, start)[3]
    log_beta = jnp.where(
        jnp.maximum(a, b) < _SMALL[a.dtype.name],
        gammaln(a) + gammaln(b) - gammaln(a + b),
        betaln(a, b),
    )
    logs = a * jnp.log(x + info.tiny) + b * jnp.log(rest + info.tiny)
    return jnp.exp(logs - log_beta) / a * total


def _by_roots(a, b, x, rest):
    swap = a > b
    small, large = jnp.minimum(a, b), jnp.maximum(a, b)
    x, rest = jnp.where(swap, rest, x), jnp.where(swap, x, rest)
    tiny = jnp.finfo(a.dtype).tiny
    minus_log = jnp.where(
        rest > 0.5, -jnp.log1p(-jnp.minimum(x, 0.9)), -jnp.log(rest + tiny)
    )
    few = jnp.minimum(small, _FEW)
    by_gamma = gammainc(few, minus_log * (large + 0.5 * (few - 1.0)))
    one, two = jnp.cbrt(large * x), jnp.cbrt(small * rest)
    away = one * (1.0 - 1.0 / (9.0 * large)) - two * (1.0 - 1.0 / (9.0 * small))
    by_roots = ndtr(3.0 * away / jnp.sqrt(one**2 / large + two**2 / small + tiny))
    found = jnp.where(small < _FEW, by_gamma, by_roots)
    return jnp.where(swap, 1.0 - found, found)
