"""The result of nested inference, which is asked what a fit is asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._checks import check_key, check_levels, check_sample_shape, check_whole
from numpyro_sgp._threads import methods_alone
from numpyro_sgp.diagnostics.arviz import Found, to_arviz
from numpyro_sgp.distributions.arguments import with_given
from numpyro_sgp.fitting import Fitted
from numpyro_sgp.fitting.log_score import LogScore
from numpyro_sgp.fitting.options import with_options
from numpyro_sgp.fitting.problem import as_plain_arrays
from numpyro_sgp.fitting.verdict import Verdict
from numpyro_sgp.integrated.check import check
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.functions import MixtureFunctions, functions
from numpyro_sgp.integrated.marginals import (
    Mixture,
    axes_of_rows,
    centred,
    draw_field,
    given,
    gp_shapes,
    made_of_responses,
    marginals,
)
from numpyro_sgp.integrated.nodes import Nodes
from numpyro_sgp.integrated.packing import packed
from numpyro_sgp.integrated.placing import arguments_at
from numpyro_sgp.integrated.responses import at_draws, densities, loose, predicted
from numpyro_sgp.integrated.units_of_data import few_rows_do
from numpyro_sgp.integrated.views import Shown
from numpyro_sgp.plots.posterior import Plotted
from numpyro_sgp.predictive import Prediction, Predictions
from numpyro_sgp.predictive.predictions import with_reasons

_THETA_DRAWS = 8192
_TOGETHER = 64  # draws that the model runs with at one time
_LEVELS = 0.05, 0.5, 0.95


@methods_alone
class Nested(Plotted):
    """
    The posterior of a model with its hyperparameters integrated, as
    :func:`~numpyro_sgp.nested` finds it.

    Arguments of the methods, but for options by name, are those of the model, most often
    new inputs ``X_new``. Printed, it is a summary.

    :param field: the model: what is the Gaussian field, and what are hyperparameters.
    :param nodes: hyperparameters with weights, and the field's best Gaussian at each.
    :param args: arguments of the model with the training data.
    :param kwargs: its keyword arguments.
    :param seconds: how long it took.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 12)[:, None]
    >>> data = X, jnp.sin(X[:, 0])
    >>> posterior = sgp.nested(model, sgp.SVGP(4), data, progress_bar=False)
    >>> posterior.predict(X[:3])["y"].mean.shape
    (3,)
    >>> posterior.sample(jax.random.key(0), X[:3], sample_shape=(5,))["f"].shape
    (5, 3)
    """

    kind: ClassVar[str] = "nested"  # what files call it

    def __init__(
        self, field: Field, nodes: Nodes, args: tuple, kwargs: dict, seconds: float
    ):
        self.field, self.nodes = field, nodes
        self.model, self.guide = field.model, field.guide
        self.args, self.kwargs, self.seconds = args, kwargs, seconds
        self._thetas: dict[str, np.ndarray] | None = None
        self._verdict: Verdict | None = None
        #: Arguments with a row or two of the data, from a file.
        self.examples: tuple | None = None

    # ---- in numbers -----------------------------------------------------------------

    @property
    def log_evidence(self) -> float:
        """
        Log evidence, with all hyperparameters integrated: a lower bound but for the error
        of the nodes and of weighed draws, if these are not too few (``print`` tells).
        """
        return self.nodes.log_evidence

    @property
    def hyperparameters(self) -> dict[str, np.ndarray]:
        """8192 draws of each hyperparameter from its posterior, ``(8192, *shape)``."""
        if self._thetas is None:
            self._thetas = self._constrained(self.nodes.draws(_THETA_DRAWS)[0])
        return self._thetas

    def _constrained(self, free) -> dict[str, np.ndarray]:
        """Hyperparameters by name, of unconstrained vectors ``(S, p)``."""
        if not self.field.thetas:
            return {}

        def run(free, values, where):
            def one(free):
                trace = given(self.field, free, values, *where, jax.random.key(0))
                return {name: trace[name]["value"] for name in self.field.thetas}

            return jax.lax.map(one, free, batch_size=256)

        field = self.field
        shapes = gp_shapes(field, self.nodes.points, self.args, self.kwargs)
        zeros = {name: np.zeros(shape) for name, shape in shapes.items()}
        zeros |= {name: np.zeros(field.shapes[name]) for name in field.effects}
        found = at_draws(field, run, free, zeros, self.args, self.kwargs)
        return {name: np.asarray(found[name]) for name in field.thetas}

    def summary(self, levels: Sequence[float] = _LEVELS) -> Any:
        """
        Mean, standard deviation and quantiles of hyperparameters and effects; of those at
        points, whose spread is not known, these are NaN.

        :param levels: of the quantiles.
        :return: a :class:`pandas.DataFrame` with a row for each number.
        """
        import pandas as pd

        rows, levels = {}, check_levels(levels)

        def add(name, mean, sd, quantiles):
            for index in np.ndindex(np.shape(mean)):
                label = f"{name}[{', '.join(map(str, index))}]" if index else name
                found = {"mean": mean[index], "sd": sd[index]}
                shown = [f"{100 * level:g}%" for level in levels]
                rows[label] = found | dict(zip(shown, quantiles[:, *index], strict=True))

        for name, draws in self.hyperparameters.items():
            wide, known = draws.astype(float), np.nan if self._held else 1.0
            quantiles = known * np.quantile(wide, levels, axis=0)
            add(name, wide.mean(0), known * wide.std(0), quantiles)
        if self.field.effects:
            effects = self.field.effects
            found = marginals(self.field, self.nodes, self.args, self.kwargs, effects)
            for name in effects:
                q = found[name]
                add(name, q.mean, q.sd, q.quantile(levels))
        return pd.DataFrame.from_dict(rows, orient="index")

    # ---- posteriors and predictions -------------------------------------------------

    def posterior(self, *args, **kwargs) -> dict[str, Mixture]:
        """
        The posterior of each GP site, of each effect, and of each deterministic site that
        is linear in them (:func:`numpyro.deterministic` of a sum of sites, say). Sites that
        combine rows of a GP site (a mean over rows) are in :meth:`sample` alone, unless
        inducing points leave nothing open there.

        :param args: arguments of the model, ``X_new`` most often.
        :return: by site a mixture of Gaussians over nodes, with ``mean``, ``variance``,
            ``sd`` and ``quantile`` in the shape of the site.
        :raises ValueError: if the inputs do not fit the model.
        """
        args, kwargs = self._arguments(args, kwargs, self.posterior)
        return marginals(self.field, self.nodes, args, kwargs)

    def quantiles(self, quantiles: Sequence[float], *args, **kwargs) -> dict:
        """
        Posterior quantiles of each number of hyperparameters, effects, GP sites and sums of
        them.

        :param quantiles: levels between 0 and 1.
        :param args: arguments of the model; the training data if left out.
        :return: by site an array with a leading axis of the levels.
        """
        levels, found = check_levels(quantiles), self.posterior(*args, **kwargs)
        out = {k: np.quantile(v, levels, axis=0) for k, v in self.hyperparameters.items()}
        return out | {name: q.quantile(levels) for name, q in found.items()}

    def median(self, *args, **kwargs) -> dict:
        """
        Posterior medians of what :meth:`quantiles` has.

        :param args: arguments of the model; the training data if left out.
        """
        found = self.quantiles([0.5], *args, **kwargs)
        return {name: values[0] for name, values in found.items()}

    def predict(
        self,
        *args,
        quantiles: Sequence[float] = (0.05, 0.95),
        num_draws: int = 2048,
        rng_key: Array | None = None,
        **kwargs,
    ) -> Predictions:
        """
        Means, standard deviations and quantiles of GP sites, of deterministic sites, and of
        the responses at new inputs, those that do not depend on GP sites among them; of
        classes the probabilities. Those of GP sites and of sums of them are exact for the
        mixture over nodes; responses and other deterministic sites are averaged over draws
        of all latents. Deterministic sites that combine rows of a GP site are in
        :meth:`sample` alone.

        :param args: arguments of the model, ``X_new`` most often.
        :param quantiles: levels between 0 and 1.
        :param num_draws: draws of all latents, for the responses and what is not linear.
        :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
        :return: a :class:`~numpyro_sgp.Prediction` for each site.
        :raises ValueError: if levels are not between 0 and 1, or the inputs do not fit.
        """
        levels = check_levels(quantiles)
        check_whole(num_draws, "num_draws", least=1)
        args, kwargs = self._arguments(args, kwargs, self.predict)
        found, known = {}, marginals(self.field, self.nodes, args, kwargs)
        axes = axes_of_rows(self.field, {k: q.mean.shape for k, q in known.items()})
        for name, q in known.items():
            if name in self.field.effects:
                continue
            values = q.quantile(levels) if levels else np.zeros((0, *q.mean.shape))
            mean, sd, at = map(jnp.asarray, (q.mean, q.sd, values))
            found[name] = Prediction(mean, sd, at, levels, None, axes[name])
        rng_key = jax.random.key(0) if rng_key is None else rng_key
        check_key(rng_key)
        free, values = self._draw(rng_key, num_draws, args, kwargs, joint=False)
        values |= {k: centred(v, known[k]) for k, v in values.items() if k in known}
        where = self.field, free, values, args, kwargs, levels, rng_key
        found |= predicted(*where, known=frozenset(known))
        absent = [name for name in self.field.responses if name not in found]
        return with_reasons(self.guide, found, absent)

    def log_score(
        self, *args, rng_key: Array | None = None, num_draws: int = 2048, **kwargs
    ) -> dict[str, LogScore]:
        """
        Log predictive density of observations, with all latents integrated: over the nodes
        and, given each, over the linear predictors of a row. Where a row has more than 20
        of these, or observations are not by row, it is averaged over draws.

        :param args: arguments of the model with observations, such as ``X_new, y_new``.
        :param rng_key: key of draws; ``jax.random.key(0)`` if None.
        :param num_draws: draws of all latents.
        :return: for each observed site the mean over the rows that no mask leaves out, and
            the density of each row.
        :raises ValueError: if there are no observations.
        """
        check_whole(num_draws, "num_draws", least=1)
        args, kwargs = self._arguments(args, kwargs, self.log_score)
        rng_key = jax.random.key(0) if rng_key is None else rng_key
        check_key(rng_key)
        more = {"args": args, "kwargs": kwargs}
        draw = partial(self._draw, rng_key, joint=False, **more)
        found = densities(self.field, self.nodes, draw, num_draws, **more)
        if not found:
            raise ValueError(
                "The model has no observed site, or factor of each row, with these "
                "arguments. Pass observations too: log_score(X_new, y_new)."
            )
        return {name: LogScore(float(jnp.nanmean(v)), v) for name, v in found.items()}

    def check(self, *args, **kwargs) -> Verdict:
        """
        What the result misses, in nats: of the optimum of q(w), of the nodes, of what more
        inducing points would gain (at five nodes, and two more at the ends of each of the
        first ten coordinates) and of what importance weights see between q(w) and the
        field's posterior (at up to five). What is the same at all leaves nodes' weights
        right. Of one node the hyperparameters are at a point, which is told too; and, where
        a likelihood is not log-concave, optima of q(w) beside the one that was found, to
        which natural steps lead from other means.

        :param args: arguments of the model; those of the inference if left out.
        :return: a :class:`~numpyro_sgp.fitting.verdict.Verdict`, which prints as a table.
        """
        args, kwargs = self._arguments(args, kwargs, self.check)
        self._verdict = check(self.field, self.nodes, args, kwargs)
        return self._verdict

    # ---- draws ----------------------------------------------------------------------

    def sample(self, key: Array, *args, sample_shape: tuple = (), **kwargs) -> dict:
        """
        Joint draws of all latent and deterministic sites from the posterior, rows of GP
        sites drawn together, at a cost of O(N^3) for each node that is drawn from. Where
        deterministic sites depend on responses, these are drawn too; sites of those that
        cannot be drawn are left out.

        The field is drawn from that of a node. Hyperparameters on which predictors depend
        beside it (levels, amplitudes) are those of the node too; others, and all of
        :attr:`hyperparameters`, are drawn from the density between nodes.

        :param key: random key.
        :param args: arguments of the model, ``X_new`` most often; the training data if left
            out.
        :param sample_shape: shape of the sample.
        :return: values by site, each of shape ``sample_shape + site shape``.
        """
        if args or kwargs or self.examples is not None:
            args, kwargs = self._arguments(args, kwargs, self.sample)
        else:  # all rows, also of a model that takes some of them
            args, kwargs = self.args, self.kwargs
        check_key(key, "key")
        sample_shape = check_sample_shape(sample_shape)
        number = int(np.prod(sample_shape))
        free, values = self._draw(key, max(number, 1), args, kwargs, joint=True)
        some = jnp.asarray(free[0], self.field.dtype)
        is_open = made_of_responses(self.field, some, args, kwargs)
        drawn = self.field.responses if is_open else ()
        keys = jax.random.split(jax.random.fold_in(key, 1), len(free))

        def run(free, values, where, keys):
            def one(inputs):
                *latents, key = inputs
                trace = given(self.field, *latents, *where, key, drawn)
                return {
                    name: site["value"]
                    for name, site in trace.items()
                    if name in self.field.latents or site["type"] == "deterministic"
                    if is_open.get(name, True)
                }

            return jax.lax.map(one, (free, values, keys), batch_size=_TOGETHER)

        found = at_draws(self.field, run, free, values, args, kwargs, keys).items()
        return {k: v[:number].reshape(*sample_shape, *v.shape[1:]) for k, v in found}

    @cached_property
    def _loose(self):
        known = None if self.examples else (self.args, self.kwargs)
        return loose(self.field, self.nodes, known)

    def _draw(self, key, number, args, kwargs, joint):
        """Draws of unconstrained hyperparameters, and of the field's values."""
        seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
        free, which = self.nodes.draws_beside(joint and self._loose, number, seed)
        where = which, seed + 1, args, kwargs, joint
        return free, draw_field(self.field, self.nodes, *where)

    def functions(
        self, key: Array, shape: tuple | int = (), num_features: int = 1024
    ) -> dict[str, MixtureFunctions]:
        """
        Draws of whole functions, which can be evaluated anywhere, with hyperparameters
        drawn from the nodes; those of all GP sites are drawn together.

        :param key: random key.
        :param shape: shape of the draws, or their number.
        :param num_features: random features of each draw; see
            :meth:`GPPosterior.sample_functions`.
        :return: for each GP site a function from X of shape ``(N, D)`` to values of shape
            ``shape + batch_shape + (N,)``.
        :raises NotImplementedError: for kernels without random features.
        :raises ValueError: if ``num_features`` is not positive.
        """
        check_key(key, "key")
        check_whole(num_features, "num_features", least=1)
        args, kwargs = self.examples or (self.args, self.kwargs)
        shape = check_sample_shape((shape,) if isinstance(shape, int) else shape)
        where = self.field, self.nodes, key, shape, num_features
        return functions(*where, args, kwargs)

    def shown(self) -> Shown:
        """What figures ask of it."""
        return Shown(self)

    # ---- ArviZ ----------------------------------------------------------------------

    def to_arviz(self, *args, num_samples: int = 1000, **kwargs) -> Any:
        """
        The posterior as ArviZ data, with the groups that NUTS has; see
        :func:`~numpyro_sgp.to_arviz`.

        :param args: arguments of the model with all of the data; those of the inference if
            left out.
        :param num_samples: number of draws.
        :param kwargs: options of :func:`~numpyro_sgp.to_arviz` (``rng_key``, ``coords``,
            ``dims``), and keyword arguments of the model.
        """
        own = self._with_options(args, {}, self.to_arviz, to_arviz)
        if not args:
            args, own = self._arguments((), {}, self.to_arviz)
        args, kwargs = with_given(self.model, args, own, kwargs)
        kwargs.setdefault("seconds", self.seconds)
        return to_arviz(self, *args, num_samples=num_samples, **kwargs)

    def found_draws(
        self, num_samples: int, rng_key: Array, args: tuple, kwargs: dict
    ) -> Found:
        """What :func:`~numpyro_sgp.to_arviz` asks for."""
        args, kwargs = as_plain_arrays(self.model, args, kwargs)
        draws = self.sample(rng_key, *args, sample_shape=(num_samples,), **kwargs)
        attrs = {
            "method": "nested",
            "approximation": str(self.guide.approximation),
            **(self._bound_attrs(self.log_evidence) if self.nodes.is_bound else {}),
            "num_parameters": self.field.size * (self.field.size + 3) // 2,
            "num_nodes": len(self.nodes.nodes),
            "effective_nodes": self.nodes.effective,
        }
        if self._verdict is not None:
            attrs |= self._verdict.attrs
        draws = {name: np.asarray(v)[None] for name, v in draws.items()}
        return Found(draws, self.model, {}, args, kwargs, attrs)

    @property
    def _held(self) -> list[str]:
        """Hyperparameters at a point, as those of one node are."""
        return [] if len(self.nodes.nodes) > 1 else sorted(self.field.thetas)

    def _bound_attrs(self, bound: float, se: float = 0.0) -> dict[str, float | str]:
        if self._held:  # the sum of one node is Laplace's, no bound
            return {"point_estimates": ", ".join(self._held)}
        return {"elbo": bound, "elbo_se": se}

    # ---- files ----------------------------------------------------------------------

    def save(self, path: str | os.PathLike) -> None:
        """
        Writes the result to a file, for :func:`~numpyro_sgp.load` in another process: as
        :meth:`Fitted.save` does. A node has m^2 numbers, for a field of m.

        :param path: the file; written at once or not at all, over one that is there.
        :raises ValueError: if the model has parameters, as it may under an
            :class:`~numpyro_sgp.AutoJointGP`.
        """
        if self.model is not self.guide.model:
            raise ValueError(
                "The model has parameters (numpyro.param), which are not in files of "
                "nested results. Sample them instead."
            )
        self._for_file().save(path)

    def _for_file(self) -> Fitted:
        fitted = Fitted(self.guide, self.guide.known().starts, self.args, self.kwargs)
        if self.examples is not None:
            fitted.args, fitted.kwargs, fitted.examples = None, {}, self.examples
        elif not few_rows_do(self.field, self.args, self.kwargs):
            fitted.args = None
        fitted.bound, fitted.seconds = self.log_evidence, self.seconds
        fitted.more = {self.kind: packed(self.field, self.nodes)}
        return fitted

    def _arguments(self, args, kwargs, method):
        own = self.args, self.kwargs
        if args or kwargs:
            kwargs = self._with_options(args, kwargs, method)
        return arguments_at(self.field, own, self.examples, args, kwargs)

    def _with_options(self, args, kwargs, *methods) -> dict:
        known = self.examples or (self.args, self.kwargs)
        return with_options(self.guide, known, args, kwargs, *methods)

    def _parts(self) -> str:
        """What the field is made of, and how many numbers of it each has."""
        field = self.field
        sizes = field.gp_sizes() | {k: int(np.prod(field.shapes[k])) for k in field.effects}
        return ", ".join(f"{name} ({size})" for name, size in sizes.items())

    def __repr__(self):
        nodes, field = self.nodes, self.field
        lines = [
            f"Nested inference in {self.seconds:.1f} s",
            f"  one Gaussian over: {self._parts()}",
            f"  {'integrated' if len(nodes.nodes) > 1 else 'at a point'}: "
            + (", ".join(field.thetas) or "nothing"),
            f"  nodes: {len(nodes.nodes)} ({nodes.kind}), effective {nodes.effective:.0f}"
            + (f", {nodes.stopped}" if nodes.stopped else ""),
        ]
        lines += nodes.told_of_evidence()
        if self._verdict is not None:
            lines.append(f"  verdict: {self._verdict.summary}")
        lines += nodes.told_of_doubts()
        return "\n".join(lines)
