"""The site: its code runs, its names and messages are those of the package."""

import ast
import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

import numpyro_sgp as sgp

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
#: Tutorials and other notebooks run when the site is built, and not here.
PAGES = {
    page.relative_to(DOCS).as_posix(): page.read_text()
    for page in sorted(DOCS.rglob("*.md"))
    if "_build" not in page.parts
}


def blocks(page):
    return re.findall(r"^ *```python\n(.*?)^ *```", PAGES[page], flags=re.S | re.M)


# ---- code -------------------------------------------------------------------------------


def shortly(function, **options):
    return functools.partial(function, progress_bar=False, **options)


def small_svi(num_rows=32):
    """An SVI on minibatches, its guide set up, and data, for pages that have their own."""
    X = np.linspace(0.0, 6.0, num_rows)[:, None]
    y = np.sin(2.0 * X[:, 0])

    def model(X, y=None, num_rows=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", num_rows or len(X), subsample_size=len(X)):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    state = svi.init(jax.random.key(0), X, y)
    names = {"X": X, "y": y, "model": model, "svi": svi, "guide": guide, "state": state}
    return names | {"batches": [(X, y)], "num_rows": num_rows}


def of_groups():
    rng = np.random.default_rng(0)
    X, group = rng.uniform(0.0, 3.0, (40, 1)), np.arange(40) % 20
    y = rng.poisson(2.0, 40)
    names = {"X": X, "group": group, "y": y, "X_new": X[:3], "group_new": group[:3]}
    return names | {"SVI": SVI, "optax": optax}


def of_images():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(4, 32, 32, 3)).astype(np.float32)
    names = {"images": images, "RobustMax": sgp.likelihoods.RobustMax}
    return names | {
        "robust_max_probabilities": sgp.likelihoods.robust_max_probabilities,
        "set_up": lambda guide: trained(guide, images, jnp.arange(4)),
    }


def trained(guide, *data):
    svi = SVI(guide.model, guide, optax.adam(0.01), sgp.TraceGP_ELBO(sgp.MonteCarlo(1)))
    return svi.get_params(svi.init(jax.random.key(0), *data))


def of_growing_data():
    names = small_svi(12) | {"candidates": np.linspace(0.0, 6.0, 9)[:, None]}
    return names | {"measure": lambda x: np.sin(2.0 * x[0])}


def of_two_results():
    names = small_svi(16)
    data = names["X"], names["y"]
    fitted = sgp.fit(names["model"], sgp.SVGP(4), data, steps=20, progress_bar=False)
    posterior = sgp.nested(names["model"], sgp.SVGP(4), data, progress_bar=False)
    return {"fitted": fitted, "posterior": posterior}


#: What a page's code finds, and what it has fewer of here.
RUN = {
    "choosing.md": (of_two_results, {}),
    "index.md": (dict, {"sgp.fit(": "fit_shortly(", "SVGP(20)": "SVGP(6)"}),
    "reference/collapsed.md": (
        dict,
        {
            "num_warmup=500, num_samples=500": "num_warmup=5, num_samples=5",
            "(0.0, 6.0, 200)": "(0.0, 6.0, 64)",
        },
    ),
    "reference/model.md": (
        dict,
        {
            "sgp.fit(": "fit_shortly(",
            "num_warmup=500, num_samples=500": "num_warmup=5, num_samples=5",
            "ScoreFunction(200)": "ScoreFunction(20)",
            "SOLVEGP(20, 20": "SOLVEGP(4, 4",
            "layers, (X, y)": "layers, (X, y), expectation=sgp.MonteCarlo(1)",
            "(0.0, 6.0, 200)": "(0.0, 6.0, 64)",
        },
    ),
    "reference/numerics.md": (dict, {'jax.config.update("jax_': '("jax_'}),
    "reference/training.md": (
        dict,
        {
            "sgp.fit(": "fit_shortly(",
            "500, X, y)": "30, X, y, progress_bar=False)",
            "num_samples=500,\n": "num_samples=5,\n",
            "SVGP(50)": "SVGP(8)",
            "(0.0, 6.0, 200)": "(0.0, 6.0, 64)",
        },
    ),
    "records/deep.md": (
        of_images,
        {
            "SOLVEGP(64, 64": "SOLVEGP(3, 3",
            "elbo = ": "params = set_up(guide); elbo = ",
            "(0), 10)": "(0), 2)",
            "images, 10,": "images, 2,",
        },
    ),
    "records/devices.md": (
        small_svi,
        {
            "100_000": "2",
            "8192": "8",
            "jax.distributed.initialize()": "jax.device_count()",
            "/shared/run": "run",
        },
    ),
    "records/nested.md": (
        of_groups,
        {
            "SVGP(50)": "SVGP(5)",
            "sgp.nested(": "nested_shortly(",
            "sgp.fit(": "fit_shortly(",
            "2000, X, group, y)": "5, X, group, y, progress_bar=False)",
        },
    ),
    "records/startup.md": (
        of_growing_data,
        {
            "sgp.fit(": "fit_shortly(",
            "range(30)": "range(2)",
            "SVGP(20)": "SVGP(4)",
            'jax.config.update("jax_': '("jax_',
        },
    ),
}


#: Pages whose code takes long, or is that of the README: run by `make slow`.
LONG = {
    "choosing.md",
    "index.md",
    "records/deep.md",
    "records/nested.md",
    "records/startup.md",
    "reference/collapsed.md",
    "reference/model.md",
    "reference/training.md",
}


def test_every_page_with_code_is_run():
    pages = {page for page in PAGES if blocks(page)}
    others = {page for page in pages if page.startswith("coming_from/")}
    assert pages - others == RUN.keys()
    for page in others:  # that of other libraries; ours runs when the site is built
        assert not any("sgp" in block for block in blocks(page)), page


