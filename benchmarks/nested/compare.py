"""
Nested inference beside NUTS: how far posteriors are apart, and how long each took.

`python compare.py NAME... [--guides]` reads what `reference.py` wrote
and prints for each problem (and writes to benchmarks/results/nested.json) the largest
differences over all numbers of a kind: of means in reference sds, sds as a ratio, and 5 %
and 95 % quantiles of hyperparameters in sds; and what each is sure that the evidence is.
`--guides` adds the factorised guide (AutoNormal) and AutoMultivariateNormal beside q(u),
with the bound of one Gaussian over sites and effects beside theirs, all at the same
hyperparameters and inducing points. `--bounds` has the bounds alone, of nested inference
and AutoNormal, which takes no reference.
"""

import argparse
import json
import time
from dataclasses import replace
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
    """
    Seconds, summaries and bounds of nested inference, and medians of hyperparameters, None
    where the field is one GP site alone.
    """
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
    if len(posterior.field.sites) + len(posterior.field.effects) == 1:
        medians = None  # with one part there is nothing to be apart
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
    if values is not None:
        bounds |= at_values(problem, data, base, values)
    return seconds, out, bounds


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
            w = worst(sites.values())
            print(
                f"    {kind:<16} mean {w['mean']:.3f} sd, sds {w['sd_low']:.3f} to "
                f"{w['sd_high']:.3f}, quantiles {w['quantiles']:.3f} sd"
            )


METHODS = {
    "nested": "`sgp.nested`",
    "AutoNormal": "`fit`, AutoNormal",
    "AutoMultivariateNormal": "`fit`, AutoMultivariateNormal",
}


def worst(sites):
    """The largest differences over several sites, as :func:`apart` has them of one."""
    return {k: f(site[k] for site in sites) for k, f in WORST.items()}


WORST = {"mean": max, "sd_low": min, "sd_high": max, "quantiles": max}


def table(results):
    """The table of docs/records/nested.md: the worst over all numbers of a problem."""
    lines = [
        "| problem | rows | method | s | hyperparameters: mean, sds, quantiles | "
        "effects, functions: mean, sds | log evidence at least; joint gains |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, methods in results.items():
        reference = methods["NUTS"]
        label = "NUTS"
        if "min_ess" in reference:
            label += f", ESS {reference['min_ess']:,.0f}"
        cells = name, f"{reference['rows']:,}", label, f"{seconds_of(reference):.0f}"
        lines.append(f"| {' | '.join(cells)} | | | |")
        for method in (m for m in METHODS if m in methods):
            cells = METHODS[method], *cells_of(methods[method])
            lines.append(f"| | | {' | '.join(cells)} |")
    return "\n".join(lines)


def cells_of(found):
    """What a method took, how far it is from the reference, and its bounds."""
    cells = [""] * 3
    if "seconds" in found:
        thetas = worst(found["hyperparameters"].values())
        others = worst([*found["effects"].values(), *found["functions"].values()])
        shown = "{mean:.2f}, {sd_low:.2f} to {sd_high:.2f}"
        cells = [f"{seconds_of(found):.1f}", *(shown.format(**w) for w in (thetas, others))]
        cells[1] += f", {thetas['quantiles']:.2f}"
    bounds, told = found.get("bounds", {}), ""
    if "evidence" in bounds:
        told = f"{bounds['evidence']:.1f}"
    if "joint" in bounds:
        told += f"; {bounds['joint'] - bounds['apart']:.2f}"
    return [*cells, told]


def seconds_of(found):
    """Of the processor; of the wall's clock where that was not kept."""
    return found.get("cpu_seconds", found["seconds"])


def times_faster(results):
    """Seconds of NUTS over those of nested inference, by problem."""
    return {
        name: seconds_of(methods["NUTS"]) / seconds_of(methods["nested"])
        for name, methods in results.items()
    }


def beyond(results, method="nested"):
    """Problems with a number that is farther away than LIMITS, and what is."""
    found = {}
    for name, methods in results.items():
        kinds = {k: methods[method][k] for k in ("hyperparameters", "effects", "functions")}
        for kind, sites in kinds.items():
            for site, there in sites.items():
                told = [
                    key
                    for key, (low, high) in LIMITS.items()
                    if not low <= there[key] <= high
                    if key != "quantiles" or kind == "hyperparameters"
                ]
                if told:
                    found.setdefault(name, {})[site] = {key: there[key] for key in told}
    return found


LIMITS = {
    "mean": (0.0, 0.1),
    "sd_low": (0.93, 1.07),
    "sd_high": (0.93, 1.07),
    "quantiles": (0.0, 0.15),
}


def keep(methods, method, found, asked, reference):
    """Compares what was found, prints it and adds it to the results of a problem."""
    seconds, summaries, bounds = found
    _, _, thetas, positive = asked
    table = compare(summaries, reference, thetas, positive)
    cost = dict(zip(COSTS, seconds.tolist(), strict=False))
    print(f"  {method}: {cost}, {bounds}")
    shown(table)
    methods[method] = cost | {"bounds": bounds, **table}


def beside(problem, reference, guides):
    """All methods on a problem, compared with its reference."""
    data = problem.data()
    thetas = [
        k
        for k in reference
        if reference[k].ndim and not k.endswith(("_mean", "_sd", "_quantiles"))
        if k not in ("intercept", "slope", "b", "weekday")
    ]
    positive = [k for k in thetas if np.all(reference[k] > 0)]
    asked = problem, data, thetas, positive
    cost = {k: float(reference[k]) for k in COSTS}
    print(f"{problem.name}: NUTS {cost}")
    methods = {"NUTS": cost | {"rows": max(len(v) for v in data)}}
    *found, medians = nested(*asked)
    keep(methods, "nested", found, asked, reference)
    for base in (AutoNormal, AutoMultivariateNormal) if guides else ():
        found = guide(*asked, base, medians)
        keep(methods, base.__name__, found, asked, reference)
    return methods


def bounds_alone(problem, methods):
    """Adds bounds to what is known of a problem."""
    asked = problem, problem.data(), [], []
    *_, bounds, medians = nested(*asked)
    methods["nested"]["bounds"] = bounds
    *_, bounds = guide(*asked, AutoNormal, medians)
    methods.setdefault("AutoNormal", {})["bounds"] = bounds
    print(problem.name, methods["nested"]["bounds"], bounds, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--reference", default=Path(__file__).parent / "reference")
    parser.add_argument("--out", default=RESULTS)
    parser.add_argument("--guides", action="store_true")
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--num-inducing", type=int, help="another number of points")
    parser.add_argument("--table", action="store_true", help="print that of the page alone")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    every = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.table:
        print(table(every), times_faster(every), beyond(every), sep="\n\n")
        return
    for name in options.names:
        problem = PROBLEMS[name]
        path = Path(options.reference) / f"{name}.npz"
        if options.num_inducing:
            problem = replace(problem, num_inducing=options.num_inducing)
            name += f", M = {options.num_inducing}"
        if options.bounds:
            bounds_alone(problem, every[name])
        else:
            every[name] = beside(problem, dict(np.load(path)), options.guides)
        Path(options.out).write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
