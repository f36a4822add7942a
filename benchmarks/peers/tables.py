# ruff: noqa: E501 (tables of docs/records/speed.md)
"""Writes docs/records/speed.md and its figures from the results of the parts."""

import json

import numpy as np

HEAD = """\
# Speed, beside other libraries

Made by `python benchmarks/peers/run.py --table` from what that script measured: this
package, {versions}, each in an environment of its
own, and a whitened SVGP as a textbook has it, written in plain JAX (*naive*).

**How.** A worker process for each library builds its model and compiles. It then computes
only when it is told to. All are told in turn, in several rounds (of step times and of
epochs the other way round in every second one); tables have medians over the rounds, and in
brackets the smallest and the largest. The unit *product* is one M x M x M matrix product of
that precision in JAX, timed in the same rounds. Every model is a whitened SVGP with a Matérn 3/2 kernel with one
lengthscale a column, zero mean, a full Gaussian over the inducing variables, and Adam on all
parameters, inducing points and noise too. Batches are rows gathered from arrays in memory
by the same indices: what the libraries' data loaders add is left out. Each is used as
its documentation advises: GPflow in a `tf.function`, GPyTorch as PyTorch runs it, with its
default of factors in double precision, GPJax by the step of its `fit` in a loop that is
compiled once (its `fit` compiles at every call). In float32, where its default is too small
for these data, jitter is 1e-4 in GPJax and 1e-5 in GPflow. The plain JAX and GPJax run with
`OPENBLAS_NUM_THREADS=1`, which ours sees to by itself, see [Threads](#threads)."""

VERSIONS = "GPflow 2.11.2, GPyTorch 1.15.2, GPJax 1.0.0"

OPERATIONS = """\

## Operations of a step

Arithmetic of one gradient step on a batch of B rows with n inducing points in all, m of
them in each set, in units of one product, 2 M^3 operations, at B = M: counted from the code,
and by `tests/test_docs.py` in the program that JAX traces. As Table 4 of Shi, Titsias &
Mnih (2020), but with the reverse pass, and with what depends on q(u), which that table
leaves out.

| | operations | SVGP M | SVGP 2M | SOLVE-GP M + M | ODVGP M + M |
|---|---|---|---|---|---|
| Cholesky factor L of K_uu | n^3 / 3 | 1/6 | 4/3 | 4/3 | 4/3 |
| A = L^-1 K_uf | n^2 B | 1/2 | 2 | 2 | 2 |
| F = S^T A, for each set with an S | 2 m^2 B | 1 | 4 | 2 | 1 |
| *forward* | | **1.67** | **7.33** | **5.33** | **4.33** |
| dA from F: S dF | 2 m^2 B | 1 | 4 | 2 | 1 |
| dS = A dF^T | 2 m^2 B | 1 | 4 | 2 | 1 |
| dK_uf = L^-T dA | n^2 B | 1/2 | 2 | 2 | 2 |
| dPhi = -dA A^T | 2 n^2 B | 1 | 4 | 4 | 4 |
| dK_uu = L^-T Phi(dPhi) L^-1 | 2 n^3 | 1 | 8 | 8 | 8 |
| *reverse* | | **4.50** | **22.00** | **18.00** | **16.00** |
| **step** | | **6.17** | **29.33** | **23.33** | **20.33** |
| kernel matrices and their reverse, D columns | 6 n (n + B) D | 6 D/M | 18 D/M | 18 D/M | 18 D/M |

What is left is elementwise: about (n^2 + n B) square roots and exponentials forward, means,
variances and the KL divergence, O(n B + n^2), and Adam.

The derivative of A is L^-1 dK_uf - Phi(L^-1 dK_uu L^-T) A (`whitened_solve`), so the reverse
pass does not go through L. By way of it, as automatic differentiation would, dL = -dK_uf A^T
takes the place of dPhi, and L^T dL is one product more (8 for 2M points).

On a CPU the triangles of S and Phi are used too (`numpyro_sgp/linalg/triangular.py`):
from 385 rows on and, in products, for more than 384 columns,
products with them and L^-T Phi L^-1 are taken by up to four blocks a side, and blocks that
are zero are left out. If they left out all that is zero, the rows above would be

| | operations | SVGP M | SVGP 2M | SOLVE-GP M + M | ODVGP M + M |
|---|---|---|---|---|---|
| F, dA from F, and dS, each | m^2 B | 1/2 | 2 | 1 | 1/2 |
| dPhi | n^2 B | 1/2 | 2 | 2 | 2 |
| dK_uu | n^3 | 1/2 | 4 | 4 | 4 |
| *forward* | | **1.17** | **5.33** | **4.33** | **3.83** |
| *reverse* | | **2.50** | **12.00** | **10.00** | **9.00** |
| **step** | | **3.67** | **17.33** | **14.33** | **12.83** |

The factor of two sets is that of their union, whose arithmetic is that of Algorithm 1:
SOLVE-GP saves on what is done with S alone, 6 of 29.33 products, or 3 of 17.33. So
what a step of SOLVE-GP M + M costs of one of SVGP 2M where all run at the same speed is
23.33 / 29.33 = 0.80 with dense products and 14.33 / 17.33 = 0.83 with triangular ones;
forward 0.73 and 0.81. Both steps are faster for it, SVGP's by more.

What is measured above is more than this arithmetic: LAPACK's solves run slower than
products, matrices change between LAPACK's order by columns and XLA's by rows, and n^2 + n B
kernel entries, their derivatives and Adam are elementwise. That part SOLVE-GP M + M and SVGP
2M have in common, so the measured ratio is nearer to one than the counted."""


