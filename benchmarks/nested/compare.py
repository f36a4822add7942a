"""
Nested inference beside NUTS: how far posteriors are apart, and how long each took.

`python compare.py NAME... [--reference FOLDER] [--guides]` reads what `reference.py` wrote
and prints for each problem (and writes to benchmarks/results/nested.json) the largest
differences over all numbers of a kind: of means in reference sds, sds as a ratio, and 5 %
and 95 % quantiles of hyperparameters in sds; and what each is sure that the evidence is.
`--guides` adds the factorised guide (AutoNormal) and AutoMultivariateNormal beside q(u),
with the bound of one Gaussian over sites and effects beside theirs, all at the same
hyperparameters and inducing points.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from problems import PROBLEMS

import numpyro_sgp as sgp

LEVELS = 0.05, 0.95
RESULTS = Path(__file__).resolve().parents[1] / "results" / "nested.json"
COSTS = "seconds", "cpu_seconds", "min_ess", "max_rhat"
FIELDS = "f", "eta", "trend", "season"


def of_draws(draws):
    """Mean, sd and quantiles over the first axis."""
    return draws.mean(0), draws.std(0), np.quantile(draws, LEVELS, axis=0)


def logs(name, draws, positive):
    """Hyperparameters that are positive by their logarithms."""
    return np.log(draws) if name in positive else draws


def apart(found, reference):
    """Largest differences of means and quantiles in sds, and the range of sd ratios."""
    mean, sd, quantiles = (np.atleast_1d(v) for v in found)
    mean0, sd0, quantiles0 = (np.atleast_1d(v) for v in reference)
    ratio = sd / sd0
    return {
        "mean": float(np.max(np.abs(mean - mean0) / sd0)),
        "sd_low": float(ratio.min()),
        "sd_high": float(ratio.max()),
        "quantiles": float(np.max(np.abs(quantiles - quantiles0) / sd0)),
    }


def compare(summaries, reference, thetas, positive):
    """
    :param summaries: by site mean, sd and quantiles, of logarithms where positive.
    :param reference: what is in the file of `reference.py`.
    """
    table = {"hyperparameters": {}, "effects": {}, "functions": {}}
    for name, found in summaries.items():
        if name in reference:
            kind = "hyperparameters" if name in thetas else "effects"
            other = of_draws(logs(name, reference[name], positive))
        elif name in FIELDS and f"{name}_mean" in reference:
            kind, quantiles = "functions", reference[f"{name}_quantiles"][[0, -1]]
            other = reference[f"{name}_mean"], reference[f"{name}_sd"], quantiles
        else:
            continue
        table[kind][name] = apart(found, other)
    return table


def clocks():
    """Seconds of the wall's clock and of the processor."""
    return np.array([time.monotonic(), time.process_time()])


def nested(problem, data, thetas, positive):
    """Seconds, summaries and bounds of nested inference, and medians of hyperparameters."""
    started = clocks()
    option = sgp.SVGP(problem.num_inducing)
    posterior = sgp.nested(problem.model, option, data, progress_bar=False)
    found = posterior.posterior(*data)
    seconds = clocks() - started
    draws = posterior.hyperparameters
    out = {k: of_draws(logs(k, draws[k], positive)) for k in thetas}
    out |= {k: (q.mean, q.sd, q.quantile(LEVELS)) for k, q in found.items()}
    print(posterior)
    medians = {name: np.median(x, axis=0) for name, x in draws.items()}
    return seconds, out, {"evidence": posterior.log_evidence}, medians


def guide(problem, data, thetas, positive, base, values):
    """Seconds, summaries and bounds of a trained guide."""
    started = clocks()
    option = sgp.SVGP(problem.num_inducing)
    fitted = sgp.fit(problem.model, option, data, base_guide=base, progress_bar=False)
    draws = fitted.sample(jax.random.key(1), sample_shape=(2000,))
    seconds = clocks() - started
    draws = {k: np.asarray(v) for k, v in draws.items()}
    out = {k: of_draws(logs(k, v, positive)) for k, v in draws.items()}
    bounds = {"evidence": fitted.bound, "evidence_se": fitted.bound_se}
    return seconds, out, bounds | at_values(problem, data, base, values)


