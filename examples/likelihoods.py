"""
Likelihoods of single applications, as functions of latent functions f for model code.

The examples and benchmarks import them from here; other programs copy what they need.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


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
    depth, velocity = jnp.broadcast_arrays(jnp.asarray(depth), jnp.asarray(velocity))
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
    intensity = jnp.exp(jnp.asarray(mean) + offset + jnp.asarray(variance) / 2)
    return intensity, jnp.expm1(variance) * intensity**2
