"""
The sparse bound of a drawn program by hand: the dense program run at quadrature nodes, with
the moments of q(f) and the KL of q(u) by explicit inverses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.infer.util import compute_log_probs

from campaigns._dense import JITTER, matrix, mean_at
from campaigns._drawn import write


def grid(num, functions):
    """Gauss-Hermite nodes over some latent functions, ``(S, functions)``, and weights."""
    x, w = np.polynomial.hermite_e.hermegauss(num)
    nodes = np.stack([a.ravel() for a in np.meshgrid(*[x] * functions)], axis=-1)
    weights = np.prod(np.stack([a.ravel() for a in np.meshgrid(*[w] * functions)]), axis=0)
    return nodes, weights / weights.sum()


def at_node(q, x):
    """
    f where the standard normal numbers of the functions are ``x``; the KL is recorded
    at ``{f}_kl``.

    :param q: by site the points ``Z``, ``mean`` and ``root`` of q(u), ``whiten``, and
        whether it is a ``point`` (whose KL is only minus the log prior density).
    :param x: by site, shape ``(functions,)``.
    """

    def place(site, hypers, inputs, mean):
        given = q[site.name]
        Z, m, R = given["Z"], given["mean"], given["root"]
        K = matrix(site.kernel, hypers, Z, Z, same=True)
        size = jnp.mean(jnp.diagonal(K, axis1=-2, axis2=-1), axis=-1)
        K = K + JITTER * size[..., None, None] * jnp.eye(len(Z))
        L = jnp.linalg.cholesky(K)
        cross = matrix(site.kernel, hypers, Z, inputs)
        W = jnp.linalg.solve(K, cross)  # [.., M, N]
        prior = matrix(site.kernel, hypers, inputs, inputs, same=True)
        prior = jnp.diagonal(prior, axis1=-2, axis2=-1)
        if given["whiten"]:
            m = jnp.einsum("...ij,...j->...i", L, m)
            R = L @ R
        f_mean = mean_at(mean, inputs) + jnp.einsum("...mn,...m->...n", W, m)
        spread = jnp.sum((jnp.swapaxes(R, -1, -2) @ W) ** 2, axis=-2)
        variance = prior - jnp.sum(cross * W, axis=-2) + spread
        numpyro.deterministic(f"{site.name}_kl", jnp.sum(_kl(m, R, K, given["point"])))
        shift = x[site.name] if f_mean.ndim == 2 or m.ndim == 2 else x[site.name][0]
        shift = shift[:, None] if jnp.ndim(shift) else shift
        return f_mean + jnp.sqrt(variance) * shift

    return place


def _kl(m, R, K, point):
    """KL[N(m, RR') || N(0, K)], or -log N(m; 0, K) + log|K|/2: of whitened values."""
    inverse, size = jnp.linalg.inv(K), K.shape[-1]
    far = jnp.einsum("...i,...ij,...j->...", m, inverse, m)
    if point:
        return 0.5 * (far + size * jnp.log(2 * jnp.pi))
    S = R @ jnp.swapaxes(R, -1, -2)
    trace = jnp.einsum("...ij,...ji->...", inverse, S)
    log_dets = jnp.linalg.slogdet(K)[1] - jnp.linalg.slogdet(S)[1]
    return 0.5 * (trace + far - size + log_dets)


def at(p, fixed, values, q, x):
    """Log density of all but f, less KLs, at one node ``x`` of shape ``(functions,)``."""
    shares, start = {}, 0
    for site in p.sites:
        shares[site.name] = x[start : start + site.functions]
        start += site.functions
    model = handlers.substitute(write(p, at_node(q, shares)), data=fixed)
    terms, trace = compute_log_probs(model, (p.y,), {}, values)
    kls = sum(trace[f"{site.name}_kl"]["value"] for site in p.sites)
    return sum(terms.values()) - p.scales.get("f", 1.0) * kls


def bound(p, fixed, values, q, num):
    """The bound by ``num`` nodes for each latent function."""
    nodes, weights = grid(num, p.functions)
    each = jax.vmap(lambda x: at(p, fixed, values, q, x))(jnp.asarray(nodes))
    return jnp.dot(weights, each)


def closed_form(p, fixed, values, q):
    """The same where all is quadratic in f: half the second derivatives are added."""

    def of(x):
        return at(p, fixed, values, q, x)

    zero = jnp.zeros(p.functions)
    return of(zero) + 0.5 * jnp.trace(jax.hessian(of)(zero))
