"""The numbers in the pages of docs/ are those of the files of results."""

import importlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.extend.core import jaxprs_in_params
from numpyro.handlers import seed, trace

import numpyro_sgp as sgp

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
RECORDS = "docs/records"
LIMITS = "docs/reference/limits.md"
NUMERICS = "docs/reference/numerics.md"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of benchmarks/, for its functions that print tables."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(BENCHMARKS / "peers")
    return importlib.import_module


def results(name):
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def text(name):
    return (ROOT / name).read_text()


def says(name, sentence):
    """Whether a page has a sentence, wherever its lines end."""
    return sentence in " ".join(text(name).split())


# ---- tables -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bounds", "natural", "inverse_free"])
def test_a_page_is_what_its_script_prints(script, name):
    assert text(f"{RECORDS}/{name}.md") == script(name).page(results(name)) + "\n"


def test_the_page_of_papers_is_what_its_script_prints(script):
    names = "savigp", "savigp_large", "regression", "mining", "travel_times", "images"
    page = script("papers").page(*map(results, names))
    assert text(f"{RECORDS}/papers.md") == page + "\n"


def test_the_verdict_on_a_number_of_a_paper(script):
    papers = script("papers")
    line = papers.Line("p", "e", "m", "LL", 1.0, 1, [0.9, 1.1], [], "fit")
    assert papers.verdict(line) == "reached"
    assert papers.verdict(line._replace(same=[0.9, 1.05])) == "level"
    assert papers.verdict(line._replace(same=[0.9, 0.91])) == "behind by 0.095"
    assert papers.verdict(line._replace(same=[0.9], default=[1.2])).startswith("behind")
    assert papers.verdict(line._replace(same=[], default=[1.2])) == "reached"
    assert (
        papers.verdict(line._replace(better=-1, same=[1.2])) == "behind by 0.2, one split"
    )
    assert papers.verdict(line._replace(same=[])) == "not run"


def test_the_page_of_speed_is_what_its_script_prints(script):
    assert text(f"{RECORDS}/speed.md") == script("tables").page(results("peers")) + "\n"


def test_the_table_of_nested_inference_is_what_its_script_prints(script, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "nested")
    assert script("compare").table(results("nested")) in text(f"{RECORDS}/nested.md")


def test_the_table_of_sampling_is_what_its_script_prints(script):
    assert script("sampling").table(results("sampling")) in text(f"{RECORDS}/sampling.md")


@pytest.mark.slow
def test_the_densities_that_sampling_compares_are_the_same(script):
    sampling, jitter = script("sampling"), 1e-6
    coal = sgp.datasets.coal_mining(9)
    data = jnp.asarray(coal.bin_centre_day, float)[:, None], jnp.asarray(coal.count)
    energies = sampling.potentials(sampling.models(jitter, 5), data)
    # Rounding times the condition of K, which is at most 9 / jitter.
    assert sampling.largest_difference(energies) < 1e-9
    seconds = sampling.gradients(energies, rounds=1, budget=1e-3)
    assert all(len(found["cores"]) == 1 for found in seconds.values())


def test_what_docs_say_of_nested_inference(script, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "nested")
    compare, kept = script("compare"), results("nested")
    page = f"{RECORDS}/nested.md"
    ratios = list(compare.times_faster(kept).values())
    told = f"{np.median(ratios):.0f} times as long as `nested` on the median, "
    told += f"{min(ratios):.0f} to {max(ratios):.0f} times"
    assert says(page, told), told
    beyond = sorted(compare.beyond(kept))
    told = " and ".join(f"`{name}`" for name in beyond)
    assert says(page, f"All numbers are within these limits but some of {told}"), beyond
    told = {name: methods["NUTS"]["min_ess"] for name, methods in kept.items()}
    assert all(ess > 2000 for ess in told.values()), told
    assert all(m["NUTS"]["max_rhat"] < 1.005 for m in kept.values())


