"""
What NumPyro expects of a distribution, checked for each one of the package.

``python -m tests.test_protocols`` prints the table of distributions and checks.
"""

import copy
import inspect
import pickle
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro.contrib.control_flow import scan
from numpyro.distributions.batch_util import promote_batch_shape, vmap_over
from numpyro.infer.util import log_density

import numpyro_sgp as sgp
from numpyro_sgp.families import (
    Block,
    BlockGaussian,
    CoupledGaussian,
    DecoupledGaussian,
    MixtureGaussian,
)
from tests import conftest  # noqa: F401  (float64 before any array, as a script too)

KEY = random.key(0)
N, M, Q = 3, 2, 2
X = jnp.array([[0.0], [0.7], [1.5]])
Z = jnp.array([[0.2], [1.2]])
O = jnp.array([[0.6]])
MU = jnp.array([[0.3, -0.2], [0.1, 0.5]])
SQRT = jnp.array([[0.7, 0.0], [0.2, 0.5]])


def log_bernoulli(y, f):
    return y * f - np.logaddexp(0, f)


def draw_bernoulli(rng, f):
    return rng.uniform(size=f.shape) < 1 / (1 + np.exp(-f))


def process(theta, **options):
    return sgp.GaussianProcess(sgp.kernels.RBF(theta, 0.8), X, mean=theta, **options)


def batch_process(theta, **options):
    # Leaves of several ranks, which would not line up if each got an axis in front.
    kernel = sgp.kernels.Matern32(theta * jnp.array([1.0, 2.0]), 0.8) * 1.5
    kernel = kernel + sgp.kernels.RBF(0.3, jnp.array([0.5]))
    mean = sgp.means.Linear(jnp.array([0.4]), jnp.array([0.0, 1.0]) * theta)
    return sgp.GaussianProcess(kernel, X, mean, **options)


def marginal(cls, *points, **more):
    def make(theta, **options):
        kernel = sgp.kernels.RBF(theta, 0.8)
        return cls(kernel, X, *points, noise=0.3 * theta, **more, **options)

    return make


def sparse(theta, **options):
    q = BlockGaussian((Block(theta * MU, SQRT),))
    return sgp.SparsePosterior(process(theta).expand([Q]), (Z,), q, **options)


def coupled(theta, **options):
    sqrt = jnp.kron(jnp.array([[1.0, 0.0], [0.5, 0.8]]), SQRT)
    q = CoupledGaussian(theta * MU, sqrt)
    return sgp.SparsePosterior(process(theta).expand([Q]), (Z,), q, **options)


def decoupled(theta, **options):
    q = BlockGaussian((Block(theta * MU, SQRT),))
    prior = process(theta).expand([Q])
    q = DecoupledGaussian(q, O, jnp.array([0.4]))
    return sgp.SparsePosterior(prior, (Z,), q, **options)


def inverse_free(theta, **options):
    prior = process(theta)
    return sgp.InverseFreePosterior(prior, Z, MU[0], 0.6 * SQRT, theta * MU[1], **options)


def mixture(theta, **options):
    q = BlockGaussian(
        (Block(theta * jnp.stack([MU, -MU]), jnp.stack([SQRT, SQRT])[:, None]),)
    )
    prior = process(theta).expand([Q])
    q = MixtureGaussian(q, jnp.array([0.0, theta]))
    return sgp.SparsePosterior(prior, (Z,), q, **options)


def robust_max(theta, **options):
    # As many classes as rows, which shows a class taken for a row.
    f = theta * jnp.array([[1.0, 0.0, 0.2], [0.0, 2.0, 0.1], [-1.0, 0.0, 0.3]])
    return sgp.likelihoods.RobustMax(f, 0.4 * theta, **options)


def warped(theta, **options):
    loc = theta * jnp.array([-1.0, 0.0, 1.0])
    a, b, c = jnp.array([1.0, 0.5]), jnp.array([1.0, 2.0]), 0.3 * theta
    return sgp.likelihoods.WarpedNormal(loc, 0.5, a, b, c, **options)


def black_box(theta, **options):
    f = theta * jnp.array([-1.0, 0.0, 1.0])
    return sgp.BlackBox(log_bernoulli, f, sample=draw_bernoulli, **options)


