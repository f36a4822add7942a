"""The code in the README runs as it stands, with fewer steps."""

import functools
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

import numpyro_sgp as sgp

README = Path(__file__).resolve().parents[1] / "README.md"
FEWER = {
    "sgp.fit(": "fit_shortly(",
    "sgp.nested(": "nested_shortly(",
    "num_warmup=500, num_samples=500": "num_warmup=5, num_samples=40, progress_bar=False",
    "SVGP(20)": "SVGP(6)",
    "num_bins=112": "num_bins=56",
    "fitted.plot()": "fitted.plot(num_points=20)",
    "posterior.to_arviz()": "posterior.to_arviz(num_samples=200)",
    "fitted.to_arviz()": "fitted.to_arviz(num_samples=200)",
}


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


def run(code):
    names = {
        "fit_shortly": functools.partial(sgp.fit, steps=100, progress_bar=False),
        "nested_shortly": functools.partial(sgp.nested, max_nodes=8, progress_bar=False),
    }
    exec(compile(code, str(README), "exec"), names)
    plt.close("all")
    return names


def without_nuts(code):
    nuts = re.compile(r"sampler|mcmc|    .NUTS")
    return "\n".join(line for line in code.splitlines() if not nuts.match(line))


@pytest.mark.filterwarnings("ignore:There are not enough devices")
@pytest.mark.filterwarnings("ignore:Nested inference has")  # of nested_shortly
@pytest.mark.parametrize("nuts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_code_of_the_readme_runs(nuts, capsys):
    code = "\n".join(blocks())
    for old, new in FEWER.items():
        assert old in code
        code = code.replace(old, new)
    run(code if nuts else without_nuts(code))
    out = capsys.readouterr().out
    assert "SVGP" in out and "95%" in out and ("NUTS (reference)" in out) == nuts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There are not enough devices")
def test_the_posteriors_are_as_near_to_that_of_nuts_as_the_readme_says():
    assert "those of NUTS to a tenth" in " ".join(README.read_text().split())
    names = run("\n".join(blocks()))
    X, f = names["X"], names["mcmc"].get_samples()["f"]
    by_nuts = np.asarray(f.std(0))
    for name in ("fitted", "posterior"):
        q = names[name].posterior(X)["f"]
        sd = np.sqrt(np.asarray(q.variance))
        # 500 draws: standard deviations to 3 % and more, as they are correlated.
        assert abs(np.mean(sd / by_nuts) - 1) < 0.1, name
