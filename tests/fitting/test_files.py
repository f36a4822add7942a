"""Files of fits: the same predictions in another process, and nothing from damaged ones."""

import functools
import gzip
import hashlib
import io
import json
import pickle
import subprocess
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest
from numpy.testing import assert_array_equal
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuideList, AutoLowRankMultivariateNormal, AutoNormal

import numpyro_sgp as sgp
from numpyro_sgp.families import Full
from numpyro_sgp.fitting.encoding import NotInFile, decode, encode
from numpyro_sgp.training.archive import read_archive
from tests.helpers import slow

ROOT = Path(__file__).resolve().parents[2]
X = np.linspace(-2.0, 2.0, 20)[:, None]
Y = np.sin(X[:, 0])
NEW = X + 0.1

MODEL = """
import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_sgp as sgp

def model(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal())
    net = numpyro.param("net", {"layers": [(jnp.ones(2), jnp.zeros(())), ()], "b": 0.5})
    kernel = sgp.kernels.RBF(net["layers"][0][0][0])
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)
"""
exec(MODEL)


def plain(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def fit(model, approximation, args, base_guide=AutoNormal, **options):
    """A fit that was not trained, with a q(u) that is not the prior."""
    guide = sgp.AutoSparseGP(model, approximation, base_guide)
    svi = SVI(model, guide, optax.sgd(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), *args))
    moved = ("_mu", "_linear", "_weights", "_pseudo")
    params = {
        k: v + 0.1 * jnp.arange(v.size, dtype=v.dtype).reshape(v.shape)
        if k.endswith(moved)
        else v
        for k, v in params.items()
    }
    return sgp.Fitted(guide, params, args, loss=svi.loss, **options)


def assert_same(found, known, X=NEW):
    for name, q in known.posterior(X).items():
        again = found.posterior(X)[name]
        assert_array_equal(again.mean, q.mean)
        assert_array_equal(again.variance, q.variance)


@pytest.fixture(scope="module")
def fitted():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(6, tight="scalar"), AutoNormal)  # noqa: F821
    loss = sgp.TraceGP_ELBO(sgp.MonteCarlo(4, seed=3))
    svi = SVI(model, guide, optax.adam(0.05), loss)  # noqa: F821
    result = svi.run(jax.random.key(0), 5, X, Y, progress_bar=False)
    found = sgp.Fitted.from_svi(svi, result, X, Y)
    found.seconds, found.stopped, found._verdict = 1.5, "all steps done", "it is good"
    found.apart = 2.5
    return found


