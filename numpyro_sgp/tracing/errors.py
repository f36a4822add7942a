"""What errors in the code of a model say of its arguments."""

import inspect
import re
from collections.abc import Callable
from contextlib import contextmanager
from difflib import get_close_matches

import jax
import jax.numpy as jnp
import numpyro

from numpyro_sgp._checks import array_shape
from numpyro_sgp._programs import NEEDS_KNOWN_DATA
from numpyro_sgp.distributions.gaussian_process import GaussianProcess

_BY_NAME = "string indexing", "only integers, slices"
_NO_INDEX = "Indexer must have integer", "non-tuple sequence"
# Of results' methods: numbers of draws, other options, and what these are called elsewhere.
_NUMBERS = "num_samples", "num_draws", "shape"
_OPTIONS = "quantiles", "rng_key", "sample_shape", "batch_size"
_ALIASES = {"key": ["rng_key"], "seed": ["rng_key"], "levels": ["quantiles"]}
_OF_FRAMES = (
    r"(Tracer|_Matrix'? object|ArrayImpl'? object|ndarray'? object) has no attribute"
)
# Of operators, of functions of JAX, and of its shape in a distribution.
_OF_PROCESSES = (
    r"^(unsupported|bad) operand type.*'GaussianProcess'"
    r"|requires ndarray or scalar arguments, got <class '[\w.]*\.GaussianProcess'>"
    r"|^'GaussianProcess' object is not (subscriptable|iterable)"
)
_OF_SHAPES = "'method' object is not iterable"
_ABSENT = r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)"


@contextmanager
def telling_arguments(args, kwargs, model: Callable | None = None):
    """
    Says what is wrong with a model's arguments where its code meets an error of JAX: arrays
    of different numbers of rows that do not broadcast, an index that is no integer, or a
    whole number that is too large; of NumPyro, plates of other sizes and names used twice.

    :param model: what is called with them, if its own arguments are looked at.
    :raises ValueError: in the place of JAX's error.
    :raises TypeError: in the place of Python's, of arguments that are absent or not known.
    """
    try:
        yield
    except (*NEEDS_KNOWN_DATA, jax.errors.UnexpectedTracerError):
        raise  # of no shapes, though the operations that they name may broadcast
    except tuple(_TELLERS) as error:
        if isinstance(error, TypeError):
            if told := _of_absent_arguments(error, args, kwargs, model):
                raise TypeError(told) from error
            if told := _of_options(error, args, kwargs):
                raise TypeError(told) from error
        for kind, tellers in _TELLERS.items():
            for tell in tellers if isinstance(error, kind) else ():
                if told := tell(error, args, kwargs):
                    raise ValueError(told) from error
        raise


def _of_large_numbers(error, args, kwargs) -> str:
    return (
        "A whole number in the model is too large for JAX's integers. Give it as a "
        f"float (1e12, not 10**12), or call numpyro.enable_x64() first. ({error})"
    )


def _of_frames(error, args, kwargs) -> str:
    if not re.search(_OF_FRAMES, str(error)):
        return ""
    return (
        "The model asks an array for something that arrays have not; a frame is "
        "given to it as a matrix: pass a dict, {c: frame[c].to_numpy() for c in "
        f"frame}}, and take columns as table['c']. ({error})"
    )


def _of_processes(error, args, kwargs) -> str:
    """Of one that no site has drawn from."""
    in_shapes = _OF_SHAPES in str(error) and any(map(_has_process, _frames(error)))
    if not (in_shapes or re.search(_OF_PROCESSES, str(error))):
        return ""
    return (
        "The model computes with a distribution as if it were values. A "
        "GaussianProcess has them at a site alone: f = numpyro.sample('f', "
        f"GaussianProcess(kernel, X)). ({_first_line(error)})"
    )


def _of_two_names(error, args, kwargs) -> str:
    found = re.search("unique names but got `(.*)` duplicated", str(error))
    if not found:
        return ""
    return f"The model has two sites of the name '{found[1]}'. Give each its own."


def _of_absent_arguments(error, args, kwargs, model) -> str:
    """Of the model's own, not of a function that it calls."""
    found = re.search(_ABSENT, str(error))
    if not found or model is None or _takes(model, args, kwargs):
        return ""
    return (
        f"The model is called without {found[1]}. Give it; or, where that is the data, "
        "give the model a default, def model(X, y=None): predictions run it without them. "
        f"({error})"
    )


def _takes(model, args, kwargs) -> bool:
    """Whether a model can be called with these arguments, as far as it says."""
    try:
        inspect.signature(model).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # it says nothing
        pass
    return True


