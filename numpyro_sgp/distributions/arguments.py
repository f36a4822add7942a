"""What users pass to models: NumPy arrays, frames and lists where JAX arrays are meant."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import array_shape, deviations, is_sparse

_NUMBERS = "biuf"  # kinds of dtypes
_ROUNDED = 1e-3  # of a standard deviation
_WHAT = "numpyro_sgp argument"  # among the attributes of a frame
_WHAT_TO_WRITE = {
    "M": "Give the time since a fixed one as a number: (t - t.min()) / np.timedelta64(1, "
    "'D') is in days.",
    "m": "Give durations as numbers: dt / np.timedelta64(1, 'D') is in days.",
    "c": "Give real and imaginary parts as columns of their own.",
}
_ENCODE = (
    "Convert numbers by .astype(float), and encode categories as whole numbers: "
    "df['g'].astype('category').cat.codes, say."
)


class _Data(np.ndarray):
    """
    A NumPy array that may be indexed by what JAX traces, such as a plate's index inside of
    jit. All else is NumPy's: ``int(group.max()) + 1`` is a known number everywhere.
    """

    _in_jax = None

    def __getitem__(self, index):
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(index)):
            return self.in_jax()[index]
        return super().__getitem__(index)

    def __array_wrap__(self, array, context=None, return_scalar=False):
        # NumPy's reductions of a subclass would be arrays without axes, not numbers.
        if np.ndim(array) == 0:
            return np.asarray(array)[()]
        return super().__array_wrap__(array, context)

    def in_jax(self):
        """The same as a JAX array, made once."""
        if self._in_jax is None:
            with jax.ensure_compile_time_eval():
                self._in_jax = jnp.asarray(self)
        return self._in_jax


class _Matrix(_Data):
    """That of a frame, whose columns have names."""

    _columns: tuple = ()  # not `columns`, by which models tell frames


def with_columns(array, columns) -> np.ndarray:
    """A NumPy array that knows the names of its columns, for :func:`columns_in`."""
    found = np.asarray(array).view(_Matrix)
    found._columns = tuple(columns)
    return found


def columns_in(array) -> tuple:
    """Names that :func:`with_columns` gave an array; empty for others."""
    return array._columns if isinstance(array, _Matrix) else ()


def named_leaves(model, args, kwargs) -> dict:
    """Arrays, frames and the like by name, those in containers with their place there."""
    named = dict(named_arguments(model, args, kwargs))
    leaves = jax.tree_util.tree_flatten_with_path(named, is_leaf=is_frame)[0]
    return {path[0].key + jax.tree_util.keystr(path[1:]): v for path, v in leaves}


def as_arrays(model, args, kwargs):
    """
    Arguments of a model as it can use them inside of jit: NumPy arrays, frames, series and
    lists of numbers become NumPy arrays that a traced index may be applied to. All else
    stays as it is; so does a flat list of whole numbers that has not as many entries as an
    array has rows, which may be an option (sizes of layers). A frame of pandas stays one,
    of which JAX may take rows as of its matrix (``X[idx]``, ``X @ w``); strings, categories
    and times in it are refused then.

    :param args: tuple of arguments.
    :param kwargs: dict of keyword arguments.
    :return: both, converted.
    :raises TypeError: for an array with masked values.
    :raises ValueError: if the first array has no rows, or frames and series have the same
        labels of rows in another order.
    """
    named = list(named_arguments(model, args, kwargs))
    _check_order(named)
    rows = _row_counts(value for _, value in named)
    found = [_converted(value, f"Argument '{name}'", rows) for name, value in named]
    for (name, _), value in zip(named, found, strict=True):
        if shapes := [shape for leaf in _leaves(value) if (shape := np.shape(leaf))]:
            if shapes[0][0] == 0:
                raise ValueError(
                    f"Argument '{name}' of the model has no rows (shape {shapes[0]}). Give "
                    "at least one."
                )
            break
    return tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :], strict=True))


def _check_order(named) -> None:
    """Rows go together by place: refuses those whose labels say that they do not."""
    frames = [(name, v.index) for name, v in named if _is_pandas(v) and hasattr(v, "index")]
    for name, index in frames[1:]:
        first, labels = frames[0]
        if len(index) != len(labels) or index.equals(labels):
            continue
        if index.is_unique and set(index) == set(labels):
            raise ValueError(
                f"Arguments '{first}' and '{name}' have the same labels of rows in another "
                f"order, but rows go together by place. Give {name}.to_numpy() if places "
                f"are right, and {name}.loc[{first}.index] if labels are."
            )


def named_arguments(model, args, kwargs):
    """Pairs of the name and the value of each argument; unnamed ones have their number."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in by_place][: len(args)]
    names += [str(i) for i in range(len(names), len(args))]
    yield from zip(names, args, strict=True)
    yield from kwargs.items()


