"""Data that grow, in arrays of a size that seldom changes."""

import inspect
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_sgp._checks import array_shape, check_whole, real
from numpyro_sgp._programs import NEEDS_KNOWN_DATA, on_data
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.rows import sites_on_f


def pad_rows(*arrays, size: int | None = None) -> tuple:
    """
    Arrays filled up to a fixed number of rows, and a mask of the rows that count, so that
    programs compiled for that size serve while data grow (Bayesian optimisation, streams).

    Added rows repeat those that are there, in order, and have the mask False. With
    :class:`numpyro.handlers.mask` around the observed sites the bound is that of the rows
    that count. They add nothing new to the inducing points either: points are among the
    distinct rows, and in k-means a row that is repeated weighs as its copies. Points are
    chosen once, when the guide is set up, and trained from then on: keep the guide, with
    as many points as the data will need, and train it where its rows are spread already,
    or give it points (``SVGP(inducing=grid)``). A new guide compiles anew.

    Not for ``VGP``, ``covariance="pseudo_data"`` and ``tight`` bounds, which have a part
    for each row whether or not it is masked.

    :param arrays: with a common first axis, such as X and y.
    :param size: number of rows to fill up to; None for the next power of two.
    :return: the arrays and the mask, each with ``size`` rows.
    :raises ValueError: if there are more rows than ``size``, or none, or arrays differ.

    **Example:** each round trains on one more row; what was compiled in the first round
    serves until the 9th row.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpy as np, numpyro, optax
        >>> import numpyro.distributions as dist
        >>> import numpyro_sgp as sgp
        >>> def model(X, y=None, mask=True):
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        ...     with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=mask):
        ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
        >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
        >>> optimiser = sgp.natural_gradients(guide, 0.5, optax.adam(0.02))
        >>> svi = numpyro.infer.SVI(model, guide, optimiser, sgp.TraceGP_ELBO())
        >>> candidates, state = np.linspace(0.0, 4.0, 41)[:, None], None
        >>> X = np.array([[0.0], [1.0], [2.0], [3.0], [4.0]])
        >>> for _ in range(3):
        ...     data = sgp.pad_rows(X, np.sin(X[:, 0]))
        ...     result = sgp.train(
        ...         svi, jax.random.key(0), data, 20, batch_size=len(data[0]),
        ...         shuffle=False, init_state=state, progress_bar=False,
        ...     )
        ...     state = result.state
        ...     f = sgp.predict(guide, result.params, candidates)["f"]
        ...     best = np.argmax(f.mean + 2.0 * f.sd)
        ...     X = np.concatenate([X, candidates[best : best + 1]])
        >>> data[0].shape, int(data[2].sum())
        ((8, 1), 7)
    """
    known = [np.asarray(real(array, "An array of pad_rows")) for array in arrays]
    counts = {array.shape[0] if array.ndim else 0 for array in known}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "pad_rows takes arrays with the same number of rows, at least one, such as X "
            f"and y, got shapes {[array.shape for array in known]}."
        )
    (num_rows,) = counts
    size = 1 << (num_rows - 1).bit_length() if size is None else size
    check_whole(size, "size", least=1)
    if size < num_rows:
        raise ValueError(f"size must be at least the {num_rows} rows given, got {size}.")
    # By NumPy: indexing by JAX would compile for each number of rows.
    rows = np.arange(size)
    filled = [jnp.asarray(array[rows % num_rows]) for array in known]
    return *filled, jnp.asarray(rows < num_rows)


_OF_LATENT = (
    "pad=True fills the data up by rows that do not count, but those of latent site '{}', "
    "which has an entry for each row, would. Leave pad out."
)