DISTRIBUTIONS = {
    "GaussianProcess": process,
    "GaussianProcess, batch": batch_process,
    "MarginalGP": marginal(sgp.MarginalGP),
    "CollapsedSVGP": marginal(sgp.CollapsedSVGP, Z),
    "CollapsedSOLVEGP": marginal(sgp.CollapsedSOLVEGP, Z, O),
    "CollapsedODVGP": marginal(sgp.CollapsedODVGP, Z, O),
    "CollapsedCG": marginal(sgp.CollapsedCG, Z, tol=1e-12),
    "SparsePosterior": sparse,
    "SparsePosterior, coupled": coupled,
    "SparsePosterior, decoupled": decoupled,
    "InverseFreePosterior": inverse_free,
    "SparsePosterior, mixture": mixture,
    "RobustMax": robust_max,
    "WarpedNormal": warped,
    "BlackBox": black_box,
}
MARGINALS = ["MarginalGP", *(name for name in DISTRIBUTIONS if "Collapsed" in name)]
POSTERIORS = [name for name in DISTRIBUTIONS if "Posterior" in name]

# What is refused: why, and words of the message (None: NumPyro's bare refusal).
REFUSED = {
    **{
        (name, "gradient"): ("it would train the wrong bound", "wrong bound")
        for name in POSTERIORS
    },
    ("BlackBox", "gradient"): ("the function is not JAX", "has no gradient"),
    **{
        (name, check): ("q belongs to all latent functions", "cannot be expanded")
        for name in ("SparsePosterior, coupled", "SparsePosterior, mixture")
        for check in ("expand", "one value for all")
    },
    **{
        (name, "one value for all"): (
            "as do rows in a data plate",
            "All rows are one event",
        )
        for name in MARGINALS
    },
    **{
        (name, "out of support"): (
            "infinite responses have no posterior",
            "infinite values",
        )
        for name in MARGINALS
    },
    ("BlackBox", "out of support"): ("its support is not known", "no warning"),
    **{
        (name, "infer_shapes"): ("NumPyro infers no shapes of vectors", None)
        for name in DISTRIBUTIONS
        if name not in ("RobustMax", "WarpedNormal")
    },
    ("SparsePosterior, mixture", "rsample"): (
        "draws have no derivative by the weights",
        None,
    ),
    ("RobustMax", "rsample"): ("classes are discrete", None),
    ("BlackBox", "rsample"): ("the function is not JAX", None),
    ("RobustMax", "moments"): ("classes have no mean", None),
    ("BlackBox", "moments"): ("they are not known", None),
    **{
        (name, "cdf and icdf"): ("vectors, or not known", None)
        for name in DISTRIBUTIONS
        if name != "WarpedNormal"
    },
    **{
        (name, "enumerate_support"): ("not finite, or summing it out is no use", None)
        for name in DISTRIBUTIONS
    },
    **{(name, "entropy"): ("no closed form is offered", None) for name in DISTRIBUTIONS},
}


def refusal(message):
    """For what is refused without an exception of its own."""
    raise NotImplementedError(message)


def stack(make):
    """Two distributions, and both in one pytree."""
    each = make(1.0), make(1.3)
    return each, jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(known, each))


def known(d):
    """With arrays as leaves, of one type for each kind of number."""
    return jax.tree.map(jnp.asarray, d)


def check_sample_shapes(make):
    d = make(1.0)
    for sample_shape in ((), (2,), (2, 3)):
        shape = sample_shape + d.batch_shape + d.event_shape
        assert d.shape(sample_shape) == shape
        for sample in (d.sample, lambda *args: d.sample_with_intermediates(*args)[0]):
            assert jax.eval_shape(lambda: sample(KEY, sample_shape)).shape == shape  # noqa: B023
    draws = d.sample(KEY, (2, 3))
    assert draws.shape == shape and not np.allclose(draws[0], draws[1])


def check_log_prob_shapes(make):
    d = make(1.0)
    value = d.sample(KEY, (2, 3))
    found = d.log_prob(value)
    assert found.shape == (2, 3, *d.batch_shape)
    assert_allclose(d.log_prob(value, None), found)
    assert jax.eval_shape(d.log_prob, value[0]).shape == (3, *d.batch_shape)
    assert_allclose(d.log_prob(value[1, 2]), found[1, 2], rtol=1e-6)  # by itself


def check_jit(make):
    value = make(1.0).sample(KEY)
    found = jax.jit(lambda theta: make(theta).log_prob(value))(1.2)
    assert_allclose(found, make(1.2).log_prob(value), rtol=1e-7)
    found = jax.jit(lambda d, value: d.log_prob(value))(make(1.2), value)
    assert_allclose(found, make(1.2).log_prob(value), rtol=1e-7)
    sample = jax.eval_shape(lambda theta: make(theta).sample(KEY), 1.2)
    assert sample.shape == value.shape


