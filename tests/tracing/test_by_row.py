"""Which values are made of one row each, by the program and by numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgp.tracing.by_row import Rows, rows_of_values
from numpyro_sgp.tracing.program import Program, opening

N, K = 5, 3
W = jnp.asarray(np.random.default_rng(0).normal(size=(4, K)))
DATA = jnp.asarray(np.random.default_rng(1).normal(size=(N, 2)))
OTHER = jnp.arange(1.0, 1.0 + N)

#: Of f ``(K, N)``: functions, and the axis of rows in what they return.
BY_ROW = {
    "the same": (lambda f: f, 1),
    "softmax": (lambda f: jax.nn.softmax(f, axis=0), 1),
    "log of a sum": (lambda f: jax.scipy.special.logsumexp(f, axis=0), 0),
    "softplus": (lambda f: jax.nn.softplus(f), 1),
    "relu": (lambda f: jax.nn.relu(f), 1),
    "normal cdf": (lambda f: jax.scipy.special.ndtr(f), 1),
    "log gamma": (lambda f: jax.scipy.special.gammaln(jnp.exp(f)), 1),
    "where": (lambda f: jnp.where(f[0] > 0, f[1], 2.0), 0),
    "clip": (lambda f: jnp.clip(f, -1.0, 1.0), 1),
    "turned": (lambda f: f.T, 0),
    "table": (lambda f: jnp.stack([f[0], f[1] * f[2]], axis=-1), 0),
    "joined": (lambda f: jnp.concatenate([f, 2.0 * f]), 1),
    "weights": (lambda f: W @ f, 1),
    "turned weights": (lambda f: f.T @ W.T, 0),
    "sum of products": (lambda f: jnp.einsum("kn,jk,nd->njd", f, W, DATA), 0),
    "covariates": (lambda f: (f[:2].T * DATA).sum(-1), 0),
    "sorted functions": (lambda f: jnp.sort(f, axis=0), 1),
    "largest function": (lambda f: jnp.argmax(f, axis=0), 0),
    "running over functions": (lambda f: jnp.cumsum(f, axis=0), 1),
    "one function": (lambda f: f[1], 0),
    "backwards over functions": (lambda f: f[::-1], 1),
    "reshaped": (lambda f: f.reshape(1, K, 1, N), 3),
    "squares": (lambda f: (f[:, None] * f[None]).reshape(K * K, N), 1),
    "outer": (lambda f: f[0][:, None] * jnp.arange(4.0), 0),
    "threshold": (lambda f: f > 0.3, 1),
    "rounded": (lambda f: jnp.round(f).astype(int), 1),
    "checkpoint": (lambda f: jax.checkpoint(jnp.exp)(f), 1),
    "jit": (lambda f: jax.jit(lambda f: jnp.exp(f) / (1 + f**2))(f), 1),
    "vmap": (lambda f: jax.vmap(lambda row: jnp.sin(row) @ W.T, 1)(f), 0),
    "split": (lambda f: jnp.split(f, 3)[1], 1),
    "padded": (lambda f: jnp.pad(f, ((1, 0), (0, 0))), 1),
}
MIXED = {
    "sum": lambda f: f - f.sum(axis=1, keepdims=True),
    "mean of one": lambda f: f[0] - f[0].mean(),
    "total": lambda f: f.sum(),
    "backwards": lambda f: f[:, ::-1],
    "rolled": lambda f: jnp.roll(f, 1, axis=1),
    "differences": lambda f: jnp.diff(f, axis=1, append=0.0),
    "running": lambda f: jnp.cumsum(f, axis=1),
    "largest so far": lambda f: jax.lax.cummax(f, axis=1),
    "best": lambda f: f == f.max(),
    "rank": lambda f: jnp.argsort(jnp.argsort(f[0])),
    "sorted": lambda f: jnp.sort(f, axis=-1),
    "indexed": lambda f: f[:, jnp.array([1, 0, 2, 3, 4])],
    "kernel": lambda f: jnp.exp(-((f[0][:, None] - f[0]) ** 2)),
    "products of rows": lambda f: f.T @ f,
    "square": lambda f: (f[:, :, None] + f[:, None, :])[0],
    "transposed square": lambda f: jnp.zeros((N, N)) + f[0] + f[0][:, None],
    "folded": lambda f: f.reshape(N, K),
    "some": lambda f: f[:, 1:],
    "padded": lambda f: jnp.pad(f, ((0, 0), (1, 0)))[:, :N],
    "scanned": lambda f: jax.lax.scan(lambda c, x: (c + x, c), 0.0, f[0])[1],
    "a number": lambda f: jnp.float64(3.0),
    "drawn": lambda f: f + jax.random.normal(jax.random.key(0), f.shape),
    "shuffled": lambda f: jax.random.permutation(jax.random.key(0), f, axis=1),
    "mixed by weights": lambda f: f @ jnp.ones((N, N)),
    "another opening": lambda f: f + opening("g", (K, N), f.dtype),
}


def rows_of(fn, data=None):
    program = Program(lambda: {"": fn(opening("f", (K, N), DATA.dtype))})
    return rows_of_values(program, {"f"}, data)[""]


@pytest.mark.quick(9)
@pytest.mark.parametrize("name", BY_ROW)
def test_rows_are_told_and_change_with_themselves_alone(name):
    fn, axis = BY_ROW[name]
    assert rows_of(fn) == Rows(N, axis)
    assert rows_of(fn, [(DATA, 0)]) == Rows(N, axis)
    rng = np.random.default_rng(2)
    f, other = rng.normal(size=(2, K, N))
    for row in range(N):
        moved = np.where(np.arange(N) == row, f, other)
        one, all_of_them = (
            np.take(np.asarray(fn(jnp.asarray(v))), row, axis) for v in (moved, f)
        )
        np.testing.assert_array_equal(one, all_of_them)


@pytest.mark.parametrize("name", MIXED)
def test_what_is_made_of_other_rows_or_draws_is_none(name):
    assert rows_of(MIXED[name]) is None


def test_numbers_for_each_row_are_of_data_or_of_all_rows():
    both = [(DATA, 0), (OTHER, 0)]
    for fn, of_both in (
        (lambda f: f * OTHER, Rows(N, 1)),
        (lambda f: f + f / OTHER, Rows(N, 1)),
        (lambda f: f * jnp.arange(N), None),
    ):
        assert rows_of(fn) == Rows(N, 1)
        assert rows_of(fn, [(DATA, 0)]) is None
        assert rows_of(fn, both) == of_both
    assert rows_of(lambda f: f * DATA.mean(), [(DATA, 0)]) is None
    assert rows_of(lambda f: f * DATA[:, 0], [(DATA, 0)]) == Rows(N, 1)
    assert rows_of(lambda f: f * DATA[::-1, 0], [(DATA, 0)]) is None
    assert rows_of(lambda f: f * (1.0 + jnp.zeros(N)), [(DATA, 0)]) == Rows(N, 1)