@pytest.mark.filterwarnings("ignore:There are not enough devices")
@pytest.mark.filterwarnings("ignore:Nested inference has")  # of nested_shortly
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page in LONG else page for page in RUN],
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    prelude, fewer = RUN[page]
    code = "\n".join(blocks(page))
    for old, new in fewer.items():
        assert old in code, old
        code = code.replace(old, new)
    names = {"jax": jax, "jnp": jnp, "np": np, "numpyro": numpyro, "dist": dist, "sgp": sgp}
    names["fit_shortly"] = shortly(sgp.fit, steps=20)
    names["nested_shortly"] = shortly(sgp.nested, max_nodes=8)
    names |= prelude()
    monkeypatch.chdir(tmp_path)
    if "X-{part}" in code:
        np.save("X-0.npy", names["X"])
        np.save("y-0.npy", names["y"])
    exec(compile(code, page, "exec"), names)
    plt.close("all")


@pytest.mark.slow
def test_fit_and_svi_end_as_near_the_optimum_as_the_site_says():
    page = "reference/training.md"
    names = {}
    exec(compile("\n".join(blocks(page)), page, "exec"), names)
    X, y, model = names["X"], names["y"], names["model"]
    guide = sgp.AutoSparseGP(model, sgp.SVGP(50))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    result = sgp.fit_lbfgs(svi, jax.random.key(0), X, y, progress_bar=False)
    best = sgp.Fitted.from_svi(svi, result, X, y).bound
    assert "within 0.02 nats" in PAGES[page]
    for name in ("fitted", "by_hand"):
        assert abs(names[name].bound - best) < 0.02, name


def test_the_front_page_has_the_example_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    first = re.search(r"```python\n(.*?)```", readme, flags=re.S)[1]
    assert blocks("index.md") == [first]


# ---- names ------------------------------------------------------------------------------

PUBLIC = [
    name
    for name in sgp.__all__
    if inspect.isclass(getattr(sgp, name)) or inspect.isfunction(getattr(sgp, name))
]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name):
    assert ">>> " in (getattr(sgp, name).__doc__ or "")


def in_reference():
    """Paths of what has a page."""
    for page, text in PAGES.items():
        if page.startswith("reference/"):
            for room, names in re.findall(
                r"currentmodule:: (\S+)\n\n\.\. autosummary::\n(.*?)```", text, flags=re.S
            ):
                for name in re.findall(r"^   ([\w.]+)$", names, flags=re.M):
                    yield f"{room}.{name}"


def test_the_reference_has_every_public_name():
    listed = set(in_reference())
    public = {f"numpyro_sgp.{name}" for name in PUBLIC}
    for room in sgp.__all__:
        module = getattr(sgp, room)
        if inspect.ismodule(module):
            public |= {f"numpyro_sgp.{room}.{n}" for n in getattr(module, "__all__", ())}
    assert public <= listed, public - listed


def along(path):
    """What is at a path, after all that is on the way."""
    found = [sgp]
    for name in path.split(".")[1:]:
        found.append(getattr(found[-1], name))
    return found


def test_docstrings_link_to_what_the_reference_has():
    """As building the site finds, in minutes; of what has a page, and its methods."""
    conf = (DOCS / "conf.py").read_text()
    plain = set(re.findall(r"\w+", re.search(r"_INSIDE = \((.*?)\)", conf, flags=re.S)[1]))
    paged = [along(path)[-1] for path in in_reference()]
    assert len(paged) > 150
    for thing in paged:
        parts = vars(thing).items() if inspect.isclass(thing) else ()
        for part in [thing, *(value for name, value in parts if name[0] != "_")]:
            for link in re.findall(
                r":\w+:`~?(numpyro_sgp\.[\w.]+)`", inspect.getdoc(part) or ""
            ):
                known = any(at is one for at in along(link) for one in paged)
                room = inspect.ismodule(along(link)[-1]) and link.count(".") == 1
                assert known or room or link.split(".")[-1] in plain, (thing, link)


def test_names_in_pages_are_there():
    """Of ``sgp.name`` in prose and code; names of methods are seen by what runs them."""
    for page, text in {**PAGES, "README.md": (ROOT / "README.md").read_text()}.items():
        for path in set(re.findall(r"\bsgp\.([A-Za-z_]+(?:\.[A-Za-z_]\w*)?)", text)):
            room, _, name = path.partition(".")
            assert hasattr(sgp, room), (page, path)
            if name and inspect.ismodule(getattr(sgp, room)):
                assert hasattr(getattr(sgp, room), name), (page, path)


# ---- messages and links -----------------------------------------------------------------


def messages():
    """Text of every string of the package, with nothing where it has a value."""
    for path in (ROOT / "numpyro_sgp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.Call):
                parts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                yield " ".join("".join(p for p in parts if isinstance(p, str)).split())


def test_the_messages_that_the_site_explains_are_those_of_the_package():
    known = "\n".join(messages())
    told = re.findall(r"```text\n(.*?)```", PAGES["reference/errors.md"], flags=re.S)
    assert len(told) > 30
    for message in told:
        for part in " ".join(message.split()).split("..."):
            part = part.strip(" '();")
            assert len(part) < 4 or part in known, part


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(name):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text()):
        assert link.startswith("https://") or (ROOT / link).is_file(), link


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_thumbnails_of_the_gallery_are_small():
    sizes = [path.stat().st_size for path in (DOCS / "figures" / "gallery").glob("*.png")]
    assert len(sizes) >= 12 and max(sizes) < 40_000 and sum(sizes) < 700_000