def with_given(model, args, kwargs, given) -> tuple[tuple, dict]:
    """
    Known arguments of a model with others by name, which may be among those by place; of
    these given ones that are no arguments of the model are left as they are.
    """
    by_place = dict(named_arguments(model, args, {}))
    if by_place.keys() & given.keys():
        return (), {**by_place, **kwargs, **given}
    return args, {**kwargs, **given}


def refuse_sparse(model, args, kwargs) -> None:
    """
    :raises TypeError: if an argument of a model has a sparse matrix of SciPy, which no
        compiled program takes.
    """
    for name, value in named_arguments(model, args, kwargs):
        for leaf in jax.tree.leaves(value):
            if is_sparse(leaf):
                raise TypeError(
                    f"Argument '{name}' of the model has a {type(leaf).__name__}, a sparse "
                    f"matrix, which JAX does not take. Give an array: {name}.toarray()."
                )


def warn_of_rounding(value, what: str) -> None:
    """
    Warns where JAX's single precision takes digits that set apart rows of a NumPy array, as
    of seconds since 1970: where numbers of their size are rounded by more than a thousandth
    of their column's standard deviation, whether or not they are.

    :param what: what it is, the beginning of a message.
    """
    if jnp.result_type(float) == jnp.float64 or not isinstance(value, np.ndarray):
        return
    if value.dtype.kind not in "iuf" or value.dtype.itemsize < 8 or value.ndim == 0:
        return
    value = np.asarray(value)
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.max(np.abs(value - value.astype(np.float32)), axis=0, initial=0.0)
        # Whole numbers may be none the worse, and what is computed with them is.
        size = np.max(np.abs(value), axis=0, initial=0.0, where=np.isfinite(value))
        error = np.maximum(error, 0.5 * np.finfo(np.float32).eps * size)
        sd = deviations(value) if len(value) else error
        share = np.where(error > 0.0, error, 0.0) / np.where(sd > 0.0, sd, np.inf)
    most = float(np.max(share, initial=0.0))
    if most > _ROUNDED:
        warnings.warn(
            f"{what} is rounded by up to {most:.2g} standard deviations of a column to "
            "JAX's single precision. Subtract an offset, such as the column's mean, or "
            "call numpyro.enable_x64() at the beginning of the program.",
            stacklevel=1,  # of one place, so that Python shows it once for each text
        )


def warn_of_rounded_arguments(model, args, kwargs) -> None:
    """:func:`warn_of_rounding` for each argument of a model."""
    for name, value in named_arguments(model, args, kwargs):
        for leaf in _leaves(value):
            leaf = leaf.to_numpy() if _is_frame(leaf) else leaf
            warn_of_rounding(leaf, f"Argument '{name}' of the model")


def check_indexable(model, given, converted) -> None:
    """
    For models that take rows by a plate's index, which NumPyro's SVI and Predictive run
    with the arguments as they are. To be called after the model has run with what
    :func:`as_arrays` made of them, which knows of arrays of NumPy whose index was traced.

    :param given: arguments and keyword arguments of the model.
    :param converted: the same by :func:`as_arrays`.
    :raises TypeError: if data are a frame, a series or a list, or an array of NumPy of
        which rows are taken inside of jit.
    """
    inside_jit = not not_jax_tracer(jnp.zeros(()))
    named = list(named_arguments(model, *given))
    rows = _row_counts(value for _, value in named)
    others = named_arguments(model, *converted)
    for (name, value), (_, data) in zip(named, others, strict=True):
        for leaf, array in zip(_leaves(value), _leaves(data), strict=True):
            if getattr(leaf, "_takes_rows", False):
                continue
            is_numpy = isinstance(leaf, np.ndarray) and not isinstance(leaf, _Data)
            taken = inside_jit and is_numpy and getattr(array, "_in_jax", None) is not None
            if taken or _is_frame(leaf) or (_is_list(leaf) and len(leaf) in rows):
                mend = f"{name}.to_numpy()" if _is_frame(leaf) else name
                where = " inside of jit" if taken else ""
                raise TypeError(
                    f"Argument '{name}' of the model is a {type(leaf).__name__}, of which "
                    "NumPyro's SVI and Predictive cannot take rows by a plate's index"
                    f"{where}. Give an array: jnp.asarray({mend})."
                )


