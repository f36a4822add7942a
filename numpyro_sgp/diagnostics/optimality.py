"""Has a fit converged? What q(u) has left to gain, and whether the loss still falls."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._flat import Flat
from numpyro_sgp._programs import NEEDS_KNOWN_DATA, Data, shared
from numpyro_sgp.distributions import SparsePosterior
from numpyro_sgp.elbo import TraceGP_ELBO
from numpyro_sgp.families import Block
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.linalg import einsum, matmul
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.coupling import feeding

#: Nats above which q(u) has not converged: a mean that is one standard deviation off.
ENOUGH_NATS = 0.5
#: Rows up to which :func:`~numpyro_sgp.diagnostics.to_arviz` computes them.
MAX_ROWS = 20_000
_NUM_KEYS = 64  # of a random bound
_MOST_STEPS = 200  # of conjugate gradients
_FEWEST_LOSSES = 40


def nats_left(guide, params: dict, *args, loss=None, rng_key=None, **kwargs) -> float:
    r"""
    About how many nats the bound would gain if q(u) went to its optimum, all other
    parameters as they are: whether training has converged, in the units of the bound.

    With q(u) = N(w, S) in whitened coordinates, the expected log density has slopes
    :math:`g_n` and curvatures :math:`\lambda_n = -2\, \partial E_n / \partial \sigma_n^2`
    at each row, and one full natural-gradient step [1] would lead to

    .. math::

        \hat S^{-1} = I + A \Lambda A^\top, \qquad
        \hat w = \hat S A (g + \Lambda \mu), \qquad A = L^{-1} K_{uf} .

    What is left is about :math:`\mathrm{KL}[q \| \hat q]`: exactly for a Gaussian
    likelihood, and within some 15 % for Bernoulli and Poisson ones between 0.05 and 50
    nats. It is made of derivatives of the loss by q(u), so that all data are needed and any
    likelihood will do; the cost is a few training steps on all data.

    Where q(u) has several independent parts (a diagonal covariance, the sets of SOLVE-GP,
    several latent functions or GP sites), it is the gain of the best q of that form, the
    means going to their optimum together, by conjugate gradients. Where the bound is random
    (a base guide that draws, :class:`~numpyro_sgp.MonteCarlo`), slopes are averaged over 64
    keys and the parts take a step each, the others fixed, whose gains are summed.

    :param guide: the guide, an :class:`~numpyro_sgp.AutoSparseGP` that is set up.
    :param params: parameters, ``result.params`` of ``svi.run``.
    :param args: arguments of the model, with all of the data.
    :param loss: the loss that was minimised; ``TraceGP_ELBO()`` if None.
    :param rng_key: random key; ``jax.random.key(0)`` if None.
    :param kwargs: keyword arguments of the model.
    :return: nats; infinite where the bound is not concave in q(u) at its present values,
        far from an optimum. NaN where q(u) is no Gaussian with a covariance of its own
        (mixtures, inverse-free, ODVGP), for deep GPs, and where GP sites are scaled.
    :raises TypeError: if the guide is no AutoSparseGP.
    :raises ValueError: if it is not set up, or ``params`` lack q(u).

    **References:**

    1. Salimbeni, Eleftheriadis, Hensman (2018). Natural Gradients in Practice:
       Non-Conjugate Variational Inference in Gaussian Process Models. AISTATS.
       https://arxiv.org/abs/1803.09151

    >>> import jax, jax.numpy as jnp, numpyro, optax
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> from numpyro_sgp.diagnostics.optimality import nats_left
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 20)[:, None]
    >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    >>> result = svi.run(jax.random.key(0), 10, X, X[:, 0], progress_bar=False)
    >>> nats_left(guide, result.params, X, X[:, 0]) > 1.0  # ten small steps
    True
    """
    return nats_left_and_why(guide, params, args, kwargs, loss, rng_key)[0]


def loss_drop(losses, share: float = 0.1, group: int = 1) -> tuple[float, float]:
    """
    How much the mean of the losses fell from the last part but one to the last, and the
    standard error of that, as if means of some losses after another were independent.

    :param losses: recorded losses, one for each step.
    :param share: of all losses in each part.
    :param group: losses in each of these means.
    :return: a pair ``(drop, se)``; NaN with fewer than 40 losses, or with fewer than two
        means in a part, or where one is not finite.
    """
    losses = np.asarray(losses, dtype=float)
    size = int(share * len(losses))
    tail, count = losses[len(losses) - 2 * size :], size // group
    if len(losses) < _FEWEST_LOSSES or count < 2 or not np.isfinite(tail).all():
        return float("nan"), float("nan")
    parts = tail[:size], tail[size:]
    means = [part[size - count * group :].reshape(count, group).mean(1) for part in parts]
    se = np.sqrt(sum(np.var(m, ddof=1) for m in means) / count)
    return float(np.mean(means[0]) - np.mean(means[1])), float(se)


def believed(losses) -> np.ndarray:
    """Losses but of steps that were taken back, NaN; all of them where the last is one."""
    losses = np.asarray(losses)
    finite = np.isfinite(losses)
    return losses[finite] if finite[-1:].all() else losses


def convergence_attrs(svi, result, args, kwargs) -> dict:
    """
    What :func:`~numpyro_sgp.diagnostics.to_arviz` keeps of an SVI's convergence:
    ``nats_left`` of an :class:`~numpyro_sgp.AutoSparseGP`, with ``nats_left_unknown``, the
    reason, where it is NaN; ``loss_drop`` and ``loss_drop_se`` of enough losses.

    :param svi: the inference problem.
    :param result: what ``svi.run`` gave.
    :param args: tuple of the arguments of the model, with all of the data.
    :param kwargs: dict of its keyword arguments.
    """
    attrs = {}
    if isinstance(svi.guide, AutoSparseGP):
        loss = svi.loss if isinstance(svi.loss, TraceGP_ELBO) else None
        try:
            nats, why = nats_left_and_why(
                svi.guide, result.params, args, kwargs, loss, None, MAX_ROWS
            )
        except Exception as error:  # a likelihood without derivatives, for one
            nats, why = float("nan"), f"{type(error).__name__}: {error}".splitlines()[0]
        attrs["nats_left"] = nats
        if why:
            attrs["nats_left_unknown"] = why
    if result.losses is not None:
        drop, se = loss_drop(believed(result.losses))
        if np.isfinite(drop):
            attrs.update(loss_drop=drop, loss_drop_se=se)
    return attrs


def check_fitted(guide, params: dict, what: str) -> None:
    """
    :param what: what needs them, for messages.
    :raises TypeError: if the guide is no AutoSparseGP.
    :raises ValueError: if it is not set up, or ``params`` lack q(u).
    """
    if not isinstance(guide, AutoSparseGP):
        raise TypeError(
            f"{what} needs an AutoSparseGP as the guide, got {type(guide).__name__}."
        )
    own = [name for name, role in guide.roles().items() if role == "variational"]
    missing = [name for name in own if name not in params]
    if missing:
        raise ValueError(
            f"params lack {missing} of this guide; they have {sorted(params)}. Give "
            "result.params of the SVI that has this guide."
        )


def nats_left_and_why(guide, params, args, kwargs, loss, rng_key, max_rows=None):
    """Nats, and why they are NaN."""
    return begin_nats_left(guide, params, args, kwargs, loss, rng_key, max_rows)()


def begin_nats_left(guide, params, args, kwargs, loss, rng_key, max_rows=None) -> Callable:
    """What is to be called for :func:`nats_left_and_why`; compiles beside."""
    check_fitted(guide, params, "nats_left")
    loss = TraceGP_ELBO() if loss is None else loss
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    still, why = _standing_still(guide, params, args, kwargs, max_rows)
    if why:
        return lambda: (float("nan"), why)

    data = Data(args, kwargs)

    def objective(given, steps):
        params, rng_key, number, arrays = given
        key = jax.random.fold_in(rng_key, number)

        def moved(*args, **kwargs):
            with _moving(steps):
                return guide(*args, **kwargs)

        args, kwargs = data.filled(arrays)
        found = loss.loss(key, params, guide.model, moved, *args, **kwargs)
        return sum(jax.tree.leaves(found))  # by site where it has sum_sites=False

    slopes = shared(jax.value_and_grad(objective, argnums=1), briefly=True)
    first = params, rng_key, np.int32(0), data.arrays
    try:
        slopes.prepare(first, still)
    except NEEDS_KNOWN_DATA:  # a model that looks at its data
        data = Data(args, kwargs, known=True)
        first = *first[:3], data.arrays

    def finish():
        numbers = map(np.int32, range(_NUM_KEYS))
        pairs = (slopes((*first[:2], i, first[3]), still) for i in numbers)
        (value, slope), (other, second) = next(pairs), next(pairs)
        value, other = float(value), float(other)
        if not (np.isfinite(value) and np.isfinite(other)):
            return float("nan"), "the loss is not finite"
        if value == other:
            parts = _parts(slope)
            if len(parts) == 1 and parts[0][1].ndim == 2:
                return _sum_of_steps(parts), ""
            return _joint_step(objective, first, still, slope), ""
        return _extrapolated([slope, second, *(found for _, found in pairs)]), ""

    return finish


def _extrapolated(each) -> float:
    """
    Nats by slopes averaged over keys: noise adds to them in proportion to 1 / keys, which
    is extrapolated to none.
    """

    def of_mean(each):
        mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *each)
        return _sum_of_steps(_parts(mean))

    half = len(each) // 2
    whole, halves = of_mean(each), 0.5 * (of_mean(each[:half]) + of_mean(each[half:]))
    return max(2.0 * whole - halves, 0.0) if np.isfinite(halves) else whole


def _moving(steps):
    """
    Moves q(u) at GP sites in its own standardised coordinates: a block N(w, P P') becomes
    N(w + P v, P (I + T) (I + T)' P').

    :param steps: pairs (v, T) by site, one for each block.
    """

    def at_site(site):
        posterior, reinterpreted = messages.unwrap(site["fn"])
        pairs = zip(posterior.q.parts, steps[site["name"]], strict=True)
        moved = posterior.with_parts([_moved(block, *step) for block, step in pairs])
        return messages.rewrap(moved, reinterpreted), None

    return messages.AtGPSites(at_site, are=messages.is_sparse_posterior)


def _moved(block, v, T):
    sqrt = block.sqrt
    if block.is_diagonal:
        return Block(block.mu + sqrt * v, sqrt * (1.0 + T))
    if block.upper:  # a lower factor of the same covariance
        sqrt = jnp.linalg.qr(sqrt.mT, mode="r").mT
    mu = block.mu + einsum("...mk,...k->...m", sqrt, v)
    return Block(mu, sqrt + jnp.tril(matmul(sqrt, jnp.tril(T))))


def _standing_still(guide, params, args, kwargs, max_rows):
    """Zeros for :func:`_moving`, or why there are none."""
    found, why = {}, []

    def run(params):
        trace = messages.trace_of(guide, args, kwargs, data=params)
        checks.check_whole_plates(trace, "nats_left is of all rows")
        steps = {}
        for name, site in trace.items():
            if not messages.is_sparse_posterior(site):
                continue
            posterior, _ = messages.unwrap(site["fn"])
            found[name] = posterior.shape(), posterior.prior.X.dtype
            gaussian = isinstance(posterior, SparsePosterior)
            blocks = posterior.q.parts if gaussian else None
            if blocks is None:
                approximation = type(guide.approximations[name]).__name__
                why.append(
                    f"q(u) at '{name}' is no Gaussian with a mean and a covariance of its "
                    f"own ({approximation})"
                )
            elif site["scale"] is not None:
                why.append(f"GP site '{name}' is scaled (numpyro.handlers.scale)")
            else:
                steps[name] = [
                    (jnp.zeros_like(b.mu), jnp.zeros_like(b.sqrt)) for b in blocks
                ]
        return steps

    # The parameters' shapes are known, and nothing is computed.
    steps = jax.eval_shape(run, params)
    rows = max(shape[-1] for shape, _ in found.values())
    if not why and max_rows is not None and rows > max_rows:
        why.append(f"there are {rows} rows, more than {max_rows}")
    if not why and len(found) > 1:
        shapes = {name: shape for name, (shape, _) in found.items()}
        dtype = jnp.result_type(*(dtype for _, dtype in found.values()))

        def trace_at(f):
            where = guide.model, args, kwargs
            return messages.trace_of(*where, data=params, at_site=messages.at_values(f))

        if below := feeding(trace_at, shapes, dtype):
            why.append(f"GP sites {sorted(below)} feed others (a deep GP)")
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), steps)
    return zeros, why[0] if why else ""


def _parts(slopes):
    """
    For each independent Gaussian, the slope r by v, and the Hessian W by v, which that by T
    tells: shapes ``(M,)`` and ``(M, M)``, or ``(M,)`` for the diagonal of W.
    """
    parts = []
    for r, G in (pair for pairs in slopes.values() for pair in pairs):
        r, G = np.asarray(r, dtype=float), np.asarray(G, dtype=float)
        # dL/dS = P^-T (phi + phi') P^-1 / 2, phi the lower triangle of G with half the
        # diagonal, and the KL has -P^-T P^-1 / 2 in it.
        if G.ndim == r.ndim:
            W = 1.0 + G
        else:
            phi = np.tril(G) - 0.5 * np.eye(G.shape[-1]) * G
            W = np.eye(G.shape[-1]) + phi + np.swapaxes(phi, -1, -2)
        M = r.shape[-1]
        shape = (-1, M) if G.ndim == r.ndim else (-1, M, M)
        parts += zip(r.reshape(-1, M), W.reshape(shape), strict=True)
    return parts


def _eigen(W):
    """Eigenvalues and, unless it is diagonal, eigenvectors."""
    return (W, None) if W.ndim == 1 else np.linalg.eigh(W)


def _sum_of_steps(parts) -> float:
    """KL from each Gaussian to where its natural step leads, summed."""
    total = 0.0
    for r, W in parts:
        values, V = _eigen(W)
        if np.min(values) <= 0.0:
            return float("inf")
        r = r if V is None else V.T @ r
        total += 0.5 * np.sum(values - 1.0 - np.log(values)) + 0.5 * np.sum(r**2 / values)
    return float(total)


def _joint_step(objective, given, still, slopes) -> float:
    """
    The covariances' share of that, and what all means gain together: half of r' H^-1 r with
    H the Hessian by all v, preconditioned by its blocks W.
    """
    factors = [(*_eigen(W), len(r)) for r, W in _parts(slopes)]
    if min(np.min(values) for values, *_ in factors) <= 0.0:
        return float("inf")
    ends = np.cumsum([size for *_, size in factors])[:-1]

    def means(steps):
        return {name: [v for v, _ in pairs] for name, pairs in steps.items()}

    def slope(given, v):
        steps = {
            name: [(v, T) for v, (_, T) in zip(v[name], pairs, strict=True)]
            for name, pairs in still.items()
        }
        return means(jax.grad(objective, argnums=1)(given, steps))

    zeros = means(still)
    flat = Flat(zeros)

    def along(given, direction):
        _, Hd = jax.jvp(partial(slope, given), (zeros,), (direction,))
        return Hd

    times_hessian = shared(along)

    def precondition(r):
        solved = []
        for part, (values, V, _) in zip(np.split(r, ends), factors, strict=True):
            solved.append(part / values if V is None else V @ (V.T @ part / values))
        return np.concatenate(solved)

    r = flat.ravel(means(slopes)).astype(float)
    z = precondition(r)
    p, rz, gained = z, r @ z, 0.0
    for _ in range(_MOST_STEPS):
        if rz <= 1e-10 * max(gained, 1e-6):
            break
        Hp = flat.ravel(times_hessian(given, flat.unravel(p))).astype(float)
        curvature = p @ Hp
        if curvature <= 0.0:
            return float("inf")
        gained += rz * rz / curvature
        r = r - rz / curvature * Hp
        z = precondition(r)
        rz, old = r @ z, rz
        p = z + rz / old * p
    spread = sum(np.sum(values - 1.0 - np.log(values)) for values, *_ in factors)
    return float(0.5 * (spread + gained))
