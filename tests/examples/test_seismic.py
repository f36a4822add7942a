"""The seismic example on surveys so small that they take seconds, and without its data."""

import numpy as np
import pytest

from examples.likelihoods import seismic_travel_times
from numpyro_sgp.datasets import Seismic
from tests.helpers import load_example


@pytest.fixture(scope="module")
def seismic():
    return load_example("seismic")


def survey(num_sites, num_layers):
    """Times of a prior draw with independent sites."""
    example = load_example("seismic")
    whole, _ = example.simulate(example.PAPER_LENGTHSCALE, num_sites)
    X, *rest = whole
    return Seismic(X, *(values[:num_layers] for values in rest))


TINY = "--quiet --num-nodes 16 --max-iterations 5 --num-draws 40"
TINY += " --num-warmup 100 --num-samples 100"


@pytest.mark.slow
def test_example_prints_its_tables_and_saves_its_figure(seismic, tmp_path, capsys):
    options = [*TINY.split(), "--paper", "--output", str(tmp_path)]
    seismic.main(seismic.parse_args(options), survey(6, 4))
    printed = capsys.readouterr().out
    for text in ["NUTS (reference)", "SVI coupled", "on new ones", "k_max", "rms", "vel4"]:
        assert text in printed
    assert [path.name for path in tmp_path.iterdir()] == ["seismic_paper.png"]


@pytest.mark.parametrize("paper", [False, True])
def test_table_of_sds_has_ratios_and_published_ones_for_independent_sites(
    seismic, capsys, paper
):
    data = survey(5, 4)
    mean, sd = (np.broadcast_to(m, (8, 5)) for m in seismic.prior_moments(data))
    moments = {"SVI coupled": (mean, 0.9 * sd), "NUTS": (mean, sd)}
    seismic.print_sds(data, moments, paper)
    printed = capsys.readouterr().out
    assert "at most 10.0 % from NUTS, single sites at most 10.0 %" in printed
    assert printed.count(" 0.900") == 8
    for name in ("exact, sites apart", "published SAVIGP", "published MCMC"):
        assert printed.count(name) == (2 if paper else 1)


def test_figure_has_a_column_for_each_method(seismic, tmp_path, monkeypatch):
    data = survey(5, 4)
    mean, sd = (np.broadcast_to(m, (8, 5)) for m in seismic.prior_moments(data))
    figures = []
    monkeypatch.setattr(seismic.plt, "close", figures.append)
    seismic.plot(data, {"SVI coupled": (mean, sd), "NUTS": (mean, sd)}, tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()
    (figure,) = figures
    assert len(figure.axes) == 2 * 5
    assert figure.axes[0].yaxis_inverted()  # depth points down


def test_without_data_the_section_is_a_draw_of_the_prior_by_the_same_forward_model(seismic):
    data, truth = seismic.simulate()
    assert truth.shape == (8, 113) and data.times.shape == (4, 113)
    assert np.all(np.diff(truth[:4], axis=0) > 0.0)  # no interface crosses another
    depth, velocity = truth[:4], truth[4:]
    thickness = np.diff(depth, axis=0, prepend=0.0)
    noise = data.times - np.cumsum(2 * thickness / velocity, axis=0)
    noise /= data.noise_sd[:, None]
    # The sd of 452 values, and of some 64 independent ones: 4 standard errors.
    np.testing.assert_allclose(noise.std(), 1.0, atol=4 / np.sqrt(2 * 452))
    scaled = (velocity - data.velocity_mean[:, None]) / data.velocity_sd[:, None]
    np.testing.assert_allclose(scaled.std(), 1.0, atol=4 / np.sqrt(2 * 64))
    with pytest.raises(ValueError, match="read-only"):
        data.depth_mean[0] = 1.0  # all surveys share it


@pytest.mark.slow
def test_example_without_data_says_how_often_intervals_hold_the_truth(
    seismic, tmp_path, capsys, monkeypatch
):
    small = lambda lengthscale, seed: survey_and_truth  # noqa: E731
    survey_and_truth = seismic.simulate(num_sites=6)
    monkeypatch.setattr(seismic, "simulate", small)
    seismic.main(seismic.parse_args([*TINY.split(), "--output", str(tmp_path)]))
    printed = capsys.readouterr().out
    assert "published" not in printed
    assert printed.count("velocities ") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["seismic.png"]


@pytest.mark.slow
def test_a_section_too_long_to_draw_is_refused(seismic):
    with pytest.raises(ValueError, match="1000 draws of 400 sites: ask for fewer"):
        seismic.simulate(lengthscale=20.0, num_sites=400)


def test_missing_data_are_named(seismic, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"seismic/seismic\.csv\.gz in the folder"):
        seismic.main(seismic.parse_args(["--data", str(tmp_path)]))


def test_exact_sds_are_those_of_a_dense_grid(seismic):
    data = survey(2, 1)
    z = np.linspace(-6, 6, 801)
    depth = data.depth_mean + data.depth_sd * z[:, None]
    velocity = data.velocity_mean + data.velocity_sd * z
    sds = []
    for time in data.times[0]:
        residual = (time - 2 * depth / velocity) / data.noise_sd
        density = np.exp(-0.5 * (z[:, None] ** 2 + z**2 + residual**2))
        density /= density.sum()
        for value in (depth, velocity):
            mean = np.sum(density * value)
            sds.append(np.sqrt(np.sum(density * (value - mean) ** 2)))
    expected = np.mean(np.reshape(sds, (2, 2)), axis=0)
    # The standard error of a weighted sd is below 0.6 % at 40000 draws; three of them.
    np.testing.assert_allclose(seismic.exact_sds(data), expected, rtol=0.018)


def test_residuals_are_zero_at_the_true_depths_and_velocities(seismic):
    data = survey(3, 4)
    mean = np.broadcast_to(seismic.prior_moments(data)[0], (8, 3))
    times = seismic_travel_times(mean[:4], mean[4:]) + 2 * data.noise_sd[:, None]
    residuals = seismic.standardized_residuals(data._replace(times=times), mean)
    np.testing.assert_allclose(residuals, 2.0, rtol=1e-9)


@pytest.mark.slow
def test_coupled_gaussian_has_the_exact_sds_and_independent_ones_are_too_small(seismic):
    data = survey(6, 2)
    options = "--quiet --num-nodes 1024 --max-iterations 100 --num-draws 20".split()
    args = seismic.parse_args(options)
    sds = {}
    for covariance in ("full", "coupled"):
        _, (_, sd) = seismic.run_svi(covariance, data, 1.0, args)
        sds[covariance] = np.mean(sd, axis=-1)
    exact = seismic.exact_sds(data)
    np.testing.assert_allclose(sds["coupled"], exact, rtol=0.03)
    assert np.all(sds["full"] < 0.97 * exact)