def median(values, digits=1):
    """Median, smallest and largest as text."""
    found = np.median(values), min(values), max(values)
    return "{:.{d}f} ({:.{d}f}, {:.{d}f})".format(*found, d=digits)


def rows_of(kept, what):
    """Titles and results of a part."""
    for title, results in kept.items():
        if title != "cores" and title.startswith(what):
            yield title, results


def step_table(kept, first, reference):
    """Milliseconds, products and ratio to the reference, for each size and precision."""
    lines = [
        f"| precision, M | {first} | ms a step | products | {reference} |",
        "|---|---|---|---|---|",
    ]
    for title, results in rows_of(kept, "float"):
        unit = results["product"].get("seconds")
        base = None
        for name in ("ours", "SVGP 2M"):
            base = results.get(name, {}).get("seconds", base)
        for name, result in results.items():
            if name == "product":
                ms = median(1e3 * np.array(unit), 2)
                lines.append(f"| {title} | *product* | {ms} | 1 | |")
            elif "error" in result:
                lines.append(f"| {title} | {name} | {result['error'][:60]} | | |")
            else:
                seconds = np.array(result["seconds"])
                # Each round's own unit, and its own neighbour.
                units, ratio = seconds / np.array(unit), seconds / np.array(base)
                lines.append(
                    f"| {title} | {name} | {median(1e3 * seconds)} | {median(units)} "
                    f"| {np.median(ratio):.2f} |"
                )
    return lines


def steps(kept):
    """Part steps."""
    return [
        "\n## Gradient steps\n",
        "Loss, gradients and the Adam update of SVGP with M inducing points on batches of M",
        "rows with nine columns. GPyTorch has a rule of its own for derivatives on batches",
        "larger than M, so it is measured with one row more as well.\n",
        *step_table(kept, "library", "times ours"),
        "\n![products a step](../figures/speed_steps.png)",
    ]


def threads(kept):
    """Part threads."""
    return [
        "\n## Threads\n",
        "On a CPU, JAX factorises and solves by OpenBLAS. After each call the threads of",
        "OpenBLAS wait in a loop for the next one, some hundredths of a second, on cores that",
        "the threads of XLA need for everything else. With few cores it is faster without",
        "them: with up to four, a guide that is set up, `whiten` and `sparsify` give SciPy's",
        "OpenBLAS, the one that JAX calls, one thread (by threadpoolctl), unless",
        "`OPENBLAS_NUM_THREADS` is set in the environment. With many, where factorisations",
        "gain from threads, `OPENBLAS_THREAD_TIMEOUT=4`, which keeps them and shortens the",
        "wait, may be better than either: try it.\n",
        *step_table(kept, "", "times one thread"),
    ]


def orthogonal(kept):
    """Part orthogonal."""
    return [
        "\n## SOLVE-GP and ODVGP\n",
        "The same, M + M inducing points beside M and 2M. The rows without a library's name",
        "are this package's.\n",
        *step_table(kept, "method", "of SVGP 2M"),
    ]


def reached(result, goal):
    """Seconds with compilation, and training alone, to a goal; None if not reached."""
    below = np.asarray(result["nlpd"], float) <= goal
    if not below.any():
        return None
    epochs = 1 + int(np.argmax(below))
    seconds = result["seconds"][:epochs]
    usual = np.median(result["seconds"][1:]) if len(result["seconds"]) > 1 else seconds[0]
    return result["build_s"] + sum(seconds), usual * epochs


