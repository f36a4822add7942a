r"""
Likelihoods as model code: what takes more than a line.

The usual ones are a line of NumPyro under the data plate and need nothing from here; with
``f`` the draw of a GP site, of shape ``(N,)`` or ``(C, N)``:

======================================  =============================================
regression                              ``dist.Normal(f, sigma)``
regression, heavy tails                 ``dist.StudentT(df, f, sigma)``
two classes, labels 0 and 1             ``dist.Bernoulli(logits=f)``
C classes (softmax), labels 0..C-1      ``dist.Categorical(logits=f.T)``
C classes, the largest f wins           ``RobustMax(f)``
counts, log-Gaussian Cox process        ``dist.Poisson(jnp.exp(f + offset))``
noise that depends on the input         ``dist.Normal(f[0], jnp.exp(f[1]))``
warped GP                               ``WarpedNormal(f, sigma, a, b, c)``
GP regression network                   ``dist.Normal(gprn_mean(f, P, Q), sigma)``
seismic inversion                       ``dist.Normal(seismic_travel_times(d, v), s)``
======================================  =============================================

where ``s`` has shape ``(P, 1)``, one standard deviation for each interface.
"""

import copy
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.scipy.special import log_ndtr, ndtr, ndtri
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.distributions.util import array_equiv, validate_sample

from numpyro_sgp._stacked import register_stacked
from numpyro_sgp.linalg import gauss_hermite

__all__ = [
    "RobustMax",
    "TanhWarp",
    "WarpedMoments",
    "WarpedNormal",
    "gprn_mean",
    "lgcp_intensity_moments",
    "robust_max_probabilities",
    "seismic_travel_times",
    "warped_moments",
]

_MAX_ITERATIONS = 200
_UPPER_DECILE = 1.2815515655446004  # of the standard normal distribution


@jax.jit
def _warp(y: Array, a: Array, b: Array, c: Array) -> Array:
    """t(y): y of shape ``(*batch,)``, the parameters broadcast to ``(*batch, I)``."""
    return y + jnp.sum(a * jnp.tanh(b * (y[..., None] + c)), axis=-1)


@jax.jit
def _excess_slope(y: Array, a: Array, b: Array, c: Array) -> Array:
    """t'(y) - 1, shapes as in `_warp`."""
    tanh = jnp.tanh(b * (y[..., None] + c))
    return jnp.sum(a * b * (1 - tanh) * (1 + tanh), axis=-1)


@jax.jit
def _log_density(y: Array, loc: Array, scale: Array, *warp: Array) -> Array:
    """log N(t(y); loc, scale^2) + log t'(y)."""
    log_slope = jnp.log1p(_excess_slope(y, *warp))
    return dist.Normal(loc, scale).log_prob(_warp(y, *warp)) + log_slope


@jax.custom_jvp
@jax.jit
def _unwarp(z: Array, a: Array, b: Array, c: Array) -> Array:
    r"""
    The y with t(y) = z, by Newton's method kept inside a bracket.

    :math:`|t(y) - y| \le A = \sum_i |a_i|`, so that the root lies in z - A .. z + A.
    Where a Newton step would leave the bracket, or is not half the step before it, the
    bracket is halved instead; so about twice as many evaluations as bisection at worst.
    """
    reach = jnp.sum(jnp.abs(a) + jnp.zeros_like(b * c), axis=-1)
    z = jnp.broadcast_to(z, jnp.broadcast_shapes(z.shape, reach.shape))
    reach = jnp.broadcast_to(reach, z.shape)
    # t' >= 1: an error of rounding in t(y) is no larger in y.
    tolerance = 4 * jnp.finfo(z.dtype).eps * (jnp.abs(z) + reach)

    def unfinished(state):
        iteration, *_, done = state
        return (iteration < _MAX_ITERATIONS) & ~jnp.all(done)

    def advance(state):
        iteration, y, low, high, last, done = state
        residual = _warp(y, a, b, c) - z
        low = jnp.where(residual < 0, y, low)
        high = jnp.where(residual > 0, y, high)
        newton = -residual / (1 + _excess_slope(y, a, b, c))
        settled = ~(jnp.abs(newton) > tolerance)  # a NaN settles too
        outside = (y + newton <= low) | (y + newton >= high)
        slow = jnp.abs(newton) > jnp.abs(last) / 2
        bisect = ~settled & (outside | slow)
        step = jnp.where(bisect, (low + high) / 2 - y, newton)
        y = jnp.where(done, y, y + step)
        return iteration + 1, y, low, high, step, done | settled

    start = (0, z, z - reach, z + reach, 2 * reach, ~jnp.isfinite(z))
    return lax.while_loop(unfinished, advance, start)[1]


