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
from numpyro import handlers
from numpyro.infer import MCMC, SVI
from numpyro.primitives import Messenger

from numpyro_sgp.diagnostics.calibration import Calibration
from numpyro_sgp.diagnostics.khat import guide_khat, is_cheap, point_sites
from numpyro_sgp.diagnostics.optimality import convergence_attrs
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.messages import can_draw, unmasked

if TYPE_CHECKING:
    from arviz import InferenceData
    from xarray import Dataset, DataTree

_NUM_ELBO_KEYS = 10
_WHITE = "_white"


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
      sampled. Weights of :func:`numpyro.handlers.scale` are not in the log likelihood.
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
    them (``base_guide=AutoNormal`` or ``AutoMultivariateNormal``, or NUTS). What is no
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
        do not fit the arguments or are NaN, the arguments have no data or make the model
        take a minibatch, or ``dims`` names a site that is not there.

    **Example:**

    .. doctest::

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
    from xarray import DataTree

    rng_key = jax.random.key(0) if rng_key is None else rng_key
    k_draws, k_sites, k_elbo = jax.random.split(rng_key, 3)
    if isinstance(fit, MCMC):
        if result is not None:
            raise ValueError("result is for an SVI; an MCMC object has its own draws.")
        if khat or calibration is not None:
            raise ValueError("khat and calibration are of guides; leave them out for MCMC.")
        found = _of_mcmc(fit, args, kwargs)
    elif isinstance(fit, SVI):
        if isinstance(result, dict):
            raise TypeError(
                "result must be what svi.run returned. For the parameters of a loop of "
                "your own: numpyro.infer.svi.SVIRunResult(params, None, losses)."
            )
        args, kwargs = as_arrays(fit.model, args, {**fit.static_kwargs, **kwargs})
        found = _of_svi(fit, result, num_samples, k_draws, args, kwargs)
    else:
        raise TypeError(
            "fit must be a numpyro.infer.MCMC or numpyro.infer.SVI object, got "
            f"{type(fit).__name__}."
        )
    trace = _first_trace(found)
    dims = _named_dims(trace, found.draws, dims)
    log_likelihood, predictive, observed, masks = _at_observed_sites(found, trace, k_sites)
    points = set()
    if isinstance(fit, SVI):
        latents = [k for k, site in trace.items() if site["type"] == "sample"]
        flat = {name: values[0] for name, values in found.draws.items()}
        points = point_sites(fit.guide, flat, latents)
        found.attrs.update(_elbo(fit, result.params, k_elbo, args, kwargs, points))
        found.attrs.update(convergence_attrs(fit, result, args, kwargs))
        given = (result.params, fit.model, fit.guide, *args)
        if khat or (khat is None and not points and is_cheap(*given, **kwargs)):
            k_khat = jax.random.fold_in(rng_key, 3)
            found.attrs["khat"] = guide_khat(k_khat, *given, **kwargs)
        if calibration is not None:
            found.attrs.update(_calibration(calibration))
    else:
        found.attrs["num_parameters"] = sum(
            int(np.prod(np.shape(trace[name]["value"])))
            for name in found.draws
            if name in trace and trace[name]["type"] == "sample"
        )
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

    hidden = set() if keep_white else _white_sites(trace, found.draws)
    groups = {"posterior": group({k: v for k, v in found.draws.items() if k not in hidden})}
    masked = {name: predictive[name] for name in predictive if name in masks}
    whole = group(log_likelihood, skip_event_dims=True)
    seen = _places(whole, masks)
    unseen = {name: _along(f"{name}_masked", whole[name], ~masks[name]) for name in masks}
    groups["posterior_predictive"] = _at(group(predictive), seen)
    groups["predictions"] = _at(group(masked), unseen)
    if not points:
        groups["log_likelihood"] = _at(whole, seen)
    if isinstance(fit, MCMC):
        converted = as_tree(arviz.from_numpyro(fit, dims={}, log_likelihood=False))
        if "sample_stats" in converted.children:
            groups["sample_stats"] = converted["sample_stats"].to_dataset()
    elif result.losses is not None:
        loss = {"loss": np.asarray(result.losses)}
        groups["sample_stats"] = group(loss, (), {"loss": ["step"]})
    groups["observed_data"] = _at(group(observed, ()), seen)
    tree = DataTree.from_dict(
        {k: _without_slashes(v) for k, v in groups.items() if v.data_vars}
    )
    tree.attrs.update(found.attrs)
    if int(arviz.__version__.split(".")[0]) >= 1:
        return tree
    return arviz.InferenceData.from_datatree(tree)


