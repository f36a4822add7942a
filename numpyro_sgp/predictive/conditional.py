"""Predictions from posterior samples of MCMC."""

import inspect
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import check_key, check_model, check_whole, shown
from numpyro_sgp.distributions.arguments import as_arrays, named_arguments
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.plates import WholeIfFew
from numpyro_sgp.tracing.row_indices import check_codes

_GROUPED = " (Of chains, use mcmc.get_samples() without group_by_chain, or batch_ndims=2.)"


class GPPredictive:
    r"""
    Predictive distribution at new inputs, given samples of f at the training inputs.

    For each sample, a GP site at the new inputs is drawn jointly from
    :math:`p(f_* \mid f(X), \theta)`; all other sites follow from the model as in
    :class:`numpyro.infer.Predictive`. Latents of each row (in a plate with a response) are
    drawn anew at other inputs, given the samples of the others; groups are those of the
    samples, by their codes. Samples of an inducing-point guide need no such step: use
    ``Predictive(model, guide=guide, ...)`` for them.

    :param model: the model (not whitened).
    :param posterior_samples: samples by site with leading axes as ``batch_ndims`` says,
        those of ``mcmc.get_samples()``; each GP site must be there.
    :param train_args: the positional arguments the samples were drawn with.
    :param train_kwargs: the keyword arguments.
    :param return_sites: names of sites to return; None for all unobserved and
        deterministic ones but the hyperparameters in ``posterior_samples``.
    :param batch_size: number of samples done at a time; by default so many that their
        covariance matrices hold about 3e7 numbers.
    :param batch_ndims: number of leading axes of the samples, and of what is returned: one
        for draws, two for chains and draws (``mcmc.get_samples(group_by_chain=True)``),
        none for one sample.
    :raises ValueError: if a GP site, or a latent that moves its prior, has no samples,
        samples do not fit the training inputs, or (but for those of rows) the new
        arguments, inputs are not finite, codes of groups are none of the model's, or a
        site of ``return_sites`` is not in the model.

    >>> import jax, jax.numpy as jnp, numpyro
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> samples = {"f": jnp.zeros((10, 5))}  # from mcmc.get_samples()
    >>> predictive = sgp.GPPredictive(model, samples, train_args=(X, y))
    >>> draws = predictive(jax.random.key(0), jnp.array([[0.5], [5.0]]))
    >>> draws["f"].shape, draws["y"].shape
    ((10, 2), (10, 2))
    """

    def __init__(
        self,
        model,
        posterior_samples: dict,
        *,
        train_args: tuple = (),
        train_kwargs: dict | None = None,
        return_sites=None,
        batch_size: int | None = None,
        batch_ndims: int = 1,
    ):
        check_model(model)
        check_whole(batch_ndims, "batch_ndims", least=0)
        if batch_size is not None:
            check_whole(batch_size, "batch_size", least=1)
        if not isinstance(posterior_samples, dict):
            raise TypeError(
                "posterior_samples must be a dict of draws by site, such as "
                f"mcmc.get_samples(), got {shown(posterior_samples)}."
            )
        if not isinstance(train_args, tuple):
            raise TypeError(
                "train_args must be the tuple of the model's training arguments, such as "
                f"(X, y), got {type(train_args).__name__}."
            )
        self.model = model
        train = as_arrays(model, train_args, train_kwargs or {})
        self.train_args, self.train_kwargs = train
        self.return_sites = (
            [return_sites] if isinstance(return_sites, str) else return_sites
        )
        self.batch_size = batch_size
        shapes = {k: jnp.shape(v) for k, v in posterior_samples.items()}
        sizes = {shape[:batch_ndims] for shape in shapes.values()}
        if len(sizes) != 1 or any(len(shape) != batch_ndims for shape in sizes):
            axes = "one leading axis" if batch_ndims == 1 else f"{batch_ndims} leading axes"
            raise ValueError(
                f"posterior_samples must be arrays with {axes} of the same length, got "
                f"{shapes}.{_GROUPED}"
            )
        (self._batch_shape,) = sizes
        self.num_samples = math.prod(self._batch_shape)
        if not self.num_samples:
            raise ValueError(f"posterior_samples has no draws: {shapes}.")
        self.posterior_samples = {
            name: jnp.reshape(value, (self.num_samples, *shapes[name][batch_ndims:]))
            for name, value in posterior_samples.items()
        }
        check_codes(model, self.train_args, self.train_kwargs)

    def __call__(self, rng_key, *args, **kwargs) -> dict:
        """
        Draw at new inputs.

        :param rng_key: random key.
        :param args: arguments of the model at the new inputs, such as ``X_new``.
        :return: values by site, with the leading axes of the samples.
        """
        check_key(rng_key)
        args, kwargs = as_arrays(self.model, args, kwargs)
        check_codes(self.model, args, kwargs)
        first = jax.tree.map(lambda x: x[0], self.posterior_samples)
        numbers, others = self._check(first, args, kwargs)
        chunk = self.batch_size or int(np.clip(3e7 // numbers, 1, self.num_samples))

        def draw(inputs):
            key, sample = inputs
            return self._draw(key, sample, others, args, kwargs)

        keys = jax.random.split(rng_key, self.num_samples)
        drawn = jax.lax.map(draw, (keys, self.posterior_samples), batch_size=chunk)
        batch = self._batch_shape
        return jax.tree.map(lambda x: jnp.reshape(x, (*batch, *jnp.shape(x)[1:])), drawn)

    def _check(self, sample, args, kwargs) -> tuple[int, set[str]]:
        """
        Checks sites and shapes; numbers in the covariances of old and new rows, and the
        sites beside GPs whose samples are values at these arguments too.
        """
        if not (self.train_args or self.train_kwargs) and _needs_arguments(self.model):
            raise ValueError(
                "GPPredictive needs the arguments that the samples were drawn with: "
                "GPPredictive(model, samples, train_args=(X, y))."
            )
        self._check_grouped(sample)
        self._check_train(sample)
        self._check_complete(sample)
        train = _gp_priors(self.model, sample, self.train_args, self.train_kwargs)
        rows = {}
        for name, prior in train.items():
            checks.check_inputs(name, prior)
            rows[name] = prior.event_shape[0]
        new = {}
        others = self._of_no_row(sample, train, args, kwargs)

        def at_new(others):
            new.update(_gp_priors(self.model, others, args, kwargs))
            for name, prior in new.items():  # which kernels may leave no more
                checks.check_inputs(name, prior)

        jax.eval_shape(at_new, others)
        for name, prior in new.items():
            columns = train[name].X.shape[-1] if name in train else prior.X.shape[-1]
            if prior.X.shape[-1] != columns:
                raise ValueError(
                    f"GP site '{name}' has new inputs with {prior.X.shape[-1]} columns, "
                    f"but the training inputs have {columns}."
                )
            rows[name] = rows.get(name, 0) + prior.event_shape[0]
        priors = {**train, **new}
        numbers = (int(np.prod(priors[k].batch_shape)) * n**2 for k, n in rows.items())
        return sum(numbers), set(others)

    def _check_train(self, sample):
        """
        :raises ValueError: if samples are not those of GP sites at the training inputs.
        """
        shapes: dict[str, tuple] = {}
        whitened: list[str] = []

        def look():
            where = self.model, self.train_args, self.train_kwargs
            trace = messages.trace_of(*where, at_site=_mean_where_none)
            shapes.update({k: p.shape() for k, p in _gp_sites(trace).items()})
            sites = (s for s in trace.values() if s["type"] == "sample")
            whitened.extend(s["name"] for s in sites if s["infer"].get("whitened"))
            checks.warn_of_params(trace)

        jax.eval_shape(look)
        if whitened:
            raise ValueError(
                f"The model is whitened ('{whitened[0]}'), and says nothing of f at new "
                "inputs. Give GPPredictive the one that is not: GPPredictive(model, "
                "samples, train_args=(X, y)), with the samples of sgp.whiten(model)."
            )
        if not shapes:
            raise ValueError(
                "The model has no latent GP site; use numpyro.infer.Predictive."
            )
        for name, shape in shapes.items():
            if name not in sample:
                raise ValueError(
                    f"posterior_samples has no values of GP site '{name}', only of "
                    f"{sorted(sample)}."
                )
            known = jnp.shape(sample[name])
            if known != shape:
                raise ValueError(
                    f"The samples of GP site '{name}' have shape {known}, but at "
                    f"train_args it has {shape}. Pass the arguments that the samples were "
                    f"drawn with.{_GROUPED if known[1:] == shape else ''}"
                )

    def _check_complete(self, sample):
        """
        :raises ValueError: if a latent without samples moves the prior of a GP site: f
            would be conditioned under a draw from its own prior.
        """
        where = self.train_args, self.train_kwargs
        lacking = _AnyValue(handlers.substitute(self.model, substitute_fn=_values(sample)))

        def look():
            messages.trace_of(lacking, *where, at_site=_mean_where_none)

        def of_priors(**values):
            priors = _gp_priors(self.model, {**sample, **values}, *where).values()
            return [(p.mean, p.kernel(p.X, p.X)) for p in priors]

        jax.eval_shape(look)
        # By name and shape: where they lead is looked at, and nothing computed.
        moving = eval_provenance(of_priors, **lacking.given)
        if moving := frozenset().union(*jax.tree.leaves(moving)):
            name = min(moving)
            raise ValueError(
                f"posterior_samples has no values of '{name}', only of {sorted(sample)}: "
                "f would be predicted under a draw from its prior. Give all that "
                "mcmc.get_samples() has, or a model in which it is known: "
                f"numpyro.handlers.condition(model, {{'{name}': value}})."
            )

    def _check_grouped(self, sample):
        """Refuses samples with an axis of chains, before they are put into the model."""
        lengths = {jnp.shape(value)[:1] for value in sample.values()}
        if len(lengths) != 1 or lengths == {()}:
            return
        shapes, _ = _sites(self.model, self.train_args, self.train_kwargs)
        for name, site in shapes.items():
            shape = site.shape
            if name in sample and jnp.shape(sample[name])[1:] == shape:
                if jnp.shape(sample[name]) != shape:
                    raise ValueError(
                        f"The samples of site '{name}' have shape {jnp.shape(sample[name])}"
                        f", but the site has {shape}.{_GROUPED}"
                    )

    def _of_no_row(self, sample, train, args, kwargs) -> dict:
        """
        Samples beside GPs, without those of training rows where these are others.

        :raises ValueError: if there are too few of others for these arguments.
        """
        others = {name: value for name, value in sample.items() if name not in train}
        here, rows_here = _sites(self.model, args, kwargs)
        there, rows_there = _sites(self.model, self.train_args, self.train_kwargs)
        rows = {(n, rows_here.get(gp, n)) for gp, n in rows_there.items()}
        of_rows = {
            plate: size
            for name, site in there.items()
            if site.is_observed or name not in sample
            for plate, size in site.plates.items()
        }
        new = set()
        for plate, size in of_rows.items():
            sizes = {site.plates.get(plate, size) for site in here.values()}
            rows |= {(size, other) for other in sizes}
            if sizes - {size} or self._differ(size, args, kwargs):
                new.add(plate)
        kept = {}
        for name, value in others.items():
            shape, plates, *_ = here.get(name, _Site(jnp.shape(value), {}, False))
            if plates.keys() & new:
                continue
            known = jnp.shape(value)
            pairs = list(zip(known, shape, strict=False))
            # More groups than there are now may be, but no more rows.
            too_many = any(a > b and (a, b) in rows for a, b in pairs)
            too_few = len(shape) != len(known) or any(a < b for a, b in pairs)
            if too_few or too_many:
                raise ValueError(
                    f"Site '{name}' has the shape {shape} with these arguments, but its "
                    f"samples have {known}. Give arguments with the same groups; a latent "
                    "for each row, in the plate of the response, is drawn anew."
                )
            kept[name] = value
        return kept

    def _differ(self, size, args, kwargs) -> bool:
        """Whether an argument with so many rows is another one than in the training."""
        known = _by_place(self.model, self.train_args, self.train_kwargs)
        for place, leaf in _by_place(self.model, args, kwargs).items():
            other = known.get(place, ())
            are_rows = np.shape(leaf)[:1] == np.shape(other)[:1] == (size,)
            if are_rows and not _is_same(leaf, other):
                return True
        return False

    def _draw(self, rng_key, sample, others, args, kwargs):
        train = _gp_priors(self.model, sample, self.train_args, self.train_kwargs)
        drawn = {k for k in sample if k not in train and k not in others}
        others = {k: sample[k] for k in others}

        def given_train(site):
            """Its distribution given the values at the training inputs."""
            name = site["name"]
            if name not in train:
                return site["fn"], None
            prior, reinterpreted = messages.unwrap(site["fn"])
            conditional = train[name].condition(sample[name], prior.X)
            return messages.rewrap(conditional, reinterpreted), None

        model = handlers.substitute(
            handlers.seed(self.model, rng_key), substitute_fn=_values(others)
        )
        with handlers.trace() as trace, messages.AtGPSites(given_train), WholeIfFew():
            model(*args, **kwargs)
        if self.return_sites is not None:
            unknown = sorted(set(self.return_sites) - set(trace))
            if unknown:
                raise ValueError(
                    f"return_sites has {unknown}, but the model has only {sorted(trace)}."
                )
            return {name: trace[name]["value"] for name in self.return_sites}
        return {
            name: site["value"]
            for name, site in trace.items()
            if site["type"] == "deterministic"
            or (
                site["type"] == "sample"
                and not site["is_observed"]
                and name not in others
                and name not in drawn
            )
        }


def _needs_arguments(model) -> bool:
    try:
        inspect.signature(model).bind()
    except TypeError:
        return True
    except ValueError:  # it has no signature
        return False
    return False


def _by_place(model, args, kwargs) -> dict:
    """Arrays among arguments, by name and place in them, however they are given."""
    named = dict(named_arguments(model, args, kwargs))
    leaves, _ = jax.tree_util.tree_flatten_with_path(named)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _is_same(a, b) -> bool:
    if not (not_jax_tracer(a) and not_jax_tracer(b)):
        return False  # for all that is known
    a, b = np.asarray(a), np.asarray(b)  # of frames too
    if a.dtype.kind in "biuf" and b.dtype.kind in "biuf":
        dtype = jnp.result_type(a, b)  # of JAX, which may have fewer digits
        a, b = a.astype(dtype), b.astype(dtype)
    return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))


