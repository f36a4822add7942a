"""Natural-gradient steps on q(u) given by sites (conjugate-computation VI)."""

import jax
import jax.numpy as jnp

from numpyro_sgp.guides import AutoSparseGP

_SMALLEST_STEP = 1e-3


def site_names(guide) -> dict[str, tuple[str, str]]:
    """
    Names of the site parameters of each GP site of a guide that is set up.

    :raises ValueError: if the guide has a GP site whose q(u) is not given by sites.
    """
    if not isinstance(guide, AutoSparseGP):
        raise ValueError("Natural gradients need an AutoSparseGP as the guide.")
    found = {}
    for site, names in guide.parameter_names().items():
        if getattr(guide.approximations[site], "covariance", None) != "sites":
            raise ValueError(
                f"Natural gradients need covariance='sites' at every GP site, but '{site}' "
                f"has the parameters {sorted(names)}. Use SVGP(M, covariance='sites') or "
                "VGP(covariance='sites')."
            )
        found[site] = names["qu_linear"], names["qu_precision"]
    return found


def natural_steps(svi, rng_key, params, max_steps, tol, args, kwargs):
    r"""
    Parameters with q(u) at its optimum for the others, by natural gradients.

    A step of size rho takes the sites to :math:`(1 - \rho)` times themselves plus
    :math:`\rho` times

    .. math::

        \lambda_n = -2\, \partial E_n / \partial \sigma_n^2, \qquad
        \ell_n = \partial E_n / \partial \mu_n + \lambda_n \mu_n

    [1, 2], which for a Gaussian likelihood is the optimum at once. It is halved where the
    loss does not fall (or is not finite, where no Gaussian has such sites).

    :param svi: the inference problem.
    :param rng_key: key of the loss.
    :param params: constrained parameters.
    :param max_steps: how many steps at most.
    :param tol: decrease of the loss, relative to the first or to 1, at which to stop.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model.
    :return: the parameters, with other sites.

    **References:**

    1. Khan, Lin (2017). Conjugate-Computation Variational Inference. AISTATS.
       https://arxiv.org/abs/1703.04265
    2. Adam, Chang, Khan, Solin (2021). Dual Parameterization of Sparse Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/2111.03412
    """
    names = site_names(svi.guide)

    def look(sites):
        """Loss at the sites, and where a full step would take them."""
        loss, slopes = svi.loss.marginal_gradients(
            rng_key, {**params, **sites}, svi.model, svi.guide, *args, **kwargs
        )
        target = {}
        for site, (linear, precision) in names.items():
            mean, to_mean, to_variance = slopes[site]
            target[precision] = -2.0 * to_variance
            target[linear] = to_mean + target[precision] * mean
        finite = jnp.all(jnp.array([jnp.isfinite(t).all() for t in target.values()]))
        return jnp.where(finite & jnp.isfinite(loss), loss, jnp.inf), target

    def go_on(carry):
        count, rho, fall, loss, *_ = carry
        return (count < max_steps) & (rho > _SMALLEST_STEP) & (fall > tol)

    def step(carry):
        count, rho, fall, loss, sites, target = carry
        new = jax.tree.map(lambda a, b: (1.0 - rho) * a + rho * b, sites, target)
        new_loss, new_target = look(new)
        better = new_loss < loss
        # A step that changes nothing has arrived; one that raises the loss was too long.
        fall = jnp.where(better | (new_loss - loss <= tol), loss - new_loss, jnp.inf)
        keep = lambda a, b: jnp.where(better, a, b)  # noqa: E731
        sites, target = jax.tree.map(keep, (new, new_target), (sites, target))
        rho = jnp.where(better, jnp.minimum(2.0 * rho, 1.0), 0.5 * rho)
        return count + 1, rho, fall, jnp.minimum(loss, new_loss), sites, target

    sites = {name: params[name] for pair in names.values() for name in pair}
    # Where there is no Gaussian with these sites (any more), begin at the prior.
    at_start = look(sites)
    zeros = jax.tree.map(jnp.zeros_like, sites)
    sites, (loss, target) = jax.lax.cond(
        jnp.isfinite(at_start[0]), lambda: (sites, at_start), lambda: (zeros, look(zeros))
    )
    tol = jnp.maximum(tol, 8 * jnp.finfo(loss.dtype).eps) * jnp.maximum(jnp.abs(loss), 1.0)
    one = jnp.ones((), loss.dtype)
    start = (jnp.zeros((), int), one, one * jnp.inf, loss, sites, target)
    *_, sites, _ = jax.lax.while_loop(go_on, step, start)
    return {**params, **sites}
