"""The code in the README runs as it stands, with fewer steps."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.filterwarnings("ignore:There are not enough devices")
@pytest.mark.parametrize("nuts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_example_of_the_readme_runs(nuts, capsys):
    code = "\n".join(re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S))
    if not nuts:
        first, rest = code.split("# The same model by NUTS")
        _, rest = rest.split("# Side by side")
        code = first + rest.replace('"NUTS": sgp.to_arviz(mcmc, X, y),', "")
    fewer = {"500, X, y)": "30, X, y, progress_bar=False)"}
    fewer["num_warmup=500, num_samples=500"] = "num_warmup=5, num_samples=40"
    fewer["2000"] = "30"
    fewer |= {
        "ScoreFunction(200)": "ScoreFunction(20)",
        "key(0), 300, X, y)": "key(0), 5, X, y)",
    }
    fewer |= {"num_samples=500,\n": "num_samples=5,\n", "(0.0, 6.0, 200)": "(0.0, 6.0, 64)"}
    for old, new in fewer.items():
        assert old in code
        code = code.replace(old, new)
    exec(compile(code, str(README), "exec"), {})
    out = capsys.readouterr().out
    assert "SOLVE-GP" in out and "95%" in out