class _AnyValue(Messenger):
    """Zeros, kept, at sites beside GPs that have no value: shapes are looked at alone."""

    def __init__(self, fn):
        self.given = {}
        super().__init__(fn)

    def process_message(self, msg):
        is_open = msg["type"] == "sample" and msg["value"] is None
        if is_open and not messages.is_latent_gp(msg):
            msg["value"] = messages.zeros_like(msg["fn"])
            if not isinstance(messages.innermost(msg["fn"]), dist.Delta):
                shape, dtype = jnp.shape(msg["value"]), jnp.result_type(msg["value"])
                self.given[msg["name"]] = np.zeros(shape, dtype)  # no tracer


class _Site(NamedTuple):
    """A site beside GPs."""

    shape: tuple[int, ...]
    plates: dict[str, int]  # their sizes by name
    is_observed: bool


def _sites(model, args, kwargs) -> tuple[dict[str, _Site], dict[str, int]]:
    """Sites beside GPs by name, and the numbers of rows of GP sites."""
    found: dict[str, _Site] = {}
    rows: dict[str, int] = {}

    def look():
        where = _AnyValue(model), args, kwargs
        trace = messages.trace_of(*where, at_site=_mean_where_none)
        rows.update({k: p.event_shape[0] for k, p in _gp_sites(trace).items()})
        for name, site in trace.items():
            if site["type"] == "sample" and not messages.is_latent_gp(site):
                plates = {frame.name: frame.size for frame in site["cond_indep_stack"]}
                found[name] = _Site(jnp.shape(site["value"]), plates, site["is_observed"])

    jax.eval_shape(look)
    return found, rows


def _gp_priors(model, sample, args, kwargs) -> dict:
    """The GP sites of a run with the sampled values, else at prior means: no joint draw."""
    # A value that a handler gave stays.
    model = handlers.substitute(model, substitute_fn=_values(sample))
    return _gp_sites(messages.trace_of(model, args, kwargs, at_site=_mean_where_none))


def _gp_sites(trace) -> dict:
    return {
        name: messages.unwrap(site["fn"])[0]
        for name, site in trace.items()
        if messages.is_latent_gp(site)
    }


def _mean_where_none(msg):
    return msg["fn"], messages.prior_mean(msg) if msg["value"] is None else None


def _values(sample):
    """Sampled values, but not those of deterministic sites: inputs may differ."""

    def substitute(msg):
        return None if msg["type"] == "deterministic" else sample.get(msg["name"])

    return substitute
