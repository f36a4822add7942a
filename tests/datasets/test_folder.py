"""
Readers of a folder: on small made-up files in the same layout, and on the real ones where
the environment variable NUMPYRO_SGP_DATA names their folder.
"""

import gzip
import os

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numpyro_sgp import datasets
from numpyro_sgp.likelihoods import TanhWarp

READERS = "abalone airline boston breast_cancer creep mnist sarcos seismic usps".split()
SPLITS = "boston breast_cancer usps".split()
HEADERS = {
    "boston/boston": "CRIM,ZN,INDUS,CHAS,NOX,RM,AGE,DIS,RAD,TAX,PTRATIO,B,LSTAT,MEDV",
    "breast_cancer_wisconsin/wbc": (
        "clump_thickness,uniformity_cell_size,uniformity_cell_shape,marginal_adhesion,"
        "single_epithelial_cell_size,bare_nuclei,bland_chromatin,normal_nucleoli,mitoses,"
        "class,y"
    ),
    "abalone/abalone": (
        "sex_M,sex_F,sex_I,length,diameter,height,whole_weight,shucked_weight,"
        "viscera_weight,shell_weight,rings"
    ),
    "creep/creep": "lifetime_h,rupture_stress_MPa,temperature_K,f3",
    "seismic/seismic": "t1,t2,t3,t4,x",
}
ROWS, TRAIN = 12, 8


def write_table(folder, name, values):
    path = folder / f"{name}.csv.gz"
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt") as file:
        np.savetxt(file, values, delimiter=",", header=HEADERS[name], comments="")


def write_arrays(folder, name, **arrays):
    path = folder / f"{name}.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **arrays)


@pytest.fixture
def made_up(tmp_path):
    """A folder of all nine sets with 12 rows each, and the tables written there."""
    rng = np.random.default_rng(0)
    tables = {
        name: rng.normal(size=(ROWS, header.count(",") + 1))
        for name, header in HEADERS.items()
    }
    tables["breast_cancer_wisconsin/wbc"][:, -1] = rng.permutation([1, -1] * 6)
    tables["creep/creep"][:, 3] = 0.25  # a constant input
    for name, values in tables.items():
        write_table(tmp_path, name, values)
    rows = np.stack([rng.permutation(ROWS) for _ in range(5)])
    splits = dict(train_idx=rows[:, :TRAIN], test_idx=rows[:, TRAIN:])
    one_split = dict(train_idx=rows[0, :TRAIN], test_idx=rows[0, TRAIN:])
    write_arrays(tmp_path, "boston/savigp_splits", **splits)
    write_arrays(tmp_path, "breast_cancer_wisconsin/savigp_splits", **splits)
    write_arrays(tmp_path, "abalone/savigp_split", **one_split)
    write_arrays(tmp_path, "creep/savigp_split", **one_split)
    arrays = {
        "usps479/usps479": dict(
            X=rng.normal(size=(ROWS, 256)).astype(np.float32),
            y=np.array([4, 7, 9] * 4, np.uint8),
            **splits,
        ),
        "mnist/mnist": dict(
            x_train=rng.integers(0, 256, (ROWS, 28, 28), dtype=np.uint8),
            y_train=np.arange(ROWS, dtype=np.uint8) % 10,
            x_test=rng.integers(0, 256, (5, 28, 28), dtype=np.uint8),
            y_test=np.arange(5, dtype=np.uint8),
        ),
        "sarcos_test/sarcos_inv_test": dict(
            X=rng.normal(3, 2, size=(ROWS, 21)).astype(np.float32),
            Y=rng.normal(-5, 9, size=(ROWS, 7)).astype(np.float32),
        ),
        "airline_nyc2013/airline_nyc2013": dict(
            X=rng.integers(0, 99, (ROWS, 8)).astype(np.int16),
            arr_delay=rng.integers(-40, 99, ROWS).astype(np.int16),
        ),
    }
    for name, contents in arrays.items():
        write_arrays(tmp_path, name, **contents)
    return tmp_path, tables | arrays, rows


def original(data, y):
    return data.y_offset + data.y_scale * y


