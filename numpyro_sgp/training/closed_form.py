"""q(u) at its optimum for a Gaussian likelihood, by linear algebra in place of steps."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._programs import shared
from numpyro_sgp.elbo import TraceGP_ELBO
from numpyro_sgp.guides import AutoSparseGP

_MOVED = 0.5  # sd of what the other parameters are moved by, unconstrained


def gaussian_optimum(
    svi, rng_key, free: dict, data, filled: Callable, whole: Callable
) -> tuple[list[str], Callable] | None:
    r"""
    The optimum of q(u) where the likelihood is Gaussian in each value of f alone, in model
    code of any kind. With the slopes :math:`\ell` and curvatures :math:`-\lambda` of the
    log density at the prior's mean, and :math:`A = L^{-1} K_{uX}`, q(u) is in whitened
    coordinates :math:`N(B^{-1} A \ell, B^{-1})`, :math:`B = I + A \Lambda A^\top` (Titsias
    2009, eq. 10); each family has what is nearest to it. A natural step goes there too, by
    derivatives of the bound, which cost as much as the bound does, and take as long to
    compile.

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

    def optimum(free, data):
        by_site, found = rows(free, data)[0], {}
        for site, full in names.items():
            family, at = options[site].family, by_site[site]
            own = {name: free[full[name]] for name in full if full[name] in free}
            new = family.gaussian_optimum(own, at.projection, at.linear, at.precision)
            if new is None:
                raise ValueError(f"GP site '{site}' has no closed form.")
            found |= {full[name]: value for name, value in new.items()}
        finite = [jnp.isfinite(value).all() for value in found.values()]
        return found, jnp.all(jnp.array(finite))

    with suppress(ValueError, NotImplementedError, TypeError):
        own = jax.eval_shape(optimum, free, data)[0]
        is_gaussian = shared(lambda free, data: rows(free, data)[1], briefly=True)
        rng = np.random.default_rng(0)

        def moved(leaf):
            step = _MOVED * rng.normal(size=np.shape(leaf))
            return np.asarray(leaf + step, leaf.dtype)

        here = jax.tree.map(np.asarray, free)
        there = {k: v if k in own else jax.tree.map(moved, v) for k, v in here.items()}
        # As f + a f^2 is where a begins at zero.
        if is_gaussian(here, data) and is_gaussian(there, data):
            return list(own), optimum
    return None