@pytest.fixture(scope="module")
def path(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "fit.npz"
    fitted.save(path)
    return path


@pytest.fixture(scope="module")
def loaded(path):
    return sgp.load(path, model)  # noqa: F821


# ---- whole files ----------------------------------------------------------------------


@pytest.mark.slow
def test_another_process_predicts_the_same_to_the_last_bit(fitted, path, tmp_path):
    known = fitted.predict(NEW, num_draws=3)["y"]
    code = f"""
import jax
jax.config.update("jax_enable_x64", True)
import numpy as np
{MODEL}
fitted = sgp.load({str(path)!r}, model)
y = fitted.predict(np.linspace(-2.0, 2.0, 20)[:, None] + 0.1, num_draws=3)["y"]
found = {{"mean": y.mean, "sd": y.sd, "quantiles": y.quantiles}}
leaves = {{f"param_{{i}}": v for i, v in enumerate(jax.tree.leaves(fitted.params))}}
np.savez({str(tmp_path / "found.npz")!r}, **found, **leaves)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)
    with np.load(tmp_path / "found.npz") as found:
        for name in ("mean", "sd", "quantiles"):
            assert_array_equal(found[name], getattr(known, name))
        for i, value in enumerate(jax.tree.leaves(fitted.params)):
            assert_array_equal(found[f"param_{i}"], value)


@pytest.mark.slow
def test_all_that_is_known_of_the_training_comes_back(fitted, loaded):
    assert jax.tree.structure(loaded.params) == jax.tree.structure(fitted.params)
    jax.tree.map(assert_array_equal, loaded.params, fitted.params)
    for name in (
        "bound",
        "bound_se",
        "seconds",
        "stopped",
        "num_rows",
        "_verdict",
        "apart",
    ):
        assert getattr(loaded, name) == getattr(fitted, name)
    assert fitted.bound_se > 0
    assert_array_equal(loaded.losses, fitted.losses)
    assert repr(loaded.loss.expectation) == repr(fitted.loss.expectation)
    assert loaded.args is None and loaded.svi is None and loaded.model is model  # noqa: F821
    assert isinstance(loaded.guide.base_guide, AutoNormal)
    assert "20 rows, which are not here" in repr(loaded)


def test_a_file_has_two_rows_of_the_data_and_no_more(path):
    with np.load(path) as file:
        rows = {name: file[name] for name in file.files if name.startswith("arguments/")}
        assert not any(20 in file[name].shape for name in file.files)
    assert_array_equal(rows["arguments/0/0"], X[:2])
    assert_array_equal(rows["arguments/0/1"], Y[:2])


def test_a_loaded_fit_can_be_saved_again(loaded, path, tmp_path):
    loaded.save(tmp_path / "again.npz")
    with np.load(path) as first, np.load(tmp_path / "again.npz") as second:
        assert first.files == second.files
        for name in first.files:
            assert_array_equal(first[name], second[name])


@pytest.mark.slow
def test_a_fit_that_is_loaded_with_its_data_is_saved_with_two_rows_of_them(path, tmp_path):
    loaded = sgp.load(path, model, args=(X, Y))  # noqa: F821
    assert loaded.num_rows == 20 and loaded.sample(jax.random.key(0))["f"].shape == (20,)
    loaded.save(tmp_path / "again.npz")
    with np.load(tmp_path / "again.npz") as file:
        assert not any(20 in file[name].shape for name in file.files)
        assert_array_equal(file["arguments/0/0"], X[:2])
    assert_same(sgp.load(tmp_path / "again.npz", model), loaded)  # noqa: F821


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "approximation",
    [
        sgp.SOLVEGP(4, 3, train_inducing=False),
        sgp.VGP(),
        slow(sgp.SVGP(6, covariance="pseudo_data", inducing="random")),
        slow({"f": sgp.MixtureSVGP(4, inducing=X[:4])}),
    ],
    ids=["fixed", "dense", "pseudo_data", "mixture"],
)
def test_what_is_no_parameter_is_saved_too(approximation, tmp_path):
    known = fit(plain, approximation, (X, Y))
    known.save(tmp_path / "fit.npz")
    found = sgp.load(tmp_path / "fit.npz", plain)
    assert_same(found, known)
    assert repr(found.guide.approximation) == repr(known.guide.approximation)


@pytest.mark.parametrize(
    "value",
    [
        sgp.SVGP(5, whiten=False, covariance="diagonal", jitter=1e-4, seed=3),
        sgp.SVGP(inducing=jnp.arange(3.0)[:, None], covariance=Full()),
        sgp.SVGP(covariance="dual", inducing=sgp.initial_inducing(X, 3)),
        sgp.VGP(covariance="pseudo_data", jitter=1e-3),
        sgp.SOLVEGP(4, (3, 2), initial_scale=0.1, share_inducing=False),
        sgp.SOLVEGP(inducing=X[:3], orthogonal=(X[5:9], X[9:12])),
        sgp.ODVGP(5, 30, num_columns=10),
        sgp.MixtureSVGP(5, 3, covariance="full", entropy="jensen", spread=0.2),
        sgp.InverseFreeSVGP(5, bound="lc", T_start=np.eye(5), kl="stochastic"),
        sgp.InverseFreeSVGP(5, covariance="diagonal", tol=1e-2),
        sgp.SVGP(5, tight=sgp.relaxation.Blocks(partition=np.arange(6).reshape(3, 2))),
        sgp.SVGP(5, tight=sgp.relaxation.Scalar()),
        sgp.SVGP(5, inducing=sgp.SmoothedPoints("greedy", width=np.array([0.5]))),
        sgp.SVGP(inducing=sgp.FourierFeatures(jnp.ones((3, 2)), 2.0, centre=1.0)),
        sgp.SVGP(5, inducing=sgp.InducingPatches("kmeans", places="uniform")),
        {"f": sgp.SVGP(5), "g": sgp.SOLVEGP(3, 3)},
        sgp.MonteCarlo(8, antithetic=True),
        sgp.ScoreFunction(200, control_variate=False),
        sgp.GaussHermite(7),
    ],
    ids=lambda value: type(value).__name__,
)
def test_options_come_back_whole(value):
    arrays = {}
    structure = json.loads(json.dumps(encode(value, "value", arrays)))
    found = decode(structure, arrays)
    pairs = [(found, value)]
    if isinstance(value, dict):
        assert list(found) == list(value)
        pairs = zip(found.values(), value.values(), strict=True)
    for a, b in pairs:
        assert type(a) is type(b) and repr(a) == repr(b) and {*vars(a)} == {*vars(b)}
        assert_equal_trees({**vars(a)}, {**vars(b)})


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b) or not jax.tree.leaves(a)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(y, jax.Array | np.ndarray):
            assert type(x) is type(y) and x.dtype == y.dtype
            assert_array_equal(x, y)
        else:
            assert x == y or repr(x) == repr(y)


class Own(Full):
    """A family of a user's own."""

    name = "own"


class OwnRule(sgp.elbo.Expectation):
    """A rule of a user's own."""


@pytest.mark.slow
def test_what_is_ones_own_has_to_be_given_again(tmp_path):
    def base_guide(model):
        guide = AutoGuideList(model)
        guide.append(AutoNormal(numpyro.handlers.block(model, hide=[])))
        return guide

    known = fit(model, sgp.SVGP(4, covariance=Own()), (X, Y), base_guide)  # noqa: F821
    known.loss = sgp.TraceGP_ELBO(OwnRule())
    path = tmp_path / "own.npz"
    known.save(path)
    with pytest.raises(ValueError, match="own.npz does not have all.*covariance is a Own"):
        sgp.load(path, model)  # noqa: F821
    given = {"approximation": sgp.SVGP(4, covariance=Own())}
    with pytest.raises(ValueError, match="base_guide is base_guide, which is none of"):
        sgp.load(path, model, **given)  # noqa: F821
    found = sgp.load(path, model, base_guide=base_guide, **given)  # noqa: F821
    assert found.loss is None
    assert_same(found, known)


@pytest.mark.slow
def test_numbers_among_the_options_of_a_base_guide_come_back(tmp_path):
    rank = functools.partial(AutoLowRankMultivariateNormal, rank=1, init_scale=0.2)

    def two(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal().expand([2]).to_event(1))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(noise[1]), X))
        numpyro.sample("y", dist.Normal(f, noise[0]).to_event(1), obs=y)

    known = fit(two, sgp.SVGP(3), (X, Y), rank)
    known.save(tmp_path / "rank.npz")
    found = sgp.load(tmp_path / "rank.npz", two)
    assert found.guide.base_guide.rank == 1
    assert_same(found, known)


