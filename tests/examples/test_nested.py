"""The example of nested inference, with few rows: what it finds, prints and draws."""

import numpy as np
import pytest

from tests.helpers import load_example


@pytest.fixture(scope="module")
def example():
    return load_example("nested")


def small(example, name):
    """Few rows of each model."""
    if name == "daily":
        return example.thinned(example.simulate_daily(1461))
    return example.simulate_growth(90) if name == "growth" else example.simulate_map(8)


def options(example, tmp_path, *more):
    words = ["--quiet", "--max-nodes", "64", "--num-inducing", "8", "--output"]
    return example.parse([*words, str(tmp_path), *more])


EFFECTS = {
    "daily": ("weekday", "weekday_contrast", "holiday"),
    "growth": ("school",),
    "map": ("intercept", "slope"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EFFECTS)
def test_true_effects_are_found_and_the_figure_is_written(example, name, tmp_path, capsys):
    simulated = small(example, name)
    # NUTS, which is far from done then, for a table.
    nuts = (
        ["--nuts", "--num-warmup", "5", "--num-samples", "10"] if name == "growth" else []
    )
    where = options(example, tmp_path, *nuts)
    with pytest.warns(UserWarning, match="effective nodes of 64"):  # enough for effects
        posterior, runs = example.run(name, simulated, where)
    numbers = runs[0].numbers
    for site in EFFECTS[name]:
        for label, true in example.rows(site, simulated.truth[site]):
            mean, sd = numbers.loc[label, ["mean", "sd"]]
            assert abs(true - mean) < 4 * sd, label
    assert set(posterior.field.effects) == set(EFFECTS[name]) - {"weekday_contrast"}
    assert (tmp_path / f"nested_{name}.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "Nested inference in" in printed and f"nested_{name}.png" in printed
    if nuts:
        assert [run.title for run in runs] == ["nested", "NUTS"]
        _, tau = [line.split() for line in printed.splitlines() if line.startswith("tau ")]
        assert len(tau) == 6 and float(tau[1]) == 3.0
        assert "NUTS: smallest effective sample size" in printed


@pytest.mark.slow
def test_the_calendar(example):
    days, weekday, holiday = example.calendar(7305)
    assert len(days) == 7305 and days[-1, 0] == 7304
    assert weekday[0] == 0  # 2001-01-01 was a Monday
    assert holiday.sum() == 20 * len(example.HOLIDAYS)
    assert holiday[0] == 1 and holiday[1] == 0
    fewer = example.thinned(example.simulate_daily(140))
    assert sorted(set(fewer.data[1])) == list(range(7))


def test_intensity_by_quadrature(example):
    """Moments of exp(eta) under a mixture of two Gaussians in two cells."""

    class Eta:
        weights = np.array([0.3, 0.7])
        means = np.array([[0.1, 1.0], [0.6, 0.2]])
        variances = np.array([[0.2, 0.05], [0.1, 0.3]])

    nodes, rule = np.polynomial.hermite_e.hermegauss(40)
    at = np.exp(Eta.means + np.sqrt(Eta.variances) * nodes[:, None, None])
    weight = (rule / rule.sum())[:, None, None] * Eta.weights[:, None]
    mean = (weight * at).sum(axis=(0, 1))
    sd = np.sqrt((weight * at**2).sum(axis=(0, 1)) - mean**2)
    np.testing.assert_allclose(example.intensity(Eta), (mean, sd), rtol=1e-10)


def test_command_line(example, capsys):
    assert example.parse([]).models == ["daily", "growth", "map"]
    args = example.parse(["map", "growth", "--nuts", "--out", "elsewhere"])
    assert args.models == ["map", "growth"] and args.nuts
    assert str(args.output) == "elsewhere"
    with pytest.raises(SystemExit):
        example.parse(["weekly"])
    assert "no model 'weekly'" in capsys.readouterr().err
