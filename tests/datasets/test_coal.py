"""The coal-mining disasters: dates, and counts in bins."""

import csv
from datetime import date, timedelta
from importlib.resources import files

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numpyro_sgp.datasets import coal_mining, days_to_year


def read_shipped(filename):
    text = files("numpyro_sgp.datasets").joinpath("data", filename).read_text()
    return list(csv.DictReader(text.splitlines()))


def test_events_fall_on_their_calendar_dates():
    days = coal_mining().events_day
    assert days.shape == (191,)
    rows = read_shipped("coal_events.csv")
    for day, row in zip(days, rows, strict=True):
        fallen_on = date(1851, 3, 15) + timedelta(days=int(day) - 1)
        assert fallen_on.isoformat() == row["date"]
    assert rows[0]["date"] == "1851-03-15"
    assert rows[-1]["date"] == "1962-03-22"


def test_811_bins_give_the_published_counts():
    coal = coal_mining()
    rows = read_shipped("coal_binned_811.csv")
    assert_array_equal(coal.count, [int(row["count"]) for row in rows])
    assert_array_equal(coal.bin_centre_day, [float(row["bin_centre_day"]) for row in rows])
    assert np.issubdtype(coal.count.dtype, np.integer)
    assert coal.bin_width_day == 50.0


@pytest.mark.parametrize("num_bins", [1, 7, 333, 811, 40_550])
def test_every_event_is_in_the_bin_around_it(num_bins):
    coal = coal_mining(num_bins)
    assert coal.count.shape == coal.bin_centre_day.shape == (num_bins,)
    distance = abs(coal.events_day[:, None] - coal.bin_centre_day)
    # An event on an edge may be in either bin.
    inside = np.asarray(distance <= coal.bin_width_day / 2 + 1e-6)
    assert inside.any(axis=1).all()
    nearest = np.bincount(np.argmax(inside, axis=1), minlength=num_bins)
    if (inside.sum(axis=1) == 1).all():
        assert_array_equal(coal.count, nearest)
    assert coal.count.sum() == 191


def test_one_day_bins_show_the_day_with_two_events():
    count = np.asarray(coal_mining(40_550).count)
    (day_with_two,) = np.flatnonzero(count == 2)
    assert date(1851, 3, 15) + timedelta(days=int(day_with_two)) == date(1875, 12, 6)


@pytest.mark.parametrize("num_bins", [0, -3])
def test_no_bins_is_an_error(num_bins):
    with pytest.raises(ValueError, match="num_bins must be at least 1"):
        coal_mining(num_bins)


def test_fraction_of_a_bin_is_an_error():
    with pytest.raises(TypeError):
        coal_mining(811.5)


def test_years_are_within_a_month_of_the_calendar():
    years = days_to_year(coal_mining().events_day)
    calendar = [float(row["decimal_year"]) for row in read_shipped("coal_events.csv")]
    ahead = np.asarray(years) - calendar
    # Two days ahead at the start, and 27 leap days more at the end.
    assert_allclose(ahead[0], 2 / 365, atol=0.1 / 365)
    assert_allclose(ahead[-1], 29 / 365, atol=0.1 / 365)
    assert 0 < ahead.min() and ahead.max() < 30 / 365