def _of_options(error, args, kwargs) -> str:
    found = re.search("unexpected keyword argument '(.*)'", str(error))
    if not (found and found[1] in kwargs):
        return ""
    if found[1] in _NUMBERS:
        more = (
            " How many draws there are is sample_shape=(100,) of sample, "
            "num_draws=100 of predict and log_score, num_samples=100 of to_arviz."
        )
    else:
        near = _ALIASES.get(found[1]) or get_close_matches(found[1], _OPTIONS, 1)
        more = f" Is {near[0]}=... meant?" if near else ""
    return (
        f"'{found[1]}' is no option here, so it was given to the model, which does "
        f"not take it.{more} ({error})"
    )


def _of_names(error, args, kwargs) -> str:
    if not any(words in str(error) for words in _BY_NAME):
        return ""
    return (
        "The model takes a part of an argument by its name, and is given a frame "
        "as a matrix: pass a dict, {c: frame[c].to_numpy() for c in frame}. (Or an "
        f"index is a number that is not whole.) ({_first_line(error)})"
    )


def _of_one_axis(error, args, kwargs) -> str:
    if not (args and jnp.ndim(args[0]) == 1):
        return ""
    return (
        f"The model's first argument has the shape {jnp.shape(args[0])}; inputs "
        "are tables of shape (N, D). Give one column as x[:, None], one row of a "
        f"frame as df.iloc[:1], and arguments in their order. ({error})"
    )


def _of_indices(error, args, kwargs) -> str:
    if not any(words in str(error) for words in _NO_INDEX):
        return ""
    return (
        "An index in the model has no whole numbers. Codes of groups are integers "
        "from 0: names, group = np.unique(codes, return_inverse=True). (Columns of "
        "a frame are not had by lists of names: pass a dict of its columns.) "
        f"({_first_line(error)})"
    )


def _of_shapes(error, args, kwargs) -> str:
    if "broadcast" not in str(error):
        return ""
    given = {f"argument {i + 1}": arg for i, arg in enumerate(args)} | kwargs
    shapes = {name: array_shape(arg) for name, arg in given.items()}
    rows = {name: shape[0] for name, shape in shapes.items() if shape}
    each = ", ".join(f"{name} has {shape}" for name, shape in shapes.items())
    if len(set(rows.values()) - {1}) > 1:
        numbers = ", ".join(f"{name} has {number}" for name, number in rows.items())
        why = (
            f"whose arguments have different numbers of rows: {numbers}. Give as many "
            "rows of each as of the inputs, but for what is not by row."
        )
    elif any(len(shape) > 2 for shape in shapes.values()):
        why = (
            f"an argument of which has more than two axes: {each}. Inputs are tables "
            "of shape (N, D); flatten images and the like to rows."
        )
    elif sum(len(shape) == 2 for shape in shapes.values()) > 1:
        why = (
            f"whose arguments have the shapes: {each}. Outputs are rows, (P, N), as "
            "GP sites have them: Y.T, and masks with it."
        )
    else:
        return _of_plate(error)
    return f"Arrays do not broadcast in the model, {why} ({_first_line(error)})"


def _of_plate(error) -> str:
    """What to say of a site that its plate does not go with; empty of other errors."""
    for frame in _frames(error):
        plate, msg = (frame.f_locals.get(name) for name in ("self", "msg"))
        is_site = isinstance(msg, dict) and msg.get("type") == "sample"
        if isinstance(plate, numpyro.plate) and is_site:
            shape = tuple(msg["fn"].batch_shape)
            return (
                f"Site '{msg['name']}' has the batch shape {shape}, which does not go with "
                f"the size {plate.size} of plate '{plate.name}' around it. Make the plate "
                "as large as there are rows, as numpyro.plate('data', X.shape[0]); or, if "
                "the distribution takes functions along the last axis (classes of "
                "Categorical), give it f.T. For f at other rows there is posterior(X_new)."
            )
    return ""


def _frames(error):
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame
        at = at.tb_next


def _has_process(frame) -> bool:
    """Whether a distribution is made of one, in a frame of a traceback."""
    is_of_numpyro = frame.f_globals.get("__name__", "").startswith("numpyro.distributions")
    values = frame.f_locals.values() if is_of_numpyro else ()
    return any(isinstance(value, GaussianProcess) for value in values)


def _first_line(error) -> str:
    return str(error).splitlines()[0]


_OF_ARRAYS = _of_names, _of_indices, _of_shapes
#: What may be told of an error, by its type; in order.
_TELLERS: dict[type[Exception], tuple[Callable, ...]] = {
    OverflowError: (_of_large_numbers,),
    AttributeError: (_of_frames,),
    AssertionError: (_of_two_names,),
    TypeError: (_of_processes, *_OF_ARRAYS),
    IndexError: (_of_names, _of_one_axis, _of_indices, _of_shapes),
    ValueError: _OF_ARRAYS,
}
