"""Rules for expectations under the marginals of GP sites."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._checks import check_whole, shown
from numpyro_sgp.elbo.score import surrogate
from numpyro_sgp.linalg import matmul
from numpyro_sgp.tracing.rows import by_row

Sequence = Literal["random", "sobol"]
Shapes = dict[str, tuple[int, ...]]
Nodes = tuple[dict[str, Array], Array]


class AtNodes(NamedTuple):
    """What a rule has at its S nodes, of which an expectation is to be made."""

    log_probs: dict[str, Array]  # of sites that depend on f, each (S, *batch_shape)
    nodes: dict[str, Array]  # of GP sites
    weights: Array  # (S,)
    marginals: dict[str, tuple]  # means and variances at GP sites, where they are used


class Expectation:
    """
    A rule for expectations under the posteriors of GP sites.

    A rule of one's own is a class that defines :meth:`nodes`; and :meth:`value`,
    :meth:`average` and :meth:`check` where these do not do.
    :class:`~numpyro_sgp.TraceGP_ELBO` knows of no single rule.
    """

    #: Whether nodes are random keys for joint draws of f(X), rather than numbers.
    joint = False

    #: Whether expectations that a likelihood has in closed form are used.
    closed_forms = True

    #: Whether :meth:`nodes` takes ``slopes``, of shape ``(K, P, N)``: those of the P linear
    #: combinations that a likelihood takes at each row, by standard normal values of all K
    #: latent functions.
    needs_slopes = False
    #: Whether it is exact for squares of f, as of a Gaussian likelihood.
    exact_for_squares = False

    def nodes(self, rng_key: Array, shapes: Shapes, dtype) -> Nodes:
        """
        :param rng_key: random key.
        :param shapes: ``batch_shape + (N,)`` of each GP site.
        :param dtype: dtype of the nodes.
        :return: for each site S nodes, each broadcastable to its shape (or S keys), and
            weights of shape ``(S,)``, which sum to one.
        """
        raise NotImplementedError

    def value(self, q, x: Array) -> Array:
        """
        f at one node.

        :param q: of one component of the posterior at a GP site ``place`` (from x) and
            ``sample`` (from a key), and, in the ELBO, its ``marginals``.
        :param x: the node.
        """
        return q.place(x)

    def average(self, at: AtNodes) -> dict[str, Array]:
        """The expected log density of each site, a number whose gradient is right."""
        return {k: weighted(at.weights, v) for k, v in at.log_probs.items()}

    def check(self, sites: dict) -> None:
        """
        :param sites: what is known of each GP site,
            :class:`~numpyro_sgp.elbo.particle.GPSite`.
        :raises ValueError: for GP sites that the rule is not for.
        """
        if any(site.coupling.couples for site in sites.values()) and not self.joint:
            raise ValueError(
                "The likelihood ties rows of X together (its log density is no sum of "
                f"terms of one row each), and {self} uses the marginals of f alone. "
                "Use TraceGP_ELBO(MonteCarlo(num_samples, joint=True))."
            )
        for name, site in sites.items():
            if site.relaxed:
                _refuse_groups(name, site)


def check_expectation(expectation: Any) -> None:
    """
    :raises TypeError: if it is neither a rule nor None.
    """
    if not isinstance(expectation, Expectation | None):
        raise TypeError(
            "expectation must be a rule such as GaussHermite(20) or MonteCarlo(10), or "
            f"None, got {shown(expectation)}."
        )


def weighted(weights: Array, values: Array) -> Array:
    """The weighted mean over nodes of values of shape ``(S, ...)``, summed."""
    values = jnp.sum(values, axis=tuple(range(1, values.ndim)))
    return matmul(weights.astype(values.dtype), values)


def _refuse_groups(name, site):
    if site.joint_rows > 1:
        raise ValueError(
            f"GP site '{name}' draws groups of {site.joint_rows} rows together "
            "(joint_rows), but a tight bound and ScoreFunction use the marginals of f "
            "alone. Use tight='none' and MonteCarlo(num_samples)."
        )


@dataclass(frozen=True)
class MonteCarlo(Expectation):
    """
    Reparameterised Monte Carlo, with independent draws for each data point.

    :param num_samples: number of draws from each marginal.
    :param joint: whether to draw f(X) jointly, which costs O(B^3) for B rows. Only needed
        where terms of the likelihood involve several rows of X (a multivariate normal
        over rows, an integral of f); draws from the marginals would be wrong there.
    :param antithetic: whether draws come in pairs x, -x; ``num_samples`` must be even.
    :param sequence: ``"random"``, or ``"sobol"`` for quasi-Monte Carlo: Sobol points over
        the latent functions, shifted at random for each data point, which keeps the
        estimate unbiased. ``num_samples`` is best a power of two.
    :param seed: None for new draws at each step; a number for common random numbers, the
        same at every step, which make the objective a deterministic function.

    >>> import numpyro_sgp as sgp
    >>> sgp.MonteCarlo(8).joint, sgp.MonteCarlo(8, sequence="sobol").num_samples
    (False, 8)
    """

    num_samples: int = 10
    joint: bool = False
    antithetic: bool = False
    sequence: Sequence = "random"
    seed: int | None = None

    def __post_init__(self):
        _check_draws(self, 2 if self.antithetic else 1)
        if self.joint and (self.antithetic or self.sequence != "random"):
            raise ValueError(
                "joint draws are independent: leave antithetic and sequence at their "
                "defaults."
            )

    def nodes(self, rng_key: Array, shapes: Shapes, dtype) -> Nodes:
        """
        As :meth:`GaussHermite.nodes`, with draws of shape ``(S, *batch_shape, N)``, or
        with keys of shape ``(S,)`` for joint draws.
        """
        num = self.num_samples
        rng_key = rng_key if self.seed is None else jax.random.key(self.seed)
        if self.joint:
            keys = jax.random.split(rng_key, len(shapes))
            nodes = {
                name: jax.random.split(key, num)
                for name, key in zip(shapes, keys, strict=True)
            }
        else:
            options = self.antithetic, self.sequence, self.seed is not None
            nodes = _draws(rng_key, num, shapes, dtype, *options)
        return nodes, jnp.full(num, 1.0 / num, dtype)

    def value(self, q, x):
        return q.sample(x) if self.joint else q.place(x)

    def check(self, sites):
        super().check(sites)
        for name, site in sites.items():
            if self.joint and site.relaxed:
                raise ValueError(
                    f"GP site '{name}' has a tight bound, which is for expectations under "
                    "marginals of f; MonteCarlo(..., joint=True) draws rows together. Use "
                    "tight='none'."
                )
            if self.joint and site.num_components > 1:
                raise ValueError(
                    f"GP site '{name}' has a mixture posterior, whose components are "
                    "integrated one by one; MonteCarlo(..., joint=True) draws from all of "
                    "them. Use a single Gaussian (SVGP) for a likelihood that ties rows "
                    "together."
                )


@dataclass(frozen=True)
class ScoreFunction(Expectation):
    r"""
    Black-box expectations: the log likelihood is evaluated and never differentiated with
    respect to f [1].

    The expected log likelihood depends on the marginals of each data point alone (Theorem 1
    of [1]), so the gradients with respect to their means and variances are expectations of
    the log likelihood :math:`\ell_n` itself (eq. 25, 74-75),

    .. math::

        \frac{\partial E_n}{\partial \mu_n}
        = E\left[\frac{x}{\sigma_n} \ell_n\right], \qquad
        \frac{\partial E_n}{\partial \sigma_n^2}
        = E\left[\frac{x^2 - 1}{2 \sigma_n^2} \ell_n\right], \qquad
        f_n = \mu_n + \sigma_n x,

    and from there on the gradient flows by autodiff to q(u), the kernel and Z. Parameters
    of the likelihood get theirs by autodiff where it is differentiable.

    With ``control_variate`` a multiple of the score itself, whose mean is zero, is
    subtracted for each data point and latent function (appendix F). Its coefficient is
    estimated on one half of the draws and used on the other, which keeps the gradient
    unbiased.

    The likelihood must factorise over the rows of X: each observed site has one log
    likelihood for each row. A site whose shape shows otherwise is refused; one that mixes
    rows under a fitting shape cannot be detected.

    :param num_samples: number of draws from each marginal, even (with ``antithetic``
        a multiple of four).
    :param control_variate: whether to use it.
    :param antithetic: as in :class:`MonteCarlo`.
    :param sequence: as in :class:`MonteCarlo`.
    :param seed: as in :class:`MonteCarlo`.

    **References:**

    1. Bonilla, Krauth, Dezfouli (2018). Generic Inference in Latent Gaussian Process
       Models. https://arxiv.org/abs/1609.00577

    >>> import numpyro_sgp as sgp
    >>> sgp.ScoreFunction(200).control_variate
    True
    """

    num_samples: int = 1000
    control_variate: bool = True
    antithetic: bool = False
    sequence: Sequence = "random"
    seed: int | None = None

    def __post_init__(self):
        _check_draws(self, 4 if self.antithetic else 2)

    def nodes(self, rng_key: Array, shapes: Shapes, dtype) -> Nodes:
        """As :meth:`MonteCarlo.nodes`; the two halves of the draws are independent."""
        rng_key = rng_key if self.seed is None else jax.random.key(self.seed)
        num = self.num_samples // 2
        options = self.antithetic, self.sequence, self.seed is not None
        halves = [
            _draws(key, num, shapes, dtype, *options) for key in jax.random.split(rng_key)
        ]
        nodes = {name: jnp.concatenate([h[name] for h in halves]) for name in shapes}
        return nodes, jnp.full(2 * num, 0.5 / num, dtype)

    closed_forms = False

    def value(self, q, x):
        """f, whose gradient is not used: that of :meth:`average` takes its place."""
        mean, variance = q.marginals
        return jax.lax.stop_gradient(mean + jnp.sqrt(variance) * x)

    def average(self, at):
        """See :meth:`Expectation.average`; with the gradients of eq. (25) and (74-75)."""
        terms = super().average(at)
        num_rows = next(iter(at.nodes.values())).shape[-1]
        for name, log_prob in at.log_probs.items():
            values = jax.vmap(lambda value: by_row(value, num_rows))(log_prob)
            if values is None:
                raise ValueError(
                    f"ScoreFunction needs one log density for each of the {num_rows} rows, "
                    f"but site '{name}', which depends on f, has the shape "
                    f"{log_prob.shape[1:]}: it does not factorise over the data. Write the "
                    "likelihood inside numpyro.plate('data', N), or a factor as one value "
                    "for each row; or use MonteCarlo(num_samples, joint=True)."
                )
            terms[name] += sum(
                surrogate(*moments, at.nodes[site], values, self.control_variate)
                for site, moments in at.marginals.items()
            )
        return terms

    def check(self, sites):
        super().check(sites)
        for name, site in sites.items():
            _refuse_groups(name, site)
            if not site.independent_latents:
                raise ValueError(
                    f"GP site '{name}' has coupled latent functions, but ScoreFunction "
                    "needs them to be independent at each row. Use "
                    "MonteCarlo(num_samples), or covariance='full' for each function."
                )
        check_inputs_known(sites, "ScoreFunction needs")
        rows = {name: site.shape[-1] for name, site in sites.items()}
        if len(set(rows.values())) > 1:
            raise ValueError(
                "ScoreFunction needs all GP sites at the same rows, but they have "
                + ", ".join(f"{n} rows at '{name}'" for name, n in rows.items())
                + ". Use MonteCarlo(num_samples)."
            )


def check_inputs_known(sites: dict, who_needs: str) -> None:
    """
    :raises ValueError: if the posterior at a GP site depends on f at another one.
    """
    if any(site.fed_by for site in sites.values()):
        raise ValueError(
            f"{who_needs} GP sites whose inputs do not depend on another GP site; here one "
            "does (a deep GP). Use MonteCarlo(num_samples), and natural=False for "
            "fit_lbfgs."
        )


def _check_draws(rule, multiple):
    if rule.sequence not in ("random", "sobol"):
        raise ValueError(f"sequence must be 'random' or 'sobol', got {rule.sequence!r}.")
    num = check_whole(rule.num_samples, "num_samples")
    if num < 1 or num % multiple:
        what = "positive" if multiple == 1 else f"a positive multiple of {multiple}"
        raise ValueError(f"num_samples must be {what}, got {num}.")


def _draws(rng_key, num, shapes, dtype, antithetic, sequence, is_seeded=False):
    """
    Standard normal draws by site, each of shape ``(num, *batch_shape, N)``; of a seed the
    same in both precisions.
    """
    if is_seeded and dtype == jnp.float64:
        draws = _draws(rng_key, num, shapes, jnp.float32, antithetic, sequence)
        return {name: x.astype(dtype) for name, x in draws.items()}
    count = num // 2 if antithetic else num
    if sequence == "random":
        keys = jax.random.split(rng_key, len(shapes))
        draws = {
            name: jax.random.normal(key, (count, *shape), dtype)
            for (name, shape), key in zip(shapes.items(), keys, strict=True)
        }
    else:
        draws = _sobol(rng_key, count, shapes, dtype)
    if antithetic:
        draws = {name: jnp.concatenate([x, -x]) for name, x in draws.items()}
    return draws


def _sobol(rng_key, num, shapes, dtype):
    """Sobol points with one dimension for each latent function, shifted for each row."""
    from scipy.stats import qmc  # slow to import

    sizes = {name: int(np.prod(shape[:-1])) for name, shape in shapes.items()}
    # All of the next power of two, so that the points are balanced.
    engine = qmc.Sobol(sum(sizes.values()), scramble=True, rng=0)
    points = engine.random_base2(int(np.ceil(np.log2(max(num, 1)))))[:num]
    keys = jax.random.split(rng_key, len(shapes))
    tiny = float(jnp.finfo(dtype).eps)
    draws, end = {}, 0
    for (name, shape), key in zip(shapes.items(), keys, strict=True):
        start, end = end, end + sizes[name]
        own = jnp.asarray(points[:, start:end].reshape(num, *shape[:-1], 1), dtype)
        shift = jax.random.uniform(key, shape, dtype)
        uniform = jnp.clip((own + shift) % 1.0, tiny, 1.0 - tiny)
        draws[name] = jax.scipy.special.ndtri(uniform)
    return draws
