"""Trained guides as files."""

import json
import os
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._version import __version__
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.training.checkpoint import write_arrays

_FORMAT, _FORMAT_VERSION = "numpyro_sgp guide", 1
_KEYS = {"format_version", "numpyro_sgp", "fingerprint", "params", "setup", "arrays"}
_WIDE = {"float64", "int64", "uint64", "complex128"}


def save(path: str | os.PathLike, guide: AutoSparseGP, params: dict) -> None:
    """
    Writes a trained guide to a file, for :func:`load`.

    The file is an ``.npz`` archive of plain arrays, with a header in JSON (the package's
    version, the guide's fingerprint, and name, shape and dtype of each array) and a
    checksum of each; nothing in it is ever executed. It has the parameters, the inducing
    points that were not trained, and with ``VGP`` and ``covariance="pseudo_data"`` the
    inputs that q(u) is of. It does not have the model, which is code, nor other data.

    :param path: the file; written at once or not at all, over one that is there.
    :param guide: the guide, set up.
    :param params: its parameters, ``result.params``.
    :raises ValueError: if ``params`` are not this guide's or not finite.
    :raises TypeError: if ``params`` have something else than arrays in dicts, lists and
        tuples.

    **Example:**

    .. doctest::

        >>> import os, tempfile
        >>> import jax, jax.numpy as jnp, numpyro, optax
        >>> import numpyro.distributions as dist
        >>> import numpyro_sgp as sgp
        >>> def model(X, y=None):
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        ...     with numpyro.plate("data", X.shape[0]):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
        >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
        >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
        >>> path = os.path.join(tempfile.mkdtemp(), "counts.npz")
        >>> sgp.save(path, guide, result.params)

        In a new process, with the same model, and any row of X with any count:

        >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
        >>> params = sgp.load(path, guide, jnp.zeros((1, 1)), jnp.zeros(1, int))
        >>> guide.posterior(params, X)["f"].mean.shape
        (5,)
    """
    guide.check_params(params)
    arrays = {}
    header = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "numpyro_sgp": __version__,
        "fingerprint": guide.fingerprint(),
        "params": _described(params, "params", arrays),
        "setup": _described(guide.setup_state(), "setup", arrays),
    }
    shapes = {k: [list(a.shape), str(a.dtype)] for k, a in arrays.items()}
    text = np.array(json.dumps({**header, "arrays": shapes}))
    write_arrays(Path(path), {"header": text, **arrays})


def load(path: str | os.PathLike, guide: AutoSparseGP, *args, **kwargs) -> dict:
    """
    Reads what :func:`save` wrote, and sets the guide up with it.

    Inducing points come from the file, so that the arguments of the model need not be the
    training data: a row or two of X of the right width and dtype, with any observations
    that the likelihood allows.

    :param path: the file.
    :param guide: a new guide of the same model with the same options.
    :param args: arguments of the model, with observations.
    :return: the parameters, for ``guide.posterior``, :func:`~numpyro_sgp.predict` and so
        on, equal to the last bit to those saved.
    :raises ValueError: if the file is damaged or not one of :func:`save`, is of another
        guide, has float64 where JAX is set to float32, or the guide is set up already.
    :raises FileNotFoundError: if there is none.

    See :func:`save` for an example.
    """
    if guide.prototype_trace is not None:
        raise ValueError(
            "load sets a guide up, but this one is set up already: make a new AutoSparseGP "
            "with the same model and options."
        )
    header, arrays = _read(Path(path))
    if header["format_version"] != _FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {header['format_version']} of the format of "
            f"numpyro_sgp.save (numpyro_sgp {header['numpyro_sgp']}), but this is "
            f"numpyro_sgp {__version__}, which reads version {_FORMAT_VERSION}."
        )
    wide = sorted({a.dtype.name for a in arrays.values()} & _WIDE)
    if wide and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError(
            f"{path} has arrays of {', '.join(wide)}, which JAX would round: call "
            "numpyro.enable_x64() before."
        )
    setup = _restored(header["setup"], arrays)
    try:
        guide.setup_from(setup, header["fingerprint"], *args, **kwargs)
    except ValueError as error:
        raise ValueError(
            f"{path} is of another guide, or the arguments of the model are bad: {error}"
        ) from error
    params = _restored(header["params"], arrays)
    guide.check_params(params)
    return params


def _read(path):
    """Header and arrays of a file, or what is wrong with it."""
    try:
        path.stat()
        # The archive first: NumPy takes what is none for a pickle.
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no .npz archive, or its end is missing")
        with np.load(path, allow_pickle=False) as file:
            if "header" not in file.files:
                raise ValueError("it has no header")
            header = json.loads(str(file["header"]))
            if not isinstance(header, dict) or header.get("format") != _FORMAT:
                raise ValueError(f"its header is not that of a {_FORMAT}")
            if missing := sorted(_KEYS - set(header)):
                raise ValueError(f"its header has no {missing}")
            arrays = {name: file[name] for name in header["arrays"]}
    except OSError:
        raise
    except Exception as error:  # readers of damaged files raise whatever they like
        raise ValueError(
            f"{path} is damaged, or was not written by numpyro_sgp.save "
            f"({type(error).__name__}: {error})."
        ) from error
    for name, (shape, dtype) in header["arrays"].items():
        found = arrays[name]
        if [*found.shape] != shape or str(found.dtype) != dtype:
            raise ValueError(
                f"{path} is damaged: array '{name}' has shape {found.shape} and dtype "
                f"{found.dtype}, but its header says {tuple(shape)} and {dtype}."
            )
    return header, arrays


def _described(tree, name, arrays):
    """
    The structure of a tree as JSON has it; its leaves are added to ``arrays``.

    :param name: of the leaf, or of what is above it.
    """
    if isinstance(tree, dict):
        return {"dict": {k: _described(v, f"{name}/{k}", arrays) for k, v in tree.items()}}
    if type(tree) in (list, tuple):
        parts = [_described(v, f"{name}/{i}", arrays) for i, v in enumerate(tree)]
        return {type(tree).__name__: parts}
    if tree is None or isinstance(tree, bool | int | float):
        return {"value": tree}
    if not isinstance(tree, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"{name} is a {type(tree).__name__}; a file has arrays in dicts, lists and "
            "tuples alone."
        )
    array = np.asarray(tree)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{name} has the dtype {array.dtype}, which a file cannot have.")
    arrays[name] = array
    return {"array": name}


def _restored(structure, arrays):
    """The inverse of :func:`_described`."""
    ((kind, content),) = structure.items()
    if kind == "dict":
        return {name: _restored(part, arrays) for name, part in content.items()}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(_restored(p, arrays) for p in content)
    return content if kind == "value" else jnp.asarray(arrays[content])