def check_vmap_over_values(make):
    d = make(1.0)
    values = d.sample(KEY, (2,))
    assert_allclose(jax.vmap(d.log_prob)(values), d.log_prob(values), rtol=1e-7)


def check_vmap_over_distributions(make):
    each, both = stack(make)
    values = jnp.stack([d.sample(KEY) for d in each])
    expected = [d.log_prob(value) for d, value in zip(each, values, strict=True)]
    found = jax.vmap(lambda d, value: d.log_prob(value))(both, values)
    assert_allclose(found, expected, rtol=1e-7)
    # Made inside of vmap, as a model under vmap does, and seen outside.
    made = jax.vmap(lambda theta: known(make(theta)))(jnp.array([1.0, 1.3]))
    found = jax.vmap(lambda d, value: d.log_prob(value))(made, values)
    assert_allclose(found, expected, rtol=1e-7)


def check_vmap_over_a_field(make):
    each, both = stack(make)
    value = each[0].sample(KEY)
    fields = type(both).gather_pytree_data_fields()
    fields = [f for f in fields if jax.tree.leaves(getattr(both, f))]
    axes = vmap_over(both, **dict.fromkeys(fields, 0))
    found = jax.vmap(lambda d: d.log_prob(value), in_axes=(axes,))(both)
    assert_allclose(found, [d.log_prob(value) for d in each], rtol=1e-7)


def check_promote_batch_shape(make):
    each, both = stack(make)
    promoted = promote_batch_shape(both)
    assert promoted.batch_shape == (2, *each[0].batch_shape)
    assert promoted.event_shape == each[0].event_shape
    values = jnp.stack([d.sample(KEY, (4,)) for d in each], axis=1)
    expected = np.stack(
        [d.log_prob(value) for d, value in zip(each, values.swapaxes(0, 1), strict=True)], 1
    )
    assert_allclose(promoted.log_prob(values), expected, rtol=1e-7)
    sample = jax.eval_shape(lambda: promoted.sample(KEY, (4,)))
    assert sample.shape == promoted.shape((4,)) == values.shape
    assert promote_batch_shape(each[0]).shape() == each[0].shape()
    twice = promote_batch_shape(jax.tree.map(lambda *x: jnp.stack(x), both, both, both))
    assert twice.batch_shape == (3, 2, *each[0].batch_shape)
    assert jax.eval_shape(twice.log_prob, values[0]).shape == twice.batch_shape


def check_scan(make):
    T, d = 3, make(1.0)

    def step(carry, _):
        value = numpyro.sample("value", make(1.0 + 0.1 * jnp.tanh(carry)))
        return 0.5 * carry + jnp.mean(value), value

    def model():
        scan(step, 0.2, None, length=T)

    values = d.sample(KEY, (T,))
    found, trace = log_density(model, (), {}, {"value": values})
    assert trace["value"]["fn"].batch_shape == (T, *d.batch_shape)
    assert trace["value"]["fn"].event_shape == d.event_shape
    carry, expected = 0.2, 0.0
    for value in values:
        expected += jnp.sum(make(1.0 + 0.1 * jnp.tanh(carry)).log_prob(value))
        carry = 0.5 * carry + jnp.mean(value)
    assert_allclose(found, expected, rtol=1e-7)


def check_gradient(make):
    d = make(1.0)
    value = d.sample(KEY)
    slope = jax.grad(lambda theta: jnp.sum(make(theta).log_prob(value)))
    assert np.isfinite(slope(1.0))
    if not d.support.is_discrete:
        total = [jnp.sum(make(t).log_prob(value)) for t in (1 - 1e-5, 1 + 1e-5)]
        assert_allclose(slope(1.0), (total[1] - total[0]) / 2e-5, rtol=1e-5, atol=1e-6)


def check_expand(make):
    d = make(1.0)
    shape = (4, *d.batch_shape)
    for expanded in (d.expand(shape), d.expand_by((4,)), d.expand([*shape])):
        assert expanded.batch_shape == shape and expanded.event_shape == d.event_shape
        values = expanded.sample(KEY, (2,))
        assert values.shape == expanded.shape((2,))
        assert not np.allclose(values[:, 0], values[:, 1])
        found = expanded.log_prob(values)
        assert_allclose(found, d.log_prob(values), rtol=1e-7)
        assert found.shape == (2, *shape)
    assert d.expand(d.batch_shape).shape() == d.shape()
    if d.batch_shape:
        with pytest.raises(ValueError):
            d.expand((*shape[:-1], 7))


