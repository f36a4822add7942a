"""Verdicts where something is not known, or of several sites; arguments that are texts."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp._programs import join_static, split_static
from numpyro_sgp.diagnostics.evidence import EvidenceBracket
from numpyro_sgp.diagnostics.khat import too_many_rows
from numpyro_sgp.diagnostics.sparsity import SparsityCurve
from numpyro_sgp.fitting.attempts import Attempts
from numpyro_sgp.fitting.check import _of_points, _within
from numpyro_sgp.fitting.grow import grow
from numpyro_sgp.fitting.progress import CONVERGED, INTERRUPTED, Limits, Trained
from numpyro_sgp.fitting.summary import counted
from numpyro_sgp.fitting.verdict import Cause, Verdict

X = np.linspace(0.0, 6.0, 20)[:, None]
Y = np.sin(X[:, 0])
QUIET = {"progress_bar": False}


def model(X, y=None, names=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        noise = 0.1 if names is None or names[0] == "a" else 1.0
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.slow
def test_arrays_of_texts_are_arguments():
    fits = {
        name: sgp.fit(model, sgp.VGP(), (X, Y), names=np.array([name]), steps=2, **QUIET)
        for name in "ab"
    }
    assert fits["a"].bound > fits["b"].bound + 5.0


@pytest.mark.slow
def test_a_diagonal_covariance_is_the_family_and_no_loss_of_points():
    """The mend was more inducing points, of a guide that has all rows."""
    K = np.exp(-0.5 * (X - X.T) ** 2) + 0.01 * np.eye(20)
    guide = sgp.VGP(covariance="diagonal")
    verdict = sgp.fit(model, guide, (X, Y), **QUIET).check()
    evidence = -0.5 * (Y @ np.linalg.solve(K, Y) + np.linalg.slogdet(2 * np.pi * K)[1])
    assert verdict.evidence.lower == pytest.approx(evidence, abs=0.01)
    assert verdict.causes["inducing points"].nats < 0.1
    assert verdict.causes["family"].nats > 1.0
    assert "covariance='full' (of SVGP or VGP)" in verdict.causes["family"].mend


def test_arrays_of_texts_have_a_hash():
    arrays, static = split_static((X, np.array([["a"], ["bc"]])))
    assert len(arrays) == 1
    assert static == split_static((X, np.array([["a"], ["bc"]])))[1]
    assert static != split_static((X, np.array([["a"], ["bd"]])))[1]
    np.testing.assert_array_equal(join_static(arrays, static)[1], [["a"], ["bc"]])


@pytest.mark.slow
def test_a_fit_with_dual_parameters_from_a_file_is_checked(tmp_path):
    fitted = sgp.fit(model, sgp.SVGP(5, covariance="dual"), (X, Y), **QUIET)
    fitted.save(tmp_path / "fit")
    assert sgp.load(tmp_path / "fit", model, args=(X, Y)).check().converged


@pytest.mark.slow
def test_draws_of_a_deep_gp_have_covariances_of_their_own():
    def deep(X, y=None):
        h = numpyro.sample("h", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), h[:, None]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    def beside(X, y=None):
        h = numpyro.sample("h", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + h, 0.1), obs=y)

    many = np.linspace(0.0, 6.0, 201)[:, None]
    with jax.enable_x64(True):
        for layers, found in [(deep, True), (beside, False)]:
            guide = sgp.AutoSparseGP(layers, sgp.SVGP(3))
            guide.setup(many, many[:, 0])
            params = guide.known().starts
            assert bool(too_many_rows(params, layers, guide, many, many[:, 0])) == found


def test_losses_that_were_not_believed_have_no_part_in_the_trend():
    few = SimpleNamespace(free={"a": 0.0}, profiled=[])
    attempts = object.__new__(Attempts)
    attempts.problem, attempts.steps = few, 0
    losses = np.r_[np.linspace(9.0, 0.0, 500), np.zeros(500)]
    losses[950] = np.nan
    assert attempts.of_others(losses).nats == 0.0
    assert "too few losses" in attempts.of_others(losses[:20]).told
    assert "no losses" in attempts.of_others(None).told


@pytest.mark.parametrize(
    "sites, words", [(1, "40 inducing points (num"), (2, "16 more inducing points at each")]
)
def test_points_to_use_are_those_of_each_site(sites, words):
    curve = SparsityCurve(8, (8, 16), (5.0, 5.1), (0.0, 0.0), 5.0, 40)
    mend = _of_points(lambda: curve, 8, np.nan, sites).mend
    assert words in mend
    assert ("points at each GP site" in mend) == (sites > 1)
    more = SparsityCurve(8, (8, 16), (5.0, 50.0), (0.0, 0.0), 50.0, None)
    assert f"more than {'24' if sites == 1 else '16 more'} inducing" in (
        _of_points(lambda: more, 8, np.nan, sites).mend
    )


def test_a_fit_that_chose_its_points_is_not_told_to_choose_them():
    curve = SparsityCurve(8, (8, 16), (5.0, 5.1), (0.0, 0.0), 5.0, 40)
    mend = _of_points(lambda: curve, 8, np.nan, 1, grown=True).mend
    assert mend.startswith("40 inducing points (more than 'auto' took), and a check again")
    little = SparsityCurve(8, (8, 16), (0.7, 0.8), (0.0, 0.0), 0.8, 16)
    assert _of_points(lambda: little, 8, np.nan, 1).mend
    assert not _of_points(lambda: little, 8, np.nan, 1, grown=True).mend  # is its promise


def test_the_family_loses_no_more_than_the_bracket_leaves():
    """Weights in float32 told of 0.32 +- 0.02 nats where 0.036 were left at most."""
    seen = Cause("family", 1.32, 0.02, "by weights", "MCMC")
    bracket = EvidenceBracket(326.66, 326.70, gain=0.01)
    capped = _within(bracket, seen)
    assert np.isclose(capped.nats, 0.05) and capped.error == 0.0 and not capped.mend
    assert "by weights; the bracket of the evidence leaves no more" in capped.told
    wide = EvidenceBracket(320.0, 330.0, gain=0.0)
    unknown = EvidenceBracket(np.nan, np.nan, "no Gaussian likelihood")
    for other in (wide, unknown, None):
        assert _within(other, seen) is seen


def test_points_that_seem_enough_where_they_are_are_not_called_so():
    """At their own hyperparameters few points lose little: 1.1 nats, of 18.9 in truth."""
    curve = SparsityCurve(40, (8, 16), (0.4, 1.1), (0.0, 0.0), 1.1, 40)
    points = _of_points(lambda: curve, 40, np.nan, 1)
    assert points.mend.startswith("56 inducing points")  # as many rows as there are more
    causes = {name: Cause(name, 0.0) for name in ("q(u)", "other parameters")}
    told = Verdict({**causes, points.name: points}).summary
    assert "lose at least 1.1 nats at these hyperparameters, and may lose several" in told


def test_a_verdict_says_where_q_was_not_looked_at():
    known = {name: Cause(name, 0.0) for name in ("other parameters", "inducing points")}
    unknown = Cause("q(u)", np.nan, told="too many rows to tell: check part of them")
    with_others = Cause("q(u)", np.nan, told="is trained with the other parameters")
    assert "q(u) was not looked at" in Verdict({"q(u)": unknown} | known).summary
    assert "looked" not in Verdict({"q(u)": with_others} | known).summary


def test_the_first_line_says_what_is_not_known():
    """Of nodes that are too few it was "not converged: left are <0.01 nats for q(w)"."""
    names = "other parameters", "inducing points"
    known = {name: Cause(name, 0.0) for name in names}
    few = Cause("nodes", np.nan, mend="a larger max_nodes")
    found = Verdict({"q(u)": Cause("q(w)", 0.0)} | known | {"other parameters": few})
    assert found.summary.startswith("not converged: left are about <0.01 nats for q(w); ")
    assert "how many for nodes is not known (a larger max_nodes)" in found.summary


@pytest.mark.parametrize("number, told", [(0, []), (1, ["1 step"]), (2, ["2 steps"])])
def test_steps_are_counted_where_there_are_any(number, told):
    assert counted(np.zeros(number)) == told and counted(None) == []


def fake_fit(steps=0, bound=0.0, stopped="at the limit of 60 steps in all"):
    guide = SimpleNamespace(approximations={"f": 0}, roles=dict)
    return SimpleNamespace(
        stopped=stopped,
        losses=np.zeros(steps),
        guide=guide,
        params={},
        loss=0,
        bound=bound,
        bound_se=0.0,
    )


def has_curve(monkeypatch, **given):
    curve = SparsityCurve(32, **given)
    monkeypatch.setattr("numpyro_sgp.fitting.grow.sparsity_curve", lambda *_, **__: curve)


def test_limits_are_those_of_all_trainings_together(monkeypatch):
    """Of SVGP("auto"): 150 steps are two trainings of 60, and 30 with the last number."""
    has_curve(monkeypatch, lost=9.0)
    asked = []

    def train(limits):
        asked.append(limits.left)
        return fake_fit(limits.left)

    def grown(steps, most=64):
        asked.clear()
        limits = Limits(0.1, steps, None)
        return grow(
            lambda number, start, limits: train(limits),
            lambda fitted, limits: train(limits),
            most,
            (),
            {},
            limits,
            False,
        )

    grown(150)
    assert asked == [60, 60, 30]
    fitted = grown(100)
    assert asked == [60, 40] and fitted.stopped == "at the limit of 100 steps in all"


@pytest.mark.parametrize("lost, tried", [(0.5, [32, 64, 128, 256]), (0.05, [32])])
def test_what_seems_enough_is_enough_if_twice_as_many_gain_nothing(
    lost, tried, monkeypatch
):
    """Those of 32 lose little at hyperparameters which they themselves have led to."""
    has_curve(monkeypatch, lost=lost)
    bounds, asked = {32: 237.0, 64: 259.0, 128: 263.0, 256: 270.0}, []

    def begin(number, start, limits):
        asked.append(number)
        return fake_fit(60, bounds[number])

    def go_on(fitted, limits):
        return fake_fit(10, fitted.bound + 1.0, CONVERGED)

    limits = Limits(0.1, None, None)
    fitted = grow(begin, go_on, 512, (), {}, limits, False)
    assert asked == tried
    assert fitted.stopped == CONVERGED
    # 64 more gain 3 beyond what 64 have at last, which is more than a nat; 128 more gain 6
    # beyond what 128 have: less than a tenth of a nat each.
    assert [number for number, *_ in fitted.grown] == tried[: max(1, len(tried) - 1)]
    assert fitted.bound == bounds[fitted.grown[-1][0]] + 1.0


@pytest.mark.parametrize("ends", [KeyboardInterrupt, MemoryError, INTERRUPTED])
def test_a_trial_of_more_points_loses_nothing(ends, monkeypatch):
    has_curve(monkeypatch, lost=0.5)

    def begin(number, start, limits):
        if number > 32 and ends != INTERRUPTED:
            raise ends
        return fake_fit(
            60, stopped=ends if number > 32 else "at the limit of 60 steps in all"
        )

    limits = Limits(0.1, None, None)
    done = fake_fit(10, 7.0, CONVERGED)
    fitted = grow(begin, lambda *_: done, 512, (), {}, limits, False)
    assert fitted is done and [number for number, *_ in fitted.grown] == [32]
    assert "whether 64 inducing points gain more is not known" in fitted.stopped


def test_an_interrupt_ends_growth_where_a_curve_is_unknown(monkeypatch):
    has_curve(monkeypatch, unknown="too many rows")
    done, asked = fake_fit(10, 7.0, INTERRUPTED), []

    def begin(number, start, limits):
        asked.append(number)
        return fake_fit(min(60, limits.left or 60))

    def grown(limits):
        return grow(begin, lambda *_: done, 512, (), {}, limits, False).stopped

    assert grown(Limits(0.1, None, None)).startswith(INTERRUPTED) and asked == [32]
    assert grown(Limits(0.1, 5, None)).endswith("is unknown: too many rows")


def test_a_function_as_base_guide_has_no_quantiles():
    def of_slope(model):
        def guide(X, y=None, **kwargs):
            loc = numpyro.param("loc", 0.0)
            return {"slope": numpyro.sample("slope", dist.Normal(loc, 0.1))}

        return guide

    def sloped(X, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + slope * X[:, 0], 0.1), obs=y)

    guide = sgp.AutoSparseGP(sloped, sgp.SVGP(4), of_slope)
    guide.setup(X, jnp.asarray(Y))
    with pytest.raises(NotImplementedError, match="guide has no quantiles .* draw them"):
        guide.quantiles(guide.known().starts, [0.5], X)


@pytest.mark.parametrize(
    "stopped, is_more", [("converged", False), ("at the limit of 500 steps in all", True)]
)
def test_what_an_attempt_gains_that_has_ended_is_all(stopped, is_more):
    """
    Of several trainings in turn, with more iterations together than one may have, the last
    of which converged, nothing is to come.
    """
    losses = np.linspace(1.0, -1.0, 700)  # as if it went on falling, by a nat or more
    found = Trained({}, 1.0, losses, 1.0, 0.0, stopped)
    attempts = object.__new__(Attempts)
    attempts.problem = SimpleNamespace(random=False, all_natural=True, free={})
    attempts.steps, attempts._train = 500, lambda *_, **__: found
    assert (attempts._gain()[0] > 2.0 + 1e-9) == is_more


@pytest.mark.parametrize(
    "bound, own, role, told",
    [
        (0.5, 0.9, "inducing", "nothing was gained by 2 more iterations"),
        (2.0, -np.inf, "inducing", "1 were gained by 2 more iterations"),
        (2.0, 1.0, "inducing", "1 were gained by 2 more .*, from other inducing points"),
        (2.0, 1.0, "kernel", "1 were gained by 2 more .*, from other means of q.u."),
    ],
)
def test_an_attempt_tells_what_it_came_to(bound, own, role, told):
    """Of one that gained nothing, one from the fit alone, and those from elsewhere."""
    guide = SimpleNamespace(roles=lambda: {"a": role})
    found = Trained({}, -1.0, np.array([-1.5, -bound]), bound, 0.0, "converged", own=own)
    problem = SimpleNamespace(random=False, all_natural=True, free={"a": 0}, profiled=[])
    attempts = object.__new__(Attempts)
    attempts.problem, problem.guide = problem, guide
    attempts.steps, attempts._train = 500, lambda *_, **__: found
    assert re.fullmatch(told, attempts.of_others([]).told)
