"""Inducing points that change places with rows, one by one, where the bound rises."""

from collections.abc import Callable
from contextlib import contextmanager, suppress

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._programs import on_data
from numpyro_sgp.diagnostics.moved_bound import MAX_ROWS, MovedBound
from numpyro_sgp.fitting.problem import Problem, constrained
from numpyro_sgp.fitting.starts import with_other_points
from numpyro_sgp.training.descent import Descent

_FEW = 30  # swaps in vain before there are none that help
_TIMES = 3.0  # so many of those that one which helps has taken, where some did
_HELP = 0.02  # nats that count
_MANY_ROWS, _MUCH = 100, 0.1  # of which thirty may miss all that need a point; left open
_WANTED = 0.75  # of the swaps to rows by what they want, where that is known
_MOST = 0.5  # of these to the few that want most, by the square of it


class Swaps:
    """
    A local search over sets of rows as inducing points. Of smooth functions no swap is
    better than points that were trained; where each point serves few rows it finds those
    that need one, at some evaluations a swap, which trainings that begin elsewhere do not.

    :param problem: whose points are trained.
    :param descent: of its loss, with q(u) at its optimum.
    :param seed: of what is drawn.
    """

    def __init__(self, problem: Problem, descent: Descent, seed: int):
        self._problem, self._descent = problem, descent
        self._rng = np.random.default_rng((seed, 2))
        self._bound: MovedBound | None = None
        self._is_known = True
        #: Whether Ctrl-C ended a search.
        self.interrupted = False

    def search(self, most: float, is_over: Callable[[], bool] = lambda: False) -> float:
        """
        Moves one inducing point at a time to a row that is drawn, where the bound is higher
        there: any row, until that has helped (or was in vain, of many rows whose variance
        the points do not explain), and then rows by what they want.

        :param most: of the work of the descent (:attr:`Descent.work`), where to stop.
        :param is_over: whether to stop now.
        :return: nats that the bound has risen by; the descent begins anew at the place.
        """
        descent, made, helped, in_vain = self._descent, 0, 0, 0
        first, wanted, patience = descent.loss, None, float(_FEW)
        with self._until_ctrl_c():
            while descent.work < most and not is_over():
                if in_vain >= patience:
                    if wanted is not None or not self._leaves_much():
                        break
                    wanted, patience = self._wanted(), patience + _FEW
                    if wanted is None:
                        break
                before, free = descent.loss, descent.free_now()
                weights = wanted if self._rng.uniform() < _WANTED else None
                if weights is not None and self._rng.uniform() < _MOST:
                    weights = {name: want**2 for name, want in weights.items()}
                moved = with_other_points(self._problem, free, self._rng, 0.0, weights)
                if moved is None:  # inducing points that are not trained
                    return 0.0
                descent.look_at(moved)
                made, in_vain = made + 1, in_vain + 1
                if before - descent.loss > _HELP:
                    helped, in_vain = helped + 1, 0
                    patience, wanted = max(_FEW, _TIMES * made / helped), self._wanted()
        gained = first - descent.loss
        descent.start_at(descent.free_now())
        return gained

    def _leaves_much(self) -> bool:
        """Whether there are many rows, and points leave a good part of their variance."""
        problem = self._problem
        if problem.num_rows <= _MANY_ROWS:
            return False

        def shares(args, kwargs, params):
            posteriors, _ = problem.guide.posterior_at(params, args, kwargs)
            found = []
            for q in posteriors.values():
                prior = jnp.mean(q.prior.kernel.diag(q.prior.X))
                explained = jnp.sum(q.projection**2, axis=-2)
                found.append(1.0 - jnp.mean(explained) / prior)
            return jnp.stack(found)

        with suppress(Exception):  # of the model's code, or of a q(u) of another kind
            params = constrained(problem.svi, self._descent.free_now())
            left = on_data(shares, problem.args, problem.kwargs, params)
            return float(np.asarray(left).max()) > _MUCH
        return False

    @contextmanager
    def _until_ctrl_c(self):
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True

    def _wanted(self) -> dict[str, np.ndarray] | None:
        r"""
        By site what rows want: the root of what a Newton step of the function at a row,
        under the variance v that inducing points leave it, would raise the bound by,
        :math:`g^2 v / (1 + h v)` with slope g and curvature -h. None where it is not known.
        """
        if not self._is_known:
            return None
        self._is_known = False  # unless it turns out to be
        with suppress(Exception):  # of the model's code
            svi, free = self._problem.svi, self._descent.free_now()
            params, key = constrained(svi, free), jax.random.key(0)
            if self._bound is None:
                kwargs = {**svi.static_kwargs, **self._problem.kwargs}
                bound = MovedBound(svi.guide, svi.loss, self._problem.args, kwargs)
                if bound.why_unknown(params, MAX_ROWS):
                    return None
                self._bound = bound
            fields = self._bound.fields(key, params)
            _, slopes = self._bound.look(key, params, self._bound.no_shift())
            found = {}
            for name, (slope, curvature) in slopes.items():
                left = np.maximum(fields[name].left, 0.0)
                gain = slope**2 * left / (1.0 + np.maximum(curvature, 0.0) * left)
                found[name] = np.sqrt(np.nan_to_num(gain)).sum(axis=0)
            self._is_known = True
            return found
        return None