class Padded:
    """
    A model with rows that fill its data up and do not count: ``rows_that_count``,
    where it is given, is a mask of its observed sites. Without it, it is the model.

    :param model: the model.
    """

    def __init__(self, model):
        self.model = model
        self.__name__ = getattr(model, "__name__", type(model).__name__)
        self.__signature__ = inspect.signature(model)

    def __call__(self, *args, rows_that_count=None, **kwargs):
        if rows_that_count is None:
            return self.model(*args, **kwargs)
        with _Counting(rows_that_count):
            return self.model(*args, **kwargs)

    def fill(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """
        The arguments with all arrays that have as many rows as the first one filled up to a
        power of two, and with ``rows_that_count``.

        :raises ValueError: if there is no array with rows, a factor is one number of all
            rows, or the model computes with all of them.
        """
        leaves, structure = jax.tree.flatten((args, kwargs))
        shapes = [shape for leaf in leaves if (shape := array_shape(leaf))]
        num_rows = shapes[0][0] if shapes else 0
        if num_rows == 0:
            raise ValueError("pad=True needs data with rows, such as (X, y).")
        has_rows = [array_shape(leaf)[:1] == (num_rows,) for leaf in leaves]
        *filled, counts = pad_rows(
            *(v for v, has in zip(leaves, has_rows, strict=True) if has)
        )

        def with_rows(rows=None):
            rest = (v if rows is None else v[rows] for v in filled)
            new = [
                next(rest) if has else v for v, has in zip(leaves, has_rows, strict=True)
            ]
            return jax.tree.unflatten(structure, new)

        given, (args, kwargs) = (args, kwargs), with_rows()
        others = [v for v, has in zip(leaves, has_rows, strict=True) if not has]
        self._check_axes(num_rows, len(counts), others, args, kwargs)
        if num_rows < len(counts):
            self._check_sites(given, (args, kwargs), num_rows, len(counts))
            if any(_is_filled(leaf, num_rows, len(counts)) for leaf in others):
                raise ValueError(
                    f"pad=True fills the data up from {num_rows} to {len(counts)} rows by "
                    "those that are there. An argument which has as many already, and "
                    "whose last ones are as its first, would be taken for filled up. "
                    "Leave pad out, or have it in the model."
                )
        with suppress(*NEEDS_KNOWN_DATA):
            self._check_factors(args, kwargs)
        if num_rows < len(counts):
            # The same rows, filled up by the last one time after time.
            rows = np.minimum(np.arange(len(counts)), num_rows - 1)
            self._check_statistics((args, kwargs), with_rows(rows), rows, num_rows)
        return args, {**kwargs, "rows_that_count": counts}

    def _check_axes(self, num_rows, size, others, args, kwargs):
        """Refuses rows that are not along the first axis of an array."""
        along = [v.shape for v in others if num_rows in array_shape(v)[1:]]
        if not along or num_rows == size:
            return

        def run():
            where = self.model, args, kwargs
            trace = messages.trace_of(*where, at_site=messages.at_prior_mean)
            sites = [site for site in trace.values() if site["type"] == "sample"]
            return [messages.log_prob(site) for site in sites]

        try:
            jax.eval_shape(run)
        except NEEDS_KNOWN_DATA:
            return
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"pad=True fills the data up from {num_rows} to {size} rows along the "
                f"first axis of each array, but an argument of the shape {along[0]} has as "
                "many along another one, and the model failed: if these are rows, give fit "
                "the transpose, and turn it in the model. "
                f"({' '.join(str(error).splitlines()[:1])})"
            ) from error

    def _check_sites(self, given, filled, num_rows, size):
        """Refuses latents that filling up adds, and what has that many entries anyway."""

        def shapes(args, kwargs):
            found = {}

            def run():
                where = self.model, args, kwargs
                trace = messages.trace_of(*where, at_site=messages.at_prior_mean)
                for name, site in trace.items():
                    if site["type"] == "sample" and not messages.is_latent_gp(site):
                        batch = site["fn"].batch_shape
                        shape = jnp.shape(site["value"])
                        found[name] = (site["is_observed"], batch, shape)
                return 0

            with suppress(*NEEDS_KNOWN_DATA):
                jax.eval_shape(run)
            return found

        before, after = shapes(*given), shapes(*filled)
        for name in before.keys() & after.keys():
            (observed, batch, shape), same = after[name], before[name] == after[name]
            if not observed and shape != before[name][-1]:
                raise ValueError(_OF_LATENT.format(name))
            if observed and same and batch[-1:] == (size,):
                raise ValueError(
                    f"pad=True fills the data up from {num_rows} to {size} rows, and "
                    f"observed site '{name}' has as many entries that are none of these "
                    "rows: the last ones would be left out with the added rows. Leave pad "
                    "out."
                )

    def _check_statistics(self, given, other, rows, num_rows):
        """
        Refuses models in which rows that count are not the same whatever fills them up.

        :param other: the arguments filled up by other rows, of these numbers.
        """

        def look(args, kwargs, rows, f):
            size = len(rows)  # of which GP sites on a grid of their own are not
            of_rows = {k: v[..., rows] for k, v in f.items() if v.shape[-1] == size}
            at_f = messages.at_values({**f, **of_rows})
            trace = messages.trace_of(self.model, args, kwargs, at_site=at_f)
            sites = {k: site for k, site in trace.items() if site["type"] == "sample"}
            return {k: _parts_of(site, size) for k, site in sites.items()}

        def functions():
            trace = messages.trace_of(self.model, *given, at_site=messages.at_prior_mean)
            return {k: s["value"] for k, s in trace.items() if messages.is_latent_gp(s)}

        rng = np.random.default_rng(0)  # of functions, of which a model may sum rows too
        shapes = jax.eval_shape(functions)
        f = {k: jnp.asarray(rng.normal(size=v.shape), v.dtype) for k, v in shapes.items()}
        first = np.arange(len(rows)) % num_rows
        with suppress(*NEEDS_KNOWN_DATA):
            own = on_data(look, *given, first, f)
            others = on_data(look, *other, rows, f)
            for name, parts in own.items():
                pairs = zip(parts, others[name], strict=True)
                if not all(_same(*pair, len(rows), num_rows) for pair in pairs):
                    raise ValueError(
                        f"pad=True fills the data up from {num_rows} to {len(rows)} rows, "
                        f"and site '{name}' depends on what these added rows are: the "
                        "model computes something of all rows (X.mean(axis=0), say). "
                        "Compute it before and give it as an argument, or leave pad out."
                    )

    def _check_factors(self, args, kwargs):
        """Refuses sums over rows, of which none could be left out."""

        def shapes():
            trace = messages.trace_of(
                self.model, args, kwargs, at_site=messages.at_prior_mean
            )
            sites = [site for site in trace.values() if messages.is_latent_gp(site)]
            return {site["name"]: site["value"] for site in sites}

        def factors(f):
            at_f = messages.at_values(f)
            trace = messages.trace_of(self.model, args, kwargs, at_site=at_f)
            return {
                name: messages.log_prob(site)
                for name, site in trace.items()
                if site["type"] == "sample"
                and site["infer"].get("is_auxiliary")
                and site["fn"].batch_shape == ()
            }

        if names := sites_on_f(factors, jax.eval_shape(shapes)):
            raise ValueError(
                f"pad=True leaves rows out by a mask, but the factor '{min(names)}' is one "
                "number of all rows. Give it one for each row (numpyro.factor(name, "
                "log_prob), without the sum), or write the likelihood as observed sites."
            )