def assert_standardised(X, ddof):
    assert_allclose(X.mean(axis=0), 0.0, atol=1e-12)
    assert_allclose(X.std(axis=0, ddof=ddof), 1.0, rtol=1e-12)


@pytest.mark.parametrize("split", [0, 3])
def test_boston(made_up, split):
    folder, files, rows = made_up
    data = datasets.boston(folder, split)
    values, train, test = files["boston/boston"], rows[split, :TRAIN], rows[split, TRAIN:]
    assert_standardised(data.X_train, ddof=1)
    expected = (values[test, 2] - values[train, 2].mean()) / values[train, 2].std(ddof=1)
    assert_allclose(data.X_test[:, 2], expected, rtol=1e-10)
    assert data.X_train.shape == (TRAIN, 13) and data.y_scale == 1 and data.warp is None
    assert_allclose(data.y_train.mean(), 0.0, atol=1e-12)
    assert_allclose(original(data, data.y_train), values[train, -1], rtol=1e-10)
    assert_allclose(original(data, data.y_test), values[test, -1], rtol=1e-10)


@pytest.mark.parametrize("split", [0, 4])
def test_breast_cancer(made_up, split):
    folder, files, rows = made_up
    data = datasets.breast_cancer(folder, split)
    sign = files["breast_cancer_wisconsin/wbc"][:, -1]
    assert_standardised(data.X_train, ddof=1)
    assert data.X_test.shape == (ROWS - TRAIN, 9)
    assert_array_equal(data.y_train, sign[rows[split, :TRAIN]] == 1)
    assert_array_equal(data.y_test, sign[rows[split, TRAIN:]] == 1)
    assert np.issubdtype(data.y_train.dtype, np.integer)


def test_abalone_and_creep(made_up):
    folder, files, rows = made_up
    train, test = rows[0, :TRAIN], rows[0, TRAIN:]
    abalone, creep = datasets.abalone(folder), datasets.creep(folder)
    values = files["abalone/abalone"]
    assert_allclose(abalone.X_train, values[train, :-1])
    assert_allclose(abalone.X_test, values[test, :-1])
    inputs = files["creep/creep"][:, [0, 2, 3]]
    assert_standardised(creep.X_train[:, :2], ddof=0)
    assert_array_equal(creep.X_train[:, 2], 0.0)  # the constant input
    mean, sd = inputs[train].mean(0), inputs[train].std(0)
    assert_allclose(creep.X_test[:, :2], ((inputs[test] - mean)[:, :2] / sd[:2]))
    for data, target in ((abalone, values[:, -1]), (creep, files["creep/creep"][:, 1])):
        low, high = target[train].min(), target[train].max()
        assert_allclose(data.y_test, (target[test] - low) / (high - low) - 0.5)
        assert_allclose([data.y_train.min(), data.y_train.max()], [-0.5, 0.5])
        assert_allclose(data.y_scale, high - low)
        assert_allclose(original(data, data.y_train), target[train])


def test_published_warps_are_the_exponentials_of_the_stored_logs(made_up):
    folder, *_ = made_up
    abalone, creep = datasets.abalone(folder).warp, datasets.creep(folder).warp
    assert_allclose(np.log(abalone.a), [-2.0485, 1.7991, 1.5814])
    assert_allclose(np.log(abalone.b), [2.7421, 0.9426, 1.7804])
    assert_allclose(np.log(creep.b), [1.5925, -1.3360, -2.0289])
    for warp in (abalone, creep):  # which a TanhWarp takes, and inverts
        y = np.linspace(-0.5, 0.7, 5)
        assert_allclose(TanhWarp(*warp).inv(TanhWarp(*warp)(y)), y, atol=1e-12)


@pytest.mark.parametrize("split", [0, 2])
def test_usps(made_up, split):
    folder, files, rows = made_up
    data = datasets.usps(folder, split)
    assert_array_equal(data.X_train, files["usps479/usps479"]["X"][rows[split, :TRAIN]])
    assert_array_equal(data.y_test, rows[split, TRAIN:] % 3)


