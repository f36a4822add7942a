"""Likelihoods that are only a function to call: not JAX, not differentiable."""

import copy
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.custom_derivatives import SymbolicZero
from numpyro.distributions import constraints

from numpyro_sgp._checks import numbers
from numpyro_sgp._stacked import register_stacked
from numpyro_sgp.kernels.base import broadcasts_to


class BlackBoxError(ValueError):
    """
    A black-box log likelihood raised, or returned what is no log likelihood.

    JAX raises :class:`jax.errors.JaxRuntimeError` in its place, with its text.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> import numpyro_sgp as sgp
    >>> def log_prob(y, f):
    ...     return np.sum(y * f - np.exp(f))  # a number for all rows together
    >>> try:
    ...     sgp.BlackBox(log_prob, jnp.zeros(3)).log_prob(jnp.zeros(3))
    ... except jax.errors.JaxRuntimeError as error:
    ...     print("it must return one number for each row" in str(error))
    True
    """


class BlackBox(dist.Distribution):
    r"""
    The distribution of data whose log likelihood is a Python function of y and f, evaluated
    on the host: NumPy code, a compiled library, an executable behind a function.

    ``log_prob(y, f, *parameters)`` gets NumPy arrays with one row of data along the first
    axis of y and the *last* axis of f, and returns one number for each row. Rows are taken
    to be independent, so it must accept any number of them: all nodes of an expectation
    rule are put into one call, and minibatches are smaller.

    It has no gradient. Train by ``TraceGP_ELBO(ScoreFunction(n))``, which only evaluates
    it, or sample by :class:`~numpyro_sgp.EllipticalSlice`. Parameters of the function are
    to be held fixed.

    Where the density is zero, ``-inf`` is right for :class:`~numpyro_sgp.EllipticalSlice`,
    which rejects such values. ``ScoreFunction`` cannot train on it, since
    :math:`E_q[\log p] = -\infty`: return a finite floor there.

    :param log_prob: the function.
    :param f: latent values, shape ``(..., N)``.
    :param parameters: further arrays that are passed as they are.
    :param event_shape: the shape of one row of y; y has the shape ``(N, *event_shape)``.
    :param sample: optional ``sample(rng, f, *parameters)`` with a
        :class:`numpy.random.Generator` that returns y, for predictive draws; without it
        they are NaN.
    :raises jax.errors.JaxRuntimeError: with the text of a :class:`BlackBoxError`, outside
        of jit too, if the function raises, or returns another shape, NaN or what are no
        real numbers; with the rows concerned.
    :raises TypeError: if the function is differentiated.

    >>> import jax.numpy as jnp, numpy as np
    >>> import numpyro_sgp as sgp
    >>> def log_prob(y, f):
    ...     return y * f - np.exp(f)
    >>> fn = sgp.BlackBox(log_prob, jnp.zeros(3))
    >>> fn.log_prob(jnp.array([0.0, 1.0, 2.0])).tolist()
    [-1.0, -1.0, -1.0]
    """

    arg_constraints = {}
    reparametrized_params = []
    pytree_data_fields = ("f", "parameters")
    pytree_aux_fields = ("function", "sampler", "_rank")
    has_rsample = False

    def __init__(
        self,
        log_prob: Callable,
        f: Array,
        *parameters,
        event_shape: tuple[int, ...] = (),
        sample: Callable | None = None,
        validate_args: bool | None = None,
    ):
        if not callable(log_prob):
            raise TypeError(
                f"log_prob must be a function of (y, f), got {type(log_prob).__name__}."
            )
        self.function = log_prob
        self.sampler = sample
        f = numbers(f, "f of BlackBox")
        is_real = jnp.issubdtype(f.dtype, jnp.floating)
        self.f = f if is_real else f.astype(jnp.result_type(float))
        self._rank = self.f.ndim
        if self.f.ndim < 1:
            raise ValueError("f must have the rows of data along its last axis.")
        self.parameters = tuple(jnp.asarray(p) for p in parameters)
        super().__init__(self.f.shape[-1:], tuple(event_shape), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False)
    def support(self):
        """Not known, so not checked."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def log_prob(self, value, intermediates=None) -> Array:
        """
        The function's values, in one call for all axes of ``value`` before the rows.

        :param value: shape ``(..., *batch_shape, *event_shape)``; the last axis of the
            batch is that of the N rows.
        :return: shape ``(..., *batch_shape)``.
        """
        value = jnp.asarray(value)
        table = (self.f.shape[-1], *self.event_shape)
        if value.shape[max(value.ndim - len(table), 0) :] != table:
            raise ValueError(
                f"The black-box likelihood of {self.f.shape[-1]} rows needs y of shape "
                f"{self.shape()}, got {value.shape}. (event_shape is the shape of one row.)"
            )
        shape = jnp.broadcast_shapes(value.shape, self.shape())
        lead = shape[: len(shape) - len(table)]

        def evaluate(value):
            return _evaluate(self.function, value, self.f, *self.parameters)

        if not lead:
            return evaluate(value)
        values = jnp.broadcast_to(value, shape).reshape(-1, *table)
        return jax.vmap(evaluate)(values).reshape(*lead, table[0])

    def expand(self, batch_shape) -> "BlackBox":
        """
        The same likelihood for several sets of data; nothing is copied.

        :param batch_shape: ends in the number of rows.
        """
        batch_shape = tuple(batch_shape)
        rows_stay = batch_shape[-1:] == self.batch_shape[-1:]
        if not (rows_stay and broadcasts_to(self.batch_shape, batch_shape)):
            raise ValueError(
                f"A black-box likelihood of batch shape {self.batch_shape} cannot be "
                f"expanded to {batch_shape}: the last axis is that of the rows of f."
            )
        expanded = copy.copy(self)
        expanded._batch_shape = batch_shape
        return expanded

    def sample(self, key, sample_shape=()):
        """
        Draws by the function ``sample``; NaN if there is none, so that the rest of a model
        (f at new inputs) can be drawn all the same.
        """
        if self.sampler is None:
            return jnp.full(self.shape(sample_shape), jnp.nan, self.f.dtype)
        table = (self.f.shape[-1], *self.event_shape)
        count = math.prod((*sample_shape, *self.batch_shape[:-1]))
        shape = jax.ShapeDtypeStruct((count, *table), self.f.dtype)

        def draw(key_data, f, *parameters):
            rng = np.random.default_rng(np.asarray(key_data))
            f, parameters = np.asarray(f), [np.asarray(p) for p in parameters]
            draws = [self.sampler(rng, f, *parameters) for _ in range(count)]
            bad = {np.shape(y) for y in draws} - {table}
            if bad:
                raise BlackBoxError(
                    f"The function sample of BlackBox returned an array of shape "
                    f"{bad.pop()}, but y has the shape {table}: one row for each row of f."
                )
            return np.asarray(draws, shape.dtype).reshape(shape.shape)

        key_data = jax.random.key_data(key)
        draws = jax.pure_callback(
            draw, shape, key_data, self.f, *self.parameters, vmap_method="sequential"
        )
        return draws.reshape(self.shape(sample_shape))


register_stacked(BlackBox, lambda likelihood: likelihood.f)


def _evaluate(function, y, f, *parameters):
    """The host function as a JAX primitive that must not be differentiated."""
    rows = f.shape[-1]
    dims = (y.ndim, f.ndim, *(p.ndim for p in parameters))

    def call(*arrays):
        return _call(function, rows, dims, [np.asarray(a) for a in arrays])

    @jax.custom_jvp
    def evaluate(*arrays):
        out = jax.ShapeDtypeStruct((rows,), f.dtype)
        return jax.pure_callback(call, out, *arrays, vmap_method="expand_dims")

    def no_gradient(primals, tangents):
        if not all(isinstance(t, SymbolicZero) for t in tangents):
            name = getattr(function, "__name__", repr(function))
            raise TypeError(
                f"The black-box likelihood '{name}' has no gradient. Train with "
                "SVI(model, guide, optimiser, TraceGP_ELBO(ScoreFunction(1000))), which "
                "only evaluates it, or sample with MCMC(EllipticalSlice(model), ...). "
                "Learned parameters of the function itself: hold them fixed, or wrap them "
                "in jax.lax.stop_gradient."
            )
        out = evaluate(*primals)
        return out, jnp.zeros_like(out)

    evaluate.defjvp(no_gradient, symbolic_zeros=True)
    return evaluate(y, f, *parameters)


def _call(function, rows, dims, arrays):
    """
    One call of the function for all batches: their rows are put after one another.

    :param dims: number of dimensions of each array without batches; vmap puts batch axes
        before them, of size 1 where an array is the same for all.
    """
    batch_dims = arrays[0].ndim - dims[0]
    batch = np.broadcast_shapes(*(a.shape[:batch_dims] for a in arrays))
    y, f, *parameters = arrays
    if any(p.shape[:batch_dims] != (1,) * batch_dims for p in parameters):
        # Parameters of each batch: one call each.
        arrays = [np.broadcast_to(a, batch + a.shape[batch_dims:]) for a in arrays]
        values = [
            _checked(function, *(a[(*index, ...)] for a in arrays))
            for index in np.ndindex(batch)
        ]
        return np.reshape(values, (*batch, rows)).astype(f.dtype)
    parameters = [p.reshape(p.shape[batch_dims:]) for p in parameters]
    y = np.broadcast_to(y, batch + y.shape[batch_dims:])
    f = np.broadcast_to(f, batch + f.shape[batch_dims:])
    y = y.reshape(-1, *y.shape[batch_dims + 1 :])
    f = np.moveaxis(f.reshape(-1, *f.shape[batch_dims:]), 0, -2)
    f = f.reshape(*f.shape[:-2], -1)
    values = _checked(function, y, f, *parameters, rows=rows)
    return values.reshape(*batch, rows).astype(f.dtype)


def _checked(function, y, f, *parameters, rows=None):
    """Values of the function, or an error that names the rows of data."""
    rows = rows or f.shape[-1]
    count = f.shape[-1]

    def call(part=slice(None)):
        return np.asarray(function(y[part], f[..., part], *parameters))

    name = f"The black-box likelihood '{getattr(function, '__name__', repr(function))}'"
    given = f"y of shape {y.shape} and f of shape {f.shape}"
    if count > rows:
        given += f" ({count // rows} evaluations of {rows} rows)"
    finite = np.isfinite(f).reshape(-1, count).all(0)
    try:
        values = call()
    except Exception as error:
        n = _first_failure(call, count)
        if not finite[n]:
            raise BlackBoxError(_diverged(name, finite, rows)) from error
        raise BlackBoxError(
            f"{name} raised {type(error).__name__}: {error} (row {n % rows} of the data: "
            f"y = {y[n]}, f = {f[..., n]}). It was called with {given}."
        ) from error
    if values.shape != (count,):
        raise BlackBoxError(
            f"{name} returned an array of shape {values.shape} for {given}; it must return "
            f"one number for each row, shape ({count},), and accept any number of rows."
        )
    if not jnp.issubdtype(values.dtype, np.number) or np.iscomplexobj(values):
        kinds = {"b": "booleans", "c": "complex numbers"}
        what = kinds.get(values.dtype.kind, f"no numbers (dtype {values.dtype})")
        raise BlackBoxError(
            f"{name} returned {what}; return the log of the density, a real number for "
            "each row."
        )
    bad = ~(values < np.inf)
    if (bad & finite).any():
        bad = np.flatnonzero(bad & finite)
        n = bad[0]
        found = np.unique(bad % rows)
        raise BlackBoxError(
            f"{name} returned {values[n]} in {found.size} of {rows} rows of the data "
            f"(first: {found[:5].tolist()}; row {n % rows} has y = {y[n]}, "
            f"f = {f[..., n]}). Return -inf where the density is zero (ScoreFunction needs "
            "a finite floor)."
        )
    if bad.any():
        raise BlackBoxError(_diverged(name, finite, rows))
    return values


def _diverged(name, finite, rows):
    found = np.unique(np.flatnonzero(~finite) % rows)
    return (
        f"{name} was called with f that is not finite in {found.size} of {rows} rows of "
        f"the data (first: {found[:5].tolist()}): training has diverged (lower the "
        "learning rate; values of -inf cannot be trained on by ScoreFunction, use a floor)."
    )


def _first_failure(call, count):
    """The first row whose presence makes the call raise, by bisection."""
    start, end = 0, count
    while end - start > 1:
        middle = (start + end) // 2
        try:
            call(slice(start, middle))
        except Exception:
            end = middle
        else:
            start = middle
    return start