def _parts_of(site, size: int) -> list:
    """What there is at a site, with rows in the last axis where there are so many."""
    if messages.is_latent_gp(site):
        prior = messages.unwrap(site["fn"])[0]
        columns = jnp.moveaxis(prior.X, -1, 0)
        return [columns, prior.mean, prior.kernel(prior.X[..., :1, :], prior.X)]
    found = messages.log_prob(site)
    if jnp.ndim(found) == 0 and site["infer"].get("is_auxiliary"):
        # A factor of no row, or a sum over rows that f is not in.
        return [jnp.asarray(found, jnp.result_type(found, float))]
    # Of observations that are not by row it is told when they are masked.
    return [] if site["is_observed"] and jnp.shape(found)[-1:] != (size,) else [found]


def _same(left, right, size: int, num_rows: int) -> bool:
    """Whether the first rows, or all where there are no rows, are but rounded otherwise."""
    left, right = np.asarray(left), np.asarray(right)
    if left.shape[-1:] == (size,):
        left, right = left[..., :num_rows], right[..., :num_rows]
    scale = np.max(np.abs(left), initial=0.0, where=np.isfinite(left))
    atol = 1e3 * np.finfo(left.dtype).eps * scale
    return np.allclose(left, right, rtol=0.0, atol=atol, equal_nan=True)


def rows_that_count(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """
    Arguments that :meth:`Padded.fill` may have filled up, without what it added.

    :param args: tuple of arguments of the model.
    :param kwargs: its keyword arguments.
    """
    if "rows_that_count" not in kwargs:
        return args, kwargs
    kwargs = dict(kwargs)
    counts = np.asarray(kwargs.pop("rows_that_count"))
    number = int(counts.sum())

    def cut(leaf):
        return leaf[:number] if _is_filled(leaf, number, len(counts)) else leaf

    return jax.tree.map(cut, (args, kwargs))


def _is_filled(leaf, num_rows: int, size: int) -> bool:
    """Whether an array has been filled up: one of that length does not end as it begins."""
    if array_shape(leaf)[:1] != (size,):
        return False
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # keys
        return False
    known = np.asarray(leaf)
    kind = known.dtype.kind in "fc"  # equal_nan is for numbers that may be NaN
    return np.array_equal(known[num_rows:], known[: size - num_rows], equal_nan=kind)


class _Counting(Messenger):
    """Masks observed sites, and refuses latents in their plate."""

    def __init__(self, counts):
        self.counts = counts
        self._latents = {}  # by the plates that they are in
        super().__init__()

    def process_message(self, msg):
        if msg["type"] != "sample":
            return
        batch, num_rows = msg["fn"].batch_shape, self.counts.shape[0]
        plates = [f.name for f in msg["cond_indep_stack"] if f.size == num_rows]
        if not msg["is_observed"]:
            if not messages.is_latent_gp(msg):
                self._latents |= dict.fromkeys(plates, msg["name"])
            return
        if found := [self._latents[name] for name in plates if name in self._latents]:
            raise ValueError(_OF_LATENT.format(found[0]))
        if batch[-1:] == (num_rows,):
            msg["fn"] = msg["fn"].mask(jnp.broadcast_to(self.counts, batch))
        elif not msg["infer"].get("is_auxiliary"):  # a factor of no row
            raise ValueError(
                f"pad=True needs observed sites with one entry for each of {num_rows} rows "
                f"in the last axis of their batch shape, but site '{msg['name']}' has the "
                f"batch shape {batch}. Give rows a density each (of several numbers in a "
                "row one, by fn.to_event(1)), or fill the data up by sgp.pad_rows and mask "
                "them in the model."
            )
