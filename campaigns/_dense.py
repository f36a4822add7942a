"""
What stands at the GP sites of a drawn program: processes of the package, or one of three
things written by hand without it.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import numpyro_sgp as sgp
from campaigns._drawn import Q

WEIGHTS = (0.4, -0.3, 0.2)
#: Relative to the mean diagonal, in float64: docs/reference/numerics.md.
JITTER = 1e-8


# ---- by the package ---------------------------------------------------------------------


def process(site, hypers, inputs, mean):
    """A GP site of the package."""
    if isinstance(mean, str):
        columns = inputs.shape[-1]
        mean = {
            "none": None,
            "linear": sgp.means.Linear(jnp.asarray(WEIGHTS[:columns]), 0.2),
            "wave": lambda X: jnp.sin(X[..., 0]),
        }[mean]
    fn = sgp.GaussianProcess(_kernel(site.kernel, hypers), inputs, mean, site.jitter)
    if site.layout in ("expand", "event"):
        fn = fn.expand([Q])
    return numpyro.sample(site.name, fn.to_event(1) if site.layout == "event" else fn)


def _kernel(tree, hypers):
    if tree[0] == "sum":
        return _kernel(tree[1], hypers) + _kernel(tree[2], hypers)
    if tree[0] == "product":
        return _kernel(tree[1], hypers) * _kernel(tree[2], hypers)
    if tree[0] == "scaled":
        return tree[1] * _kernel(tree[2], hypers)
    kind, variance, length, option = tree
    kernel, variance, length = getattr(sgp.kernels, kind), hypers[variance], hypers[length]
    if kind in ("Constant", "White"):
        return kernel(variance)
    active = {"active_dims": (1,)} if option == "active" else {}
    if kind == "Periodic":
        return kernel(variance, length, 3.0, **active)
    if option == "ard":
        length = length * jnp.array([1.0, 1.5, 0.8])
    return kernel(variance, length, **active)


# ---- by hand ----------------------------------------------------------------------------


def matrix(tree, hypers, A, B, same=False):
    """
    The kernel matrix by its formula, from explicit differences of the points.

    :param same: whether A and B are the same rows.
    """
    if tree[0] == "sum":
        parts = [matrix(part, hypers, A, B, same) for part in tree[1:]]
        return parts[0] + parts[1]
    if tree[0] == "product":
        parts = [matrix(part, hypers, A, B, same) for part in tree[1:]]
        return parts[0] * parts[1]
    if tree[0] == "scaled":
        return tree[1] * matrix(tree[2], hypers, A, B, same)
    kind, variance, length, option = tree
    variance, length = (jnp.asarray(hypers[k])[..., None, None] for k in (variance, length))
    if option == "active" and kind not in ("Constant", "White"):
        A, B = A[:, 1:2], B[:, 1:2]
    scale = jnp.array([1.0, 1.5, 0.8]) if option == "ard" else jnp.ones(A.shape[-1])
    if kind == "Periodic":
        scale = jnp.ones(A.shape[-1])
    inner = jnp.einsum("id,jd->ij", A / scale, B / scale)
    apart = (A[:, None, :] - B[None, :, :]) / scale
    return variance * _unit(kind, apart, inner, length, same)


def _unit(kind, apart, inner, length, same):
    if kind == "White":
        return jnp.eye(len(inner)) if same else jnp.zeros_like(inner)
    if kind == "Constant":
        return jnp.ones_like(inner)
    if kind == "Linear":
        return inner / length**2
    if kind == "Polynomial":
        return (inner / length**2 + 1.0) ** 2
    if kind == "Periodic":
        return jnp.exp(-2.0 * jnp.sum(jnp.sin(jnp.pi * apart / 3.0) ** 2, -1) / length**2)
    r2 = jnp.sum(apart**2, axis=-1) / length**2
    if kind == "RBF":
        return jnp.exp(-0.5 * r2)
    if kind == "RationalQuadratic":
        return 1.0 / (1.0 + 0.5 * r2)
    apart = r2 > 0.0  # where the root has a derivative
    r = jnp.where(apart, jnp.sqrt(jnp.where(apart, r2, 1.0)), 0.0)
    if kind == "Matern12":
        return jnp.exp(-r)
    if kind == "Matern32":
        return (1.0 + 3.0**0.5 * r) * jnp.exp(-(3.0**0.5) * r)
    return (1.0 + 5.0**0.5 * r + 5.0 * r2 / 3.0) * jnp.exp(-(5.0**0.5) * r)


def mean_at(mean, inputs):
    """Prior means by hand, of shape ``(..., N)``."""
    if not isinstance(mean, str):
        return mean[..., None] * jnp.ones(len(inputs))
    if mean == "linear":
        return sum(w * x for w, x in zip(WEIGHTS, inputs.T, strict=False)) + 0.2
    return jnp.sin(inputs[:, 0]) if mean == "wave" else jnp.zeros(len(inputs))


def factor(site, hypers, inputs):
    """The lower factor of the kernel matrix with its jitter."""
    K = matrix(site.kernel, hypers, inputs, inputs, same=True)
    size = jnp.mean(jnp.diagonal(K, axis1=-2, axis2=-1), axis=-1)
    jitter = JITTER if site.jitter is None else site.jitter
    return jnp.linalg.cholesky(K + jitter * size[..., None, None] * jnp.eye(len(inputs)))


def normal(site, hypers, inputs, mean):
    """A multivariate normal at the site."""
    L = factor(site, hypers, inputs)
    fn = dist.MultivariateNormal(mean_at(mean, inputs), scale_tril=L)
    if site.layout in ("expand", "event"):
        fn = fn.expand([Q])
    return numpyro.sample(site.name, fn.to_event(1) if site.layout == "event" else fn)


def white(site, hypers, inputs, mean):
    """Standard normal numbers, and f made of them."""
    batch = [Q] if site.layout in ("expand", "event", "kernel") else []
    fn = dist.Normal(0.0, 1.0).expand([*batch, len(inputs)])
    fn = fn.to_event(2 if site.layout == "event" else 1)
    eps = numpyro.sample(f"{site.name}_white", fn)
    L = jnp.broadcast_to(factor(site, hypers, inputs), (*eps.shape, len(inputs)))
    f = mean_at(mean, inputs) + jnp.einsum("...ij,...j->...i", L, eps)
    return numpyro.deterministic(site.name, f)


def residual(values):
    """
    Records what standard normal numbers given values of f were made of, at ``{f}_white``.

    :param values: by site.
    """

    def place(site, hypers, inputs, mean):
        f = values[site.name]
        L = jnp.broadcast_to(factor(site, hypers, inputs), (*f.shape, len(inputs)))
        away = (f - mean_at(mean, inputs))[..., None]
        numpyro.deterministic(f"{site.name}_white", jnp.linalg.solve(L, away)[..., 0])
        return f

    return place
