"""Which latents a guide holds at points."""

import jax
from numpyro.ops.provenance import eval_provenance

from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.plates import FirstRows


def point_latents(guide, params: dict, args, kwargs) -> set[str]:
    """
    Names of the latents whose values do not depend on the random key: those of
    ``AutoDelta``. Of an :class:`~numpyro_sgp.AutoSparseGP`, those beside its GP sites.
    The guide is traced, and nothing is computed.

    :param guide: a guide that is set up.
    :param params: its parameters; those that are not there start where they do.
    :param args: tuple of the arguments of the model.
    :param kwargs: dict of its keyword arguments.
    """
    base = getattr(guide, "base_guide", guide)
    if base is None:
        return set()

    def values(key):
        trace = messages.trace_of(FirstRows(base), args, kwargs, key, data=params)
        return {name: site["value"] for name, site in messages.latents(trace).items()}

    found = eval_provenance(values, key=jax.random.key(0))
    return {name for name, origin in found.items() if not origin}
