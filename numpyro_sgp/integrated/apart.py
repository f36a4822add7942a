r"""
What a guide loses that has each GP site and each effect by itself.

At the hyperparameters of a fit the best Gaussian over all of the field has a precision P.
Where its parts are held apart the best that can be is :math:`q_j = N(m_j, P_{jj}^{-1})`
(exact for Gaussian likelihoods), with

.. math::

    \mathrm{KL}\Big[\prod_j q_j \,\Big\|\, q\Big]
    = \tfrac12 \Big(\sum_j \log |P_{jj}| - \log |P|\Big)

nats less, and variances of :math:`P_{jj}^{-1}` where those of q are
:math:`(P^{-1})_{jj}`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy.linalg import cho_factor, cho_solve

from numpyro_sgp._programs import join_static, on_data, shared, split_static
from numpyro_sgp.fitting.check import MORE_CAUSES
from numpyro_sgp.fitting.verdict import ENOUGH_NATS, Cause, unknown
from numpyro_sgp.guides.point_latents import point_latents
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.marginals import flat, known_at_edge
from numpyro_sgp.integrated.profile import Profile
from numpyro_sgp.integrated.row_parts import choose_layout

_NAME = "sites apart"
_LARGEST = 3e7  # numbers of the field times rows
_ASTRAY = 0.1  # nats left, of a Gaussian that is not the best one
_NARROW = 0.8  # sd, of that under one Gaussian


def sites_apart(guide: Any, params: dict, args: tuple, kwargs: dict) -> Cause | None:
    """
    A row of the verdict, for a model with several GP sites or with effects beside them.

    :param guide: an :class:`~numpyro_sgp.AutoSparseGP`, set up.
    :return: None where there is one part only, or the model is none of one Gaussian field.
    """
    setup = guide.known()
    if len(setup.sites) + len(setup.latents) < 2:
        return None
    try:
        return _looked_at(guide, setup, params, args, kwargs)
    except Exception as error:  # a likelihood without derivatives, for one
        return Cause(_NAME, np.nan, told=unknown(error))


def _looked_at(guide, setup, params, args, kwargs) -> Cause | None:
    try:
        field = Field(guide, args, kwargs)
        if len(field.sites) + len(field.effects) < 2:
            return None
        values = guide.others_at(params, args, kwargs)
        free = on_data(lambda a, k, v: field.ravel(v, a, k), args, kwargs, values)
        choose_layout(field, free, args, kwargs)
    except ValueError:  # of another kind; what it is, is no concern of a fit
        return None
    rows = field.layout.num_rows * field.layout.number
    if field.size * rows > _LARGEST:
        return Cause(_NAME, np.nan, told="unknown: too many rows")
    profile = Profile(field, args, kwargs, _points(setup, params))
    node, _ = profile(free, profile.start())
    P = np.asarray(node.q.precision.dense(), float)
    if not (np.all(np.isfinite(P)) and node.left < _ASTRAY):
        return Cause(_NAME, np.nan, told="unknown: no Gaussian over all was found")
    held = point_latents(guide, params, args, kwargs).intersection(field.effects)
    together = isinstance(guide.base_guide, AutoMultivariateNormal)
    parts = _parts(field, held, together)
    known = np.sort(np.concatenate([part for part, _ in parts]))
    apart = sum(_log_det(P[np.ix_(part, part)]) for part, _ in parts)
    nats = 0.5 * (apart - _log_det(P[np.ix_(known, known)]))
    names, ratios = _ratios(field, profile, free, P, parts, args, kwargs)
    narrowest = int(np.argmin(ratios))
    told = f"sds of '{names[narrowest]}' are {ratios[narrowest]:.2f} of those under one "
    told += "Gaussian over GP sites and effects"
    mend = headline = ""
    if ratios[narrowest] < _NARROW:
        headline = told
    if nats > ENOUGH_NATS or headline:
        mend = "sgp.fit with joint=True, or sgp.nested, has them in one Gaussian"
    return Cause(_NAME, max(nats, 0.0), told=told, mend=mend, headline=headline)


def _points(setup, params) -> dict:
    """Values at GP sites as trained."""
    found = {}
    for name, site in setup.sites.items():
        own = {k: params.get(site.names[k], p.value) for k, p in site.initial.items()}
        found[name] = own | site.constants
    return found


def _parts(field, held, together) -> list[tuple[np.ndarray, str]]:
    """Indices of the field's numbers that a guide has in one Gaussian, and of what."""
    found, end = [], 0
    for name, size in field.gp_sizes().items():
        start, end = end, end + size
        functions = max(int(np.prod(field.gp_shapes[name][:-1])), 1)
        if not field.sites[name].approximation.family.independent_latents:
            functions = 1
        found += [(part, name) for part in np.split(np.arange(start, end), functions)]
    effects = []
    for name in field.effects:
        start, end = end, end + int(np.prod(field.shapes[name]))
        if name not in held:
            effects += [(np.array([i]), name) for i in range(start, end)]
    if together and effects:
        joined = np.concatenate([part for part, _ in effects])
        return [*found, (joined, effects[0][1])]
    return found + effects


def _ratios(field, profile, free, P, parts, args, kwargs):
    """
    Sds of GP sites at the inputs, and of effects, where parts are held apart, beside those
    in one Gaussian. A GP site has the effects in it that its mean is made of.
    """
    arrays, static = split_static((args, kwargs))

    def maps(free, points, arrays):
        where = points, *join_static(arrays, static)
        program = field.program(field.unravel(free), *where)
        values = {name: program.outputs["values"][name] for name in field.sites}
        known, found = known_at_edge(program, list(values.values())), {}
        for name, value in values.items():
            linear = field.linear(program, known, [value], flat, grouped=False)
            found[name] = linear.maps.reshape(len(linear.maps), -1, value.aval.shape[-1])
        return found

    S = cho_solve(cho_factor(P), np.eye(len(P)))
    within = [(part, np.linalg.inv(P[np.ix_(part, part)])) for part, _ in parts]
    names, ratios = [], []

    def compare(name, B):
        together = np.sum(B * (S @ B))
        if together > 0.0:
            apart = sum(np.sum(B[part] * (own @ B[part])) for part, own in within)
            names.append(name)
            ratios.append(np.sqrt(apart / together))

    found = shared(maps, briefly=True)(free, profile.points, list(arrays))
    for name, B in found.items():
        for k in range(B.shape[1]):  # the functions of a site
            compare(name, np.asarray(B[:, k], float))
    for part, name in parts:
        if name not in field.sites:
            compare(name, np.eye(len(P))[:, part])
    return names, ratios


def _log_det(P) -> float:
    return float(np.linalg.slogdet(P)[1])


MORE_CAUSES.append(sites_apart)