def _without_slashes(dataset) -> Dataset:
    """In a DataTree "/" divides groups; numpyro.handlers.scope puts it into names."""
    names = {str(k) for k in (*dataset.variables, *dataset.dims) if "/" in str(k)}
    return dataset.rename({name: name.replace("/", ".") for name in names})


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


class _Found(NamedTuple):
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


def _of_mcmc(mcmc, args, kwargs) -> _Found:
    if mcmc.last_state is None:
        raise ValueError(
            "This MCMC has no draws yet. Call mcmc.run(rng_key, ...) before to_arviz."
        )
    if not (args or kwargs):
        args, kwargs = mcmc._args, mcmc._kwargs
    args, kwargs = as_arrays(mcmc.sampler.model, args, kwargs)
    draws = jax.device_get(mcmc.get_samples(group_by_chain=True))
    name = type(mcmc.sampler).__name__
    attrs = {"method": "MCMC", "approximation": name}
    return _Found(draws, mcmc.sampler.model, {}, args, kwargs, attrs)


def _of_svi(svi, result, num_samples, rng_key, args, kwargs) -> _Found:
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
    if num_samples < 1:
        raise ValueError(f"num_samples must be positive, got {num_samples}.")
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
    return _Found(draws, svi.model, dict(result.params), args, kwargs, attrs)


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


def _elbo(svi, params, rng_key, args, kwargs, points) -> dict:
    """
    The bound with all of the data: its mean and standard error over some keys, named after
    what it is a bound of.
    """

    def bound(key):
        loss = svi.loss.loss(key, params, svi.model, svi.guide, *args, **kwargs)
        return -sum(jax.tree.leaves(loss))  # by site where the loss has sum_sites=False

    bounds = jax.lax.map(bound, jax.random.split(rng_key, _NUM_ELBO_KEYS))
    bounds = np.asarray(bounds, dtype=float)
    se = np.std(bounds, ddof=1) / np.sqrt(_NUM_ELBO_KEYS)
    if points:
        return {
            "point_estimates": ", ".join(sorted(points)),
            "log_joint_bound": float(np.mean(bounds)),
            "log_joint_bound_se": float(se),
        }
    return {"elbo": float(np.mean(bounds)), "elbo_se": float(se)}


def _calibration(calibration) -> dict:
    if not isinstance(calibration, Calibration):
        raise TypeError(
            "calibration must be what numpyro_sgp.calibrate returned, got "
            f"{type(calibration).__name__}."
        )
    return {
        "sbc_p": calibration.p_value,
        "sbc_verdict": calibration.verdict,
        "sbc_num_simulations": calibration.num_simulations,
    }


class _Given(Messenger):
    """Puts draws at their sites; refuses ``bad`` sites and draws of another shape."""

    def __init__(self, values, bad=()):
        self.values = values
        self.bad = bad
        super().__init__()

    def process_message(self, msg):
        if msg["type"] == "sample" and not msg["is_observed"]:
            name = msg["name"]
            if name not in self.values:
                return
            if name in self.bad:
                raise ValueError(
                    f"Draws of site '{name}' are NaN. The fit has failed (did the loss "
                    "diverge?); lower the step size, or look at the data."
                )
            value, shape = self.values[name], tuple(msg["fn"].shape())
            if jnp.shape(value) != shape:
                raise ValueError(
                    f"The draws of site '{name}' have shape {jnp.shape(value)}, but "
                    f"with these arguments the model gives it {shape}. Pass the "
                    "arguments that the model was fitted with, all of the data."
                )
            msg["value"] = value
        elif msg["type"] == "deterministic" and f"{msg['name']}{_WHITE}" in self.values:
            # f of a whitened site: given, it need not be made from a Cholesky factor.
            msg["value"] = self.values[msg["name"]]


class _Forget(Messenger):
    """Takes the data from observed sites, so that they are drawn."""

    def __init__(self, names):
        self.names = names
        super().__init__()

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["name"] in self.names:
            msg["value"], msg["is_observed"] = None, False


