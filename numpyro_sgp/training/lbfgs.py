"""Full-batch training by L-BFGS, of all parameters together or of blocks in turn."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import jax
from numpyro.infer.svi import SVI, SVIRunResult, SVIState
from tqdm import tqdm

from numpyro_sgp._checks import check_key, check_not_negative, check_whole
from numpyro_sgp._threads import alone
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.elbo import TraceGP_ELBO
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.parameters import GROUPS, parameter_blocks
from numpyro_sgp.tracing.row_indices import check_row_indices
from numpyro_sgp.training.descent import Descent, warn_of_edge
from numpyro_sgp.training.natural_gradients import pseudo_data_names
from numpyro_sgp.training.results import FitInterrupted, cause


@alone
def fit_lbfgs(
    svi: SVI,
    rng_key: jax.Array,
    *args,
    max_iterations: int | Mapping[str, int] = 1000,
    blocks: Sequence | None = None,
    sweeps: int = 50,
    tol: float = 1e-12,
    sweep_tol: float = 1e-6,
    natural: bool | None = None,
    init_params: dict | None = None,
    init_state: SVIState | None = None,
    progress_bar: bool = True,
    **kwargs,
) -> SVIRunResult:
    """
    Minimises the loss of an :class:`~numpyro.infer.SVI` on all data by L-BFGS.

    The loss uses the same random numbers at each evaluation, so that one that draws
    (:class:`~numpyro_sgp.MonteCarlo`, a base guide such as ``AutoNormal``) is a function
    without noise; with few draws its optimum fits these draws. Points where the loss or
    its gradient is not finite are stepped back from. SciPy's optimiser runs on the host in
    float64, whatever the dtype of the model.

    With ``blocks``, L-BFGS runs over one block of parameters at a time while the others
    stay as they are, as SAVIGP trains [1, section 8]; parameters in no block keep their
    values. Begin with ``"variational"``: at its start, where q(u) is the prior, the bound
    does not depend on kernel and inducing points. An evaluation costs as much as one for
    all parameters.

    :param svi: the inference problem; its optimiser is not used.
    :param rng_key: random key, of starting values as in ``svi.run``, and of the fixed
        random numbers (with ``init_state`` too: use the same key to go on with the same
        loss).
    :param args: arguments of model and guide, with all data.
    :param max_iterations: of L-BFGS; with blocks, in each visit of a block, or a dict of
        such numbers by block (a list of names under its names joined by ``"+"``).
    :param blocks: what to train in turn: each block is the name of a parameter, a group of
        :func:`~numpyro_sgp.guides.parameters.parameter_blocks` (``"variational"``,
        ``"inducing"``, ``"kernel"``, ``"likelihood"``, ``"other"``), or a list of those.
        The name of a parameter goes before that of a group; empty groups are left out.
        None for all parameters together.
    :param sweeps: how often to go through the blocks at most.
    :param tol: L-BFGS ends where an iteration lowers the loss by less than this,
        relative to the loss (or to 1, if larger); at least the resolution of the dtype.
    :param sweep_tol: the sweeps end where one lowers the loss by less than this, relative
        to the same.
    :param natural: whether q(u) goes to its optimum by natural gradients before each
        evaluation, so that L-BFGS sees the other parameters alone. It takes few iterations
        then, and most often far less time. For Gaussian q(u); the default for those given
        by ``covariance="pseudo_data"``. Not with ``blocks``.
    :param init_params: starting values, as in ``svi.run``.
    :param init_state: state to start from, of ``svi.init`` or another result.
    :param progress_bar: whether to show block, iteration and loss.
    :return: ``params`` as ``svi.run`` returns them, the best that were met; ``losses``, the
        loss at the start and after each iteration; and ``state``, with the optimiser of
        ``svi`` fresh at these parameters, from which ``svi.update`` and ``svi.run`` go on.
        ``svi.evaluate(result.state, ...)`` is ``losses[-1]``.
    :raises ValueError: if a plate is subsampled, the loss is not finite at the start, there
        are no parameters or none of a block's name, q(u) has ``covariance="dual"``, or
        options contradict each other.
    :raises FitInterrupted: where the loss raises an error after the first evaluation, or
        the user interrupts: its ``result`` is the best so far. (Errors in the first
        evaluation are raised as they are.)

    **References:**

    1. Bonilla, Krauth, Dezfouli (2018). Generic inference in latent Gaussian process
       models. https://arxiv.org/abs/1609.00577

    >>> import jax, jax.numpy as jnp, numpyro, optax
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(5, train_inducing=False))
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    >>> result = sgp.fit_lbfgs(svi, jax.random.key(0), X, y, progress_bar=False)
    >>> print(f"{result.losses[0]:.2f} -> {result.losses[-1]:.2f}")
    12.81 -> 9.20
    """
    if init_params is not None and init_state is not None:
        raise ValueError("Give init_params or init_state, not both.")
    check_key(rng_key)
    for name, value in {"tol": tol, "sweep_tol": sweep_tol}.items():
        check_not_negative(value, name)
    args, kwargs = as_arrays(svi.model, args, kwargs)
    check_row_indices(svi.model, args, {**kwargs, **svi.static_kwargs})
    state = init_state
    if state is None or svi.constrain_fn is None:  # which gives svi its transforms
        fresh = svi.init(rng_key, *args, init_params=init_params, **kwargs)
        state = fresh if state is None else state
    state = state._replace(rng_key=jax.random.split(rng_key, 3)[0])
    if natural is None:
        natural = blocks is None and suits_natural(svi)
    if natural and not isinstance(svi.loss, TraceGP_ELBO):
        raise ValueError(
            f"natural=True needs TraceGP_ELBO as the loss, not {type(svi.loss).__name__}."
        )
    if natural and blocks is not None:
        raise ValueError("natural=True trains q(u) by itself; leave out blocks.")
    descent = Descent(svi, state, args, {**kwargs, **svi.static_kwargs}, natural)
    visits = _visits(descent, blocks, max_iterations)
    if blocks is None:
        sweeps = 1
    else:
        check_whole(sweeps, "sweeps", least=1)
    descent.start()
    try:
        total = visits[0][2] if blocks is None else None
        with tqdm(total=total, disable=not progress_bar) as bar:
            for sweep in range(sweeps):
                before = descent.loss
                for label, index, iterations in visits:
                    where = f"sweep {sweep + 1}, {label}, " if blocks is not None else ""
                    descent.run(index, iterations, tol, _show(bar, where))
                    if descent.at_edge:
                        warn_of_edge()
                if before - descent.loss <= sweep_tol * max(abs(descent.loss), 1.0):
                    break
            bar.total = bar.n  # it converged, or the bar is full anyway
            bar.refresh()
    except (Exception, KeyboardInterrupt) as error:
        raise FitInterrupted(
            f"Training stopped after {len(descent.losses) - 1} iterations by "
            f"{cause(error)}\nThe best parameters so far (loss "
            f"{descent.loss:.6g}) are in the attribute 'result' of this error; go on from "
            "them with init_state=error.result.state.",
            descent.result(),
        ) from error
    return descent.result()


def suits_natural(svi) -> bool:
    """Whether natural gradients can train q(u) of a guide."""
    loss = svi.loss
    if not isinstance(loss, TraceGP_ELBO) or getattr(loss.expectation, "joint", False):
        return False
    with suppress(ValueError):
        pseudo_data_names(svi.guide)
        return loss.num_particles == 1 and loss.sum_sites and not svi.guide.couples_rows
    return False


def _visits(descent, blocks, max_iterations):
    """Label, place in the vector and iterations of each block."""
    if blocks is None:
        if isinstance(max_iterations, Mapping):
            raise ValueError("max_iterations is a dict by block, but blocks is None.")
        # Where there are but sites, natural gradients alone find the optimum.
        others = set(descent.free) - set(descent.profiled) or set(descent.free)
        visits = [("all", descent.index(others), max_iterations)]
    else:
        if isinstance(blocks, str):
            raise ValueError(f"blocks is a sequence of blocks: blocks=[{blocks!r}].")
        blocks = [[b] if isinstance(b, str) else list(b) for b in blocks]
        names = _names(descent, [name for block in blocks for name in block])
        labels = ["+".join(block) for block in blocks]
        limits = max_iterations
        if not isinstance(limits, Mapping):
            limits = dict.fromkeys(labels, limits)
        if set(limits) != set(labels):
            raise ValueError(
                f"max_iterations is given for {sorted(limits)}, but the blocks are "
                f"{sorted(set(labels))}. Give one number, or one for each block."
            )
        visits = []
        for label, block in zip(labels, blocks, strict=True):
            index = descent.index({name for part in block for name in names[part]})
            if index.size:
                visits.append((label, index, limits[label]))
        if not visits:
            raise ValueError(f"No parameter is in any of the blocks {labels}.")
    for label, _, limit in visits:
        check_whole(limit, f"max_iterations (of '{label}')", least=1)
    return visits


def _names(descent, parts):
    """The parameters that names of parameters and of groups stand for."""
    params, guide = descent.start_params, descent.svi.guide
    found = {name: [name] for name in params}
    is_sparse = isinstance(guide, AutoSparseGP)
    if is_sparse and any(part not in found for part in parts):
        groups = parameter_blocks(guide, params, *descent.args, **descent.kwargs)
        found = {**groups, **found}
    unknown = sorted({part for part in parts if part not in found})
    if unknown:
        groups = f"the groups {list(GROUPS)}" if is_sparse else "no groups"
        raise ValueError(
            f"blocks has {unknown}, but there are {groups} (groups need an AutoSparseGP) "
            f"and the parameters {sorted(params)}."
        )
    return found


def _show(bar, where):
    def show(loss):
        bar.update()
        bar.set_postfix_str(f"{where}loss: {loss:.4f}", refresh=False)

    return show
