"""A model, a guide and data as a loss of unconstrained parameters, whole or by batches."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.svi import SVI, SVIState
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from numpyro_sgp._programs import join_static, split_static
from numpyro_sgp.distributions.arguments import as_arrays, is_frame
from numpyro_sgp.families import Family
from numpyro_sgp.guides.points import points_of
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.coupling import feeding


def as_plain_arrays(model, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments of a model as :func:`as_arrays` has them, frames as matrices too."""
    args, kwargs = as_arrays(model, args, kwargs)

    def plain(leaf):
        return np.asarray(leaf) if is_frame(leaf) else leaf

    return jax.tree.map(plain, (args, kwargs), is_leaf=is_frame)


class BatchOfRows(Messenger):
    """
    Takes data plates that have the rows of a batch for subsampled ones, so that what is in
    them counts N / B times (eq. 33 of Bonilla, Krauth and Dezfouli 2018).

    :param plates: their names.
    :param num_rows: number N of all rows.
    """

    def __init__(self, plates: frozenset[str], num_rows: int):
        self.plates, self.num_rows = plates, num_rows
        self._rows: dict[str, int] = {}
        super().__init__()

    def process_message(self, msg):
        """Scales what is in these plates, and gives the plates both sizes."""
        if msg["type"] == "plate" and msg["name"] in self.plates:
            size, batch = msg["args"]
            if batch in (None, size) and size < self.num_rows:
                self._rows[msg["name"]] = size
                msg["args"] = (self.num_rows, size)
                msg["value"] = jnp.arange(size)
        elif msg["type"] == "sample":
            for frame in msg["cond_indep_stack"]:
                if size := self._rows.get(frame.name):
                    scale = 1.0 if msg["scale"] is None else msg["scale"]
                    msg["scale"] = scale * (self.num_rows / size)


class Problem:
    """
    What is to be trained.

    :param svi: model, guide and loss, initialised.
    :param state: where it starts.
    :param args: arguments of the model, with all data.
    :param kwargs: its keyword arguments.
    """

    def __init__(self, svi: SVI, state: SVIState, args: tuple, kwargs: dict):
        self.svi, self.guide = svi, svi.guide
        #: Unconstrained starting values.
        self.free: dict = svi.optim.get_params(state.optim_state)
        #: Starting value of the mutable state.
        self.mutable = state.mutable_state
        arrays, self._static = split_static((args, {**kwargs, **svi.static_kwargs}))
        #: Arrays among the arguments.
        self.arrays: list[Array] = [jnp.asarray(a) for a in arrays]
        self.args, self.kwargs = args, kwargs
        #: Number N of rows, and the plates whose rows a batch may be of (or none).
        self.num_rows, self.plates = _data_plates(self.guide, self.arrays, args, kwargs)
        #: Families of q(u) that natural steps train, with names of what they are for.
        self.natural: list[tuple[Family, dict[str, str]]] = _natural(self)
        #: Whether the loss of all rows is random.
        self.random: bool = bool(
            eval_provenance(
                lambda key: self.loss(self.free, key, self.arrays), key=jax.random.key(0)
            )
        )

    @property
    def profiled(self) -> list[str]:
        """Parameters that natural steps train."""
        return [full for _, names in self.natural for full in names.values()]

    def loss(self, free, key, arrays, mutable=None):
        """
        The loss at unconstrained parameters, of all rows or of a batch of them.

        :param arrays: in the place of :attr:`arrays`.
        :return: the loss; with ``mutable``, also the next mutable state.
        """
        svi = self.svi
        args, kwargs = join_static(arrays, self._static)
        params = svi.constrain_fn(free)
        if mutable:
            params.update(jax.lax.stop_gradient(mutable))
        elif self.mutable and mutable is None:
            params.update(self.mutable)
        with BatchOfRows(self.plates, self.num_rows):
            out = svi.loss.loss_with_mutable_state(
                key, params, svi.model, svi.guide, *args, **kwargs
            )
        return out["loss"] if mutable is None else (out["loss"], out["mutable_state"])

    def work(self, num_rows: int) -> float:
        """Multiplications of M x M matrices with so many rows, of all latent functions."""
        total = 0.0
        for name, site in self.guide._known().sites.items():
            fn = self.guide.prototype_trace[name]["fn"]
            size = sum(points_of(p).shape[-2] for p in site.points)
            functions = int(np.prod(fn.shape()[:-1]))
            total += functions * (num_rows + size) * float(size) ** 2
        return total

    def rows(self, arrays, index: Array) -> list[Array]:
        """Arrays with some rows of the data only."""
        N = self.num_rows
        return [a[index] if a.ndim and a.shape[0] == N else a for a in arrays]

    def scales(self) -> dict[str, Array]:
        """
        What a step of length one is for each parameter that has no natural steps: for
        inducing points the standard deviations of the inputs, for all others one.
        """
        scales, roles = {}, self.guide.roles()
        for name, site in self.guide._known().sites.items():
            sd = np.std(site.X, axis=0)
            for full in self.guide.parameter_names()[name].values():
                if roles[full] == "inducing" and full in self.free:
                    if jnp.shape(self.free[full])[-1:] == sd.shape:
                        scales[full] = np.where(sd > 0.0, sd, 1.0)
        ones = {name: np.ones(()) for name in self.free if name not in self.profiled}
        return {name: jnp.asarray(scales.get(name, one)) for name, one in ones.items()}