@_unwarp.defjvp
def _unwarp_jvp(primals, tangents):
    """dy = (dz - dt) / t'(y), with dt the change of t at y from its parameters."""
    _, *parameters = primals
    z_dot, *parameters_dot = tangents
    y = _unwarp(*primals)
    _, t_dot = jax.jvp(lambda *p: _warp(y, *p), tuple(parameters), tuple(parameters_dot))
    return y, (z_dot - t_dot) / (1 + _excess_slope(y, *parameters))


class TanhWarp(Transform):
    r"""
    The warp :math:`t(y) = y + \sum_{i=1}^I a_i \tanh(b_i (y + c_i))` of warped Gaussian
    processes [1], from the data to the scale on which they are Gaussian.

    It increases everywhere if no :math:`a_i b_i` is negative, with a slope of at least 1.
    The inverse has no closed form: it is found by Newton's method, safeguarded by
    bisection, and has the derivatives of an implicit function, in ``a``, ``b`` and ``c``
    too. Units are those of y, but for b, which has one over them.

    :param a: heights of the steps, a number or shape ``(*batch, I)``.
    :param b: their steepness, likewise.
    :param c: minus their places, likewise.
    :raises ValueError: if some ``a * b`` is negative, or the shapes do not broadcast.
        Traced values cannot be looked at: give learnable ``a`` and ``b`` positive priors.

    >>> import jax.numpy as jnp
    >>> warp = TanhWarp(a=[1.0, 0.5], b=[2.0, 1.0], c=[0.0, -1.0])
    >>> z = warp(jnp.array([-1.0, 0.0, 2.0]))
    >>> print(z)
    [-2.446 -0.381 3.380]
    >>> print(warp.inv(z))
    [-1.000 0.000 2.000]

    **References:**

    1. Snelson, E., Rasmussen, C. E., Ghahramani, Z. (2004). Warped Gaussian processes.
       NIPS 16.
    """

    domain = constraints.real
    codomain = constraints.real
    sign = 1

    def __init__(self, a: ArrayLike, b: ArrayLike, c: ArrayLike):
        self.a, self.b, self.c = _terms(a, b, c)
        _check_increases(a, b)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of a batch of warps, ``()`` for one."""
        shapes = (value.shape[:-1] for value in (self.a, self.b, self.c))
        return jnp.broadcast_shapes(*shapes)

    def __call__(self, x: ArrayLike) -> Array:
        """t(x), of the shape of ``x`` broadcast with ``batch_shape``."""
        return _warp(*self._common_dtype(x))

    def _inverse(self, y: ArrayLike) -> Array:
        """The x with t(x) = y; infinities and NaN stay themselves."""
        return _unwarp(*self._common_dtype(y))

    def log_abs_det_jacobian(self, x, y, intermediates=None) -> Array:
        """log t'(x); ``y`` is not used."""
        return jnp.log1p(_excess_slope(*self._common_dtype(x)))

    def forward_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """``shape`` broadcast with ``batch_shape``."""
        return jnp.broadcast_shapes(shape, self.batch_shape)

    def inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As :meth:`forward_shape`."""
        return self.forward_shape(shape)

    def tree_flatten(self):
        """``a``, ``b`` and ``c`` are the leaves."""
        return (self.a, self.b, self.c), (("a", "b", "c"), {})

    def eq(self, other: object, static: bool = False) -> ArrayLike:
        """Whether ``other`` is a warp with the same parameters."""
        if not isinstance(other, TanhWarp):
            return False
        pairs = zip(self.tree_flatten()[0], other.tree_flatten()[0], strict=True)
        equal = True
        for mine, theirs in pairs:
            equal = equal & array_equiv(mine, theirs, static=static)
        return equal

    def _common_dtype(self, value: ArrayLike) -> list[Array]:
        values = [_floating(value), self.a, self.b, self.c]
        dtype = jnp.result_type(*values)
        return [jnp.asarray(value, dtype) for value in values]


def _terms(a, b, c):
    """Parameters of a warp as arrays with an axis of terms."""
    terms = [jnp.atleast_1d(_floating(value)) for value in (a, b, c)]
    shapes = tuple(value.shape for value in terms)
    try:
        jnp.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"TanhWarp: a, b and c of shapes {shapes} do not broadcast; give each one "
            "value for each tanh term, in the last axis."
        ) from None
    return terms


def _check_increases(a, b):
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((a, b))):
        return
    # By NumPy, which also looks at constants while jit traces the model around them.
    if not (np.asarray(a) * np.asarray(b) >= 0).all():
        raise ValueError(
            "TanhWarp: the warp increases only if a * b >= 0 in every term, got "
            f"a = {np.asarray(a)} and b = {np.asarray(b)}. If they were stored as "
            "logarithms, give their exponentials."
        )


class WarpedNormal(dist.Distribution):
    r"""
    Likelihood of a warped Gaussian process [1]: :math:`t(y) \sim N(f, \sigma^2)`.

    .. math::
        \log p(y \mid f) = \log N(t(y); f, \sigma^2) + \log t'(y), \qquad
        t(y) = y + \sum_{i=1}^I a_i \tanh(b_i (y + c_i))

    as in Section 9.3.2 of [2]. Where f is Gaussian with a known mean and variance, the
    predictive density of y is exact by the same change of variables:
    ``WarpedNormal(mean, jnp.sqrt(variance + scale**2), a, b, c).log_prob(y)``. Its mean
    and variance need quadrature: :func:`warped_moments`.

    Learnable ``a`` and ``b`` need positive priors. All three may differ over the batch.

    :param loc: f, on the warped scale; broadcasts to ``batch_shape``.
    :param scale: standard deviation :math:`\sigma` of the noise, on the warped scale.
    :param a: heights of the steps of the warp, a number or shape ``(*batch, I)``.
    :param b: their steepness, likewise.
    :param c: minus their places, likewise.
    :raises ValueError: as :class:`TanhWarp`; without ``validate_args`` for shapes only.

    >>> import jax.numpy as jnp
    >>> warped = WarpedNormal(jnp.zeros(3), 0.5, a=1.0, b=2.0, c=0.0)
    >>> print(warped.log_prob(jnp.array([-0.5, 0.0, 1.0])).round(3))
    [-2.799 0.873 -7.808]
    >>> print(warped.icdf(jnp.array([0.1, 0.5, 0.9])).round(3))
    [-0.223 0.000 0.223]

    **References:**

    1. Snelson, E., Rasmussen, C. E., Ghahramani, Z. (2004). Warped Gaussian processes.
       NIPS 16.
    2. Bonilla, E. V., Krauth, K., Dezfouli, A. (2019). Generic inference in latent
       Gaussian process models. Journal of Machine Learning Research 20(117), 1-63.
    """

    arg_constraints = {
        "loc": constraints.real,
        "scale": constraints.positive,
        "a": constraints.real_vector,
        "b": constraints.real_vector,
        "c": constraints.real_vector,
    }
    support = constraints.real
    reparametrized_params = ["loc", "scale", "a", "b", "c"]

    def __init__(
        self,
        loc: ArrayLike,
        scale: ArrayLike,
        a: ArrayLike,
        b: ArrayLike,
        c: ArrayLike,
        *,
        validate_args: bool | None = None,
    ):
        terms = _terms(a, b, c)
        if self._validate_args if validate_args is None else validate_args:
            _check_increases(a, b)
        shapes = (jnp.shape(loc), jnp.shape(scale), *(x.shape[:-1] for x in terms))
        batch_shape = jnp.broadcast_shapes(*shapes)
        self.loc = jnp.broadcast_to(_floating(loc), batch_shape)
        self.scale = jnp.broadcast_to(_floating(scale), batch_shape)
        # As many axes as loc, so that a distribution that vmap returns stays in line.
        self.a, self.b, self.c = (
            value.reshape((1,) * (len(batch_shape) + 1 - value.ndim) + value.shape)
            for value in terms
        )
        super().__init__(batch_shape, validate_args=validate_args)

    @property
    def warp(self) -> TanhWarp:
        """The warp t, from y to the scale of f."""
        # Not by the constructor: vmap puts placeholders where arrays were.
        return TanhWarp.tree_unflatten((("a", "b", "c"), {}), (self.a, self.b, self.c))

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of y, of shape ``sample_shape + batch_shape``."""
        noise = jax.random.normal(key, sample_shape + self.batch_shape, self.loc.dtype)
        return self.warp.inv(self.loc + self.scale * noise)

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates=None) -> Array:
        """log N(t(value); loc, scale^2) + log t'(value)."""
        y, *warp = self.warp._common_dtype(value)
        return _log_density(y, self.loc, self.scale, *warp)

    def cdf(self, value: ArrayLike) -> Array:
        """Probability of a y of at most ``value``."""
        return ndtr((self.warp(value) - self.loc) / self.scale)

    def icdf(self, q: ArrayLike) -> Array:
        """The y below which the probability is ``q``."""
        return self.warp.inv(self.loc + self.scale * ndtri(_floating(q)))

    @property
    def mean(self) -> Array:
        """By quadrature with 32 nodes; see :func:`warped_moments`."""
        return warped_moments(self.loc, self.scale**2, self.warp, 32).mean

    @property
    def variance(self) -> Array:
        """By quadrature with 32 nodes; see :func:`warped_moments`."""
        return warped_moments(self.loc, self.scale**2, self.warp, 32).variance