@pytest.mark.slow
def test_all_kinds_of_arguments_are_kept(tmp_path):
    def covariates(frame, y=None, *, names=(), table=None, size=None):
        slope = numpyro.sample("slope", dist.Normal())
        X = jnp.asarray(frame[["a"]].to_numpy()) * table[0]
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", len(frame)):
            mean = f + slope * frame["b"].to_numpy()
            numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)

    frame = pd.DataFrame({"a": X[:, 0], "b": np.arange(20)})
    options = {"names": ("a", "b"), "table": np.ones(3), "size": None}
    guide = sgp.AutoSparseGP(covariates, sgp.SVGP(3))
    guide.setup(frame, list(Y), **options)
    svi = SVI(covariates, guide, optax.sgd(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), frame, list(Y), **options))
    known = sgp.Fitted(guide, params, (frame, list(Y)), options)
    known.save(tmp_path / "frame.npz")
    args, kwargs = sgp.load(tmp_path / "frame.npz", covariates).examples
    pd.testing.assert_frame_equal(args[0], frame[:2])
    assert_array_equal(args[1], Y[:2])
    assert kwargs["names"] == ("a", "b") and kwargs["size"] is None
    assert_array_equal(kwargs["table"], np.ones(3))


@pytest.mark.slow
def test_minibatches_larger_than_two_rows_do_no_harm(tmp_path):
    def model(X, y=None, batch_size=None):
        data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
        with data as idx:
            X, y = X[idx], None if y is None else y[idx]
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with data:
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    known = fit(model, sgp.SVGP(3), (X, Y, 7))
    known.save(tmp_path / "fit.npz")
    assert_same(sgp.load(tmp_path / "fit.npz", model), known)


