"""q(u) at its optimum for a Gaussian likelihood, by linear algebra in place of steps."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import NEEDS_KNOWN_DATA, shared
from numpyro_sgp.elbo import TraceGP_ELBO
from numpyro_sgp.families.blocks import inverse_root
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.linalg import einsum, matmul
from numpyro_sgp.tracing.curvature import Quadratic

# Of what has none, and of a model's own code at other parameters.
_NO_FORM = (
    *NEEDS_KNOWN_DATA,
    ValueError,
    NotImplementedError,
    TypeError,
    KeyError,
    FloatingPointError,
    jax.errors.JaxRuntimeError,
)
_MOVED = 0.5  # sd of what the other parameters are moved by, unconstrained


def gaussian_optimum(
    svi, rng_key, free: dict, data, filled: Callable, whole: Callable
) -> tuple[list[str], Callable] | None:
    r"""
    The optimum of q(u) where the likelihood is Gaussian in the values of f at each row, in
    model code of any kind. With the slopes :math:`\ell` and curvatures :math:`-\lambda` of
    the log density at the prior's mean, and :math:`A = L^{-1} K_{uX}`, q(u) is in whitened
    coordinates :math:`N(B^{-1} A \ell, B^{-1})`, :math:`B = I + A \Lambda A^\top` (Titsias
    2009, eq. 10); each family has what is nearest to it, and functions that add up have the
    means that suit each other. A natural step goes there too, or many, by derivatives of
    the bound, which cost as much as it does, and take as long to compile.

    :param svi: the inference problem.
    :param rng_key: key of the loss.
    :param free: unconstrained parameters.
    :param data: what a program is given of the model's arguments.
    :param filled: from that to the arguments, positional ones and those by name.
    :param whole: makes a handler that refuses minibatches.
    :return: names of the parameters of q(u), and from unconstrained parameters and data to
        their unconstrained values there and whether these are finite; None where the
        likelihood is another, or a q(u) has no such form.
    """
    guide, loss = svi.guide, svi.loss
    if type(loss) is not TraceGP_ELBO or loss.num_particles != 1:
        return None
    if not isinstance(guide, AutoSparseGP) or not guide.known().coupling.quadratic:
        return None
    names, options = guide.parameter_names(), guide.approximations
    if not all(getattr(option, "whiten", True) for option in options.values()):
        return None

    @partial(jax.jit, inline=True)  # traced once, for what is found and for the look below
    def rows(free, data):
        args, kwargs = filled(data)
        params = svi.constrain_fn(free)
        with whole():
            return loss.gaussian_rows(rng_key, params, svi.model, guide, args, kwargs)

    def optimum(free, data, apart):
        quadratic, projections = rows(free, data)
        linear, found = quadratic.linear, {}
        if not apart:
            linear = _given_the_others(quadratic, projections)
        for site, full in names.items():
            family, A = options[site].family, projections[site]
            own = {name: free[full[name]] for name in full if full[name] in free}
            new = family.gaussian_optimum(own, A, linear[site], quadratic.precision[site])
            if new is None:
                raise ValueError(f"GP site '{site}' has no closed form.")
            found |= {full[name]: value for name, value in new.items()}
        finite = [jnp.isfinite(value).all() for value in found.values()]
        return found, jnp.all(jnp.array(finite))

    with suppress(*_NO_FORM):  # natural steps lead there
        own = jax.eval_shape(partial(optimum, apart=True), free, data)[0]
        look = shared(lambda *where: rows(*where)[0][-2:], briefly=True)
        rng = np.random.default_rng(0)

        def moved(leaf):
            step = _MOVED * rng.normal(size=np.shape(leaf))
            return np.asarray(leaf + step, leaf.dtype)

        here = jax.tree.map(np.asarray, free)
        there = {k: v if k in own else jax.tree.map(moved, v) for k, v in here.items()}
        # As f + a f^2 is where a begins at zero.
        are_so, are_apart = zip(look(here, data), look(there, data), strict=True)
        if all(are_so):
            return list(own), partial(optimum, apart=bool(all(are_apart)))
    return None


def _given_the_others(quadratic: Quadratic, projections: dict) -> dict:
    r"""
    :math:`\ell_j - \sum_{k \ne j} \lambda_{jk} g_k` by site, g_k the mean of function k
    where all are at their optimum: what is left for each function.
    """
    linear, cross = quadratic.linear, quadratic.cross
    assert cross is not None, "functions that are in no term together are apart"
    As: list[Array] = []
    for name, value in linear.items():
        A = projections[name]
        A = jnp.broadcast_to(A, (*value.shape[:-1], *A.shape[-2:]))
        As.extend(A.reshape(-1, *A.shape[-2:]))
    ell = jnp.concatenate([v.reshape(-1, v.shape[-1]) for v in linear.values()])
    # B = I + sum_k V_k V_k', with the rows of V_k those of the A_j times (R_n)_kj, where
    # the curvatures of row n are R_n' R_n.
    V = [
        jnp.concatenate([A * r for A, r in zip(As, row, strict=True)])
        for row in _row_factor(cross)
    ]
    P = inverse_root(jnp.concatenate(V, axis=-1))
    ends = np.cumsum([len(A) for A in As])[:-1]
    mean, g = jnp.zeros(P.shape[-1], P.dtype), jnp.zeros_like(ell)
    for _ in range(2):  # the second time for what rounding left
        rest = ell - einsum("jkn,kn->jn", cross, g)
        pull = [matmul(A, r) for A, r in zip(As, rest, strict=True)]
        mean = mean + matmul(P, matmul(P.T, jnp.concatenate(pull) - mean))
        parts = zip(As, jnp.split(mean, ends), strict=True)
        g = jnp.stack([matmul(A.T, part) for A, part in parts])
    left = ell - einsum("jkn,kn->jn", cross, g) + jnp.diagonal(cross).T * g
    found, end = {}, 0
    for name, value in linear.items():
        start, end = end, end + int(np.prod(value.shape[:-1]))
        found[name] = left[start:end].reshape(value.shape)
    return found


def _row_factor(cross):
    """Upper R with R' R the curvatures of each row; zeros where these have no rank."""
    J, tiny = len(cross), 1e2 * jnp.finfo(cross.dtype).eps
    R = [[jnp.zeros_like(cross[0, 0])] * J for _ in range(J)]
    for i in range(J):
        left = cross[i, i] - sum(R[k][i] ** 2 for k in range(i))
        has = left > tiny * cross[i, i]
        root = jnp.sqrt(jnp.where(has, left, 1.0))
        for j in range(i, J):
            rest = cross[i, j] - sum(R[k][i] * R[k][j] for k in range(i))
            R[i][j] = jnp.where(has, rest / root, 0.0)
    return R