class WarpedMoments(NamedTuple):
    """Moments of y on the scale of the data; see `warped_moments`."""

    mean: Array
    """E[y], by quadrature."""

    variance: Array
    """Var[y], by quadrature with the same nodes."""

    quantile_variance: Array
    """((90 % quantile - 10 % quantile) / 4)^2, what the SAVIGP paper's code reports."""


def warped_moments(
    mean: ArrayLike, variance: ArrayLike, warp: TanhWarp, num_points: int = 10
) -> WarpedMoments:
    r"""
    Predictive mean and variance of a warped GP on the scale of the data:
    :math:`E[y] = \int t^{-1}(z)\, N(z; m, v)\, dz` [1], and the variance likewise.

    :math:`m` and :math:`v` belong to the warped observation :math:`z = t(y)`: the noise
    :math:`\sigma^2` is part of :math:`v`. The quadrature is Gauss-Hermite, with 10 nodes
    as in [2]; steep warps need more. The quantiles are exact. Of a Gaussian,
    ``quantile_variance`` is 0.41 of the variance, 2.563 standard deviations lying between
    the two quantiles and not 4: it is here to compare with [2], and ``variance`` to use.

    :param mean: mean of f at the inputs, any shape.
    :param variance: variance of f there plus that of the noise; broadcasts with ``mean``.
    :param warp: the warp.
    :param num_points: number of nodes.
    :return: a :class:`WarpedMoments`, each of the broadcast shape.

    >>> warp = TanhWarp(a=1.0, b=2.0, c=0.0)
    >>> moments = warped_moments(1.0, 0.25, warp)
    >>> [round(float(moment), 3) for moment in moments]
    [0.406, 0.065, 0.024]

    **References:**

    1. Snelson, E., Rasmussen, C. E., Ghahramani, Z. (2004). Warped Gaussian processes.
       NIPS 16.
    2. Bonilla, E. V., Krauth, K., Dezfouli, A. (2019). Generic inference in latent
       Gaussian process models. Journal of Machine Learning Research 20(117), 1-63;
       the quadrature and the quantiles are those of its code,
       https://github.com/Karl-Krauth/Sparse-GP (``savigp/likelihood.py``).
    """
    mean, variance = jnp.broadcast_arrays(_floating(mean), _floating(variance))
    return _moments(mean, variance, warp, num_points)


