"""Where programs stop being linear in their openings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgp.tracing.linear import LinearProgram
from numpyro_sgp.tracing.program import opening

KNOWN = jnp.array([1.0, 2.0, 3.0, 4.0])
INDEX = jnp.array([0, 0, 3, 1, 2])


def program(run):
    """Of two openings of four numbers, with one output."""

    def opened():
        return run(opening("a", (4,), float), opening("b", (4,), float))

    return LinearProgram(opened, ["a", "b"])


LINEAR = {
    "sum": lambda a, b: a + 2.0 * b - KNOWN,
    "gather": lambda a, b: a[INDEX] + b[1],
    "matrix": lambda a, b: jnp.outer(KNOWN, KNOWN) @ a + b.sum(),
    "where": lambda a, b: jnp.where(KNOWN > 2.0, a, 3.0 * b),
    "joined": lambda a, b: jnp.concatenate([a, b])[::-1].reshape(2, 4).T,
    "stack": lambda a, b: jnp.stack([a, b, *jnp.outer(KNOWN[:2], b)]).sum(0),
    "split": lambda a, b: jnp.split(a, 2)[1] + b[:2],
    "cumsum": lambda a, b: jnp.cumsum(a) / KNOWN,
    "segments": lambda a, b: jax.ops.segment_sum(a, jnp.array([0, 1, 1, 0]), 2),
    "jit": lambda a, b: jax.jit(lambda x: x.mean() + b)(a),
}
OTHER = {
    "product": lambda a, b: a * b,
    "exp": lambda a, b: jnp.exp(a),
    "divisor": lambda a, b: KNOWN / a,
    "square": lambda a, b: a**2,
    "abs": lambda a, b: jnp.abs(a + b),
    "choice": lambda a, b: jnp.where(a > 0.0, a, b),
    "index": lambda a, b: KNOWN[jnp.argmax(a)] + b,
    "sort": lambda a, b: jnp.sort(a),
    "softplus": lambda a, b: jax.nn.softplus(a),
    "rounded": lambda a, b: a.astype(int).astype(float),
    "scan": lambda a, b: jax.lax.scan(lambda c, x: (c * x, c), 1.0, a)[0] + b,
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear(name):
    found = program(LINEAR[name])
    kind = found.kind(found.outputs)
    assert kind.is_linear and kind.labels
    rng = np.random.default_rng(0)
    x, y = ({k: jnp.asarray(rng.normal(size=4)) for k in "ab"} for _ in range(2))

    def value(given):
        (out,) = found.evaluate([found.outputs], {}, given)
        return out

    between = {k: 0.3 * x[k] + 0.7 * y[k] for k in "ab"}
    expected = 0.3 * value(x) + 0.7 * value(y)
    np.testing.assert_allclose(value(between), expected, atol=1e-12)
    np.testing.assert_allclose(value(x), LINEAR[name](x["a"], x["b"]), atol=1e-12)


@pytest.mark.parametrize("name", OTHER)
def test_what_is_not(name):
    found = program(OTHER[name])
    assert not found.kind(found.outputs).is_linear


def roots(run):
    found = program(run)
    return found, found.predictors([found.outputs])


def test_one_predictor_for_all_that_is_made_of_it_number_by_number():
    def run(a, b):
        eta = a + b
        return jnp.exp(eta).sum() - (3.0 * eta - KNOWN).sum() + (eta[:, None] > KNOWN).sum()

    _, found = roots(run)
    assert [root.aval.shape for root in found] == [(4,)]

    def by_number(a, b):
        eta = a + b
        return jnp.exp(eta) - KNOWN * eta + jnp.tanh(eta[:, None] - KNOWN).sum(axis=1)

    _, found = roots(by_number)
    assert [root.aval.shape for root in found] == [(4,)]


def test_a_likelihood_follows_from_its_predictors():
    def run(a, b):
        return jnp.exp(a + b) * KNOWN - jnp.cos(a[INDEX][:4])

    found, predictors = roots(run)
    assert len(predictors) == 2
    rng = np.random.default_rng(1)
    x = {k: jnp.asarray(rng.normal(size=4)) for k in "ab"}
    edge = found.boundary([found.outputs], predictors)
    known = dict(zip(edge, found.evaluate(edge, {}, {}), strict=True))
    values = found.evaluate(predictors, known, x)
    given = {**known, **dict(zip(predictors, values, strict=True))}
    (out,) = found.evaluate([found.outputs], given, {})
    np.testing.assert_allclose(out, run(x["a"], x["b"]), atol=1e-12)


def test_what_it_depends_on():
    found = program(lambda a, b: (jnp.exp(a), KNOWN + 1.0, a - b))
    first, second, third = found.outputs
    assert found.labels(first) == {"a"}
    assert found.labels(second) == frozenset()
    assert found.labels(third) == {"a", "b"}