def test_the_joint_bound_is_at_least_that_of_parts_apart():
    gains, evidence = [], []
    for methods in results("nested").values():
        for method in ("AutoNormal", "AutoMultivariateNormal"):
            bounds = methods.get(method, {}).get("bounds", {})
            if "joint" in bounds:
                gains.append(bounds["joint"] - bounds["apart"] + 3 * bounds["apart_se"])
            if "evidence" in bounds:
                more = methods["nested"]["bounds"]["evidence"] - bounds["evidence"]
                evidence.append(more + 3 * bounds["evidence_se"])
    assert gains and min(gains) > 0.0
    assert evidence and min(evidence) > 0.0


def test_steps_of_the_joint_guide():
    ratios = [results("nested_steps")[kind]["ratio"] for kind in ("float32", "float64")]
    told = "took {:.1f} (float32) and {:.1f} (float64) times".format(*ratios)
    assert says("docs/records/nested.md", told), told


def test_what_groups_cost():
    found = results("nested_groups")
    for number, row in found["apart"].items():
        dense = found["dense"].get(number)
        seconds = [f"{row[kind] + 1e-9:.2f}" for kind in ("node", "slope")]
        seconds += [f"{dense[k] + 1e-9:.1f}" if dense else "" for k in ("node", "slope")]
        told = f"| {int(number):,} | {row['size']:,} | {' | '.join(seconds)} |"
        assert told in text(f"{RECORDS}/nested.md"), told
    apart, dense = (found[f"whole, {kind}"]["1000"] for kind in ("apart", "dense"))
    told = f"takes {apart['seconds']:.0f} s of a core ({apart['nodes']} nodes)"
    assert says("docs/records/nested.md", told), told
    told = f"dense products {dense['seconds']:.0f} s ({dense['nodes']} nodes)"
    assert says("docs/records/nested.md", told), told


@pytest.mark.parametrize("page", ["regression", "deep", "images", "images_memory"])
def test_a_table_is_what_its_script_prints(script, page):
    name = page.removesuffix("_memory")
    form = "memory_table" if name != page else "table"
    found = getattr(script(name), form)(results(page))
    where = "regression" if name == "regression" else "deep"
    assert len(found.splitlines()) > 2 and found in text(f"{RECORDS}/{where}.md")


# ---- sentences --------------------------------------------------------------------------


def saved(script, names):
    """How many times fewer steps natural gradients took; None where they did not arrive."""
    natural, found = script("natural"), []
    for title, runs in results("natural").items():
        for name, run in runs.items():
            if title.startswith(names) and " + " in name:
                own = runs[re.sub(r" \+ [^,]*", "", name)]  # Adam alone at that rate
                goal = max(own["bounds"])
                here = natural.steps_to(run, goal)
                found.append(here and natural.steps_to(own, goal) / here)
    return found


def test_the_steps_that_natural_gradients_save(script):
    found = saved(script, "kin40k")
    reached = [ratio for ratio in found if ratio]
    told = f"{min(reached):.1f} to {max(reached):.1f} times fewer steps to Adam's bound on"
    told += f" kin40k ({len(found) - len(reached)} of {len(found)} runs did not reach it)"
    assert says(LIMITS, told), told
    found = saved(script, ("sign", "banana"))
    reached = [ratio for ratio in found if ratio]
    told = f"{min(reached):.1f} to {max(reached):.1f} times with Bernoulli likelihoods "
    told += f"({len(found) - len(reached)} of {len(found)} did not), where half the runs"
    told += f" had less than {np.median(reached):.1f}"
    assert says(LIMITS, told), told


def seconds_of(part, title, name):
    return np.array(results("peers")[part][title][name]["seconds"])