def by_row(X, y=None):
    with numpyro.plate("data", X.shape[0]):
        shift = numpyro.sample("shift", dist.Normal())
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data2", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + shift, 0.1), obs=y)


@pytest.mark.slow
def test_a_model_that_two_rows_do_not_do_for_says_so(tmp_path):
    known, path = fit(by_row, sgp.SVGP(3), (X, Y)), tmp_path / "rows.npz"
    with pytest.warns(UserWarning, match=r"rows.npz can be loaded with the training data"):
        known.save(path)
    with pytest.raises(ValueError, match=r"rows.npz does not have all.*args=\(X, y\)"):
        sgp.load(path, by_row)
    found = sgp.load(path, by_row, (X, Y))
    assert_same(found, known, X)
    assert found.args[0] is X and found.num_rows == 20


def test_a_large_array_that_is_no_data_is_not_written(tmp_path):
    known = fit(plain, sgp.SVGP(3), (X, Y))
    known.kwargs["grid"] = np.zeros(10_001)
    with pytest.warns(UserWarning, match=r"\(10001,\) has not the 20 rows"):
        known.save(tmp_path / "large.npz")
    assert (tmp_path / "large.npz").stat().st_size < 20_000


@pytest.mark.slow
def test_a_model_or_precision_that_does_not_fit_is_refused(fitted, path, tmp_path):
    told = "fit.npz is of another model .*'.*' is in the sites of what was saved"
    with pytest.raises(ValueError, match=told):
        sgp.load(path, plain)
    with pytest.raises(ValueError, match="fit.npz is of another model or guide"):
        sgp.load(path, model, approximation=sgp.SVGP(6))  # noqa: F821
    with pytest.raises(ValueError, match="fit.npz is of another model .*TypeError"):
        sgp.load(path, lambda X, y, groups: None)
    with pytest.raises(ValueError, match="inputs with 2 columns, but .* have 1"):
        sgp.load(path, model, (np.zeros((1, 2)), Y[:1]))  # noqa: F821
    with pytest.raises(TypeError, match="give it the model"):
        sgp.load(path, fitted.guide)
    with pytest.raises(TypeError, match="args must be the tuple .* got ndarray"):
        sgp.load(path, model, X)  # noqa: F821
    with pytest.raises(FileNotFoundError):
        sgp.load(tmp_path / "none.npz", model)  # noqa: F821
    with jax.enable_x64(False), pytest.raises(ValueError, match="fit.npz.*enable_x64"):
        sgp.load(path, model)  # noqa: F821


@pytest.mark.quick(2)
@pytest.mark.parametrize("with_data", [False, True])
@pytest.mark.parametrize("variance, noise", [(1.0, 0.3), (9.0, 0.3), (1.0, 3.0)])
def test_a_model_with_other_numbers_is_told_of(tmp_path, variance, noise, with_data):
    """It predicted something else, with the bound and the verdict of the file."""

    def made_of(variance, noise):
        def model(X, y=None):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(variance), X))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", dist.Normal(f, noise), obs=y)

        return model

    fit(made_of(1.0, 0.3), sgp.SVGP(4), (X, Y)).save(tmp_path / "fit")
    args = (X, Y) if with_data else None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sgp.load(tmp_path / "fit", made_of(variance, noise), args)
    is_other = (variance, noise) != (1.0, 0.3)
    assert len(told) == is_other
    assert all("computes something else" in str(w.message) for w in told)


