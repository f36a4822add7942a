"""A small part of the campaign of calibration, with fixed seeds."""

import numpy as np
import pytest
from scipy.stats import kstest

from campaigns import calibration
from campaigns._problems import N, problem, weighed
from campaigns.calibration import Posterior, judged, p_values, simulated


def exact(model, each, scale=1.0, told=None):
    """Draws of what the reference in closed form has, its sds times a number."""
    _, truths, _, references = simulated(model, each)
    rng = np.random.default_rng(0)
    mean, sd = (np.stack([getattr(r, k) for r in references]) for k in ("mean", "sd"))
    f = mean[:, None] + scale * sd[:, None] * rng.normal(size=(each, 99, N))
    return Posterior(mean, scale * sd, {"f": f}, told), references, truths


@pytest.mark.parametrize("model", ["conjugate", "hierarchical"])
def test_references_are_calibrated(model):
    # Tests of 5 and 8 quantities at 1e-3 over all.
    known = problem(model)
    found = []
    for i in range(100):
        truth, y = known.simulate(np.random.default_rng((1, i)))
        found.append(known.reference(y, truth).probabilities)
    for name in found[0]:
        share = [each[name] for each in found]
        assert kstest(share, "uniform").pvalue > 1e-3 / len(found[0]), name


def test_two_references_agree():
    # By weights with 20,000 draws, of which several thousand are effective.
    _, _, ys, references = simulated("conjugate", 1)
    rng = np.random.default_rng(0)
    f, weights, khat = weighed("conjugate", np.asarray(ys[0]), rng)
    mean = weights @ f
    assert khat < 0.5
    assert np.abs(mean - references[0].mean).max() < 0.1 * references[0].sd.min()
    sd = np.sqrt(weights @ (f - mean) ** 2)
    np.testing.assert_allclose(sd, references[0].sd, rtol=0.1)


@pytest.mark.slow
def test_a_fit_of_the_campaign_is_calibrated():
    found = calibration.look("SVGP, conjugate", each=8)
    assert not found.failed and found.numbers["misses"] == 0
    assert found.numbers["mean sd ratio"] == pytest.approx(1.0, abs=1e-6)


def test_ranks_of_too_narrow_posteriors_are_seen():
    for scale, failed in ((1.0, False), (0.5, True)):
        posterior, *known = exact("conjugate", 100, scale)
        found = judged("NUTS, conjugate", posterior, *known)
        rows_only = [s for s in found.failed if s.startswith("f[")]  # sums need joint draws
        assert bool(rows_only) is failed
        assert found.numbers["misses"] == (100 if failed else 0)


def test_misses_that_are_not_told_are_seen():
    for told in (True, False):
        posterior, *known = exact("conjugate", 20, 0.7, np.full(20, told))
        found = judged("ODVGP of halves, conjugate", posterior, *known)
        assert found.numbers["told"] == (20 if told else 0)
        assert ("0 are told of 20 that miss" in found.failed) is not told


def test_p_values_are_those_of_uniform_numbers():
    share = (np.arange(200) + 0.5) / 200
    assert min(p_values(share).values()) > 0.5
    assert p_values(0.25 + 0.5 * share)["spread"] < 1e-6
    assert p_values(share**2)["ranks"] < 1e-6