def test_mnist(made_up):
    folder, files, _ = made_up
    data = datasets.mnist(folder)
    arrays = files["mnist/mnist"]
    assert_allclose(data.X_train, arrays["x_train"].reshape(ROWS, 784) / 255)
    assert_array_equal(data.y_test, arrays["y_test"])
    part = datasets.mnist(folder, binary=True, num_train=4, num_test=2, dtype=np.float32)
    assert part.X_train.shape == (4, 784) and part.X_train.dtype == np.float32
    assert_array_equal(part.y_train, [0, 1, 0, 1])
    assert_array_equal(part.y_test, [0, 1])
    with pytest.raises(ValueError, match="num_train must be 1 to 12, got 13"):
        datasets.mnist(folder, num_train=13)


def test_sarcos(made_up):
    folder, files, _ = made_up
    data = datasets.sarcos(folder, joints=(7, 4), test_fraction=0.25)
    arrays = files["sarcos_test/sarcos_inv_test"]
    assert data.y_train.shape == (2, 9) and data.y_test.shape == (2, 3)
    assert data.y_offset.shape == data.y_scale.shape == (2, 1)
    assert_standardised(data.X_train, ddof=0)
    assert_standardised(data.y_train.T, ddof=0)
    Y = np.concatenate([original(data, y) for y in (data.y_train, data.y_test)], axis=1)
    assert_allclose(np.sort(Y), np.sort(arrays["Y"][:, [6, 3]].T), rtol=1e-6)
    # Inputs stay with their outputs.
    X = np.concatenate([data.X_train, data.X_test])
    first = np.argsort(X[:, 0])
    assert_allclose(Y[:, first], arrays["Y"][np.argsort(arrays["X"][:, 0])][:, [6, 3]].T)
    assert datasets.sarcos(folder).y_train.shape[0] == 7
    with pytest.raises(ValueError, match=r"joints must be numbers from 1 to 7, got \[0\]"):
        datasets.sarcos(folder, joints=(0,))


def test_airline(made_up):
    folder, files, _ = made_up
    data = datasets.airline(folder, test_fraction=0.25)
    assert data.X_train.shape == (9, 8) and data.y_test.shape == (3,)
    assert_standardised(data.X_train, ddof=0)
    assert_standardised(data.y_train, ddof=0)
    y = np.concatenate([original(data, y) for y in (data.y_train, data.y_test)])
    delays = files["airline_nyc2013/airline_nyc2013"]["arr_delay"]
    assert_allclose(np.sort(y), np.sort(delays), atol=1e-10)


def test_own_splits_follow_the_seed(made_up):
    folder, *_ = made_up
    first, again, other = (datasets.airline(folder, seed=seed) for seed in (1, 1, 2))
    assert_array_equal(first.y_train, again.y_train)
    assert not np.array_equal(
        original(first, first.y_train), original(other, other.y_train)
    )
    with pytest.raises(ValueError, match="test_fraction must leave both parts of 12 rows"):
        datasets.airline(folder, test_fraction=1.0)


def test_seismic(made_up):
    folder, files, _ = made_up
    data = datasets.seismic(folder)
    assert_allclose(data.times, files["seismic/seismic"][:, :4].T)
    assert_allclose(data.X, files["seismic/seismic"][:, 4:])
    assert_allclose(data.depth_sd, [30, 75, 240, 330])
    assert_allclose(data.velocity_sd, [195, 230, 275, 365])


@pytest.mark.parametrize("name", READERS)
def test_arrays_are_those_of_numpy_in_double_precision(made_up, name):
    for array in getattr(datasets, name)(made_up[0]):
        if not isinstance(array, datasets.Warp | None):
            assert isinstance(array, np.ndarray | np.generic)
            assert array.dtype in (np.float64, np.int64)