def test_parameters_that_are_bad_are_not_written(fitted, tmp_path):
    bad = sgp.Fitted(fitted.guide, fitted.params, (X, Y))
    bad.params = {**fitted.params, "f_auto_qu_mu": fitted.params["f_auto_qu_mu"] * np.nan}
    with pytest.raises(ValueError, match="not finite"):
        bad.save(tmp_path / "bad.npz")
    bad.params = {**fitted.params, "net": Own}
    with pytest.raises(ValueError, match="Parameter 'net' is no array of numbers"):
        bad.save(tmp_path / "bad.npz")
    assert list(tmp_path.iterdir()) == []


def test_arrays_whose_names_do_for_no_member_are_kept_apart():
    arrays = {}
    odd = {"a/b": np.ones(1), "a": {"b": np.zeros(1)}, "\0": np.ones(2), "x" * 300: X}
    found = decode(encode(odd, "params", arrays, strict=True), arrays)
    assert len(arrays) == 4
    assert_equal_trees(found, jax.tree.map(jnp.asarray, odd))
    told = r"params/a is a type, which a file cannot have. Keep the fit by pickle.dump\("
    with pytest.raises(TypeError, match=told):
        encode({"a": Own}, "params", {}, strict=True)
    with pytest.raises(NotInFile, match="args is a random key"):
        decode(encode(jax.random.key(0), "args", {}), {})


@pytest.mark.slow
def test_float32_comes_back_as_float32(tmp_path):
    with jax.enable_x64(False):
        known = fit(plain, sgp.SVGP(inducing=X[:4]), (X, Y))
        known.save(tmp_path / "fit.npz")
        found = sgp.load(tmp_path / "fit.npz", plain)
        assert found.params["f_auto_Z"].dtype == np.float32
        assert_same(found, known)


def test_the_version_is_that_of_the_project():
    text = (ROOT / "numpyro_sgp" / "_version.py").read_text()
    assert f'"{sgp.__version__}"' in text
    assert 'path = "numpyro_sgp/_version.py"' in (ROOT / "pyproject.toml").read_text()


# ---- damaged and foreign files --------------------------------------------------------


def members(content):
    with np.load(io.BytesIO(content)) as file:
        return dict(file)


def packed(arrays, **options):
    file = io.BytesIO()
    np.savez(file, **arrays, **options)
    return file.getvalue()


def with_header(content, change, seal=True):
    """With another header, and the checksum that goes with it."""
    arrays = members(content)
    header = json.loads(str(arrays["header"]))
    changed = change(header)
    text = changed if isinstance(changed, str) else json.dumps(changed or header)
    arrays["header"] = np.array(text)
    if seal:
        arrays["checksum"] = np.array(hashlib.sha256(text.encode()).hexdigest())
    return packed(arrays)