def _trace(found, rng_key, values, *, forget=(), bad=()):
    with handlers.block(), handlers.trace() as trace, _Given(values, bad):
        with handlers.substitute(data=found.params), handlers.seed(rng_seed=rng_key):
            with _Forget(forget):
                found.model(*found.args, **found.kwargs)
    return trace


def _first_trace(found):
    """The model's trace at the first draw, checked."""
    first = {name: values[0, 0] for name, values in found.draws.items()}
    bad = {name for name, values in found.draws.items() if np.isnan(values).any()}
    trace = _trace(found, jax.random.key(0), first, bad=bad)
    checks.check_whole_plates(trace, "ArviZ needs the log likelihood of each observation")
    if not any(s["type"] == "sample" and s["is_observed"] for s in trace.values()):
        raise ValueError(
            "With these arguments the model has no observed site. Pass the data too: "
            "to_arviz(fit, X, y, ...)."
        )
    return trace


def _white_sites(trace, draws) -> set[str]:
    names = (name for name in draws if name.endswith(_WHITE))
    return {name for name in names if _is_whitened(trace.get(name.removesuffix(_WHITE)))}


def _is_whitened(site) -> bool:
    """Whether a site is f of a whitened model, or of one that its sampler whitens."""
    return site is not None and (
        site["type"] == "deterministic" or messages.is_latent_gp(site)
    )