def check_one_value_for_all(make):
    d = make(1.0)
    expanded = d.expand((4, *d.batch_shape))
    value = d.sample(KEY)
    assert_allclose(expanded.log_prob(value), [d.log_prob(value)] * 4, rtol=1e-7)


def check_mask(make):
    d = make(1.0)
    value = d.sample(KEY)
    expected = d.log_prob(value)
    assert_allclose(d.mask(False).log_prob(value), jnp.zeros(d.batch_shape))
    mask = jnp.arange(expected.size).reshape(d.batch_shape) % 2 == 0
    if not getattr(d, "independent_latents", True) or not getattr(d, "has_rsample", True):
        mask = jnp.ones(d.batch_shape, bool)  # one density for all latent functions
    found = d.mask(mask).log_prob(value)
    assert_allclose(found, jnp.where(mask, expected, 0.0), rtol=1e-7)
    assert d.mask(mask).sample(KEY).shape == value.shape


def check_to_event(make):
    d = make(1.0)
    value = d.sample(KEY, (2,))
    event = d.to_event()
    assert event.batch_shape == () and event.event_shape == d.shape()
    expected = jnp.sum(d.log_prob(value).reshape(2, -1), -1)
    assert_allclose(event.log_prob(value), expected, rtol=1e-7)


def check_pytree(make):
    d = make(1.0)
    value = d.sample(KEY)
    leaves, structure = jax.tree.flatten(d)
    for again in (
        jax.tree.unflatten(structure, leaves),
        jax.tree.map(lambda leaf: leaf, d),
        jax.jit(lambda d: d)(d),
        copy.deepcopy(d),
    ):
        assert type(again) is type(d) and again.shape() == d.shape()
        assert jax.tree.structure(again) == structure
        assert_allclose(again.log_prob(value), d.log_prob(value), rtol=1e-7)
    # As vmap, grad and ahead-of-time compilation do it.
    jax.tree.unflatten(structure, [object()] * len(leaves))
    jax.tree.unflatten(structure, [None] * len(leaves))


def check_pickle(make):
    d = make(1.0)
    value = d.sample(KEY)
    before = d.log_prob(value)  # may keep factors
    again = pickle.loads(pickle.dumps(d))
    assert type(again) is type(d) and again.shape() == d.shape()
    assert_allclose(again.log_prob(value), before, rtol=1e-7)


def check_repr(make):
    d = make(1.0)
    for part in (type(d).__name__, str(d.batch_shape), str(d.event_shape)):
        assert part in repr(d)
    assert len(repr(d)) < 400


def check_support(make):
    d = make(1.0)
    value = d.sample(KEY, (5,))
    inside = d.support(value)
    assert inside.shape == (5, *d.batch_shape) and inside.all()
    assert d.support.event_dim == d.event_dim
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        d.log_prob(value)


def outside(d):
    value = d.sample(KEY).astype(float)
    return value.at[(0,) * value.ndim].set(jnp.inf)