def in_float64(tree):
    """
    A tree of arrays with its real numbers in 64 bits. Those of NumPy are new ones, so that
    what they keep of themselves in JAX is of 64 bits too.
    """

    def wide(leaf):
        if not isinstance(leaf, np.ndarray | jax.Array):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
            return leaf.astype(np.float64)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(wide, tree)


def as_numbers(value, what: str):
    """
    A frame, series or list of numbers, or an array of another library, as a NumPy array;
    arrays and all else as they are.

    :param what: what it is, the beginning of a message.
    :raises TypeError: if its entries are not numbers, or masked.
    """
    if _is_frame(value):
        return _frame_as_numbers(value, what)
    if _is_list(value) or _is_of_other_library(value):
        value = np.asarray(value)
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            raise TypeError(
                f"{what} is a masked array, whose mask JAX would not see. Give it "
                ".filled(0.0), and, if these are observations, leave the masked ones out "
                "with numpyro.handlers.mask(mask=...) around their site."
            )
        return value.data
    if isinstance(value, np.ndarray) and value.dtype.kind not in _NUMBERS:
        kind = value.dtype.kind
        raise TypeError(
            f"{what} has the dtype {value.dtype}, which are no real numbers. "
            f"{_WHAT_TO_WRITE.get(kind, _ENCODE)}"
        )
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        if value.dtype.itemsize > 8:  # np.longdouble, which JAX has not
            return value.astype(np.float64)
    return _held(value) if isinstance(value, np.ndarray) else value


def frames_as_arrays(tree):
    """A pytree with its frames as matrices."""

    def plain(leaf):
        return as_numbers(leaf, "An argument") if is_frame(leaf) else leaf

    return jax.tree.map(plain, tree, is_leaf=is_frame)


def _converted(value, what, rows):
    """An argument with its arrays converted; itself if there is nothing to convert."""
    leaves, structure = jax.tree.flatten(value, is_leaf=_is_list)
    found = [_leaf_as_data(leaf, what, rows) for leaf in leaves]
    if all(new is old for new, old in zip(found, leaves, strict=True)):
        return value
    return jax.tree.unflatten(structure, found)


def _leaf_as_data(leaf, what, rows):
    if _is_list(leaf):
        is_option = all(isinstance(v, int) for v in leaf) and len(leaf) not in rows
        return leaf if is_option else np.asarray(leaf).view(_Data)
    if isinstance(leaf, np.ndarray) and not isinstance(leaf, np.ma.MaskedArray):
        # A model may encode strings by itself, and a number is no data.
        if leaf.ndim == 0 or leaf.dtype.kind not in _NUMBERS or isinstance(leaf, _Data):
            return leaf
    if is_frame(leaf):
        if getattr(leaf, "_takes_rows", False):
            return leaf
        frame = _with_rows(type(leaf))(leaf)
        frame.attrs = {**leaf.attrs, _WHAT: what}
        return frame
    found = as_numbers(leaf, what)
    if not isinstance(found, np.ndarray):
        return found
    kind = _Series if _is_pandas(leaf) else _Data
    return found.astype(found.dtype.newbyteorder("="), copy=False).view(kind)


class _Series(_Data):
    """Of a series, whose moments are those of pandas."""

    def std(self, *args, ddof=1, **options):
        return super().std(*args, ddof=ddof, **options)

    def var(self, *args, ddof=1, **options):
        return super().var(*args, ddof=ddof, **options)

    @property
    def values(self):
        return np.asarray(self)

    def to_numpy(self):
        return np.asarray(self)


