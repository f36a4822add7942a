"""Saved guides: the same predictions in another process, and files that are not whole."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_array_equal
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal

import numpyro_sgp as sgp

ROOT = Path(__file__).resolve().parents[2]
X = np.linspace(-2.0, 2.0, 20)[:, None]
Y = np.sin(X[:, 0])

MODEL = """
import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_sgp as sgp
from numpyro.infer.autoguide import AutoNormal

def model(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal())
    variance = numpyro.param("variance", 1.0)
    kernel = sgp.kernels.RBF(variance)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)
"""
exec(MODEL)

APPROXIMATIONS = {
    "trained": lambda: sgp.SVGP(6),
    "fixed": lambda: sgp.SOLVEGP(4, 3, train_inducing=False),
    "dense": lambda: sgp.VGP(),
    "sites": lambda: sgp.SVGP(6, covariance="pseudo_data"),
    "dual": lambda: sgp.SVGP(6, covariance="dual"),
}


def trained(kind):
    guide = sgp.AutoSparseGP(model, APPROXIMATIONS[kind](), AutoNormal)  # noqa: F821
    optimiser = optax.adam(0.05)
    if kind == "dual":
        optimiser = sgp.natural_gradients(guide, 0.5, optimiser)
    svi = SVI(model, guide, optimiser, sgp.TraceGP_ELBO())  # noqa: F821
    return guide, svi.run(jax.random.key(0), 5, X, Y, progress_bar=False).params


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A guide, its parameters and its file."""
    guide, params = trained("trained")
    path = tmp_path_factory.mktemp("saved") / "guide.npz"
    sgp.save(path, guide, params)
    return guide, params, path


def empty(approximation=None):
    return sgp.AutoSparseGP(model, approximation or sgp.SVGP(6), AutoNormal)  # noqa: F821


