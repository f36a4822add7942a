"""What every variational posterior at a GP site offers."""

import copy
import operator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.custom_derivatives import SymbolicZero
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_sgp._checks import check_key, check_sample_shape
from numpyro_sgp._stacked import register_stacked
from numpyro_sgp.distributions.function_samples import FunctionSamples, draw_functions
from numpyro_sgp.distributions.posterior_programs import in_one_program
from numpyro_sgp.linalg import at_least, einsum, gaussian_log_prob, jittered_cholesky


class GPPosterior(dist.Distribution):
    """
    Base class of the distributions q(f(X)) that a guide puts at a GP site.

    :class:`~numpyro_sgp.TraceGP_ELBO` asks for values of f at standard normal nodes
    (:meth:`place`), one component of q at a time, and for :meth:`prior_kl`.
    """

    arg_constraints = {}
    support = constraints.real_vector
    reparametrized_params = []

    #: How q(f | u) is relaxed in the bound, if it is.
    relaxation = None

    #: Whether rows of different latent functions are independent under q.
    independent_latents: Any = True

    #: Whether moments and draws are programs, where all that they are of is known.
    in_programs = False

    #: Rows in each group of consecutive ones that :meth:`place` draws jointly.
    joint_rows = 1

    # Whether groups of rows may be drawn jointly.
    _draws_groups: Any = False

    # Whether f has the prior's mean, and what the inducing variables leave open.
    _has_mean: Any = True
    _residual: Any = True

    def __repr__(self):
        sizes = " + ".join(str(points.shape[-2]) for points in self.inducing)
        parts = [f"{sizes} inducing points", f"kernel {type(self.prior.kernel).__name__}"]
        if (q := getattr(self, "given_q", None)) is not None:
            parts.append(f"q(u) {type(q).__name__}")
        if self.num_components > 1:
            parts.append(f"{self.num_components} components")
        if self.relaxation is not None:
            parts.append(f"tight bound ({self.relaxation.name})")
        return (
            f"<{type(self).__name__} with batch shape {self.batch_shape} and event shape "
            f"{self.event_shape}: {', '.join(parts)}>"
        )

    @property
    def _rank(self) -> int:
        return self.prior._rank

    @property
    def num_components(self) -> int:
        """Number K of Gaussian components."""
        return 1

    @property
    def log_weights(self) -> Array:
        """Log weights of the components, shape ``(K,)``."""
        return jnp.zeros(1, self.mean.dtype)

    def marginals(self, component=0) -> tuple[Array, Array]:
        """
        Marginal means and variances under one component.

        :param component: its number, which may be traced.
        :return: two arrays of shape ``batch_shape + (N,)``.
        """
        return self.mean, self.variance

    def _above_zero(self, variance, prior):
        """
        Variances in the shape of f. Exact arithmetic stays above zero; the floor takes the
        square root's rounding errors where the data pin f down to the last digits.
        """
        limits = jnp.finfo(prior.dtype)
        floor = limits.eps * prior + limits.tiny  # of no variance the root has a slope too
        return jnp.broadcast_to(at_least(variance, floor), self.shape())

    def expand(self, batch_shape: tuple[int, ...]) -> Self:
        """Independent posteriors with the same parameters; nothing is copied."""
        expanded = copy.copy(self)
        expanded.prior = self.prior.expand(batch_shape)
        expanded._batch_shape = tuple(batch_shape)
        return expanded

    def relaxed(self, relaxation) -> "GPPosterior":
        """
        The same posterior for a tighter bound: only :meth:`bound_marginals` and
        :meth:`relaxation_cost` change, predictions do not.

        :param relaxation: a :class:`~numpyro_sgp.distributions.relaxation.Relaxation`, or
            None.
        """
        new = copy.copy(self)
        new.relaxation = relaxation
        return new

    def bound_marginals(self, component=0) -> tuple[Array, Array]:
        """As :meth:`marginals`, those that the bound takes expectations under."""
        return self.marginals(component)

    def relaxation_cost(self, precision: Array | None = None) -> Array:
        """
        What a relaxed q(f | u) costs the bound at the rows of X, shape ``batch_shape``.

        :param precision: of a Gaussian likelihood, ``batch_shape + (N,)``.
        """
        raise NotImplementedError

    def place(self, x: Array, component=0) -> Array:
        """
        Values of f with the marginals of one component where x is standard normal, or
        with the joint distribution of each group of :attr:`joint_rows`.

        :param x: nodes, broadcastable to ``batch_shape + (N,)``; of that shape for groups.
        """
        mean, variance = self.marginals(component)
        if self.joint_rows > 1:
            if jnp.shape(x) != mean.shape:
                raise ValueError(
                    f"Rows that are drawn jointly need nodes of the shape {mean.shape}, "
                    f"got {jnp.shape(x)}."
                )
            return mean + self._joint_noise(x)
        return mean + jnp.sqrt(variance) * x

    def draw_rows(self, key: Array) -> Array:
        """Values of f from their marginals, of one component of a mixture."""
        key_k, key_x = jax.random.split(key)
        component: Any = 0
        if self.num_components > 1:
            component = jax.random.categorical(key_k, self.log_weights)
        x = jax.random.normal(key_x, self.shape(), self.prior.X.dtype)
        return self.place(x, component)

    def drawn_together(self, num_rows: int) -> "GPPosterior":
        """
        The same posterior, of which :meth:`place` draws groups of rows jointly; marginals
        do not change.

        :param num_rows: in a group of consecutive rows.
        :raises ValueError: if groups do not divide the rows evenly.
        :raises NotImplementedError: for a family that cannot.
        """
        if not 1 <= num_rows <= self.event_shape[0] or self.event_shape[0] % num_rows:
            raise ValueError(
                f"joint_rows={num_rows} does not divide {self.event_shape[0]} rows."
            )
        if num_rows > 1 and not self._draws_groups:
            raise NotImplementedError(
                f"Rows of a {type(getattr(self, 'given_q', self)).__name__} are not drawn "
                "in groups (joint_rows): use SVGP, SOLVEGP or ODVGP with independent "
                "latent functions."
            )
        new = copy.copy(self)
        new.joint_rows = num_rows
        return new

    def quantile(self, level) -> Array:
        """
        Marginal quantiles of f.

        :param level: between 0 and 1, of any shape.
        :return: shape ``level.shape + batch_shape + (N,)``.
        """
        mean, variance = self.mean, self.variance
        level = jnp.asarray(level, mean.dtype)
        z = jax.scipy.stats.norm.ppf(level).reshape(*level.shape, *(1,) * mean.ndim)
        return mean + jnp.sqrt(variance) * z

    def prior_kl(self, rng_key: Array | None = None) -> Array:
        """
        KL[q(f, u) || p(f, u)], or an upper bound of it.

        :param rng_key: for the families whose KL is drawn.
        """
        raise NotImplementedError

    def sample_functions(
        self, rng_key: Array, sample_shape=(), num_features: int = 1024
    ) -> FunctionSamples:
        r"""
        Draws of whole functions, to be evaluated anywhere and any number of times, by
        Matheron's rule [1, 2]: a draw :math:`f_0` of the prior by random features of its
        own, corrected at the inducing points :math:`u`,

        .. math::

            f(x) = m(x) + f_0(x) + k(x, u)\, L^{-\top}
                \bigl(w - L^{-1} (f_0(u) + \epsilon)\bigr),

        with w from q in whitened coordinates and :math:`\epsilon` the jitter in
        :math:`L L^\top = K_{uu}`. Over the draws, means and covariances are those of this
        posterior exactly, whatever the number F of features; the joint distribution of
        f at several points is q's (Gaussian, or a mixture) only as F grows.

        Costs O(M^2 + M F) for a draw, and O(N (M + F)) for its values at N inputs, of
        any shape or number: nothing of size N x N is formed. The memory for the values
        of S draws is that of S F N numbers.

        :param sample_shape: shape of the draws, or their number.
        :param num_features: number F of random features of each draw.
        :return: what, called with inputs of shape ``(N, D)``, has the values of shape
            ``sample_shape + batch_shape + (N,)``.
        :raises NotImplementedError: if the kernel has no random features, as ``White``
            and other libraries' kernels have not. (A kernel of one's own may define
            ``features``, as :meth:`numpyro_sgp.kernels.Kernel.features` says; and joint
            draws at given inputs, by ``sample``, need none.)
        :raises ValueError: if ``num_features`` is not positive.

        **References:**

        1. Wilson, Borovitskiy, Terenin, Mostowsky, Deisenroth (2020). Efficiently
           Sampling Functions from Gaussian Process Posteriors. ICML.
           https://arxiv.org/abs/2002.09309
        2. Wilson, Borovitskiy, Terenin, Mostowsky, Deisenroth (2021). Pathwise
           Conditioning of Gaussian Processes. JMLR 22(105).
           https://arxiv.org/abs/2011.04026

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> from numpyro_sgp.families import Block, BlockGaussian
        >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
        >>> q = BlockGaussian((Block(jnp.zeros(4), 0.1 * jnp.eye(4)),))
        >>> prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X)
        >>> posterior = sgp.SparsePosterior(prior, (X[::14],), q)
        >>> f = posterior.sample_functions(jax.random.key(0), (3,))
        >>> f(X).shape, bool(jnp.allclose(f(X)[:, 10:12], f(X[10:12]), atol=1e-3))
        ((3, 50), True)
        """
        if isinstance(sample_shape, int):
            sample_shape = (sample_shape,)
        check_key(rng_key)
        static = check_sample_shape(sample_shape), operator.index(num_features)
        return self._draw_functions(rng_key, static=static)

    _draw_functions = in_one_program(draw_functions)

    def _sample_whitened(self, key, sample_shape) -> Array:
        """
        Draws from q of the whitened inducing variables.

        :return: shape ``sample_shape + batch_shape + (M,)``.
        """
        raise NotImplementedError

    def _with_fixed_part(self, points, weights):
        """Points and weights of kernel functions with those that all draws share."""
        return points, weights

    def _scale_tril(self, covariance) -> Array:
        """Lower factor of a covariance over X, with the prior's jitter."""
        size = jnp.mean(self.prior.kernel.diag(self.prior.X), axis=-1)
        return jittered_cholesky(covariance, self.prior.jitter, size)[0]

    def _with_residual(self, key, f, residual) -> Array:
        """``f`` plus joint draws of what the inducing variables leave open."""
        L = self._scale_tril(residual)
        noise = jax.random.normal(key, f.shape, L.dtype)
        return f + einsum("...ij,...j->...i", L, noise)

    def _joint_log_prob(self, value) -> Array:
        """Joint log density of f(X), O(N^3)."""
        L = self._scale_tril(self.covariance_matrix)
        return gaussian_log_prob(value - self.mean, L)

    @validate_sample
    def log_prob(self, value, intermediates=None) -> Array:
        """
        Joint log density of f(X), O(N^3): for importance weights, as in
        :func:`numpyro.infer.psis_diagnostic`, and not for training.

        :param value: shape ``(..., *batch_shape, N)``.
        :return: shape ``(..., *batch_shape)``.
        :raises TypeError: when differentiated, as ``Trace_ELBO`` would, which takes the
            wrong bound from it in minibatches and the wrong gradient for mixtures.
        """
        return _value_only(self._joint_log_prob(value))


register_stacked(GPPosterior, lambda posterior: posterior.prior.X)


@jax.custom_jvp
def _value_only(x):
    return x


def _value_only_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    if not isinstance(dx, SymbolicZero):
        raise TypeError(
            "The log density of a sparse posterior q(f(X)) would train the wrong bound. "
            "Use numpyro_sgp.TraceGP_ELBO() as the loss of SVI: it takes KL[q || p] from "
            "the inducing variables. (For single Gaussians, TraceMeanField_ELBO does so "
            "too.)"
        )
    return x, dx


_value_only.defjvp(_value_only_jvp, symbolic_zeros=True)