def _is_of_other_library(value) -> bool:
    """Whether it is an array that is neither JAX's nor NumPy's, as a tensor of PyTorch."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return False
    reads = hasattr(value, "__array__") and not hasattr(value, "__jax_array__")
    return reads and bool(getattr(value, "shape", ()))


def is_frame(value) -> bool:
    """Whether it is a frame of pandas."""
    return _is_pandas(value) and hasattr(value, "columns")


def has_no_numbers(value) -> bool:
    """
    Whether it is a frame of pandas, or an array of strings and the like: what no compiled
    program takes, but a model may encode by itself.
    """
    is_numpy = isinstance(value, np.ndarray)
    return is_frame(value) or (is_numpy and value.dtype.kind not in _NUMBERS)


def _is_pandas(value) -> bool:
    """Whether it is a frame or a series of pandas, which is not imported for it."""
    return type(value).__module__.split(".")[0] == "pandas"


@functools.cache
def _with_rows(kind):
    """A class of frames of pandas, whose rows and products JAX takes as of their matrix."""

    class Frame(kind):
        _takes_rows = True

        @property
        def _constructor(self):
            return kind

        def __getitem__(self, index):
            axes = index if isinstance(index, tuple) else ()
            of_matrix = any(i is None or i is ... or isinstance(i, slice) for i in axes)
            if isinstance(index, jax.Array) or of_matrix:
                return jnp.asarray(as_numbers(self, ""))[index]
            return super().__getitem__(index)

    def with_jax(name):
        plain = getattr(kind, name)

        def operation(self, other):
            if isinstance(other, jax.Array):
                return getattr(jnp.asarray(as_numbers(self, "")), name)(other)
            return plain(self, other)

        return operation

    for name in ("add", "sub", "mul", "truediv", "matmul"):
        for full in (f"__{name}__", f"__r{name}__"):
            setattr(Frame, full, with_jax(full))
    Frame.__name__, Frame.__module__ = kind.__name__, kind.__module__
    return Frame


def _leaves(value):
    return jax.tree.leaves(value, is_leaf=_is_list)


def _row_counts(values) -> set:
    """Lengths of the first axes of arrays."""
    leaves = (leaf for value in values for leaf in _leaves(value))
    return {shape[0] for leaf in leaves if (shape := _shape(leaf))}


def _shape(leaf):
    """The shape of an array of numbers, or of a list that is surely data, or ()."""
    if _is_list(leaf):
        return () if all(isinstance(v, int) for v in leaf) else np.shape(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in _NUMBERS:
        return ()
    return array_shape(leaf)


def _is_list(value) -> bool:
    """Whether it is a list of numbers, or of such lists of one length."""
    if not isinstance(value, list) or not value:
        return False
    if all(isinstance(v, list) for v in value):
        return len({len(v) for v in value}) == 1 and all(_is_list(v) for v in value)
    return all(isinstance(v, int | float | np.number | np.bool_) for v in value)


def _is_frame(value) -> bool:
    """Whether it is a frame or a series of pandas, or the like."""
    known = hasattr(value, "to_numpy") and hasattr(value, "shape")
    return known and not isinstance(value, _Data)


def _frame_as_numbers(frame, what):
    what = getattr(frame, "attrs", {}).get(_WHAT, what)
    what = f"{what} is a {type(frame).__name__} and"
    dtypes = getattr(frame, "dtypes", getattr(frame, "dtype", None))
    columns = dtypes.items() if hasattr(dtypes, "items") else [(None, dtypes)]
    for column, dtype in columns:
        kind = getattr(dtype, "kind", "f")
        if kind not in _NUMBERS:
            where = "has" if column is None else f"its column {column!r} has"
            mend = _WHAT_TO_WRITE.get(kind, _ENCODE)
            raise TypeError(f"{what} {where} the dtype {dtype}: no numbers. {mend}")
    found = frame.to_numpy()
    if found.dtype.kind not in _NUMBERS:  # columns of several types, or missing values
        found = frame.to_numpy(dtype=np.float64, na_value=np.nan)
    found = _held(found)
    return with_columns(found, frame.columns) if is_frame(frame) else found


def _held(array):
    """
    Whole numbers that JAX does not hold, which it would wrap around without a word (times
    in milliseconds, say), as real ones.
    """
    if array.dtype.kind not in "iu" or array.size == 0 or isinstance(array, np.memmap):
        return array
    kind = jax.dtypes.canonicalize_dtype(array.dtype)
    limits = np.iinfo(kind)
    if kind == array.dtype or limits.min <= array.min() <= array.max() <= limits.max:
        return array
    return array.astype(np.float64)