@pytest.mark.parametrize("name", READERS)
def test_missing_file_is_named_with_its_folder_and_source(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="No file .* Put it there: ") as error:
        getattr(datasets, name)(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("split", [-1, 5])
def test_no_such_split(made_up, name, split):
    with pytest.raises(ValueError, match=f"split must be 0 to 4, got {split}"):
        getattr(datasets, name)(made_up[0], split)


def test_missing_column_and_array_are_named(made_up):
    folder, *_ = made_up
    write_arrays(folder, "sarcos_test/sarcos_inv_test", X=np.zeros((3, 21)))
    with pytest.raises(ValueError, match=r"lacks the arrays \['Y'\]; it has \['X'\]"):
        datasets.sarcos(folder)
    with gzip.open(folder / "seismic/seismic.csv.gz", "wt") as file:
        file.write("t1,t2,t3,x\n1,2,3,4\n")
    with pytest.raises(ValueError, match=r"lacks the columns \['t4'\]"):
        datasets.seismic(folder)


DATA = os.environ.get("NUMPYRO_SGP_DATA")


@pytest.mark.skipif(not DATA, reason="NUMPYRO_SGP_DATA names no folder of data")
class TestRealData:
    @pytest.mark.parametrize("split", range(5))
    def test_boston(self, split):
        data = datasets.boston(DATA, split)
        assert data.X_train.shape == (300, 13) and data.X_test.shape == (206, 13)
        y = np.concatenate([data.y_train, data.y_test]) + data.y_offset
        assert_allclose(y.mean(), 22.533, atol=5e-4)
        if split == 0:  # the first test row of the authors' standardised file
            expected = [-0.42926, 2.8894, -1.0946, -0.30101, -1.2751, -0.0085272, -1.7882]
            expected += [1.2651, -0.6107, -0.36811, -1.1172, 0.4363, -1.1009]
            assert_allclose(data.X_test[0], expected, rtol=5e-5)
            assert_allclose(original(data, data.y_test[0]), 23.5)

    @pytest.mark.parametrize("split", range(5))
    def test_breast_cancer(self, split):
        data = datasets.breast_cancer(DATA, split)
        assert data.X_train.shape == (300, 9) and data.X_test.shape == (383, 9)
        assert data.y_train.sum() + data.y_test.sum() == 444  # benign, of 683

    def test_abalone(self):
        data = datasets.abalone(DATA)
        assert data.X_train.shape == (1000, 10) and data.X_test.shape == (3177, 10)
        rings = original(data, np.concatenate([data.y_train, data.y_test]))
        assert_allclose([rings.min(), rings.max()], [1, 29], atol=1e-12)
        assert_allclose(rings.mean(), 9.934, atol=5e-4)
        assert_allclose([data.y_scale, data.y_offset], [20, 13])

    def test_creep(self):
        data = datasets.creep(DATA)
        assert data.X_train.shape == (800, 30) and data.X_test.shape == (1266, 30)
        assert_allclose([data.y_scale, data.y_offset], [512, 274])
        assert abs(data.y_test).max() <= 0.5

    @pytest.mark.parametrize("split", range(5))
    def test_usps(self, split):
        data = datasets.usps(DATA, split)
        assert data.X_train.shape == (1233, 256) and data.X_test.shape == (1232, 256)
        y = np.concatenate([data.y_train, data.y_test])
        assert_array_equal(np.bincount(y), [852, 792, 821])

    def test_mnist(self):
        data = datasets.mnist(DATA, dtype=np.float32)
        assert data.X_train.shape == (60000, 784) and data.X_test.shape == (10000, 784)
        assert_allclose(data.X_train.mean(dtype=float), 0.13066, atol=5e-6)
        assert_array_equal(np.bincount(data.y_train)[:2], [5923, 6742])

    def test_sarcos(self):
        data = datasets.sarcos(DATA, joints=(4, 7))
        assert data.X_train.shape == (3559, 21) and data.X_test.shape == (890, 21)
        Y = original(data, np.concatenate([data.y_train, data.y_test], axis=1))
        assert_allclose(Y.mean(axis=1), [27.475, 4.1635], rtol=1e-4)

    def test_airline(self):
        data = datasets.airline(DATA)
        assert len(data.y_train) + len(data.y_test) == 273_853 and data.X_test.shape[1] == 8
        y = original(data, np.concatenate([data.y_train, data.y_test]))
        assert_allclose([y.mean(), y.std()], [7.0, 44.9], atol=0.1)

    def test_seismic(self):
        data = datasets.seismic(DATA)
        assert data.times.shape == (4, 113)
        assert_allclose(data.X[:, 0], 400.0 * np.arange(113))
        assert np.all(np.diff(data.times, axis=0) > 0)