def test_steps_beside_the_other_libraries():
    kept, ours = results("peers")["steps"], []
    for title, methods in kept.items():
        if title == "cores":
            continue
        others = [
            np.median(seconds_of("steps", title, "ours") / seconds_of("steps", title, name))
            for name in methods
            if name.startswith("GP")
        ]
        ours.append(max(others))
    assert says(LIMITS, f"{min(ours):.2f} to {max(ours):.2f} of the fastest of them")
    first = results("peers")["startup"]["first step, float32, 1024"]
    medians = {name: np.median(found["first_s"]) for name, found in first.items()}
    ours, gpjax, gpflow, naive = (
        f"{medians[name]:.1f} s" for name in ("ours", "GPJax", "GPflow", "naive")
    )
    told = f"took {ours} on two cores, those of GPJax and GPflow {gpjax[:-2]} and {gpflow}"
    assert says(LIMITS, told), told
    assert says(LIMITS, f"SVGP in JAX {naive}")
    ratios = {}
    for dtype in ("float32", "float64"):
        rows = results("peers")["predict"][f"{dtype}, 1024"]
        rows = {name: np.median(found["rows_per_s"]) for name, found in rows.items()}
        ratios[dtype] = f"{rows['ours'] / rows['GPflow']:.1f} times"
    told = f"does {ratios['float32']} as many rows a second"
    assert says(LIMITS, told), told
    assert says(LIMITS, f"{ratios['float64']} in float64")


def test_what_precision_threads_and_orthogonal_points_cost():
    double = [
        np.median(seconds_of("steps", f"float64, {M}", "ours"))
        / np.median(seconds_of("steps", f"float32, {M}", "ours"))
        for M in (256, 512, 1024, 2048)
    ]
    told = f"float64 takes {min(double):.1f} to {max(double):.1f} times the time on a CPU"
    assert says(NUMERICS, told), told
    found = []
    for dtype in ("float32", "float64"):
        one = seconds_of("threads", f"{dtype}, 1024", "ours")
        several = seconds_of("threads", f"{dtype}, 1024", "ours, threads of OpenBLAS")
        found.append(1 / np.median(several / one))
    told = "takes {:.2f} of the time in float32, {:.2f} in float64".format(*found)
    assert says(NUMERICS, told), told
    title = "float32, 1024"
    parts = [seconds_of("orthogonal", title, k) for k in ("SOLVE-GP M + M", "SVGP 2M")]
    told = f"takes {np.median(parts[0] / parts[1]):.2f} of one of `SVGP(2048)`"
    assert says(LIMITS, told), told


def test_the_time_and_arithmetic_of_steps_without_inverses():
    kept, counted, cpu, gpu = results("inverse_free"), [], [], []
    for title, rows in kept.items():
        for key, row in rows.items():
            M, method = key.split(" ", 1)
            if method in ("product", "SVGP"):
                continue
            base = rows[f"{M} SVGP"]
            both = row["products"] + row["solves"], base["products"] + base["solves"]
            counted.append(both[0] / both[1])
            seconds = cpu if title.startswith("cpu") else gpu
            seconds.append(row["step_s"] / base["step_s"])
    told = f"{min(counted):.1f} to {max(counted):.0f} times the arithmetic of SVGP's, and"
    told += f" took {min(cpu):.1f} to {max(cpu):.1f} times as long on a CPU, "
    told += f"{min(gpu):.1f} to {max(gpu):.1f} times on an H100"
    assert says(LIMITS, told), told
    rows = kept["cpu, float32, batches of 1024"]
    before = rows["1024 SVGP"]["step_s"]
    now = np.median(seconds_of("steps", "float32, 1024", "ours"))
    assert says(LIMITS, f"became {before / now:.1f} times as fast")
    told = (
        f"{1e3 * now:.0f} ms on two cores of a CPU at M = 1024 in float32 where the table"
    )
    assert says(f"{RECORDS}/inverse_free.md", f"{told} below has {1e3 * before:.0f}")
    # The first bound is that of the second ten steps.
    goal = rows["512 SVGP"]["bounds"][29]
    for name in ("relaxed", "relaxed, stochastic KL"):
        first = np.argmax(np.array(rows[f"512 {name}"]["bounds"]) >= goal)
        told = f"after {10 * (first + 2)} what SVGP had after {10 * (29 + 2)}"
        assert says(LIMITS, f"with M = 512 it had {told}"), told