def _at_observed_sites(found, trace, rng_key) -> tuple[dict, dict, dict, dict]:
    """
    Log likelihood, predictive draws and data of each observed site; and of those with
    masked entries, which entries are not masked.
    """
    sites = {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample"
        and site["is_observed"]
        and not site["infer"].get("is_auxiliary")
    }
    masks = {name: unmasked(site["fn"]) for name, site in sites.items()}
    drawn_ones = [name for name, site in sites.items() if can_draw(site["fn"])]
    shape = next(iter(found.draws.values())).shape[:2]
    flat = {
        name: jnp.asarray(v).reshape(-1, *v.shape[2:]) for name, v in found.draws.items()
    }

    def at_draw(inputs):
        key, values = inputs
        given = _trace(found, key, values)
        drawn = _trace(found, key, values, forget=drawn_ones) if drawn_ones else {}
        log_prob = {k: given[k]["fn"].log_prob(given[k]["value"]) for k in sites}
        same_mask = {k: jnp.all(unmasked(given[k]["fn"]) == masks[k]) for k in sites}
        return log_prob, {k: drawn[k]["value"] for k in drawn_ones}, same_mask

    keys = jax.random.split(rng_key, shape[0] * shape[1])
    rows = max([1, *(int(np.prod(site["fn"].shape())) for site in sites.values())])
    chunk = int(np.clip(1e6 // rows, 1, len(keys)))
    all_of_them = ({}, {}, {})
    if sites:
        all_of_them = jax.lax.map(at_draw, (keys, flat), batch_size=chunk)
    log_likelihood, predictive, same_mask = jax.tree.map(
        lambda v: np.asarray(v).reshape(*shape, *v.shape[1:]), all_of_them
    )
    for name in [name for name in sites if not same_mask[name].all()]:
        warnings.warn(
            f"The mask of site '{name}' differs between draws: it depends on a latent "
            "value. Which of its values are observations is then unknown, so the site is "
            "left out of log_likelihood, and LOO does not count it.",
            stacklevel=3,
        )
        del log_likelihood[name], masks[name]
    masks = {name: np.asarray(mask) for name, mask in masks.items()}
    observed = {
        name: np.broadcast_to(np.asarray(site["value"]), site["fn"].shape())
        for name, site in sites.items()
    }
    masks = {name: mask for name, mask in masks.items() if not mask.all()}
    return log_likelihood, predictive, observed, masks


def _places(whole, masks) -> dict:
    """
    Indices by site and dimension of what masks leave; None where they leave nothing. On a
    grid if it is one and no other site is at odds with it, else along one new dimension.

    :param whole: log likelihood of all sites.
    :param masks: of those that have masked entries, arrays of the batch shape.
    """
    grids = {name: _grid(whole[name], masks.get(name)) for name in whole}

    def at_odds(grid):
        return any(
            dim in other and not np.array_equal(where, other[dim])
            for other in grids.values()
            for dim, where in grid.items()
        )

    places = {}
    for name, mask in masks.items():
        places[name] = grids[name] if mask.any() else None
        if mask.any() and (not grids[name] or at_odds(grids[name])):
            places[name] = _along(f"{name}_obs", whole[name], mask)
    return places


def _grid(values, mask) -> dict:
    """Indices by dimension, empty where those of the mask are not a grid."""
    mask = np.ones(values.shape[2:], bool) if mask is None else mask
    axes = range(mask.ndim)
    where = [np.flatnonzero(mask.any(axis=(*axes[:i], *axes[i + 1 :]))) for i in axes]
    is_grid = mask[np.ix_(*where)].all()
    return dict(zip(values.dims[2:], where, strict=True)) if is_grid else {}


def _along(dim, values, mask) -> dict:
    """Indices of the true entries of a mask, along one dimension."""
    from xarray import DataArray

    where = np.nonzero(mask) if mask.ndim else ()
    return {d: DataArray(i, dims=dim) for d, i in zip(values.dims[2:], where, strict=True)}


def _at(dataset, places) -> Dataset:
    """The variables of a group at these places, and labels of these."""
    from xarray import Dataset

    found = {}
    for name, values in dataset.items():
        where = places.get(name, {})
        if where is None:
            continue
        values = values.isel(where)
        new = {dim for i in where.values() for dim in getattr(i, "dims", ())}
        for along in new:
            values = values.rename({dim: f"{along}_{dim}" for dim in where})
            values = values.assign_coords({along: np.arange(values.sizes[along])})
        found[name] = values
    return Dataset(found, attrs=dataset.attrs)


def _named_dims(trace, draws, given) -> dict[str, list]:
    """Names of the axes of each site, those of plates where they are not given."""
    given = dict(given or {})
    known = {k for k, s in trace.items() if s["type"] in ("sample", "deterministic")}
    unknown = sorted(set(given) - known - set(draws))
    if unknown:
        raise ValueError(
            f"dims names sites {unknown}, which are not in the model; it has "
            f"{sorted(known)}."
        )
    named = {name: _axes(trace, name) for name in known}
    for white in _white_sites(trace, draws) - known:  # of a sampler that whitens
        named[white] = [*named[white.removesuffix(_WHITE)][:-1], None]
    return {**named, **{name: list(axes) for name, axes in given.items()}}


def _axes(trace, name) -> list:
    """Names of the axes of a site, None where it has no plate."""
    site = trace[name]
    frames = site["cond_indep_stack"]
    if site["type"] == "sample":
        shape, num_batch = site["fn"].shape(), len(site["fn"].batch_shape)
    else:
        shape = jnp.shape(site["value"])
        num_batch = _num_batch(shape, frames, trace.get(f"{name}{_WHITE}"))
    axes = [None] * len(shape)
    for frame in frames:
        axis = num_batch + frame.dim
        if 0 <= axis and shape[axis] == frame.size:
            axes[axis] = frame.name
    event = list(site.get("infer", {}).get("event_dims", ()))
    if event:
        axes[len(axes) - len(event) :] = event
    return axes


def _num_batch(shape, frames, white) -> int:
    """
    How many axes of a deterministic value are batch axes. It does not say; f of a
    whitened model has those of its white values, and other values as few as their plates
    leave, which is how ``arviz.from_numpyro`` reads them.
    """
    if white is not None and white["type"] == "sample" and white["fn"].shape() == shape:
        return len(white["fn"].batch_shape)
    depth = max((-frame.dim for frame in frames), default=0)
    for num_batch in range(depth, len(shape) + 1):
        if all(shape[num_batch + frame.dim] == frame.size for frame in frames):
            return num_batch
    return len(shape)


class LOO(NamedTuple):
    """
    Leave-one-out cross-validation of a fit by Pareto-smoothed importance sampling.

    :param elpd: expected log predictive density, summed over observations.
    :param se: its standard error.
    :param p_loo: effective number of parameters.
    :param pointwise: the terms of elpd.
    :param pareto_k: shape of the tail of the importance weights, for each observation.
    :param good_k: largest such k at which they are to be relied on, by the number of draws.
    """

    elpd: float
    se: float
    p_loo: float
    pointwise: np.ndarray
    pareto_k: np.ndarray
    good_k: float


def leave_one_out(tree: DataTree) -> LOO | None:
    """
    LOO over all observations of all observed sites, each left out on its own.

    Observations whose log likelihood is 0 in every draw are masked ones, and not
    counted.

    :param tree: ArviZ data with the groups posterior and log_likelihood.
    :return: the result; None without a log likelihood, or where latents are held at points
        (``point_estimates`` in ``tree.attrs``), which weights cannot move.
    """
    tree = as_tree(tree)
    if (
        tree.attrs.get("point_estimates")
        or "log_likelihood" not in tree.children
        or not tree["log_likelihood"].data_vars
    ):
        return None
    import arviz_stats
    from xarray import DataArray, Dataset, DataTree

    parts = []
    for values in tree["log_likelihood"].data_vars.values():
        values = values.transpose("chain", "draw", ...).values
        parts.append(values.reshape(*values.shape[:2], -1))
    values = np.concatenate(parts, axis=-1)
    values = values[..., (values != 0).any(axis=(0, 1))]
    if not values.shape[-1]:
        return None
    both = {
        "posterior": tree["posterior"].to_dataset(),
        "log_likelihood": Dataset(
            {"all": DataArray(values, dims=("chain", "draw", "observation"))}
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # high values of k are shown in the table
        try:
            loo = arviz_stats.loo(DataTree.from_dict(both), pointwise=True)
        except ValueError as error:
            if "tail values are the same" not in str(error):
                raise
            raise ValueError(
                "LOO cannot be computed: the draws of this fit repeat each other, so that "
                "importance weights tie. A chain has not moved; run it longer, or look at "
                "its acceptance and step size."
            ) from error
    return LOO(
        float(loo.elpd),
        float(loo.se),
        float(loo.p),
        np.asarray(loo.elpd_i),
        np.asarray(loo.pareto_k),
        float(loo.good_k),
    )


class Convergence(NamedTuple):
    """
    The worst of all variables of a posterior by MCMC; NaN where there are too few draws or
    chains.

    :param r_hat: largest R-hat.
    :param ess_bulk: smallest effective sample size of the bulk.
    :param ess_tail: smallest effective sample size of the tails.
    :param where: the entries that they are of, by the names of these.
    """

    r_hat: float
    ess_bulk: float
    ess_tail: float
    where: dict[str, str]


def convergence(posterior: Dataset) -> Convergence:
    """
    R-hat and effective sample sizes of the worst entry of all variables.

    :param posterior: draws with the dimensions ``chain`` and ``draw``.
    """
    import arviz_stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one chain gives NaN
        found = {
            "r_hat": _worst(arviz_stats.rhat(posterior), np.nanargmax),
            "ess_bulk": _worst(arviz_stats.ess(posterior, method="bulk"), np.nanargmin),
            "ess_tail": _worst(arviz_stats.ess(posterior, method="tail"), np.nanargmin),
        }
    where = {name: entry for name, (_, entry) in found.items()}
    return Convergence(**{name: value for name, (value, _) in found.items()}, where=where)


def _worst(found: Dataset, which) -> tuple[float, str]:
    """Its value, and the entry's name such as ``f[3]``."""
    parts = {str(name): np.asarray(v, dtype=float) for name, v in found.data_vars.items()}
    values = np.concatenate([np.ravel(v) for v in parts.values()])
    if np.isnan(values).all():
        return float("nan"), ""
    at = index = int(which(values))
    for name, part in parts.items():
        if index < part.size:
            place = ", ".join(map(str, np.unravel_index(index, part.shape)))
            return float(values[at]), f"{name}[{place}]" if place else name
        index -= part.size


def mean_and_sd_errors(values) -> tuple[np.ndarray, np.ndarray]:
    """
    Monte Carlo standard errors of the mean and of the standard deviation of each entry.

    :param values: a :class:`xarray.DataArray` with the dimensions ``chain`` and ``draw``.
    :return: two arrays of the shape of an entry; NaN where it does not vary.
    """
    import arviz_stats

    dataset = values.transpose("chain", "draw", ...).to_dataset(name="values")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # entries that do not vary
        return tuple(
            np.asarray(arviz_stats.mcse(dataset, method=method)["values"], dtype=float)
            for method in ("mean", "sd")
        )