def time_to_nlpd(kept):
    """Part time_to_nlpd."""
    options = [
        r.get("options", {}) for _, found in rows_of(kept, "") for r in found.values()
    ]
    natural, our_rate = next((o["natural"], o["rate"]) for o in options if "natural" in o)
    lines = [
        "\n## Time to a test NLPD\n",
        "Seconds from the start of building the model, compilation included and evaluation",
        "and imports left out, to the test NLPD that the best of the libraries has after its",
        "last epoch of Adam, in float32, all from the same inducing points (k-means) and",
        "hyperparameters. Adam's rate is 0.01 unless told otherwise; the fastest library has a",
        f"second run at {our_rate:g}. Our runs without *Adam* in their name have natural",
        f"gradients for q(u) at the rate {natural:g}, Adam at {our_rate:g} beside them, both",
        "falling to a tenth over a run whose length was chosen beforehand (the column",
        '*epochs*), and for regression `tight="diagonal"`. These rates were tried on the same',
        "sets in short runs, those of the libraries were not. Where a run does not reach the",
        "goal, the last NLPD tells how far it came. *Without compilation*: the epochs to there",
        "at the median epoch's time.",
    ]
    for title, results in rows_of(kept, ""):
        peers = {
            name: result
            for name, result in results.items()
            if not name.startswith(("ours", "naive")) and "error" not in result
        }
        if not peers:
            continue
        best = min(peers, key=lambda name: peers[name]["nlpd"][-1])
        goal = peers[best]["nlpd"][-1]
        times = {
            name: reached(result, goal)
            for name, result in results.items()
            if "error" not in result
        }
        fastest = min(times[name][0] for name in peers if times[name])
        lines += [
            f"\n{title}: to {goal:.4f}, {best}'s after {len(peers[best]['nlpd'])} epochs\n",
            "| | s | of the fastest peer's | without compilation, s | epochs | last NLPD |",
            "|---|---|---|---|---|---|",
        ]
        for name, result in results.items():
            if "error" in result:
                lines.append(f"| {name} | {result['error'][:60]} | | | | |")
                continue
            told = "not reached | | "
            if times[name]:
                total, usual = times[name]
                told = f"{total:.1f} | {total / fastest:.2f} | {usual:.1f}"
            lines.append(
                f"| {name} | {told} | {len(result['nlpd'])} | {result['nlpd'][-1]:.4f} |"
            )
    return [*lines, "\n![NLPD over time](../figures/speed_nlpd.png)"]


def startup(kept):
    """Part startup."""
    lines = ["\n## Start-up\n"]
    if "import" in kept:
        found = kept["import"]
        beyond = median(found["numpyro_sgp beyond numpyro"]["seconds"], 2)
        before = median(found["numpyro"]["seconds"], 2)
        several = found.get("largest", {}).get("seconds", {})
        several = ", ".join(f"{k} {v:.2f}" for k, v in list(several.items())[:8])
        lines += [
            f"`import numpyro_sgp` takes {beyond} s after `import numpyro, numpyro.infer`,",
            f"which takes {before} s, in fresh processes. Both by package, in seconds of",
            f"modules of their own: {several}.\n",
        ]
    lines += [
        "Seconds of a worker's imports, and from the data to the end of the first gradient",
        "step, less one step: building, setting up and compiling.\n",
        "| | library | imports | to the first step |",
        "|---|---|---|---|",
    ]
    for title, results in rows_of(kept, "first step"):
        for name, result in results.items():
            told = f"{median(result['import_s'])} | {median(result['first_s'])}"
            lines.append(f"| {title.removeprefix('first step, ')} | {name} | {told} |")
    return lines


def memory(kept):
    """Part memory."""
    lines = [
        "\n## Memory\n",
        "Peak resident memory of a process with ten steps, compilation and data included,",
        "beyond its peak after the imports.\n",
        "| precision, M | library | MiB | peak after imports |",
        "|---|---|---|---|",
    ]
    for title, results in rows_of(kept, "float"):
        for name, result in results.items():
            lines.append(
                f"| {title} | {name} | {result['mib']:.0f} | {result['import_mib']:.0f} |"
            )
    return lines


def predict(kept):
    """Part predict."""
    lines = [
        "\n## Prediction\n",
        "Marginal means and variances, 1000 rows a call: ours by a `Predictor`, GPflow's by",
        "its posterior, which keep what does not depend on the rows; GPJax factorises K_uu",
        "in each call (and was measured earlier, in another run).\n",
        "| precision, M | library | rows a second |",
        "|---|---|---|",
    ]
    for title, results in rows_of(kept, "float"):
        for name, result in results.items():
            told = median(result["rows_per_s"], 0)
            lines.append(f"| {title} | {name} | {told} |")
    return lines


