"""
Fig. 12 of SAVIGP (Bonilla, Krauth and Dezfouli 2018): depths and velocities of four layers
of rock from travel times at 113 sites, by each approximation beside NUTS and HMC.

    python benchmarks/travel_times.py --data FOLDER    # goes on where it was stopped
    python benchmarks/travel_times.py --table

The model, its forward model and the methods are those of `examples/seismic.py`. Kept are
posterior sds of the depths and velocities of each layer, means over the sites: with the
lengthscale of 1 m of the published experiment, at which sites are independent and the sds
are known by importance sampling (*exact*), and with 2000 m. In double precision.
"""

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import numpyro
from _results import FOLDER, Results
from numpyro.infer import HMC, NUTS

import numpyro_sgp as sgp

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import seismic  # noqa: E402
from coal_mining import mixing  # noqa: E402

LENGTHSCALES = seismic.PAPER_LENGTHSCALE, 2000.0
EXACT = "exact"
COVARIANCES = {seismic.FULL: "full", seismic.COUPLED: "coupled"}
CHAINS = {
    "NUTS": NUTS,
    "HMC": lambda model: HMC(model, trajectory_length=2.0),
}
#: What each is compared with.
REFERENCE = {seismic.PAPER_LENGTHSCALE: EXACT, 2000.0: "NUTS"}
PUBLISHED = {
    (seismic.FULL, seismic.PAPER_LENGTHSCALE): seismic.PUBLISHED["published SAVIGP"]
}
RESULTS = FOLDER / "travel_times.json"
SETTINGS = SimpleNamespace(
    num_warmup=500,
    num_samples=2000,
    num_chains=2,
    num_nodes=1024,
    num_draws=2000,
    max_iterations=500,
    seed=0,
    quiet=True,
)


def found(method, lengthscale, survey):
    """Sds of a method, means over the sites, and what else is told of it."""
    if method == EXACT:
        return seismic.exact_sds(survey), {}
    if method in COVARIANCES:
        covariance = COVARIANCES[method]
        fit, (_, sd) = seismic.run_svi(covariance, survey, lengthscale, SETTINGS)
        told = {"bound": float(fit.attrs["elbo"])}
    else:
        chain = survey, lengthscale, SETTINGS, CHAINS[method]
        fit, (_, sd) = seismic.run_nuts(*chain)
        r_hat, worst, _ = mixing(fit, "g")
        told = {"r-hat": float(r_hat), "ess": float(worst)}
    return np.mean(sd, axis=-1), told


def main(args):
    results = Results(args.results, ["method", "lengthscale"])
    if args.table:
        print(table(results.rows()))
        return
    if args.data is None:
        raise SystemExit("--data FOLDER is needed; --table prints what is there.")
    numpyro.enable_x64()
    survey = sgp.datasets.seismic(args.data)
    for lengthscale in LENGTHSCALES:
        for method in (EXACT, *COVARIANCES, *CHAINS):
            done = results.has(method=method, lengthscale=lengthscale)
            if done or (method == EXACT and lengthscale > seismic.PAPER_LENGTHSCALE):
                continue
            begin = time.monotonic()
            sds, told = found(method, lengthscale, survey)
            row = {"method": method, "lengthscale": lengthscale}
            row |= {"sds": np.round(sds, 2).tolist(), **told}
            row |= {"seconds": round(time.monotonic() - begin, 1)}
            row |= {"device": jax.devices()[0].device_kind, **vars(SETTINGS)}
            results.add(row)
            jax.clear_caches()
            print(table(results.rows()).splitlines()[-1], file=sys.stderr, flush=True)


def farthest(row, rows):
    """The largest distance of a row's sds from the reference's, in per cent of them."""
    reference = REFERENCE[row["lengthscale"]]
    for other in rows:
        if (other["method"], other["lengthscale"]) == (reference, row["lengthscale"]):
            return 100.0 * np.max(np.abs(np.divide(row["sds"], other["sds"]) - 1.0))
    return np.nan


def table(rows):
    """Sds of the layers, with the paper's in a row of their own."""
    layers = range(1, 5)
    heads = [*(f"depth {i}" for i in layers), *(f"velocity {i}" for i in layers)]
    lines = [
        f"| lengthscale, m | method | {' | '.join(heads)} | farthest from reference |",
        "|---" * (3 + len(heads)) + "|",
    ]

    def add(lengthscale, method, sds, end):
        cells = " | ".join(f"{sd:.1f}" for sd in sds)
        lines.append(f"| {lengthscale:g} | {method} | {cells} | {end} |")

    for row in rows:
        method, lengthscale = row["method"], row["lengthscale"]
        far = farthest(row, rows)
        add(lengthscale, method, row["sds"], f"{far:.1f} %" if far else "")
        told = PUBLISHED.get((method, lengthscale))
        if told is not None:
            apart = 100.0 * np.max(np.abs(np.divide(row["sds"], told) - 1.0))
            end = f"{apart:.1f} % from the row above"
            add(lengthscale, f"{method}, published", told, end)
    return "\n".join(lines)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="folder of seismic/seismic.csv.gz")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is there, and end")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