def test_another_process_predicts_the_same_to_the_last_bit(saved, tmp_path):
    guide, params, path = saved
    q = guide.posterior(params, X + 0.1)["f"]
    code = f"""
import jax
jax.config.update("jax_enable_x64", True)
import numpy as np
{MODEL}
guide = sgp.AutoSparseGP(model, sgp.SVGP(6), AutoNormal)
params = sgp.load({str(path)!r}, guide, np.zeros((1, 1)), np.zeros(1))
X = np.linspace(-2.0, 2.0, 20)[:, None]
q = guide.posterior(params, X + 0.1)["f"]
np.savez({str(tmp_path / "found.npz")!r}, q_mean=q.mean, q_variance=q.variance, **params)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)
    with np.load(tmp_path / "found.npz") as found:
        assert_array_equal(found["q_mean"], q.mean)
        assert_array_equal(found["q_variance"], q.variance)
        assert sorted(found) == sorted([*params, "q_mean", "q_variance"])
        for name, value in params.items():
            assert_array_equal(found[name], value)


@pytest.mark.parametrize("kind", ["fixed", "dense", "sites", "dual"])
def test_what_is_no_parameter_is_saved_too(kind, tmp_path):
    guide, params = trained(kind)
    sgp.save(tmp_path / "guide.npz", guide, params)
    other = empty(APPROXIMATIONS[kind]())
    again = sgp.load(tmp_path / "guide.npz", other, X[:2], Y[:2])
    known, found = (g.posterior(p, X)["f"] for g, p in ((guide, params), (other, again)))
    assert_array_equal(found.mean, known.mean)
    assert_array_equal(found.variance, known.variance)


def test_another_family_is_refused_by_name(tmp_path):
    guide, params = trained("fixed")
    sgp.save(tmp_path / "guide.npz", guide, params)
    other = empty(sgp.SVGP(6, covariance="pseudo_data"))
    with pytest.raises(ValueError, match=r"guide.npz.*'f' was saved with .*qu_linear"):
        sgp.load(tmp_path / "guide.npz", other, X[:2], Y[:2])


def test_nested_parameters_come_back(tmp_path):
    def model(X, y):
        net = numpyro.param("net", {"layers": [(jnp.ones(2), jnp.zeros(())), ()], "b": 0.5})
        kernel = sgp.kernels.RBF(net["layers"][0][0][0])
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, net["b"]), obs=y)

    guides = [sgp.AutoSparseGP(model, sgp.SVGP(3)) for _ in range(2)]
    svi = SVI(model, guides[0], optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    sgp.save(tmp_path / "guide.npz", guides[0], params)
    again = sgp.load(tmp_path / "guide.npz", guides[1], X[:1], Y[:1])
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(assert_array_equal, again, params)
    with pytest.raises(ValueError, match="Parameter 'net' is no array of numbers"):
        sgp.save(tmp_path / "guide.npz", guides[0], {**params, "net": test_layers})
    sgp.load(tmp_path / "guide.npz", sgp.AutoSparseGP(model, sgp.SVGP(3)), X[:1], Y[:1])


def test_layers():
    """Stands for something that is no array."""


def damaged(content, kind, path):
    """A file that is not what was written."""
    if kind == "truncated":
        return content[: len(content) // 2]
    if kind == "empty":
        return b""
    if kind == "a bit":
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo("params/f_auto_qu_mu.npy")
        at = content.index(b"NUMPY", info.header_offset) + 140
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    if kind == "text":
        return b"lengthscale, 1.0\n"
    if kind == "pickle":
        return b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07"
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["truncated", "empty", "a bit", "text", "pickle"])
def test_damaged_files_are_refused_by_name(saved, tmp_path, kind):
    _, _, path = saved
    broken = tmp_path / "broken.npz"
    broken.write_bytes(damaged(path.read_bytes(), kind, path))
    guide = empty()
    with pytest.raises(ValueError, match="broken.npz is damaged, or was not written by"):
        sgp.load(broken, guide, X[:1], Y[:1])
    assert guide.prototype_trace is None


def test_foreign_files_are_refused_by_name(saved, tmp_path):
    _, _, path = saved
    other = tmp_path / "other.npz"
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(str(arrays.pop("header")))
    objects = {**arrays, "params/f_auto_qu_mu": np.array([print], dtype=object)}
    cases = [
        ({}, arrays, "no header"),
        ({"format": "others"}, arrays, "not that of a numpyro_sgp guide"),
        ({"format_version": 9}, arrays, "has version 9 of the format"),
        ({"fingerprint": "0"}, arrays, "is of another guide"),
        ({"arrays": {"setup/x": [[1], "float64"]}}, arrays, "damaged"),
        ({}, {**arrays, "params/f_auto_qu_mu": np.ones(2)}, r"shape \(2,\)"),
        ({}, objects, "allow_pickle=False"),
    ]
    for change, content, message in cases:
        text = {"header": np.array(json.dumps({**header, **change}))}
        np.savez(other, **content, **({} if message == "no header" else text))
        with pytest.raises(ValueError, match=message) as caught:
            sgp.load(other, empty(), X[:1], Y[:1])
        assert "other.npz" in str(caught.value)
    with pytest.raises(FileNotFoundError):
        sgp.load(tmp_path / "none.npz", empty(), X[:1], Y[:1])


def test_a_guide_or_precision_that_does_not_fit_is_refused(saved, tmp_path):
    guide, params, path = saved
    with pytest.raises(ValueError, match="set up already"):
        sgp.load(path, guide, X, Y)
    with pytest.raises(ValueError, match="is of another guide"):
        sgp.load(path, sgp.AutoSparseGP(model, sgp.SVGP(6)), X, Y)  # noqa: F821
    with pytest.raises(ValueError, match="inputs with 2 columns, but .* have 1"):
        sgp.load(path, empty(), np.zeros((1, 2)), Y[:1])
    with pytest.raises(ValueError, match="not finite"):
        bad = {**params, "f_auto_qu_mu": params["f_auto_qu_mu"] * np.nan}
        sgp.save(tmp_path / "bad.npz", guide, bad)
    with jax.enable_x64(False), pytest.raises(ValueError, match="enable_x64"):
        sgp.load(path, empty(), X[:1].astype(np.float32), Y[:1].astype(np.float32))
    assert sorted(p.name for p in tmp_path.iterdir()) == []


def test_the_version_is_that_of_the_project():
    text = (ROOT / "numpyro_sgp" / "_version.py").read_text()
    assert f'"{sgp.__version__}"' in text
    assert 'path = "numpyro_sgp/_version.py"' in (ROOT / "pyproject.toml").read_text()