def mcmc(kept):
    """Part mcmc."""
    lines = [
        "\n## Sampling\n",
        "One chain of NUTS or elliptical slices on the log-Gaussian Cox process of",
        "`examples/coal_mining.py`: bulk effective samples (ArviZ) of f in each bin, and of",
        "the hyperparameters, per second after warm-up. *Hand-written* is the same prior,",
        "whitened by a Cholesky factor, in NumPyro alone (made once where hyperparameters",
        "are fixed). With learned hyperparameters, elliptical slices take turns with NUTS.\n",
        "| | method | f, worst bin | f, median | hyperparameters, worst | compile and warm-up, s |",
        "|---|---|---|---|---|---|",
    ]
    for title, results in rows_of(kept, ""):
        for name, result in results.items():
            runs = result["runs"]

            def rate(*keys, runs=runs):
                found = [
                    min(r[k] for k in keys) / r["seconds"] for r in runs if keys[0] in r
                ]
                return median(found, 2) if found else ""

            hyper = rate("min variance", "min lengthscale")
            warmup = median([r["warmup_s"] for r in runs])
            told = f"{rate('min f')} | {rate('median f')} | {hyper} | {warmup}"
            lines.append(f"| {title} | {name} | {told} |")
    return lines


def draw_steps(kept, path):
    """Products a step over M."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10.5, 3.6), sharey=True)
    for axis, dtype in zip(axes, ("float32", "float64"), strict=True):
        curves = {}
        for title, results in rows_of(kept, dtype):
            unit = np.array(results["product"]["seconds"])
            for name, result in results.items():
                if name != "product" and "seconds" in result:
                    value = np.median(np.array(result["seconds"]) / unit)
                    curves.setdefault(name, []).append((int(title.split()[-1]), value))
        for name, points in curves.items():
            axis.plot(*zip(*sorted(points), strict=True), "o-", label=name)
        axis.set(title=dtype, xlabel="M", xscale="log", yscale="log")
        axis.minorticks_off()
        sizes = sorted({M for points in curves.values() for M, _ in points})
        axis.set_xticks(sizes, [str(M) for M in sizes])
        axis.set_yticks([5, 10, 20, 50], ["5", "10", "20", "50"])
    axes[0].set_ylabel("products a step")
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_nlpd(kept, path):
    """Test NLPD over seconds."""
    import matplotlib.pyplot as plt

    titles = [title for title, _ in rows_of(kept, "")]
    names = list(dict.fromkeys(name for title in titles for name in kept[title]))
    figure, axes = plt.subplots(1, len(titles), figsize=(10.5, 3.6), squeeze=False)
    for axis, title in zip(axes[0], titles, strict=True):
        for name, result in kept[title].items():
            if result.get("nlpd"):
                seconds = result["build_s"] + np.cumsum(result["seconds"])
                style = "-" if name.startswith("ours") else "--"
                colour = f"C{names.index(name)}"
                axis.plot(seconds, result["nlpd"], style, color=colour, label=name)
        axis.set(title=title, xlabel="seconds", ylabel="test NLPD", xscale="log")
        axis.minorticks_off()
        low, high = axis.get_xlim()
        ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500) if low < t < high]
        axis.set_xticks(ticks, [str(t) for t in ticks])
    lines = axes[0][0].get_legend_handles_labels()  # the part with most
    axes[0][-1].legend(*lines, fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def page(kept):
    """docs/records/speed.md."""
    lines = [HEAD.format(versions=VERSIONS)]
    parts = (steps, threads, orthogonal, time_to_nlpd, startup, memory, predict, mcmc)
    for part in parts:
        if part.__name__ in kept:
            title, *rest = part(kept[part.__name__])
            cores = kept[part.__name__]["cores"]
            told = {1: "one core", 2: "two cores"}.get(cores, f"{cores} cores")
            lines += [title, f"On {told} of a CPU.\n", *rest]
    lines.append(OPERATIONS)
    return "\n".join(lines)


def write(results, docs):
    """docs/records/speed.md and its figures, from the file of results."""
    kept = json.loads(results.read_text())
    figures = docs / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    if "steps" in kept:
        draw_steps(kept["steps"], figures / "speed_steps.png")
    if "time_to_nlpd" in kept:
        draw_nlpd(kept["time_to_nlpd"], figures / "speed_nlpd.png")
    (docs / "records" / "speed.md").write_text(page(kept) + "\n")