def setting(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(header):
        part = header
        for key in keys:
            part = part[key]
        part[last] = value

    return change


def without(*keys):
    def change(header):
        part = header
        for key in keys[:-1]:
            part = part[key]
        del part[keys[-1]]

    return change


def of_arrays(change):
    def damage(content):
        arrays = members(content)
        return packed(change(arrays) or arrays)

    return damage


def replaced(name, value):
    return of_arrays(lambda arrays: {**arrays, name: value(arrays[name])})


def swapped(a, b):
    return of_arrays(lambda arrays: {**arrays, a: arrays[b], b: arrays[a]})


def zipped(**files):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def twice(content):
    file = io.BytesIO(content)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Dupl"):
        archive.writestr("params/f_auto_Z.npy", archive.read("setup/initial/f/Z.npy"))
    return file.getvalue()


def compressed(content):
    file = io.BytesIO()
    np.savez_compressed(file, **members(content))
    return file.getvalue()


def tarred(content):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("fit.npz")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def npy(value):
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def shapes_that_lie(content):
    """An array whose own header promises 10^15 numbers."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    lie = npy(np.zeros(3)).replace(b"(3,)", b"(1000000000000000,)")
    return zipped(**{**files, "params/f_auto_Z.npy": lie})


MU, Z = "params/f_auto_qu_mu", "params/f_auto_Z"
KEYS = ("format", "format_version", "numpyro_sgp", "guide", "params", "setup", "fit")
KEYS = (*KEYS, "num_rows", "arguments", "arrays")
DEEP = "[" * 100_000 + "]" * 100_000
SVGP_OF = ("guide", "approximation")
DAMAGES = {
    # parts of the file that are not there
    **{f"truncated at {i}/16": lambda c, i=i: c[: len(c) * i // 16] for i in range(1, 16)},
    **{f"{n} bytes short": lambda c, n=n: c[:-n] for n in (1, 2, 22, 100)},
    "a hole": lambda c: c[: len(c) // 3] + c[len(c) // 3 + 64 :],
    "a block of zeros": lambda c: c[:4096] + bytes(1024) + c[5120:],
    "a block twice": lambda c: c[:4096] + c[:512] + c[4096:],
    "the first byte": lambda c: b"X" + c[1:],
    "upside down": lambda c: c[::-1],
    "with carriage returns": lambda c: c.replace(b"\n", b"\r\n"),
    "as text": lambda c: c.decode("utf-8", "replace").encode(),
    # arrays that are not those that were written
    "swapped arrays": swapped(Z, "params/f_auto_qu_mu"),
    "swapped constants": swapped("losses", MU),
    "swapped rows of data": of_arrays(lambda a: {**a, "arguments/0/1": a[MU][:2]}),
    "one number": replaced(MU, lambda v: v + np.eye(len(v))[0] * 1e-12),
    "another order": replaced(MU, lambda v: v[::-1].copy()),
    "another dtype": replaced(MU, lambda v: v.astype(np.float32)),
    "another byte order": replaced(MU, lambda v: v.astype(">f8")),
    "whole numbers": replaced(MU, lambda v: v.astype(int)),
    "complex numbers": replaced(MU, lambda v: v + 0j),
    "strings": replaced(MU, lambda v: v.astype(str)),
    "objects": replaced(MU, lambda v: np.array([print], object)),
    "another shape": replaced(MU, lambda v: v[:, None]),
    "fewer": replaced(MU, lambda v: v[:2]),
    "none": replaced(MU, lambda v: v[:0]),
    "a number": replaced(MU, lambda v: v[0]),
    "NaN": replaced(MU, lambda v: v * np.nan),
    "zeros": replaced(Z, np.zeros_like),
    "transposed": replaced(Z, lambda v: v.T),
    "one more": of_arrays(lambda a: {**a, "params/other": np.ones(3)}),
    "one of another name": of_arrays(lambda a: {**a, "params/g": a.pop(Z)}),
    "losses gone": of_arrays(lambda a: {k: v for k, v in a.items() if k != "losses"}),
    "params gone": of_arrays(lambda a: {k: v for k, v in a.items() if k != MU}),
    "rows gone": of_arrays(lambda a: {k: v for k, v in a.items() if k[:9] != "arguments"}),
    "header gone": of_arrays(lambda a: {k: v for k, v in a.items() if k != "header"}),
    "checksum gone": of_arrays(lambda a: {k: v for k, v in a.items() if k != "checksum"}),
    "only the header": of_arrays(lambda a: {"header": a["header"]}),
    "checksum another": replaced("checksum", lambda v: np.array("0" * 64)),
    "checksum a number": replaced("checksum", lambda v: np.ones(())),
    "header a table": replaced("header", lambda v: np.stack([v, v])),
    "header numbers": replaced("header", lambda v: np.ones(3)),
    "header bytes": replaced("header", lambda v: v.astype("S")),
    "header an object": replaced("header", lambda v: np.array({"format": 1}, object)),
    "an array twice": twice,
    "compressed": compressed,
    "shapes that lie": shapes_that_lie,
    # headers that were changed, with the old checksum
    **{
        f"unsealed {'.'.join(map(str, keys))}": lambda c, k=keys, v=value: with_header(
            c, setting(*k, v), seal=False
        )
        for keys, value in {
            ("fit", "bound"): 1.0,
            ("fit", "stopped"): "",
            ("num_rows",): 21,
            ("guide", "prefix"): "other",
            ("guide", "approximation", "object", 0): "ODVGP",
            ("numpyro_sgp",): "0",
        }.items()
    },
    # and with the right one
    **{f"no {k}": lambda c, k=k: with_header(c, without(k)) for k in KEYS},
    **{f"{k} is null": lambda c, k=k: with_header(c, setting(k, None)) for k in KEYS[:7]},
    **{f"{k} is a list": lambda c, k=k: with_header(c, setting(k, [1])) for k in KEYS},
    **{
        f"version {v!r}": lambda c, v=v: with_header(c, setting("format_version", v))
        for v in (0, 2, -1, "1", True, 1.0, 10**400)
    },
    "of a guide": lambda c: with_header(c, setting("format", "numpyro_sgp guide")),
    **{
        f"sealed {'.'.join(map(str, keys))} {str(value)[:20]}": lambda c, k=keys, v=value: (
            with_header(c, setting(*k, v))
        )
        for *keys, value in [
            ("guide", "description", {"sites": {}, "parameters": {}}),
            ("guide", "prefix", "other"),
            ("guide", "prefix", 3),
            ("guide", "base_guide", {"name": "AutoDelta", "options": {}}),
            ("guide", "base_guide", {"name": "os.system", "options": {}}),
            ("guide", "base_guide", {"name": "AutoNormal", "options": {"no": 1}}),
            ("guide", "base_guide", {}),
            (*SVGP_OF, {"object": ["os.system", {"command": {"value": "true"}}]}),
            (*SVGP_OF, {"object": ["SVGP", {}]}),
            (*SVGP_OF, {"object": ["SVGP", {"num_inducing": {"value": 6}}]}),
            (*SVGP_OF, {"object": "SVGP"}),
            (*SVGP_OF, {"value": "SVGP"}),
            (*SVGP_OF, {"list": []}),
            (*SVGP_OF, {"pickle": "gASVAA=="}),
            (*SVGP_OF, {}),
            (*SVGP_OF, "object", 1, "covariance", {"value": "other"}),
            (*SVGP_OF, "object", 1, "jitter", {"value": -1.0}),
            (*SVGP_OF, "object", 1, "tight", {"value": "none"}),
            ("guide", "loss", {"object": ["MonteCarlo", {"num_samples": {"value": 0}}]}),
            ("params", {"jax": Z}),
            ("params", {"dict": {}}),
            ("params", {"dict": {"f_auto_Z": {"jax": "nowhere"}}}),
            ("params", "dict", "f_auto_Z", {"jax": MU}),
            ("params", "dict", "f_auto_Z", {"value": "text"}),
            ("setup", {"dict": {}}),
            ("setup", "dict", "initial", {"dict": {}}),
            ("fit", "bound", "many"),
            ("fit", "bound", None),
            ("fit", "stopped", 3),
            ("fit", "verdict", {}),
            ("num_rows", "20"),
            ("num_rows", 2.5),
            ("arguments", {"list": []}),
            ("arguments", {"list": [{"tuple": []}, {"dict": {}}]}),
            ("arguments", {"absent": "gone"}),
            ("arguments", "list", 0, {"tuple": [{"numpy": MU}, {"numpy": MU}]}),
            ("arguments", "list", 1, {"dict": {"no": {"value": 1}}}),
            ("arrays", {}),
            ("arrays", MU, [[6], "<f8", "0" * 64]),
            ("arrays", MU, None),
            ("arrays", "../../etc/passwd", [[6], "<f8", "0" * 64]),
        ]
    },
    "header is no JSON": lambda c: with_header(c, lambda h: "{"),
    "header is empty": lambda c: with_header(c, lambda h: ""),
    "header is a list": lambda c: with_header(c, lambda h: "[1, 2]"),
    "header is a number": lambda c: with_header(c, lambda h: "9" * 10_000),
    "header is deep": lambda c: with_header(c, lambda h: DEEP),
    "params are deep": lambda c: with_header(
        c,
        lambda h: json.dumps(h).replace(
            '"params": {"dict"',
            '"params": ' + '{"list": [' * 900 + "]}" * 900 + ', "x": {"d"',
        ),
    ),
    "header is huge": lambda c: with_header(c, lambda h: json.dumps(["x" * 10**6])),
    # files of something else
    "empty": lambda c: b"",
    "text": lambda c: b"lengthscale, 1.0\n",
    "JSON": lambda c: json.dumps({"format": "numpyro_sgp fit"}).encode(),
    "pickle": lambda c: pickle.dumps({"params": [1.0]}),
    "npy": lambda c: npy(X),
    "npz": lambda c: packed({"X": X, "y": Y}),
    "zip": lambda c: zipped(**{"readme.txt": "hello"}),
    "empty zip": lambda c: zipped(),
    "zip in a zip": lambda c: zipped(**{"fit.npz": c}),
    "zip of texts": lambda c: zipped(**{"header.npy": "{}", "checksum.npy": ""}),
    "gzip": lambda c: gzip.compress(c, mtime=0),
    "tar": tarred,
    "zeros only": lambda c: bytes(10_000),
    "noise": lambda c: np.random.default_rng(0).bytes(10_000),
    "noise that begins well": lambda c: c[:64] + np.random.default_rng(0).bytes(10_000),
    "only the end": lambda c: c[-22:],
}


def test_there_are_more_than_a_hundred_kinds_of_damage():
    assert len(DAMAGES) > 100


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_and_foreign_files_are_refused_by_name(path, tmp_path, kind):
    content = path.read_bytes()
    damaged = DAMAGES[kind](content)
    assert damaged != content
    broken = tmp_path / "broken.npz"
    broken.write_bytes(damaged)
    with pytest.raises(ValueError, match="broken.npz") as caught:
        sgp.load(broken, model)  # noqa: F821
    assert len(str(caught.value)) < 2_000


def test_a_folder_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="is a folder, and no file of"):
        sgp.load(tmp_path, model)  # noqa: F821


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_refused_or_changes_nothing(path, tmp_path, loaded, seed):
    """200 places in all; most of a file are arrays and the header, where each is seen."""
    content, rng = path.read_bytes(), np.random.default_rng(seed)
    broken, refused = tmp_path / "broken.npz", 0
    for at in rng.integers(len(content), size=50):
        flipped = content[at] ^ (1 << rng.integers(8))
        broken.write_bytes(content[:at] + bytes([flipped]) + content[at + 1 :])
        try:
            found = sgp.load(broken, model)  # noqa: F821
        except ValueError as error:
            assert "broken.npz" in str(error)
            refused += 1
        else:
            jax.tree.map(assert_array_equal, found.params, loaded.params)
            jax.tree.map(
                assert_array_equal, found.guide.setup_state(), loaded.guide.setup_state()
            )
            assert found.bound == loaded.bound and repr(found) == repr(loaded)
    assert refused > 35


def test_every_byte_of_the_directory_is_refused_or_changes_nothing(path, tmp_path):
    """The last bytes of an archive say where its members are."""
    content = path.read_bytes()
    broken = tmp_path / "broken.npz"
    start = content.rindex(b"PK\x01\x02")
    header, arrays = read_archive(path, set())
    for at in range(start, len(content)):
        for flip in (1, 0x80, 0xFF):
            changed = bytes([content[at] ^ flip])
            broken.write_bytes(content[:at] + changed + content[at + 1 :])
            try:
                found = read_archive(broken, set())
            except ValueError as error:
                assert "broken.npz" in str(error)
            else:
                assert found[0] == header
                jax.tree.map(assert_array_equal, found[1], arrays)