def _natural(problem):
    """
    The families that natural steps are for: those of every Gaussian q(u) but of inner
    layers, whose loss is too noisy and too far from a quadratic.
    """
    guide, found = problem.guide, []
    inner = _inner_layers(problem)
    for site, full in guide.parameter_names().items():
        family = guide.approximations[site].family
        taken = family.takes_natural_steps(full)
        if family.no_natural_step is None and taken and site not in inner:
            found.append((family, {name: full[name] for name in taken}))
    return found


def _inner_layers(problem) -> frozenset[str]:
    """GP sites that others depend on."""
    guide = problem.guide
    if len(guide.approximations) == 1:
        return frozenset()
    shapes = {
        name: messages.unwrap(guide.prototype_trace[name]["fn"])[0].shape()
        for name in guide.approximations
    }

    def trace_at(f):
        where = guide.model, problem.args, problem.kwargs
        return messages.trace_of(*where, at_site=messages.at_values(f))

    dtype = jnp.result_type(float)
    return feeding(trace_at, shapes, dtype)


def _data_plates(guide, arrays, args, kwargs) -> tuple[int, frozenset[str]]:
    """
    Number of rows, and the plates of which a batch may be taken: none unless each
    observation is in one of them, each row of the data has one of each GP site, and no
    other latent is in them.
    """
    num_rows = next((a.shape[0] for a in arrays if a.ndim), 0)
    setup, none = guide._known(), (num_rows, frozenset())
    if setup.coupling.couples or setup.coupling.combines or setup.arguments is None:
        return none
    if any(option.needs_all_rows for option in guide.approximations.values()):
        return none
    sizes, sites = {}, []

    def run():
        where = guide.model, args, kwargs
        for name, site in messages.trace_of(*where, at_site=messages.at_prior_mean).items():
            if site["type"] == "plate":
                sizes[name] = site["args"][0]
            elif site["type"] == "sample":
                sites.append((name, site))

    jax.eval_shape(run)
    plates = frozenset(name for name, size in sizes.items() if size == num_rows)
    for name, site in sites:
        inside = any(frame.name in plates for frame in site["cond_indep_stack"])
        if name in guide.approximations:
            fits = messages.unwrap(site["fn"])[0].shape()[-1] == num_rows
        else:
            fits = inside == site["is_observed"]
        if not fits:
            return none
    return num_rows, plates