@partial(jax.jit, static_argnums=3)
def _moments(mean: Array, variance: Array, warp: TanhWarp, num_points: int):
    nodes, weights = gauss_hermite(num_points)
    places = np.append(nodes, _UPPER_DECILE * np.array([1, -1]))
    # Places in the first axis, so that a batch of warps lines up with `mean`.
    shape = warp.forward_shape(mean.shape)
    mean, scale = jnp.broadcast_to(mean, shape), jnp.broadcast_to(variance**0.5, shape)
    places = jnp.asarray(places.reshape(-1, *[1] * len(shape)), mean.dtype)
    *values, upper, lower = warp.inv(mean + scale * places)
    values, weights = jnp.stack(values), jnp.asarray(weights, mean.dtype)
    centre = jnp.tensordot(weights, values, 1)
    spread = jnp.tensordot(weights, (values - centre) ** 2, 1)
    return WarpedMoments(centre, spread, ((upper - lower) / 4) ** 2)


class RobustMax(dist.Distribution):
    r"""
    The class with the largest latent function, or another one by mistake [1],

    .. math::
        p(y \mid f) = 1 - \epsilon \text{ if } y = \arg\max_c f_c, \text{ else }
        \epsilon / (C - 1) .

    Its density is flat in f, so that drawing f gives no gradient; but its expectation under
    independent Gaussians is a one-dimensional integral, :meth:`expected_log_prob`, which
    :class:`~numpyro_sgp.TraceGP_ELBO` takes in place of an average over its nodes. For
    that, ``f`` must be the value of a GP site itself. Other ELBOs do not: use
    :class:`~numpyro_sgp.TraceGP_ELBO`; and for MCMC :class:`~numpyro_sgp.EllipticalSlice`.

    :param f: latent functions, shape ``(C, N)``.
    :param epsilon: probability of a mistake.
    :param num_points: Gauss-Hermite nodes of the expectation.
    :raises ValueError: if ``f`` is not of at least two functions.

    >>> import jax.numpy as jnp
    >>> f = jnp.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    >>> print(jnp.exp(RobustMax(f, epsilon=0.1).log_prob(jnp.array([0, 0]))))
    [0.90 0.05]
    >>> mean, variance = jnp.zeros((3, 2)), jnp.ones((3, 2))
    >>> expected = RobustMax(f).expected_log_prob(mean, variance, jnp.array([0, 1]))
    >>> print(expected.round(3))
    [-5.068 -5.068]

    **References:**

    1. Hernandez-Lobato, Hernandez-Lobato, Dupont (2011). Robust Multi-Class Gaussian
       Process Classification. NIPS 24.
    """

    arg_constraints = {
        "f": constraints.independent(constraints.real, 2),
        "epsilon": constraints.unit_interval,
    }
    reparametrized_params = []
    pytree_data_fields = ("f", "epsilon")
    pytree_aux_fields = ("num_points",)
    _rank = 2  # axes of f

    def __init__(
        self,
        f: Array,
        epsilon: ArrayLike = 1e-3,
        num_points: int = 20,
        *,
        validate_args: bool | None = None,
    ):
        if jnp.ndim(f) != 2 or jnp.shape(f)[0] < 2:
            raise ValueError(
                "RobustMax takes f of shape (C, N), a latent function for each of C >= 2 "
                f"classes, got {jnp.shape(f)}. Use .expand([C]) on the process, and f as "
                "it is, without f.T."
            )
        self.f, self.epsilon, self.num_points = f, epsilon, num_points
        super().__init__(jnp.shape(f)[1:], validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self):
        """The classes, 0 to C - 1."""
        return constraints.integer_interval(0, self.f.shape[0] - 1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of classes, of shape ``sample_shape + (N,)``."""
        shape, num = sample_shape + self.batch_shape, self.f.shape[0]
        key_wrong, key_other = jax.random.split(key)
        wrong = jax.random.bernoulli(key_wrong, self.epsilon, shape)
        other = jax.random.randint(key_other, shape, 1, num)
        return (jnp.argmax(self.f, axis=0) + jnp.where(wrong, other, 0)) % num

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates=None) -> Array:
        """log p(y | f), of the shape of ``value`` broadcast with ``batch_shape``."""
        shape = jnp.broadcast_shapes(jnp.shape(value), self.batch_shape)
        right = jnp.argmax(self.f, axis=0) == value
        return self._log_prob(jnp.broadcast_to(right, shape))

    @classmethod
    def infer_shapes(cls, f, epsilon=None, num_points=None):
        """The shapes of the distribution of an ``f`` of this shape."""
        return tuple(f[1:]), ()

    def expand(self, batch_shape) -> dist.Distribution:
        """
        The same likelihood for several sets of labels; nothing is copied.

        :param batch_shape: ends in the number of rows.
        """
        batch_shape = tuple(batch_shape)
        if not self.batch_shape == batch_shape[len(batch_shape) - len(self.batch_shape) :]:
            return super().expand(batch_shape)
        expanded = copy.copy(self)
        expanded._batch_shape = batch_shape
        return expanded

    def _log_prob(self, probability: Array) -> Array:
        """Its mean where the largest function is that of the class with a probability."""
        probability = jnp.asarray(probability, self.f.dtype)
        right = jnp.log1p(-jnp.asarray(self.epsilon, self.f.dtype))
        wrong = jnp.log(self.epsilon / (self.f.shape[0] - 1))
        return wrong + (right - wrong) * probability

    def expected_log_prob(self, mean: Array, variance: Array, value: ArrayLike) -> Array:
        r"""
        :math:`E[\log p(y \mid f)]` with independent :math:`f_c \sim N(\mu_c, v_c)`, by
        quadrature of :math:`E_{f_y}[\prod_{c \ne y} \Phi((f_y - \mu_c) / \sqrt{v_c})]`.

        :param mean: shape ``(C, N)``.
        :param variance: shape ``(C, N)``.
        :param value: classes, shape ``(..., *batch_shape)``.
        :return: shape ``(..., *batch_shape)``.
        """
        shape = jnp.broadcast_shapes(jnp.shape(value), self.batch_shape)
        labels = jnp.broadcast_to(jnp.asarray(value, int), shape).reshape(-1, shape[-1])
        largest = jax.vmap(_largest_probability, (None, None, 0, None))(
            mean, variance, labels, self.num_points
        )
        return self._log_prob(largest).reshape(shape)


register_stacked(RobustMax, lambda likelihood: likelihood.f)


def robust_max_probabilities(
    mean: ArrayLike, variance: ArrayLike, epsilon: ArrayLike = 1e-3, num_points: int = 20
) -> Array:
    """
    Predictive probabilities of the classes of :class:`RobustMax` under independent
    Gaussian latent functions.

    :param mean: their means, shape ``(C, N)``, of ``guide.posterior(...)["f"]``, say.
    :param variance: their variances, likewise.
    :param epsilon: probability of a mistake.
    :param num_points: Gauss-Hermite nodes.
    :return: shape ``(C, N)``.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.likelihoods import robust_max_probabilities
    >>> print(robust_max_probabilities(jnp.array([[1.0], [0.0]]), jnp.ones((2, 1)))[:, 0])
    [0.760 0.240]
    """
    mean, variance = _floating(mean), _floating(variance)
    num_classes, num_rows = mean.shape

    def largest(label):
        labels = jnp.full(num_rows, label)
        return _largest_probability(mean, variance, labels, num_points)

    p = jax.vmap(largest)(jnp.arange(num_classes))
    return (1 - epsilon) * p + epsilon / (num_classes - 1) * (1 - p)


def _largest_probability(mean, variance, label, num_points):
    """Probability that the function of the label is the largest, shape ``(N,)``."""
    nodes, weights = gauss_hermite(num_points)
    nodes, weights = (jnp.asarray(x, mean.dtype) for x in (nodes, weights))
    scale = jnp.sqrt(variance)
    own_mean = jnp.take_along_axis(mean, label[None], axis=0)
    own_scale = jnp.take_along_axis(scale, label[None], axis=0)
    own = own_mean + own_scale * nodes[:, None]  # [S, N]
    log_below = log_ndtr((own[:, None, :] - mean) / scale)  # [S, C, N]
    others = jnp.arange(len(mean))[:, None] != label
    below = jnp.exp(jnp.sum(jnp.where(others, log_below, 0.0), axis=1))
    return weights @ below


def gprn_mean(f: ArrayLike, num_outputs: int, num_nodes: int) -> Array:
    r"""
    Noise-free outputs of a Gaussian process regression network [1]:
    :math:`y_p(x) = \sum_{q=1}^{Q} W_{pq}(x)\, g_q(x)` with a GP for each weight and node.

    One GP site holds all latent functions, ordered as in [2]: first the weights W row by
    row, :math:`W_{11}, \ldots, W_{1Q}, W_{21}, \ldots`, then the nodes
    :math:`g_1, \ldots, g_Q`. The observations are ``dist.Normal(gprn_mean(f, P, Q),
    sigma)``. The distribution of y stays the same when a node and its weights all change
    sign, so a Gaussian posterior settles on one of several equal modes.

    :param f: latent functions at N inputs, shape ``(*batch, P * Q + Q, N)``.
    :param num_outputs: P.
    :param num_nodes: Q.
    :return: shape ``(*batch, P, N)``.
    :raises ValueError: if ``f`` has another number of latent functions.

    >>> import jax.numpy as jnp
    >>> f = jnp.array([[1.0, 2.0], [3.0, 4.0], [10.0, 100.0]])  # W_11, W_21, g_1
    >>> print(gprn_mean(f, num_outputs=2, num_nodes=1))
    [[ 10. 200.]
     [ 30. 400.]]

    **References:**

    1. Wilson, A. G., Knowles, D. A., Ghahramani, Z. (2012). Gaussian process regression
       networks. ICML. https://arxiv.org/abs/1110.4411
    2. Bonilla, E. V., Krauth, K., Dezfouli, A. (2019). Generic inference in latent
       Gaussian process models. Journal of Machine Learning Research 20(117), 1-63
       (Section 9.4).
    """
    f = jnp.asarray(f)
    num_weights = num_outputs * num_nodes
    if f.ndim < 2 or f.shape[-2] != num_weights + num_nodes:
        raise ValueError(
            f"gprn_mean with {num_outputs} outputs and {num_nodes} nodes takes f of shape "
            f"(..., {num_weights + num_nodes}, N), {num_weights} weights and then "
            f"{num_nodes} nodes, got {f.shape}."
        )
    *batch, _, N = f.shape
    weights = f[..., :num_weights, :].reshape(*batch, num_outputs, num_nodes, N)
    return jnp.einsum("...pqn,...qn->...pn", weights, f[..., num_weights:, :])


def seismic_travel_times(
    depth: ArrayLike,
    velocity: ArrayLike,
    chain: str = "noise_free",
    times: ArrayLike | None = None,
) -> Array:
    r"""
    Two-way travel times of sound to P interfaces in the ground, from their depths
    :math:`d_p` and the velocities :math:`v_p` of the layers above them:

    .. math::
        G_1 = 2 d_1 / v_1, \qquad G_p = G_{p-1} + 2 (d_p - d_{p-1}) / v_p

    Equation 43 of [1] has the *observed* time :math:`y_{p-1}` in place of
    :math:`G_{p-1}`, which makes the noise add up from layer to layer; the authors' code
    has the noise-free chain above. ``chain="observed"`` gives the equation as printed.

    :param depth: depths below the surface in metres, shape ``(..., P, N)``; they need not
        increase (a prior draw may not), and times then go down.
    :param velocity: velocities in metres per second, broadcasts with ``depth``.
    :param chain: ``"noise_free"`` or ``"observed"``.
    :param times: observed times in seconds, shape ``(..., P, N)``; for ``"observed"``.
    :return: mean travel times in seconds, shape ``(..., P, N)``.
    :raises ValueError: if ``chain`` is neither, ``times`` is missing where it is needed or
        given where it is not, or the arrays have no axis of interfaces.

    >>> import jax.numpy as jnp
    >>> depth, velocity = jnp.array([[200.0], [500.0]]), jnp.array([[2000.0], [2400.0]])
    >>> print(seismic_travel_times(depth, velocity)[:, 0])
    [0.200 0.450]

    **References:**

    1. Bonilla, E. V., Krauth, K., Dezfouli, A. (2019). Generic inference in latent
       Gaussian process models. Journal of Machine Learning Research 20(117), 1-63.
    """
    depth, velocity = jnp.broadcast_arrays(_floating(depth), _floating(velocity))
    if depth.ndim < 2:
        raise ValueError(
            "seismic_travel_times: depth and velocity need shape (..., P, N), interfaces "
            f"by sites, got {depth.shape}."
        )
    if chain not in ("noise_free", "observed"):
        raise ValueError(f"chain must be 'noise_free' or 'observed', got {chain!r}.")
    if (chain == "observed") != (times is not None):
        raise ValueError(
            "seismic_travel_times: give times, the observations, with chain='observed' "
            f"and only then; got chain={chain!r} and times={times!r}."
        )
    thickness = jnp.diff(depth, axis=-2, prepend=jnp.zeros_like(depth[..., :1, :]))
    within = 2 * thickness / velocity
    if times is None:
        return jnp.cumsum(within, axis=-2)
    above = jnp.asarray(times, within.dtype)[..., :-1, :]
    return within + jnp.concatenate([jnp.zeros_like(above[..., :1, :]), above], axis=-2)


def lgcp_intensity_moments(
    mean: ArrayLike, variance: ArrayLike, offset: ArrayLike = 0.0
) -> tuple[Array, Array]:
    r"""
    Mean and variance of the intensity :math:`e^{f + m}` of a log-Gaussian Cox process,
    in closed form: with :math:`f \sim N(\mu, v)` it is log-normal, and

    .. math::
        E = e^{\mu + m + v/2}, \qquad V = (e^v - 1)\, E^2.

    :param mean: :math:`\mu`, any shape.
    :param variance: :math:`v`; broadcasts with ``mean``.
    :param offset: :math:`m`, log of a base rate; broadcasts with ``mean``.
    :return: mean and variance of the intensity, in events per bin (or per whatever
        ``exp(offset)`` counts) and its square.

    >>> mean, variance = lgcp_intensity_moments(0.0, 1.0)
    >>> round(float(mean), 3), round(float(variance), 3)
    (1.649, 4.671)

    **References:**

    1. Moller, J., Syversveen, A. R., Waagepetersen, R. P. (1998). Log Gaussian Cox
       processes. Scandinavian Journal of Statistics 25(3), 451-482.
    """
    mean, variance = _floating(mean), _floating(variance)
    intensity = jnp.exp(mean + _floating(offset) + variance / 2)
    return intensity, jnp.expm1(variance) * intensity**2


def _floating(value: ArrayLike) -> Array:
    """``value`` as an array of floats: Python numbers and integers get the default type."""
    value = jnp.asarray(value)
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)