def at_values(problem, data, base, values):
    """Bounds of the guide and of one Gaussian, at hyperparameters and the same points."""

    def model(*data):
        hidden = handlers.block(hide=list(values))
        with hidden, handlers.substitute(data=values):
            return problem.model(*data)

    option = sgp.SVGP(problem.num_inducing)
    apart = sgp.fit(model, option, data, base_guide=base, progress_bar=False)
    end = "_auto_Z"
    points = {
        name.removesuffix(end): sgp.SVGP(inducing=np.asarray(Z))
        for name, Z in apart.params.items()
        if name.endswith(end)
    }
    (node,) = sgp.nested(model, points, data, progress_bar=False).nodes.nodes
    joint = node.value - float(node.weighed.gain)
    return {"apart": apart.bound, "apart_se": apart.bound_se, "joint": joint}


def shown(table):
    """One line a kind."""
    for kind, sites in table.items():
        if sites:
            worst = {
                "mean": max(s["mean"] for s in sites.values()),
                "sd_low": min(s["sd_low"] for s in sites.values()),
                "sd_high": max(s["sd_high"] for s in sites.values()),
                "quantiles": max(s["quantiles"] for s in sites.values()),
            }
            print(
                f"    {kind:<16} mean {worst['mean']:.3f} sd, sds {worst['sd_low']:.3f} to "
                f"{worst['sd_high']:.3f}, quantiles {worst['quantiles']:.3f} sd"
            )


METHODS = {
    "nested": "`sgp.nested`",
    "AutoNormal": "`fit`, AutoNormal",
    "AutoMultivariateNormal": "`fit`, AutoMultivariateNormal",
}


def table(results):
    """The table of docs/records/nested.md: the worst over all numbers of a problem."""
    lines = [
        "| problem | rows | method | CPU s | hyperparameters: mean, sds, quantiles | "
        "effects, functions: mean, sds | log evidence at least; joint gains |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, methods in results.items():
        reference = methods["NUTS"]
        rows = f"{reference['rows']:,}"
        lines.append(f"| {name} | {rows} | NUTS | {reference['cpu_seconds']:.0f} | | | |")
        for method, label in METHODS.items():
            if method not in methods:
                continue
            found = methods[method]
            thetas = list(found["hyperparameters"].values())
            others = [*found["effects"].values(), *found["functions"].values()]
            cells = []
            for sites, last in ((thetas, True), (others, False)):
                mean = max(s["mean"] for s in sites)
                low, high = (f([s[k] for s in sites]) for f, k in _ENDS)
                text = f"{mean:.2f}, {low:.2f} to {high:.2f}"
                if last:
                    text += f", {max(s['quantiles'] for s in sites):.2f}"
                cells.append(text)
            cells.append(f"{found['bounds']['evidence']:.1f}")
            if "joint" in found["bounds"]:
                cells[-1] += f"; {found['bounds']['joint'] - found['bounds']['apart']:.2f}"
            cells = [label, f"{found['cpu_seconds']:.1f}", *cells]
            lines.append(f"| | | {' | '.join(cells)} |")
    return "\n".join(lines)


_ENDS = (min, "sd_low"), (max, "sd_high")


def keep(methods, method, found, asked, reference):
    """Compares what was found, prints it and adds it to the results of a problem."""
    seconds, summaries, bounds = found
    _, _, thetas, positive = asked
    table = compare(summaries, reference, thetas, positive)
    cost = dict(zip(COSTS, seconds.tolist(), strict=False))
    print(f"  {method}: {cost}, {bounds}")
    shown(table)
    methods[method] = cost | {"bounds": bounds, **table}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--reference", default=Path(__file__).parent / "reference")
    parser.add_argument("--out", default=RESULTS)
    parser.add_argument("--guides", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    every = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.names:
        problem, path = PROBLEMS[name], Path(options.reference) / f"{name}.npz"
        reference = dict(np.load(path))
        data = problem.data()
        thetas = [
            k
            for k in reference
            if reference[k].ndim and len(reference[k]) > 1000
            if k not in ("intercept", "slope", "b", "weekday")
        ]
        positive = [k for k in thetas if np.all(reference[k] > 0)]
        asked = problem, data, thetas, positive
        cost = {k: float(reference[k]) for k in COSTS}
        print(f"{name}: NUTS {cost}")
        every[name] = {"NUTS": cost | {"rows": max(len(v) for v in data)}}
        *found, medians = nested(*asked)
        keep(every[name], "nested", found, asked, reference)
        for base in (AutoNormal, AutoMultivariateNormal) if options.guides else ():
            found = guide(*asked, base, medians)
            keep(every[name], base.__name__, found, asked, reference)
        Path(options.out).write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
