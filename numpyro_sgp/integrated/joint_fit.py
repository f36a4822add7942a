"""The result of a fit with one Gaussian over GP sites and effects."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import numpy as np
from jax import Array

from numpyro_sgp._threads import methods_alone
from numpyro_sgp.diagnostics.arviz import Found
from numpyro_sgp.fitting import Fitted
from numpyro_sgp.fitting.attempts import Attempts, ended_alone
from numpyro_sgp.fitting.check import problem_at
from numpyro_sgp.fitting.hierarchies import told_of, vanished
from numpyro_sgp.fitting.summary import counted
from numpyro_sgp.fitting.verdict import ENOUGH_NATS, OTHER_OPTIMA, Cause, Verdict
from numpyro_sgp.integrated.check import check, no_digits, spread_out
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.nodes import Nodes
from numpyro_sgp.integrated.profile import Profile
from numpyro_sgp.integrated.result import Nested

_MEND = "sgp.nested, or base_guide=AutoNormal"  # of latents that no field has


@methods_alone
class JointFit(Nested):
    """
    A fit with one Gaussian over GP sites and effects: what :func:`~numpyro_sgp.fit` returns
    with ``joint=True``. It is asked what a :class:`~numpyro_sgp.Nested` is asked, with
    hyperparameters at points (or at draws of the base guide) in the place of its nodes.

    :param field: the model: what is the Gaussian field, and what are hyperparameters.
    :param nodes: hyperparameters, and q(w).
    :param args: arguments of the model with the training data.
    :param kwargs: its keyword arguments.
    :param seconds: how long it took.
    :param params: parameters of the guide and of the model.
    :param losses: loss of each step; None if not known.
    :param bound: the bound with all of the data, on a log joint density where
        hyperparameters are at points; NaN if not known.
    :param bound_se: its standard error, where it is random.
    :param stopped: why the training ended.
    :param svi: the :class:`~numpyro.infer.SVI` that was trained, if any.
    :param descent: what trained it, if it saw all rows.
    :param apart: nats by which it is above where trainings from other starts ended; 0 if
        one came near or there were none.

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f + slope * X[:, 0], 0.5), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 12)[:, None]
    >>> data = X, jnp.sin(X[:, 0])
    >>> fitted = sgp.fit(model, sgp.SVGP(4), data, joint=True, progress_bar=False)
    >>> fitted.posterior(X[:3])["slope"].sd.shape
    ()
    >>> bool(fitted.log_evidence == fitted.bound)  # no hyperparameter is at a point
    True
    """

    kind: ClassVar[str] = "joint"

    def __init__(
        self,
        field: Field,
        nodes: Nodes,
        args: tuple,
        kwargs: dict,
        seconds: float = math.nan,
        *,
        params: dict | None = None,
        losses: Any = None,
        bound: float = math.nan,
        bound_se: float = 0.0,
        stopped: str = "",
        svi: Any = None,
        descent: Any = None,
        loss: Any = None,
        apart: float = 0.0,
    ):
        super().__init__(field, nodes, args, kwargs, seconds)
        self.params, self.losses, self.loss = params, losses, loss
        self.bound, self.bound_se = float(bound), float(bound_se)
        self.stopped, self.svi, self.descent = stopped, svi, descent
        self.apart = apart

    def __getstate__(self):
        """As that of :class:`Fitted`."""
        return {**vars(self), "svi": None, "descent": None}

    @property
    def log_evidence(self) -> float:
        """
        The bound, as one on the log evidence; NaN where hyperparameters are at points,
        whose densities count in ``bound``.
        """
        return math.nan if self._held else self.bound

    def check(self, *args, rng_key: Array | None = None, **kwargs) -> Verdict:
        """
        What the fit misses, in nats: of the optimum of q(w) on all rows, of other
        parameters (as :meth:`Fitted.check` tells it), of what more inducing points would
        gain and of what importance weights see between q(w) and the field's posterior.

        :param args: arguments of the model; those of the training if left out.
        :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
        :return: a :class:`~numpyro_sgp.fitting.verdict.Verdict`, which prints as a table.
        """
        own = not (args or kwargs)
        rng_key = jax.random.key(0) if rng_key is None else rng_key
        args, kwargs = self._arguments(args, kwargs, self.check)
        found = check(self.field, self.nodes, args, kwargs)
        causes = {
            **found.causes,
            "q(u)": self._of_q(args, kwargs),
            "other parameters": self._of_others(args, kwargs, own, rng_key),
        }
        if own and self.apart:
            causes[OTHER_OPTIMA] = ended_alone(self.apart)
        self._verdict = Verdict(causes, None, self.bound)
        return self._verdict

    def _of_q(self, args, kwargs):
        """What the best q(w) has more, on all rows."""
        profile = Profile(self.field, args, kwargs, self.nodes.points, whole=True)
        left = []
        for node in spread_out(self.nodes):
            here = profile.value_at(node.free, node.weighed.mean, node.weighed.factor)
            best = profile(node.free, profile.about(node.weighed.mean))[0]
            left.append(best.value - here if np.isfinite(best.left) else np.nan)
        # What natural steps end far below of they say nothing.
        nats = float(np.mean(left))
        nats = np.nan if nats < -1.0 else max(nats, 0.0)
        if np.isnan(nats):
            return Cause("q(w)", nats, told="no natural step is known", mend=no_digits())
        if len(self.nodes.nodes) > 1:
            told = f"the best at each of {len(left)} draws of the hyperparameters has "
            return Cause("q(w)", np.nan, told=f"{told}{nats:.2g} nats more on average")
        mend = "train longer: more steps, or seconds, of sgp.fit"
        told = "by natural steps on all rows"
        return Cause("q(w)", nats, told=told, mend=mend if nats > ENOUGH_NATS else "")

    def _of_others(self, args, kwargs, own, rng_key):
        if self.svi is None:
            told = "unknown: the training is not here (a file has none of it)"
            return Cause("other parameters", np.nan, told=told)
        if gone := vanished(self.guide, self.params, args, kwargs):
            return Cause("other parameters", np.nan, told=told_of(gone), mend=_MEND)
        problem = problem_at(self.svi, self.params, args, kwargs)
        descent = self.descent if own else None
        return Attempts(problem, rng_key, descent).of_others(self.losses)

    def found_draws(
        self, num_samples: int, rng_key: Array, args: tuple, kwargs: dict
    ) -> Found:
        """What :func:`~numpyro_sgp.to_arviz` asks for."""
        found = super().found_draws(num_samples, rng_key, args, kwargs)
        more = {"method": "fit", **self._bound_attrs(self.bound, self.bound_se)}
        return found._replace(attrs={**found.attrs, **more})

    def _bound_attrs(self, bound: float, se: float = 0.0) -> dict[str, float | str]:
        found = super()._bound_attrs(bound, se)
        if self._held:
            found |= {"log_joint_bound": self.bound, "log_joint_bound_se": self.bound_se}
        return found

    def _for_file(self) -> Fitted:
        fitted = super()._for_file()
        fitted.bound, fitted.bound_se = self.bound, self.bound_se
        fitted.apart = self.apart
        fitted.losses, fitted.stopped = self.losses, self.stopped
        return fitted

    def __repr__(self):
        field = self.field
        lines = [f"Fitted with one Gaussian over: {self._parts()}"]
        held = "at points" if len(self.nodes.nodes) == 1 else "at draws of the base guide"
        lines.append(f"  {held}: " + (", ".join(field.thetas) or "nothing"))
        if not math.isnan(self.bound):
            se = f" (standard error {self.bound_se:.2g})" if self.bound_se > 0 else ""
            of = ""
            if self._held:
                of = ", of log p(y, points): the densities of latents at points count"
            lines.append(f"  bound: {self.bound:.7g}{se}{of}")
        steps = counted(self.losses)
        steps += [f"{self.seconds:.1f} s"] if math.isfinite(self.seconds) else []
        steps += [self.stopped] if self.stopped else []
        if steps:
            lines.append(f"  training: {', '.join(steps)}")
        if self._verdict is not None:
            lines.append(f"  verdict: {self._verdict.summary}")
        return "\n".join(lines)