def test_what_the_tuning_of_products_on_a_gpu_costs():
    kept = results("inverse_free")
    tuned = "NVIDIA H100 80GB HBM3, float32, batches of 1024"
    sets = {"with": kept[tuned], "without": kept[f"{tuned}, XLA without autotuning"]}
    first = {
        name: [row["first_s"] for key, row in rows.items() if key.endswith(" SVGP")]
        for name, rows in sets.items()
    }
    told = f"took {min(first['with']):.0f} to {max(first['with']):.0f} s on an H100, and "
    told += f"{min(first['without']):.1f} to {max(first['without']):.1f} s with"
    assert says(LIMITS, told), told
    slower = sets["without"]["1024 product"] / sets["with"]["1024 product"]
    assert says(LIMITS, f"{slower:.1f} times slower"), slower


def test_the_times_of_a_billion_rows():
    rows = results("inverse_free")["NVIDIA H100 80GB HBM3, float32, batches of 1024"]
    step_s = [rows[f"{M} SVGP"]["step_s"] for M in (1024, 4096)]
    told = "of {:.1f} ms and {:.1f} ms ([inverse_free.md]".format(*np.array(step_s) * 1e3)
    assert says(f"{RECORDS}/devices.md", told), told
    for devices in (1, 8, 64):
        cells = [
            f"{devices}",
            f"{1024 * devices:,}",
            f"{-(-(10**9) // (1024 * devices)):,}",
        ]
        for seconds in step_s:
            rate = 1024 * devices / seconds / 1e6
            epoch = 1e9 / 1e6 / rate
            unit, name = next(
                (unit, name)
                for unit, name in ((3600, "h"), (60, "min"), (1, "s"))
                if epoch >= unit
            )
            digits = 1 if epoch / unit < 10 else 0
            cells.append(f"{rate:.2g} million, {epoch / unit:.{digits}f} {name}")
        assert f"| {' | '.join(cells)} |" in text(f"{RECORDS}/devices.md"), cells
    slow = next(
        row["step_s"]
        for row in results("regression")
        if (row["set"], row["method"], row["inducing"]) == ("kin40k", "SVGP", 1024)
        and row["tight"] == "none"
    )
    assert says(f"{RECORDS}/devices.md", f"took {1e3 * slow:.1f} ms a step")
    assert says(f"{RECORDS}/devices.md", f"is {slow / step_s[0]:.1f} times as long")


def fits(study, **settings):
    """Log likelihoods of the rows with these settings, by split or seed."""
    found = {}
    for row in results(study):
        if all(row[k] == v for k, v in settings.items()):
            found[row.get("split", row.get("seed"))] = row["LL" if "LL" in row else "ll"]
    return found


