"""
Everything that touches ArviZ.

ArviZ, xarray and pandas are imported inside functions: together they take about as long
to load as the rest of the package.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import MCMC, SVI

from numpyro_sgp._checks import check_key, check_whole
from numpyro_sgp._numpyro import arguments_of
from numpyro_sgp._programs import mapped, on_data, split
from numpyro_sgp._threads import alone
from numpyro_sgp.diagnostics.bound import bound_of
from numpyro_sgp.diagnostics.calibration import Calibration, calibration_attrs
from numpyro_sgp.diagnostics.given import trace_given, warned_of_undrawn
from numpyro_sgp.diagnostics.khat import guide_khat, too_many_rows
from numpyro_sgp.diagnostics.layout import (
    along,
    at_places,
    named_dims,
    places,
    white_sites,
    without_slashes,
)
from numpyro_sgp.diagnostics.optimality import convergence_attrs
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.guides.point_latents import point_latents
from numpyro_sgp.tracing import checks, messages

if TYPE_CHECKING:
    from arviz import InferenceData
    from xarray import DataTree


@alone
def to_arviz(
    fit,
    *args,
    result=None,
    num_samples: int = 1000,
    rng_key=None,
    seconds: float | None = None,
    coords: dict | None = None,
    dims: dict | None = None,
    keep_white: bool = False,
    khat: bool | None = None,
    calibration: Calibration | None = None,
    **kwargs,
) -> DataTree | InferenceData:
    r"""
    An MCMC or SVI fit as ArviZ data, the same groups for both.

    - ``posterior``: draws of all latent and deterministic sites, with the dimensions
      ``chain`` and ``draw``; one chain for SVI, drawn jointly from the guide.
    - ``posterior_predictive``, ``log_likelihood`` and ``observed_data``: of each
      observed site, at the same draws. Sites of :func:`numpyro.factor` are no data and
      are left out, and so are predictive draws of a distribution that cannot be
      sampled. There is no log likelihood of sites with weights
      (:class:`numpyro.handlers.scale`): LOO takes each row out once, and they are in the
      posterior as often as their weight says. ``.attrs["weighted"]`` names them.
    - ``predictions``: predictive draws of what :func:`numpyro.handlers.mask` hides.
      Masked values are no observations, and in none of the three groups above. Where
      the mask depends on a latent value, the site has no log likelihood, with a warning.
    - ``sample_stats``: ``diverging`` and so on for MCMC; for SVI the loss of each step,
      ``loss``, with the dimension ``step``.

    It is what ``from_numpyro`` of the installed ArviZ returns: a
    :class:`xarray.DataTree` from ArviZ 1 on, an ``arviz.InferenceData`` before (the last
    one for Python 3.11). With several observed sites ``arviz.loo`` needs ``var_name``.

    ``.attrs`` has ``method`` ("MCMC" or "SVI"), ``approximation``,
    ``num_parameters`` (those of the guide; the latent numbers of the sampler) and
    ``seconds`` if given. For SVI it has ``elbo`` and ``elbo_se`` too: mean and standard
    error of the bound on the log evidence at ``result.params`` over 10 keys, all data.
    (They differ only where the bound is random, under a base guide that draws or
    :class:`~numpyro_sgp.MonteCarlo`.) It may have ``khat``, the PSIS k-hat of the guide
    (:func:`~numpyro_sgp.diagnostics.khat.guide_khat`): above 0.67, the guide is far from
    the joint posterior of all latents. ``nats_left`` says what q(u) has left to gain
    (:func:`~numpyro_sgp.diagnostics.optimality.nats_left`; up to 20,000 rows), and
    ``loss_drop``, ``loss_drop_se`` how much the mean of ``result.losses`` fell from the
    last tenth but one to the last. And ``sbc_p``, ``sbc_verdict`` and
    ``sbc_num_simulations`` are of a calibration.

    **Latents at points.** Where a guide holds latents beside f at a point (``AutoDelta``),
    all draws have the same value of them, f and the predictions are given that value, and
    its uncertainty is nowhere. ``.attrs["point_estimates"]`` names them. The bound is then
    on log p(y, point), a density at a point that may be any number beside the evidence, and
    is kept as ``log_joint_bound``. There is no k-hat, and no group ``log_likelihood``:
    importance sampling does not reweight what does not vary, so that LOO and WAIC would be
    those of data that the point has seen, with clean diagnostics. Draw these latents for
    them (``base_guide=AutoNormal`` or ``AutoMultivariateNormal``, or NUTS), or integrate
    them (:func:`~numpyro_sgp.nested`, with more than one node). What is no
    latent, a number or a :func:`numpyro.param` of the model, is taken for known: bound and
    LOO are given it.

    Dimensions are named after plates, ``f_dim_0`` and so on where there is none; a "/" in a
    name (of :class:`numpyro.handlers.scope`) becomes a ".". A masked site ``y`` in the
    plate ``data`` keeps this dimension, with the labels of its observed rows, where other
    sites have the same rows. Else, or where single entries of several dimensions are
    masked, it lies along ``y_obs``, with the labels ``y_obs_data``; its predictions lie
    along ``y_masked``, with the labels ``y_masked_data``.

    An argument of the model that has the name of an option below must be passed by
    position.

    :param fit: a :class:`numpyro.infer.MCMC` that was run, or a
        :class:`numpyro.infer.SVI` whose guide has ``sample_posterior``, such as
        :class:`~numpyro_sgp.AutoSparseGP`.
    :param args: arguments of the model with all of the data, such as ``X, y``; for MCMC
        those of ``mcmc.run`` if left out.
    :param result: what ``svi.run`` gave; for SVI only.
    :param num_samples: number of draws from the guide; MCMC gives those that it has.
    :param rng_key: key of the draws; ``jax.random.key(0)`` if None.
    :param seconds: how long the fit took, to be kept.
    :param coords: coordinate values by dimension, arrays, lists or pandas indices.
    :param dims: names of dimensions by site, without ``chain`` and ``draw``; they come
        before the names of plates.
    :param keep_white: whether to keep the sites ``f_white`` of
        :func:`~numpyro_sgp.whiten` beside ``f``.
    :param khat: whether to compute k-hat, for SVI only, from 1000 draws at a cost of
        O(N^3) for N rows of f(X) (of each draw, where the guide draws hyperparameters);
        if None, where N is at most 1000, or 200 where each draw costs that or in float32.
        It is NaN, with a warning, where the guide's draws cannot be weighted.
        If None, not where latents are held at points.
    :param calibration: what :func:`~numpyro_sgp.calibrate` found of this SVI.
    :param kwargs: keyword arguments of the model.
    :return: ArviZ data; ``.to_netcdf`` and ``arviz.from_netcdf`` keep all of it.
    :raises TypeError: if ``fit`` is neither MCMC nor SVI, its guide cannot be sampled, or
        ``calibration`` is something else.
    :raises ValueError: if an MCMC was not run, an SVI comes without its result or an
        MCMC with one, with k-hat or a calibration, ``result`` is of another guide, draws
        do not fit the arguments or are NaN, the arguments have no data, so many rows that
        covariances of f cannot fit into memory, or make the model take a minibatch, or
        ``dims`` names a site that is not there.

    >>> import jax, jax.numpy as jnp, numpyro, optax
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> from numpyro_sgp.diagnostics import to_arviz
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
    >>> data = to_arviz(svi, X, y, result=result, num_samples=50)
    >>> dict(data["posterior"].sizes)
    {'chain': 1, 'draw': 50, 'f_dim_0': 5}
    >>> dict(data["log_likelihood"].sizes)
    {'chain': 1, 'draw': 50, 'data': 5}
    >>> data.attrs["method"]
    'SVI'
    """
    import arviz
    import arviz_base
    from arviz_base import io_numpyro
    from xarray import DataTree

    rng_key = jax.random.key(0) if rng_key is None else rng_key
    check_key(rng_key)
    k_draws, k_sites, k_elbo = split(rng_key, 3)
    of_svi = bool(khat) or calibration is not None
    found = _found_of(fit, args, kwargs, result, num_samples, k_draws, of_svi)
    trace = _first_trace(found)
    dims = named_dims(trace, found.draws, dims)
    log_likelihood, predictive, observed, masks = _at_observed_sites(found, trace, k_sites)
    if left_out := messages.factors_of_rows(trace):
        found.attrs["factors"] = ", ".join(left_out)
    if weighted := messages.weighted_responses(trace):
        found.attrs["weighted"] = ", ".join(weighted)
    if isinstance(fit, SVI):
        found.attrs.update(_of_guide(fit, result, found, k_elbo))
        free = "point_estimates" not in found.attrs
        given = (result.params, fit.model, fit.guide, *found.args)
        if khat or (khat is None and free and not too_many_rows(*given, **found.kwargs)):
            k_khat = jax.random.fold_in(rng_key, 3)
            found.attrs["khat"] = guide_khat(k_khat, *given, **found.kwargs)
        if calibration is not None:
            found.attrs.update(calibration_attrs(calibration))
    elif isinstance(fit, MCMC):
        sampled = [k for k in found.draws if k in trace and trace[k]["type"] == "sample"]
        sizes = (int(np.prod(np.shape(trace[name]["value"]))) for name in sampled)
        found.attrs["num_parameters"] = sum(sizes)
    held = "point_estimates" in found.attrs
    if seconds is not None:
        found.attrs["seconds"] = float(seconds)

    # xarray takes the name of a pandas index for a dimension.
    coords = {dim: np.asarray(labels) for dim, labels in (coords or {}).items()}

    def group(values, sample_dims=("chain", "draw"), dims=dims, **options):
        return arviz_base.dict_to_dataset(
            values,
            inference_library=numpyro,
            sample_dims=list(sample_dims),
            coords=coords,
            dims=dims,
            **options,
        )

    hidden = set() if keep_white else white_sites(trace, found.draws)
    groups = {"posterior": group({k: v for k, v in found.draws.items() if k not in hidden})}
    masked = {name: predictive[name] for name in predictive if name in masks}
    whole = group(log_likelihood, skip_event_dims=True)
    seen = places(whole, masks)
    unseen = {name: along(f"{name}_masked", whole[name], ~masks[name]) for name in masks}
    groups["posterior_predictive"] = at_places(group(predictive), seen)
    groups["predictions"] = at_places(group(masked), unseen)
    if not held and not warned_of_undrawn(trace, found.draws):
        groups["log_likelihood"] = at_places(
            whole.drop_vars(weighted, errors="ignore"), seen
        )
    if isinstance(fit, MCMC):
        # Not from_numpyro, whose tree takes no names with "/" in them.
        adapted = getattr(io_numpyro, "MCMCAdapter", lambda mcmc: mcmc)  # of ArviZ 1
        options = {"dims": {}, "log_likelihood": False}
        converter = io_numpyro.NumPyroConverter(posterior=adapted(fit), **options)
        groups["sample_stats"] = converter.sample_stats_to_xarray()
    elif result is not None and result.losses is not None:
        loss = {"loss": np.asarray(result.losses)}
        groups["sample_stats"] = group(loss, (), {"loss": ["step"]})
    groups["observed_data"] = at_places(group(observed, ()), seen)
    tree = DataTree.from_dict(
        {k: without_slashes(v) for k, v in groups.items() if v.data_vars}
    )
    tree.attrs.update(found.attrs)
    if int(arviz.__version__.split(".")[0]) >= 1:
        return tree
    return arviz.InferenceData.from_datatree(tree)


def as_tree(data) -> DataTree | None:
    """
    ArviZ data as a tree, whichever ArviZ it is from.

    :param data: a :class:`xarray.DataTree`, or an ``arviz.InferenceData``.
    :return: a tree that has those attributes which are one number or string
        (``arviz.concat`` makes lists of them); None for anything else.
    """
    from xarray import DataTree

    if not isinstance(data, DataTree):
        if not hasattr(data, "to_datatree"):
            return None
        data = data.to_datatree()
    tree = data.copy()
    tree.attrs = {k: v for k, v in data.attrs.items() if np.ndim(v) == 0}
    return tree


class Found(NamedTuple):
    """
    What to_arviz needs of a fit.

    :param draws: values by site, with leading axes of chains and draws.
    :param model: the model that the draws are of.
    :param params: values of :func:`numpyro.param` sites.
    :param args: arguments of the model.
    :param kwargs: its keyword arguments.
    :param attrs: what describes the fit.
    """

    draws: dict
    model: object
    params: dict
    args: tuple
    kwargs: dict
    attrs: dict


def _found_of(fit, args, kwargs, result, num_samples, rng_key, of_svi: bool) -> Found:
    """Draws of a fit of either kind; of_svi: whether there are options for SVI alone."""
    if isinstance(fit, MCMC):
        if result is not None:
            raise ValueError("result is for an SVI; an MCMC object has its own draws.")
        if of_svi:
            raise ValueError("khat and calibration are of guides; leave them out for MCMC.")
        return _of_mcmc(fit, args, kwargs)
    if hasattr(fit, "found_draws"):
        if result is not None or of_svi:
            raise ValueError("result, khat and calibration are for an SVI; leave them out.")
        return fit.found_draws(num_samples, rng_key, args, kwargs)
    if not isinstance(fit, SVI):
        raise TypeError(
            "fit must be a numpyro.infer.MCMC or numpyro.infer.SVI object (or what "
            "numpyro_sgp.nested returned; what numpyro_sgp.fit returned has a method, "
            f"fitted.to_arviz()), got {type(fit).__name__}."
        )
    if isinstance(result, dict):
        raise TypeError(
            "result must be what svi.run returned. For the parameters of a loop of "
            "your own: numpyro.infer.svi.SVIRunResult(params, None, losses)."
        )
    args, kwargs = as_arrays(fit.model, args, {**fit.static_kwargs, **kwargs})
    return _of_svi(fit, result, num_samples, rng_key, args, kwargs)


def _of_mcmc(mcmc, args, kwargs) -> Found:
    if mcmc.last_state is None:
        raise ValueError(
            "This MCMC has no draws yet. Call mcmc.run(rng_key, ...) before to_arviz."
        )
    if mcmc.sampler.model is None:
        raise ValueError(
            "The sampler has no model (it was made with potential_fn=...), which to_arviz "
            "would run at the draws. Use arviz.from_numpyro."
        )
    if not (args or kwargs):
        args, kwargs = arguments_of(mcmc)
    args, kwargs = as_arrays(mcmc.sampler.model, args, kwargs)
    draws = jax.device_get(mcmc.get_samples(group_by_chain=True))
    name = type(mcmc.sampler).__name__
    attrs = {"method": "MCMC", "approximation": name}
    return Found(draws, mcmc.sampler.model, {}, args, kwargs, attrs)


def _of_svi(svi, result, num_samples, rng_key, args, kwargs) -> Found:
    if result is None:
        raise ValueError(
            "An SVI object does not keep its result. Pass it: "
            "to_arviz(svi, ..., result=result) with result = svi.run(...)."
        )
    if not hasattr(svi.guide, "sample_posterior"):
        raise TypeError(
            "The guide has no method sample_posterior (it is a "
            f"{type(svi.guide).__name__}). Use AutoSparseGP or one of NumPyro's "
            "autoguides."
        )
    check_whole(num_samples, "num_samples", least=1)
    draws = svi.guide.sample_posterior(
        rng_key, result.params, *args, sample_shape=(num_samples,), **kwargs
    )
    draws = {name: np.asarray(v)[None] for name, v in draws.items()}
    approximation = getattr(svi.guide, "approximation", type(svi.guide).__name__)
    attrs = {
        "method": "SVI",
        "approximation": str(approximation),
        "num_parameters": sum(map(_num_free, result.params, result.params.values())),
    }
    return Found(draws, svi.model, dict(result.params), args, kwargs, attrs)


def _num_free(name, value) -> int:
    """Size of a parameter, without the upper triangle of a triangular factor."""
    shape = np.shape(value)
    # By its values: standard deviations of K components may be a square too.
    if (
        name.endswith("_sqrt")
        and len(shape) > 1
        and shape[-1] == shape[-2]
        and not np.triu(value, 1).any()
    ):
        return int(np.prod(shape[:-1])) * (shape[-1] + 1) // 2
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(value))


def _of_guide(svi, result, found, rng_key) -> dict:
    """
    The bound with all of the data, its mean and standard error over some keys, named after
    what it is a bound of; and what is left to gain.
    """
    given = result.params, found.args, found.kwargs
    points = point_latents(svi.guide, *given)
    bound, se = bound_of(svi, *given, rng_key)
    name = "log_joint_bound" if points else "elbo"
    told = {"point_estimates": ", ".join(sorted(points))} if points else {}
    told |= {name: bound, f"{name}_se": se}
    return told | convergence_attrs(svi, result, found.args, found.kwargs)


def _first_trace(found):
    """The model's trace at the first draw, checked."""
    first = {name: values[0, 0] for name, values in found.draws.items()}
    bad = {name for name, values in found.draws.items() if np.isnan(values).any()}
    trace = trace_given(found, jax.random.key(0), first, bad=bad)
    checks.check_whole_plates(trace, "ArviZ needs the log likelihood of each observation")
    if not any(s["type"] == "sample" and s["is_observed"] for s in trace.values()):
        raise ValueError(
            "With these arguments the model has no observed site. Pass the data too: "
            "to_arviz(fit, X, y, ...)."
        )
    return trace


