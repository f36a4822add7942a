"""Nested inference: one Gaussian over the field, and the hyperparameters integrated."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from numpyro_sgp._checks import check_key, check_positive, check_whole
from numpyro_sgp._checks import check_model as check_callable
from numpyro_sgp._threads import alone
from numpyro_sgp.distributions.arguments import warn_of_rounded_arguments
from numpyro_sgp.fitting.arguments import check_data
from numpyro_sgp.fitting.problem import as_plain_arrays
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.checks import check_support_stays
from numpyro_sgp.integrated.coordinates import hierarchical, informed
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.nodes import Nodes
from numpyro_sgp.integrated.placing import (
    check_hyperparameters,
    check_likelihood,
    check_model,
)
from numpyro_sgp.integrated.profile import Profile
from numpyro_sgp.integrated.result import Nested
from numpyro_sgp.integrated.row_parts import choose_layout
from numpyro_sgp.integrated.search import Search
from numpyro_sgp.integrated.starts import (
    lengthscale_slopes,
    moved,
    other_periods,
    starting_hyperparameters,
)
from numpyro_sgp.training.checks import check_keywords

# Of the prior's variance is left by the data, of hyperparameters that are not standardised,
# and of those of which both are tried, if nodes end at their limit.
_KNOWN, _NEARLY_KNOWN = 0.01, 0.05


@alone
def nested(
    model: Callable,
    approximation: Any,
    data: tuple,
    rng_key: Array | None = None,
    *,
    max_nodes: int = 3000,
    seconds: float | None = None,
    progress_bar: bool = True,
    **kwargs,
) -> Nested:
    r"""
    The posterior of a model with GP sites, Gaussian effects and hyperparameters, the latter
    integrated [1].

    The model's latents fall in two parts, found by following the program's arithmetic:

    * the *field*: GP sites by their inducing variables, and latents with normal priors
      (``Normal``, ``MultivariateNormal``, ``GaussianRandomWalk``, ``CAR``, and affine
      transforms of these) on which the likelihood's predictors depend linearly (intercepts,
      slopes, effects of groups). It has one Gaussian q(w) over all of it, so that sites and
      effects that the data tie together are tied in q;
    * *hyperparameters*: all other latents, of kernels, noise, variances of effects,
      cutpoints.

    For each setting :math:`\theta` of the hyperparameters natural steps lead to the best
    q(w), and with it to the bound :math:`\mathrm{ELBO}^*(\theta)`; then

    .. math::

        p(\theta \mid y) \approx p(\theta) \exp \mathrm{ELBO}^*(\theta) / Z, \qquad
        q(f, w) = \sum_k \pi_k\, q^*(f, w \mid \theta_k),

    with nodes :math:`\theta_k` around the mode, in unconstrained space: a grid for up to
    three numbers, as far as the density is within 6 to 9 nats of the mode's; for more,
    quasi-random draws with importance weights, in rounds that learn where the mass is.
    Integrated nested Laplace approximations [1] have a Laplace approximation in the place
    of the variational optimum; here the likelihood may be any code with one row of
    predictors at a time, and N only counts in products. Up to three predictors in a row are
    integrated by quadrature, more by quasi-random numbers. Observed sites may be of rows of
    their own: two surveys of one f at unlike places, under unlike likelihoods.

    Effects of 64 groups or more, of which each row has one, are eliminated from the
    precision of q(w) group by group, at a cost that is linear in their number.

    Hyperparameters of groups whose prior has a location and a scale that are sampled
    too (``l ~ LogNormal(mu, tau)``) are integrated by their standardised values, unless
    the data say nearly all of them, so that models may be written either way.

    Where too few nodes count for intervals and the evidence, a warning says what to do.

    Inducing points that a method chooses are chosen anew at the mode, greedily for its
    kernels, where that raises the bound.

    :param model: a NumPyro model with GP sites.
    :param approximation: what to put at GP sites, as :class:`~numpyro_sgp.AutoSparseGP`
        takes it: ``SVGP(50)``, ``SOLVEGP``, ``VGP``, or a dict of them by site.
    :param data: the model's positional arguments with all of the data, such as ``(X, y)``.
    :param rng_key: key of the starting values; ``jax.random.key(0)`` if None.
    :param max_nodes: most settings of the hyperparameters; with 1 there is one, the mode.
        Where standardised values leave few that count, and others are tried too, of each.
    :param seconds: time after which no further node is looked at.
    :param progress_bar: whether to show what is being done.
    :param kwargs: keyword arguments of the model.
    :return: the result: ``summary``, ``posterior``, ``predict``, ``sample``, ``to_arviz``,
        ``check``, ...
    :raises TypeError: if ``data`` is no tuple.
    :raises ValueError: if the model is none of one Gaussian field (a deep GP, a mixture, a
        black box, a likelihood that ties rows together but by sums), has discrete latents,
        improper priors, more hyperparameters than nodes can cover (15), or no finite bound
        at the start.

    **References:**

    1. Rue, Martino, Chopin (2009). Approximate Bayesian Inference for Latent Gaussian
       Models by Using Integrated Nested Laplace Approximations. JRSS B 71(2).

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    ...     slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    ...     kernel = sgp.kernels.RBF(1.0, lengthscale)
    ...     f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f + slope * X[:, 0])), obs=y)
    >>> X = jnp.linspace(0.0, 4.0, 20)[:, None]
    >>> y = jnp.round(jnp.exp(1.0 + jnp.sin(2.0 * X[:, 0])))
    >>> posterior = sgp.nested(model, sgp.SVGP(8), (X, y), progress_bar=False)
    >>> list(posterior.summary().index)
    ['lengthscale', 'slope']
    >>> posterior.predict(X[:3])["y"].mean.shape
    (3,)
    """
    started = time.monotonic()
    check_callable(model)
    check_keywords(model, kwargs, nested)
    check_data(data)
    check_whole(max_nodes, "max_nodes", least=1)
    if seconds is not None:
        check_positive(seconds, "seconds")
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    check_key(rng_key)
    args, kwargs = as_plain_arrays(model, tuple(data), kwargs)
    warn_of_rounded_arguments(model, args, kwargs)
    check_model(model, args, kwargs)
    guide = AutoSparseGP(model, approximation)
    guide.setup(*args, **kwargs)
    check_support_stays(guide, args, kwargs)
    check_likelihood(guide, args, kwargs)
    field = Field(guide, args, kwargs)
    check_hyperparameters(field)
    field.standardised = hierarchical(field, args, kwargs)
    starts = starting_hyperparameters(field, rng_key, args, kwargs)
    free = jnp.asarray(starts[0], field.dtype)
    choose_layout(field, free, args, kwargs, grouped=True)
    until = None if seconds is None else started + seconds
    with tqdm(disable=not progress_bar, bar_format="{desc} {elapsed}") as bar:

        def progress(what, number):
            shown = f"{number:.2f} nats" if what == "mode" else f"{number}"
            bar.set_description_str(f"{what}: {shown}", refresh=False)
            bar.update()

        limits = max_nodes, until, progress
        field, nodes = _in_best_coordinates(field, args, kwargs, starts, limits)
    if message := nodes.warning():
        warnings.warn(message, stacklevel=3)  # one is of the lock
    took = time.monotonic() - started
    return Nested(field, nodes, args, kwargs, seconds=took)


def _in_best_coordinates(
    field: Field, args: tuple, kwargs: dict, starts: np.ndarray, limits: tuple
) -> tuple[Field, Nodes]:
    """
    Nodes, and the field with the coordinates that they are in: hierarchies standardised, or
    not where the data say so much of them that the others would bend. Where that is not
    clear and standardised ones leave few nodes that count, both are tried.

    :param starts: hyperparameters to begin from, ``(S, p)``.
    :param limits: on nodes and time, and a function that is told of progress.
    """
    one_node = limits[0] == 1
    slopes = functools.partial(lengthscale_slopes, field, args, kwargs)
    periods = functools.partial(other_periods, field, args, kwargs)
    search = Search(Profile(field, args, kwargs, one_node=one_node), *limits)
    mode, axes = search.around(starts, slopes, periods)
    nodes, known = None, informed(field, axes, _KNOWN)
    if not known:
        nodes, known = search.nodes(mode, axes), informed(field, axes, _NEARLY_KNOWN)
        if not known or not nodes.at_limit:
            return field, nodes
    other, points = copy(field), search.profile.points
    other.standardised = field.standardised - known
    places = np.stack([mode.free, *(free for free, _ in search.ends)])
    start, *ends = moved(field, other, places, args, kwargs)
    again = Search(Profile(other, args, kwargs, points, one_node=one_node), *limits)
    centre, widths = again.around(start[None])
    again.ends += [(at, below) for at, (_, below) in zip(ends, search.ends, strict=True)]
    found = again.nodes(centre, widths)
    if found.astray and nodes is None:  # a funnel after all
        nodes = search.nodes(mode, axes)
    if nodes is None or (not found.astray and found.effective > nodes.effective):
        return other, found
    return field, nodes