def test_what_docs_say_of_the_regression_benchmark(script):
    benchmark = script("regression")
    plain = {"tight": "none", "natural": 0.0}
    best = {"tight": "diagonal", "natural": 0.1}

    def ll(name, method, M, **options):
        return fits("regression", set=name, method=method, inducing=M, **plain | options)

    def mean(name, method, M):
        return np.mean(list(ll(name, method, M).values()))

    at_1024 = [mean("kin40k", method, 1024) for method in ("SOLVE", "SVGP2")]
    paper = [benchmark.PUBLISHED["kin40k"][method][0] for method in ("SOLVE", "SVGP2")]
    told = "LL {:.3f} and {:.3f}, where the paper has {:.3f} and {:.3f}".format(
        *at_1024, *paper
    )
    assert says(f"{RECORDS}/regression.md", told), told
    differences = {256: [], 1024: []}
    for name in benchmark.SETS:
        for M, found in differences.items():
            solve, twice = ll(name, "SOLVE", M), ll(name, "SVGP2", M)
            found += [abs(solve[split] - twice[split]) for split in solve]
            odvgp, one = ll(name, "ODVGP", M)[0], ll(name, "SVGP", M)[0]
            assert one < odvgp < twice[0]
            for method in ("SVGP", "SOLVE"):
                for split, tighter in ll(name, method, M, **best).items():
                    gain = tighter - ll(name, method, M)[split]
                    behind = (name, method, M) == ("keggundirected", "SOLVE", 256)
                    assert round(gain, 3) == -0.002 if behind else gain > 0
    told = "differ by at most {:.3f} on each split of each set with M = 256"
    told = (told + ", by at most {:.3f}").format(*map(max, differences.values()))
    assert says(f"{RECORDS}/regression.md", told), told
    both = "keggdirected", "keggundirected"
    kegg = [mean(name, "ODVGP", 1024) for name in both]
    told = "LL {:.3f} and {:.3f} with M = 1024".format(*kegg)
    assert says(f"{RECORDS}/regression.md", told), told
    told = "SVGP is at {:.3f} and {:.3f} with M = 256, at {:.3f} and {:.3f}".format(
        *(ll(name, "SVGP", M)[0] for M in (256, 1024) for name in both)
    )
    assert says(f"{RECORDS}/regression.md", told), told
    apart = [
        abs(ll(name, method, 1024)[0] - ll(name, "SVGP", 1024)[0])
        for name in both
        for method in ("SVGP2", "ODVGP", "SOLVE")
    ]
    told = f"no method with M = 1024 is more than {max(apart):.3f}"
    assert says(f"{RECORDS}/regression.md", told), told
    devices = [row.get("device") for row in results("regression")]
    known, cpu = devices.count("NVIDIA H100 80GB HBM3"), devices.count("cpu")
    assert known + cpu + devices.count(None) == len(devices)
    told = f"{known} of the {len(devices)} fits ran on an NVIDIA H100, {cpu} on a CPU."
    told += f" The file does not have the device of the other {devices.count(None)}"
    assert says(f"{RECORDS}/regression.md", told), told
    at_1024 = [ll("protein", method, 1024)[0] for method in ("SVGP", "SOLVE", "SVGP2")]
    told = "SVGP is at {:.3f}, SOLVE-GP at {:.3f} and SVGP 2M at {:.3f}".format(*at_1024)
    assert says(f"{RECORDS}/regression.md", told), told


def test_what_docs_say_of_deep_gps():
    for name in ("kin40k", "protein"):
        both = [
            [fits("deep", set=name, layers=n, method=method)[0] for n in (1, 2, 3)]
            for method in ("SVGP", "SOLVE")
        ]
        assert (np.diff(both) > 0).all() and (np.diff(both, axis=0) > 0).all()
    images = [
        row for row in results("images") if (row["set"], row["layers"]) == ("cifar", 1)
    ]
    by = {
        method: [r for r in images if r["method"] == method and r["steps"] == 2000]
        for method in ("conv", "solve", "conv2")
    }
    for i in range(3):
        one, solve = (
            next(r for r in by[method] if r["seed"] == i) for method in ("conv", "solve")
        )
        assert solve["error"] < one["error"] and solve["ll"] > one["ll"]
    deep = [r for r in results("images") if (r["set"], r["layers"]) == ("cifar", 2)]
    deep = [next(r for r in deep if (r["steps"], r["seed"]) == (5000, i)) for i in (0, 1)]
    flat = [next(r for r in images if (r["steps"], r["seed"]) == (5000, i)) for i in (0, 1)]
    points = [100 * (a["error"] - b["error"]) for a, b in zip(flat, deep, strict=True)]
    nats = [b["ll"] - a["ll"] for a, b in zip(flat, deep, strict=True)]
    told = f"in errors ({min(points):.1f} and {max(points):.1f} points) and in LL "
    told += f"({min(nats):.3f} and {max(nats):.3f})"
    assert says(f"{RECORDS}/deep.md", told), told
    times = [np.mean([r["seconds_per_step"] for r in by[k]]) for k in ("solve", "conv2")]
    assert says(
        f"{RECORDS}/deep.md", f"with 2M at {times[0] / times[1]:.1f} of the time of a step"
    )


# ---- counts -----------------------------------------------------------------------------


def model(X, y, num_rows):
    kernel = sgp.kernels.Matern32(
        numpyro.param("variance", jnp.ones(())), numpyro.param("lengthscale", jnp.ones(2))
    )
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", num_rows, subsample_size=len(X)):
        numpyro.sample("y", dist.Normal(f, numpyro.param("noise", jnp.ones(()))), obs=y)