def _at_observed_sites(found, trace, rng_key) -> tuple[dict, dict, dict, dict]:
    """
    Log likelihood, predictive draws and data of each observed site; and of those with
    masked entries, which entries are not masked.
    """
    observed = {k: site for k, site in trace.items() if messages.is_response(site)}
    masks = {name: np.asarray(messages.unmasked(s["fn"])) for name, s in observed.items()}
    drawn_ones = [name for name, site in observed.items() if messages.can_draw(site["fn"])]
    shape = next(iter(found.draws.values())).shape[:2]
    flat = {
        name: jnp.asarray(v).reshape(-1, *v.shape[2:]) for name, v in found.draws.items()
    }

    def at_draws(args, kwargs, params, inputs):
        here = found._replace(args=args, kwargs=kwargs, params=params)

        def at_draw(inputs):
            key, values = inputs
            given = trace_given(here, key, values)
            drawn = trace_given(here, key, values, forget=drawn_ones) if drawn_ones else {}
            fns = {name: given[name]["fn"] for name in observed}
            log_prob = {k: messages.log_prob(given[k], scaled=False) for k in observed}
            same = {k: jnp.all(messages.unmasked(fn) == masks[k]) for k, fn in fns.items()}
            return log_prob, {k: drawn[k]["value"] for k in drawn_ones}, same

        return mapped(at_draw, inputs, chunk)

    keys = jax.random.split(rng_key, shape[0] * shape[1])
    rows = max([1, *(int(np.prod(site["fn"].shape())) for site in observed.values())])
    chunk = int(np.clip(1e6 // rows, 1, len(keys)))
    found_each = ({}, {}, {})
    if observed:
        found_each = on_data(at_draws, found.args, found.kwargs, found.params, (keys, flat))
    log_likelihood, predictive, same_mask = jax.tree.map(
        lambda v: np.asarray(v).reshape(*shape, *v.shape[1:]), found_each
    )
    for name in [name for name, same in same_mask.items() if not same.all()]:
        warnings.warn(
            f"The mask of site '{name}' differs between draws: it depends on a latent "
            "value. Which of its values are observations is then unknown, so the site is "
            "left out of log_likelihood, and LOO does not count it.",
            stacklevel=4,  # one is of the lock
        )
        del log_likelihood[name], masks[name]
    values = {
        name: np.broadcast_to(np.asarray(site["value"]), site["fn"].shape())
        for name, site in observed.items()
    }
    masks = {name: mask for name, mask in masks.items() if not mask.all()}
    return log_likelihood, predictive, values, masks
