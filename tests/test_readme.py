"""The code in the README runs as it stands, with fewer steps."""

import functools
import re
from pathlib import Path

import jax
import optax
import pytest
from numpyro.infer import SVI

import numpyro_sgp as sgp

README = Path(__file__).resolve().parents[1] / "README.md"
FEWER = {
    "sgp.fit(": "fit_shortly(",
    "500, X, y)": "30, X, y, progress_bar=False)",
    "num_warmup=500, num_samples=500": "num_warmup=5, num_samples=40",
    "num_samples=500,\n": "num_samples=5,\n",
    "ScoreFunction(200)": "ScoreFunction(20)",
    "SVGP(50)": "SVGP(8)",
    "SOLVEGP(20, 20": "SOLVEGP(4, 4",
    "layers, (X, y)": "layers, (X, y), expectation=sgp.MonteCarlo(1)",
    "(0.0, 6.0, 200)": "(0.0, 6.0, 64)",
}


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


def without_nuts(code):
    first, rest = code.split("# The same model by NUTS")
    _, rest = rest.split("# Side by side")
    return first + rest.replace('"NUTS": sgp.to_arviz(mcmc, X, y), ', "")


def run(code):
    names = {"fit_shortly": functools.partial(sgp.fit, steps=100, progress_bar=False)}
    exec(compile(code, str(README), "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:There are not enough devices")
@pytest.mark.parametrize("nuts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_code_of_the_readme_runs(nuts, capsys):
    code = "\n".join(blocks())
    if not nuts:
        code = without_nuts(code)
    for old, new in FEWER.items():
        assert old in code
        code = code.replace(old, new)
    run(code)
    out = capsys.readouterr().out
    assert "SVGP" in out and "95%" in out and ("NUTS (reference)" in out) == nuts


@pytest.mark.slow
def test_fit_and_svi_end_as_near_the_optimum_as_the_readme_says():
    names = run(without_nuts("\n".join(blocks()[:2])).replace("sgp.compare", "len"))
    X, y, model = names["X"], names["y"], names["model"]
    guide = sgp.AutoSparseGP(model, sgp.SVGP(50))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    result = sgp.fit_lbfgs(svi, jax.random.key(0), X, y, progress_bar=False)
    best = sgp.Fitted.from_svi(svi, result, X, y).bound
    assert "within 0.02 nats" in README.read_text()
    for name in ("fitted", "by_hand"):
        assert abs(names[name].bound - best) < 0.02, name
