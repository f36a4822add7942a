"""Fits from files."""

import os
from collections.abc import Callable
from typing import Any

from numpyro_sgp._checks import check_args
from numpyro_sgp._threads import alone
from numpyro_sgp.fitting.files import read
from numpyro_sgp.fitting.fitted import Fitted
from numpyro_sgp.guides import AutoSparseGP

#: From a fit and what else its file has to another kind of result, by that kind.
RESULTS: dict[str, Callable[[Fitted, dict], Any]] = {}


@alone
def load(
    path: str | os.PathLike,
    model: Any,
    args: tuple | None = None,
    kwargs: dict | None = None,
    *,
    approximation: Any = None,
    base_guide: Any = None,
    loss: Any = None,
) -> Any:
    """
    Reads what :meth:`Fitted.save` or :meth:`Nested.save` wrote. The training data are not
    needed, and nothing in the file is executed.

    :param path: the file.
    :param model: the model that was trained.
    :param args: arguments of the model with the training data, if at hand: they become
        those of the result.
    :param kwargs: its keyword arguments.
    :param approximation: the approximation that was trained, where it has parts of one's
        own; a file has those of the package.
    :param base_guide: the base guide, where it is none of NumPyro's.
    :param loss: the loss, where it is no :class:`~numpyro_sgp.TraceGP_ELBO` with a rule of
        the package; predictions do not need it.
    :return: a :class:`Fitted`, whose predictions are equal to the last bit to those before;
        or a :class:`Nested`, whose are but for rounding.
    :raises ValueError: if the file is damaged or not one of :meth:`Fitted.save`, is of
        another model or another version of the format, has float64 where JAX is set to
        float32, or does not have all that makes the guide.
    :raises TypeError: if ``model`` is a guide, or no function, or ``args`` no tuple.
    :raises FileNotFoundError: if there is no file.

    >>> import os, tempfile
    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> fitted = sgp.fit(model, sgp.SVGP(3), (X, y), progress_bar=False)
    >>> path = os.path.join(tempfile.mkdtemp(), "counts.npz")
    >>> fitted.save(path)

    In a new process, with the same model:

    >>> fitted = sgp.load(path, model)
    >>> fitted.predict(X)["y"].mean.shape
    (5,)
    """
    if isinstance(model, AutoSparseGP) or not callable(model):
        raise TypeError(
            "load makes the guide by itself: give it the model, numpyro_sgp.load(path, "
            f"model), not {type(model).__name__}."
        )
    check_args(args)
    arguments = None
    if args is not None or kwargs is not None:
        arguments = tuple(args or ()), dict(kwargs or {})
    given = {"approximation": approximation, "base_guide": base_guide, "loss": loss}
    found = read(path, model, {**given, "arguments": arguments})
    of_file = {k: found.pop(k) for k in ("examples", "num_rows", "_verdict", "more")}
    fitted = Fitted(found.pop("guide"), found.pop("params"), *(arguments or ()), **found)
    if arguments is None:  # else they are all of the data, of which a file has two rows
        fitted.examples, fitted.num_rows = of_file["examples"], of_file["num_rows"]
    fitted._verdict = of_file["_verdict"]
    for kind, more in of_file["more"].items():
        return RESULTS[kind](fitted, more)
    return fitted