def check_out_of_support(make):
    for d in (make(1.0), make(1.0, validate_args=True)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = d.log_prob(outside(d))
        if not any("Out-of-support" in str(w.message) for w in seen):
            refusal("no warning")
        assert found[(0,) * found.ndim] == -jnp.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(1.0, validate_args=False).log_prob(outside(d))


def check_without_validation(make):
    value = make(1.0).sample(KEY)
    expected = make(1.0).log_prob(value)
    with numpyro.validation_enabled(False):
        d = make(1.0)
        assert_allclose(d.log_prob(value), expected, rtol=1e-7)
        assert_allclose(d.log_prob(value, None), expected, rtol=1e-7)
        assert d.sample(KEY).shape == value.shape


def check_infer_shapes(make):
    d = make(1.0)
    names = [
        name
        for name in inspect.signature(type(d).__init__).parameters
        if name in type(d).arg_constraints and hasattr(d, name)
    ] or ["f"]
    shapes = {name: np.shape(getattr(d, name, 0.0)) for name in names}
    assert type(d).infer_shapes(**shapes) == (d.batch_shape, d.event_shape)


def check_rsample(make):
    d = make(1.0)
    assert_allclose(d.rsample(KEY, (2,)), d.sample(KEY, (2,)))  # refused, or the same
    assert d.has_rsample
    slope = jax.jacfwd(lambda theta: make(theta).rsample(KEY))(1.0)
    up, down = (make(1.0 + h).rsample(KEY) for h in (1e-5, -1e-5))
    assert_allclose(slope, (up - down) / 2e-5, rtol=1e-5, atol=1e-6)
    assert np.abs(slope).max() > 0


def check_moments(make):
    d, S = make(1.0), 20_000
    mean, variance = d.mean, d.variance
    assert mean.shape == variance.shape == d.shape()
    draws = np.asarray(d.sample(KEY, (S,)))
    # Five standard errors; that of a variance from the draws' fourth moment.
    error = np.sqrt(draws.var(0) / S)
    assert np.all(np.abs(draws.mean(0) - mean) < 5 * error)
    squares = (draws - np.asarray(mean)) ** 2
    assert np.all(np.abs(squares.mean(0) - variance) < 5 * squares.std(0) / np.sqrt(S))


def check_cdf_and_icdf(make):
    d = make(1.0)
    level = jnp.full(d.shape(), 0.3)
    assert_allclose(d.cdf(d.icdf(level)), level, rtol=1e-7)
    h, y = 1e-5, d.icdf(level)
    density = (d.cdf(y + h) - d.cdf(y - h)) / (2 * h)
    assert_allclose(density, jnp.exp(d.log_prob(y)), rtol=1e-6)


def check_enumerate_support(make):
    d = make(1.0)
    if d.has_enumerate_support:
        total = jnp.exp(d.log_prob(d.enumerate_support())).sum(0)
        assert_allclose(total, jnp.ones(d.batch_shape), rtol=1e-7)
    else:
        d.enumerate_support()


def check_entropy(make):
    assert make(1.0).entropy().shape == make(1.0).batch_shape


CHECKS = {
    name.removeprefix("check_").replace("_", " "): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}
for spelled in ("promote_batch_shape", "infer_shapes", "enumerate_support"):
    CHECKS = {
        spelled if name == spelled.replace("_", " ") else name: check
        for name, check in CHECKS.items()
    }


def is_refused(name, check):
    """Whether the check raises what the table of refusals says."""
    _, words = REFUSED[name, check]
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=words):
        CHECKS[check](DISTRIBUTIONS[name])


#: Of a class or kind that is in the table once more; run by `make slow`.
VARIANTS = (
    "GaussianProcess, batch",
    "CollapsedSVGP",
    "CollapsedSOLVEGP",
    "CollapsedODVGP",
    "CollapsedCG",
    "InverseFreePosterior",
    "SparsePosterior, decoupled",
    "SparsePosterior, coupled",
    "SparsePosterior, mixture",
)


@pytest.mark.quick(15)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name
        for name in DISTRIBUTIONS
    ],
)
def test_distribution_keeps_the_protocol_or_refuses_as_the_table_says(name, check):
    if (name, check) in REFUSED:
        is_refused(name, check)
    else:
        CHECKS[check](DISTRIBUTIONS[name])


def test_every_public_distribution_is_in_the_table():
    public = [getattr(sgp, name) for name in sgp.__all__]
    public += [getattr(sgp.likelihoods, name) for name in sgp.likelihoods.__all__]
    public = {
        cls
        for cls in public
        if isinstance(cls, type) and issubclass(cls, dist.Distribution)
    }
    assert public == {type(make(1.0)) for make in DISTRIBUTIONS.values()}
    assert {name for name, _ in REFUSED} <= set(DISTRIBUTIONS)
    assert {check for _, check in REFUSED} <= set(CHECKS)


def table():
    """The outcome of each check of each distribution, and the reasons of refusals."""
    outcomes = Counter()
    for name, make in DISTRIBUTIONS.items():
        row = []
        for check, function in CHECKS.items():
            try:
                refused = (name, check) in REFUSED
                is_refused(name, check) if refused else function(make)
                row.append("refused" if refused else "passed")
            except BaseException as error:  # pytest's failures are no exceptions
                if isinstance(error, KeyboardInterrupt):
                    raise
                row.append(f"FAILED ({check}: {error!r:.200})")
        outcomes.update(outcome.split(" ")[0] for outcome in row)
        print(f"{name}: {row.count('passed')} passed, {row.count('refused')} refused")
        print("".join(f"    {cell}\n" for cell in row if "FAILED" in cell), end="")
    for (name, check), (reason, _) in REFUSED.items():
        print(f"    {name} / {check}: {reason}")
    print(f"{len(DISTRIBUTIONS)} distributions x {len(CHECKS)} checks: {dict(outcomes)}")


if __name__ == "__main__":
    table()
