"""What the rows of a predictive distribution are mixtures of."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_sgp._checks import check_whole
from numpyro_sgp._programs import mapped
from numpyro_sgp.guides.row_latents import OTHER_ROWS, NoMarginals
from numpyro_sgp.kernels.base import broadcasts_to
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.coupling import feeding

_MAX_NUMBERS = 3e7  # of inducing points, rows and draws, held at one time
_MOST_TIED = 10_000  # rows that are drawn together
TIED = (
    "Marginals of f are integrated row by row, but the likelihood ties rows together (or "
    "joint draws were asked for). {} Or draw f by guide.sample_posterior, and average over "
    "the draws."
)


class MixtureParts:
    """
    What the rows of a predictive distribution are mixtures of: draws of the latents beside
    f, where the base guide draws them, and of inner layers, and given those the marginals
    of the last GP sites.

    :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
    :param num_draws: number of draws, if there is something to draw.
    :param may_tie: whether the likelihood may tie rows of f together.
    :raises NoMarginals: if it does and may not, or ties those of a deep GP or very many.
    """

    def __init__(
        self, guide, params, args, kwargs, rng_key, num_draws, kept=None, may_tie=False
    ):
        #: Whether rows of f are to be drawn together.
        self.tied = guide.couples_rows
        if self.tied and not may_tie:
            raise NoMarginals(TIED.format("Leave the expectation out."))
        check_whole(num_draws, "num_draws", least=1)
        self.guide, self.params, self.args, self.kwargs = guide, params, args, kwargs
        self.key = jax.random.key(0) if rng_key is None else rng_key
        #: Sites that were observed when the guide was set up.
        self.responses = [
            name
            for name, site in (guide.approximations and guide.prototype_trace).items()
            if messages.is_response(site)
        ]
        self._draws_others = guide.draws_others(params, args, kwargs)
        base_key = self.key if self._draws_others else None
        self._kept = None if self._draws_others else kept
        found, _ = guide.posterior_at(params, args, kwargs, base_key, kept=self._kept)
        #: Marginals of each GP site at one draw of the other latents, and that draw.
        self.posteriors = _alone(found)
        self.others = guide.others_at(params, args, kwargs, base_key)
        shapes, dtype = shapes_and_dtype(self.posteriors)
        below = feeding(lambda f: self.run(f, self.others), shapes, dtype)
        #: GP sites that feed no other.
        self.last = [name for name in shapes if name not in below]
        rows = max(shape[-1] for shape in shapes.values())
        if self.tied and below:
            raise NoMarginals(TIED.format("That is not for a deep GP."))
        if self.tied and rows > _MOST_TIED:
            told = f"Give at most {_MOST_TIED} of the {rows} rows at a time."
            raise NoMarginals(TIED.format(told))
        self.drawn = self._draws_others or bool(below)
        self.keys = jax.random.split(self.key, (num_draws if self.drawn else 1, 3))
        numbers = sum(_numbers(q, self.tied) for q in self.posteriors.values())
        #: Draws done at a time.
        self.chunk = int(np.clip(_MAX_NUMBERS / numbers, 1, len(self.keys)))

    def at(self, keys):
        """
        One draw.

        :param keys: one row of ``self.keys``.
        :return: posteriors of all GP sites, and values of those that feed others and of
            the other latents.
        """
        base_key = keys[1] if self._draws_others else None
        where = self.params, self.args, self.kwargs, base_key
        found, values = self.guide.posterior_at(*where, keys[0], self._kept)
        given = {name: values[name] for name in found if name not in self.last}
        return _alone(found), given, self.guide.others_at(*where)

    def map(self, given_draw, *others):
        """
        ``given_draw`` of each row of ``self.keys``, and of arrays with a row for each, so
        many at a time as fit.
        """
        rows = self.keys, *map(jnp.asarray, others)
        return mapped(lambda row: given_draw(*row), rows, self.chunk)

    def middle(self, points) -> dict:
        """One of weighted points, with GP sites at their means."""
        point = jax.tree.map(lambda v: v[0], points)
        means = {name: q.mean for name, q in self.posteriors.items()}
        return {**point, "f": {**point["f"], **means}, "others": self.others}

    def run(self, f, others, rng_key=0, responses=None):
        """
        The model's trace with these values of its GP sites and other latents.

        :param rng_key: of what else the model draws.
        :param responses: values of responses that the model's arguments do not give; zeros
            for those that have none here. They are not drawn: a black box cannot be.
        """

        shapes = {}  # of latents whose values are of other rows, or groups

        def at_site(msg):
            name = msg["name"]
            if msg["type"] != "sample":
                return None
            if name in others and not broadcasts_to(
                jnp.shape(others[name]), msg["fn"].shape()
            ):
                shapes[name] = jnp.shape(others[name]), msg["fn"].shape()
            if name in self.posteriors:
                return jnp.reshape(f[name], msg["fn"].shape())
            if name in self.responses and msg["value"] is None:
                given = responses or {}
                return given[name] if name in given else messages.zeros_like(msg["fn"])
            return others.get(name)

        model = handlers.substitute(self.guide.model, substitute_fn=at_site)
        try:
            return messages.trace_of(
                model, self.args, self.kwargs, rng_key, data=self.params
            )
        except (TypeError, ValueError) as error:
            for name, (held, shape) in shapes.items():
                raise NoMarginals(OTHER_ROWS.format(name, shape, held)) from error
            raise


def _alone(posteriors) -> dict:
    """The same posteriors, each row drawn by itself."""
    return {
        name: q.drawn_together(1) if q.joint_rows > 1 else q
        for name, q in posteriors.items()
    }


def _numbers(q, tied):
    """Of the covariances of inducing points and rows in one draw, or of rows and rows."""
    num_inducing = q.chol.shape[-1]
    rows = num_inducing + q.event_shape[0]
    return int(np.prod(q.batch_shape)) * (rows if tied else num_inducing) * rows


def shapes_and_dtype(posteriors: dict) -> tuple[dict, jnp.dtype]:
    """What an expectation rule needs of the sites that it integrates."""
    shapes = {name: q.shape() for name, q in posteriors.items()}
    return shapes, jnp.result_type(*(q.mean.dtype for q in posteriors.values()))


def components(posteriors: dict):
    """For each choice of components of mixtures, these by site and their log weight."""
    counts = [range(q.num_components) for q in posteriors.values()]
    for ks in itertools.product(*counts):
        chosen = dict(zip(posteriors, ks, strict=True))
        yield chosen, sum(q.log_weights[chosen[name]] for name, q in posteriors.items())