def operations(jaxpr, M):
    """Multiply-adds over M^3 of products and solves of matrices with M rows and more."""
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        shapes = [v.aval.shape for v in equation.invars]
        if name == "dot_general":
            (left, _), _ = equation.params["dimension_numbers"]
            inner = int(np.prod([shapes[0][i] for i in left]))
            outer = equation.outvars[0].aval.shape
            # The others are with vectors, or have a side of D columns.
            if len(outer) > 1 and min(inner, *outer) >= M:
                total += np.prod(outer) * inner / M**3
        elif name == "cholesky":
            total += shapes[0][-1] ** 3 / (6 * M**3)
        elif name == "triangular_solve":
            total += np.prod(shapes[1]) * shapes[0][-1] / (2 * M**3)
        inner = equation.params
        if name == "custom_linear_solve":  # beside the product that it is the inverse of
            inner = {"solve": inner["jaxprs"].solve}
        # A loop, in which jitter grows, has one turn here.
        total += sum(operations(j, M) for j in jaxprs_in_params(inner))
    return total


COLUMNS = [sgp.SVGP(16), sgp.SVGP(32), sgp.SOLVEGP(16, 16), sgp.ODVGP(16, 16)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("column", range(4), ids=["SVGP M", "SVGP 2M", "SOLVE-GP", "ODVGP"])
def test_operations_of_a_step_are_those_of_docs(column):
    M, rng = 16, np.random.default_rng(0)
    X, y = jnp.asarray(rng.normal(size=(64, 2))), jnp.asarray(rng.normal(size=64))
    guide = sgp.AutoSparseGP(model, COLUMNS[column])
    guide.setup(X, y, 64)
    elbo, batch = sgp.TraceGP_ELBO(), (X[:M], y[:M], 64)
    inits = {
        name: site["value"]
        for part in (guide, model)
        for name, site in trace(seed(part, 0)).get_trace(*batch).items()
        if site["type"] == "param"
    }

    def loss(params):
        return elbo.loss(jax.random.key(0), params, model, guide, *batch)

    page = text(f"{RECORDS}/speed.md")
    dense = page.split("## Operations of a step")[1].split("\n\n| |")[1]
    for row, function in {"*forward*": loss, "**step**": jax.value_and_grad(loss)}.items():
        line = next(line for line in dense.splitlines() if line.startswith(f"| {row} "))
        told = re.findall(r"[\d.]+", line)[column]
        counted = operations(jax.make_jaxpr(function)(inits).jaxpr, M)
        assert f"{counted:.2f}" == told, row


@pytest.mark.slow
def test_todays_bounds_are_those_of_docs(script):
    bounds, kept = script("bounds"), results("bounds")
    found = bounds.toy()
    assert found.keys() == kept["toy"].keys()
    for name, value in found.items():
        assert abs(value - kept["toy"][name]) < 0.05, name  # as the page prints it
    for row, known in zip(bounds.snelson(), kept["snelson"], strict=True):
        assert (row["method"], row["tight"]) == (known["method"], known["tight"])
        assert abs(row["bound"] - known["bound"]) < 0.005, row
        assert abs(row["noise_variance"] - known["noise_variance"]) < 5e-5, row


# ---- files ------------------------------------------------------------------------------


def test_a_row_of_results_is_known_by_its_settings(script, tmp_path):
    study = script("_results").Results(tmp_path / "new" / "study.json", ("M", "split"))
    assert study.rows() == [] and not study.has(M=1, split=0)
    for split in (0, 1):
        study.add({"M": 1, "split": split, "LL": 0.5})
    study.add({"M": 1, "split": 0, "LL": 0.25, "device": "cpu"})
    assert study.has(M=1, split=1) and not study.has(M=2, split=1)
    rows = sorted(study.rows(), key=lambda row: row["split"])
    assert [row["LL"] for row in rows] == [0.25, 0.5]
    assert len((tmp_path / "new" / "study.json").read_text().splitlines()) == 4
    with pytest.raises(ValueError, match="Settings.*'N'.*need.*'split'"):
        study.has(N=1)
