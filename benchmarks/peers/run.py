"""
Steps, training, start-up, memory, prediction and sampling beside other libraries
==================================================================================

GPflow, GPyTorch and GPJax, each in a virtual environment of its own, are measured in turns
with this package: a worker process for each library prepares and compiles, then waits until
it is told to go on, so that only one computes at a time and all see the same machine. Step
times are also given in units of one M x M x M matrix product in JAX of the same precision,
timed in the same rounds.

    python benchmarks/peers/run.py --setup                      # makes the environments
    python benchmarks/peers/run.py --parts steps threads orthogonal
    python benchmarks/peers/run.py --parts time_to_nlpd --data FOLDER
    python benchmarks/peers/run.py --parts startup memory predict mcmc
    python benchmarks/peers/run.py --table              # writes docs/records/speed.md

FOLDER has ``uci/kin40k.npz`` and ``banana/banana_5300.csv.gz`` (or these files themselves).
Results are a JSON file for each part in ``--results``; what is there is not measured again.
The data of all parts but ``time_to_nlpd`` and ``mcmc`` are random.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from _results import write  # noqa: E402

VENVS = HERE.parent / ".venvs"
RESULTS = HERE.parent / "results" / "peers.json"
SCRIPTS = {
    "ours": "ours.py",
    "ours, threads of OpenBLAS": "ours.py",
    "naive": "naive.py",
    "GPJax": "peer_gpjax.py",
    "GPflow": "peer_gpflow.py",
    "GPyTorch": "peer_gpytorch.py",
}
ON_JAX = ("ours", "naive", "GPJax")
PEERS = ("GPJax", "GPflow", "GPyTorch")
PARTS = (
    "steps",
    "threads",
    "orthogonal",
    "time_to_nlpd",
    "startup",
    "memory",
    "predict",
    "mcmc",
)
DIM = 9


def python_of(library):
    """Interpreter of a library's worker."""
    if library in PEERS:
        return VENVS / library.lower() / "bin" / "python"
    return Path(sys.executable)


def set_up():
    """Makes the environments that are missing."""
    for library in PEERS:
        name = library.lower()
        wanted = (HERE / f"requirements-{name}.txt").read_text()
        stamp = VENVS / name / "requirements.txt"
        if stamp.exists() and stamp.read_text() == wanted:
            continue
        print(f"making the environment of {library}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", VENVS / name], check=True)
        file = HERE / f"requirements-{name}.txt"
        install = [python_of(library), "-m", "pip", "install", "--quiet", "-r", file]
        subprocess.run(install, check=True)
        stamp.write_text(wanted)


class Worker:
    """A process that computes when it is told to."""

    def __init__(self, library, log):
        self.name = library
        environment = dict(os.environ, PYTHONPATH=f"{HERE.parents[1]}{os.pathsep}{HERE}")
        environment["JAX_PLATFORMS"] = "cpu"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        for name in list(environment):
            if name.startswith(("OPENBLAS_", "OMP_", "MKL_")):
                del environment[name]  # each at its own defaults
        # OpenBLAS factorises and solves for JAX; its threads wait in a loop for work, on
        # cores that JAX's own threads need. Ours sees to that (docs/records/speed.md).
        if library in ON_JAX and library != "ours":
            environment["OPENBLAS_NUM_THREADS"] = "1"
        if library == "ours, threads of OpenBLAS":
            environment["OPENBLAS_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        self.process = subprocess.Popen(
            [python_of(library), HERE / SCRIPTS[library]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        self.hello = self.ask(do="hello")

    def ask(self, check=True, **request):
        """One request and its answer; where ``check`` is False, errors are answers too."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker of {self.name} ended; see the log")
        answer = json.loads(line)
        if check and "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}; see the log")
        return answer

    def close(self):
        """Ends the process."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Workers(dict):
    """Workers by library, started when first asked for, ended at the end."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __missing__(self, library):
        self[library] = Worker(library, self.log)
        return self[library]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for worker in self.values():
            worker.close()


class Part:
    """What is kept of a part in the JSON file of all: results by title and name."""

    def __init__(self, path, name):
        self.path, self.name = path, name
        self.kept = self._all().get(name, {})

    def _all(self):
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def has(self, title, names):
        """Whether all of these are there."""
        return set(names) <= set(self.kept.get(title, {}))

    def begin(self, title):
        """Forgets what is there: what is compared must be of one run."""
        self.kept.pop(title, None)

    def keep(self, title, name, result):
        """Writes one result."""
        self.kept.setdefault(title, {})[name] = result
        self.kept["cores"] = len(os.sched_getaffinity(0))
        text = json.dumps({**self._all(), self.name: self.kept}, indent=1)
        write(self.path, f"{text}\n".encode())


def random_problem(folder, M, batch):
    """A file of random data: functions of nine inputs."""
    rng = np.random.default_rng(0)
    N = max(8 * batch, 8192)
    X = rng.normal(size=(N, DIM))
    y = np.sin(X[:, 0]) + np.cos(X[:, 1] * X[:, 2]) + 0.3 * rng.normal(size=N)
    path = folder / f"random-{M}-{batch}.npz"
    np.savez(path, X=X, y=y, Z=rng.normal(size=(2 * M, DIM)))
    return str(path)


def in_turns(runs, rounds, pause):
    """
    Seconds per step of several runs, one after another in each round.

    :param runs: a list of (title, worker, name of the task).
    """
    seconds = {title: [] for title, *_ in runs}
    for r in range(rounds):
        # The other way round every second time.
        for title, worker, name in runs if r % 2 == 0 else runs[::-1]:
            time.sleep(pause)
            answer = worker.ask(check=False, do="go", name=name)
            if "error" in answer:
                seconds[title] = answer["error"]
                continue
            if not isinstance(seconds[title], str):
                seconds[title].append(answer["seconds"] / answer["steps"])
    return seconds


def measure(part, title, methods, M, dtype, args):
    """
    Step times of several methods, and that of a product.

    :param methods: what is printed: library, method of the worker, batch.
    """
    if part.has(title, [*methods, "product"]):
        return
    part.begin(title)
    # A call costs some tenths of a step by itself, so that a few steps are too few.
    steps = max(4, min(100, round(args.scale * 64 * (512 / M) ** 3)))
    with tempfile.TemporaryDirectory() as folder, Workers(args.log) as workers:
        runs, losses = [], {}
        for called, (library, method, batch) in methods.items():
            path = random_problem(Path(folder), M, batch)
            options = {"path": path, "M": M, "batch": batch, "dtype": dtype}
            worker = workers[library]
            answer = worker.ask(
                check=False,
                do="prepare",
                task="train",
                name=called,
                steps=steps,
                method=method,
                **options,
            )
            for _ in range(2):  # the second, for what else is done once
                if "error" not in answer:
                    answer |= worker.ask(check=False, do="go", name=called)
            if "error" in answer:
                print(f"{title}: {called}: {answer['error']}", flush=True)
                part.keep(title, called, {"error": answer["error"]})
                continue
            losses[called] = answer["loss"]
            runs.append((called, worker, called))
        worker, name = workers["ours"], "product"
        times = max(2, round(steps * 10))
        worker.ask(do="prepare", task="product", name=name, M=M, dtype=dtype, times=times)
        seconds = in_turns([(name, worker, name), *runs], args.rounds, args.pause)
        for called, found in seconds.items():
            if isinstance(found, str):
                part.keep(title, called, {"error": found})
                continue
            result = {"seconds": found, "steps": steps}
            if called in losses:
                result["loss"] = losses[called]
            part.keep(title, called, result)
    unit = part.kept[title]["product"]["seconds"]
    for called, result in part.kept[title].items():
        if "seconds" in result:
            median = np.median(result["seconds"])
            told = f"{1e3 * median:.1f} ms, {median / np.median(unit):.1f} products"
            print(f"{title}: {called}: {told}", flush=True)


def steps(args):
    """Seconds per full gradient step of SVGP, batch = M."""
    part = Part(args.results, "steps")
    for dtype in args.dtypes:
        for M in args.inducing or (256, 512, 1024, 2048):
            methods = {library: (library, "SVGP", M) for library in args.libraries}
            if "GPyTorch" in methods:
                # Its own rule for derivatives is for batches larger than M.
                methods["GPyTorch, batch M + 1"] = ("GPyTorch", "SVGP", M + 1)
            measure(part, f"{dtype}, {M}", methods, M, dtype, args)


def threads(args):
    """Our steps with one thread for OpenBLAS, and with as many as there are cores."""
    part = Part(args.results, "threads")
    for dtype in args.dtypes:
        for M in args.inducing or (256, 512, 1024):
            names = ("ours", "ours, threads of OpenBLAS")
            methods = {name: (name, "SVGP", M) for name in names}
            measure(part, f"{dtype}, {M}", methods, M, dtype, args)


def orthogonal(args):
    """The same of SOLVE-GP and ODVGP."""
    part = Part(args.results, "orthogonal")
    for dtype in args.dtypes:
        for M in args.inducing or (256, 512, 1024):
            methods = {
                "SVGP M": ("ours", "SVGP", M),
                "SVGP 2M": ("ours", "SVGP2", M),
                "SOLVE-GP M + M": ("ours", "SOLVE", M),
                "ODVGP M + M": ("ours", "ODVGP", M),
            }
            if "GPyTorch" in args.libraries:
                methods["ODVGP M + M, GPyTorch"] = ("GPyTorch", "ODVGP", M)
            measure(part, f"{dtype}, {M}", methods, M, dtype, args)


def real_problem(folder, data, name, M):
    """A file of standardised training and test rows and k-means centres."""
    from scipy.cluster.vq import kmeans2

    if name == "kin40k":
        found = [data / "uci" / "kin40k.npz", data / "kin40k.npz"]
        with np.load(next(path for path in found if path.exists())) as file:
            X, y = file["X"].astype(float), file["y"].astype(float)
    else:
        found = [data / "banana" / "banana_5300.csv.gz", data / "banana_5300.csv.gz"]
        path = next(path for path in found if path.exists())
        table = np.loadtxt(path, delimiter=",", skiprows=1)
        X, y = table[:, :2], (table[:, 2] > 0).astype(float)
    order = np.random.default_rng(0).permutation(len(X))
    num_train, num_test = int(0.64 * len(X)), int(0.2 * len(X))
    train, test = order[:num_train], order[len(X) - num_test :]
    X = (X - X[train].mean(axis=0)) / X[train].std(axis=0)
    if name == "kin40k":
        y = (y - y[train].mean()) / y[train].std()
    Z, _ = kmeans2(X[train], 2 * M, minit="++", seed=0)
    # Each half is spread over the inputs: of SOLVE-GP the second set is the other half.
    Z = Z[np.random.default_rng(1).permutation(len(Z))]
    path = folder / f"{name}.npz"
    single, _ = kmeans2(X[train], M, minit="++", seed=0)
    np.savez(path, X=X[train], y=y[train], X_test=X[test], y_test=y[test], Z=single)
    double = folder / f"{name}-2.npz"
    np.savez(double, X=X[train], y=y[train], X_test=X[test], y_test=y[test], Z=Z)
    some = X[train][:1000]
    squared = ((some[:, None] - some[None]) ** 2).sum(axis=-1)
    median = float(np.median(np.sqrt(squared[np.triu_indices(len(some), 1)])))
    return str(path), str(double), median


def time_to_nlpd(args):
    """NLPD of test rows after seconds of training, from the same start."""
    if args.data is None:
        raise SystemExit("--data FOLDER is needed, the folder with kin40k and banana.")
    part = Part(args.results, "time_to_nlpd")
    settings = {
        "kin40k": {"M": 512, "batch": 1024, "likelihood": "gaussian"},
        "banana": {"M": 64, "batch": 256, "likelihood": "bernoulli"},
    }
    for name in args.sets:
        options = settings[name] | {"dtype": "float32", "test": True}
        if args.inducing:
            options["M"] = args.inducing[0]
        title = f"{name}, M = {options['M']}, batches of {options['batch']}"
        tight = " tight" if name == "kin40k" else ""
        ours = {
            "SVGP, Adam": {"method": "SVGP", "epochs": args.epochs},
            "SVGP": {"method": "SVGP" + tight, "natural": args.natural},
            "SVGP, dual": {"method": "SVGP dual" + tight, "natural": args.natural},
            "SOLVE-GP": {"method": "SOLVE" + tight, "natural": args.natural},
        }
        runs = {peer: {"method": "SVGP", "epochs": args.epochs} for peer in args.libraries}
        runs.pop("ours", None)
        if "GPflow" in runs:  # the fastest of them, at our rate of Adam too
            faster = {"library": "GPflow", "rate": args.our_rate}
            runs[f"GPflow, Adam {args.our_rate:g}"] = runs["GPflow"] | faster
        if name == "banana":
            runs.pop("naive", None)
        short = args.our_epochs[0 if name == "kin40k" else -1]
        for called, run in ours.items():
            runs[f"ours: {called}"] = {"epochs": short, "library": "ours"} | run
            if "natural" in run:
                runs[f"ours: {called}"]["rate"] = args.our_rate
        if part.has(title, runs):
            continue
        part.begin(title)
        with tempfile.TemporaryDirectory() as folder:
            paths = real_problem(Path(folder), args.data, name, options["M"])
            single, double, lengthscale = paths
            alive, found = [], {}
            for called, run in runs.items():
                library, epochs = run.pop("library", called), run.pop("epochs")
                # A process of its own, so that each compiles all that it needs.
                worker = Worker(library, args.log)
                path = double if run["method"].startswith("SOLVE") else single
                if "natural" in run:
                    rows = 0.64 * {"kin40k": 40000, "banana": 5300}[name]
                    run["decay"] = epochs * int(rows // options["batch"])
                # The natural optimum is for smoother data: the median distance.
                answer = worker.ask(
                    check=False,
                    do="prepare",
                    task="train",
                    name="train",
                    path=path,
                    lengthscale=lengthscale,
                    **options,
                    **run,
                )
                found[called] = answer | {"seconds": [], "nlpd": [], "noise": []}
                found[called]["options"] = run
                alive.append((called, worker, epochs))
            for epoch in range(max(epochs for *_, epochs in alive)):
                for called, worker, epochs in alive[:: 1 if epoch % 2 == 0 else -1]:
                    result = found[called]
                    if epoch >= epochs or "error" in result:
                        continue
                    time.sleep(args.pause)
                    answer = worker.ask(check=False, do="go", name="train", seed=epoch)
                    if "error" in answer or not np.isfinite(answer["nlpd"]):
                        result["error"] = answer.get("error", f"NaN in epoch {epoch + 1}")
                        print(f"{title}: {called}: {result['error']}", flush=True)
                        continue
                    for key in ("seconds", "nlpd", "noise"):
                        value = answer[key]
                        result[key].append(round(value, 5) if value == value else None)
                if epoch % 5 == 4 or epoch == 0:
                    last = {k: r["nlpd"][-1] for k, r in found.items() if r["nlpd"]}
                    print(f"{title}: epoch {epoch + 1}: {last}", flush=True)
            for called, worker, _ in alive:
                worker.close()
                found[called].pop("noise") if name == "banana" else None
                part.keep(title, called, found[called])


def startup(args):
    """Seconds of imports and to the end of the first step, each in a fresh process."""
    part = Part(args.results, "startup")
    if not part.has("import", ["numpyro", "numpyro_sgp beyond numpyro"]):
        code = (
            "import time, sys; a = time.perf_counter(); import numpyro, numpyro.infer; "
            "b = time.perf_counter(); import numpyro_sgp; c = time.perf_counter(); "
            "print(b - a, c - b)"
        )
        environment = dict(os.environ, PYTHONPATH=str(HERE.parents[1]))
        pairs = []
        for _ in range(args.rounds + 1):
            out = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                capture_output=True,
                text=True,
            )
            pairs.append([float(word) for word in out.stdout.split()])
        # The first one may have read files from disk.
        before, beyond = zip(*pairs[1:], strict=True)
        part.keep("import", "numpyro", {"seconds": before})
        part.keep("import", "numpyro_sgp beyond numpyro", {"seconds": beyond})
        code = "import numpyro, numpyro.infer, numpyro_sgp"
        out = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code],
            env=environment,
            capture_output=True,
            text=True,
        )
        part.keep("import", "largest", {"seconds": largest(out.stderr)})
    for M in args.inducing or (1024,):
        title = f"first step, float32, {M}"
        if part.has(title, args.libraries):
            continue
        part.begin(title)
        found = {library: [] for library in args.libraries}
        with tempfile.TemporaryDirectory() as folder:
            path = random_problem(Path(folder), M, M)
            for _ in range(args.rounds):
                for library in args.libraries:
                    with Workers(args.log) as workers:
                        worker = workers[library]
                        options = {"path": path, "M": M, "batch": M, "dtype": "float32"}
                        begin = time.perf_counter()
                        worker.ask(
                            do="prepare", task="train", name="train", steps=1, **options
                        )
                        worker.ask(do="go", name="train")
                        first = time.perf_counter() - begin
                        second = worker.ask(do="go", name="train")["seconds"]
                        row = [worker.hello["import_s"], first - second]
                        found[library].append(row)
        for library, rows in found.items():
            imports, compiles = zip(*rows, strict=True)
            part.keep(title, library, {"import_s": imports, "first_s": compiles})
            print(f"{title}: {library}: {rows}", flush=True)


def largest(told):
    """The packages that take most time to import, by their own modules' times."""
    own = {}
    for line in told.splitlines():
        if line.startswith("import time:") and "|" in line and "self" not in line:
            spent, _, name = line.removeprefix("import time:").split("|")
            package = name.strip().split(".")[0]
            own[package] = own.get(package, 0.0) + int(spent) / 1e6
    return dict(sorted(own.items(), key=lambda item: -item[1])[:15])


def memory(args):
    """Peak resident memory of ten steps, beyond what it was after the import."""
    part = Part(args.results, "memory")
    for dtype in args.dtypes:
        for M in args.inducing or (1024,):
            title = f"{dtype}, {M}"
            for library in args.libraries:
                if part.has(title, [library]):
                    continue
                options = {"M": M, "batch": M, "dtype": dtype, "steps": 5}
                with (
                    tempfile.TemporaryDirectory() as folder,
                    Workers(args.log) as workers,
                ):
                    options["path"] = random_problem(Path(folder), M, M)
                    worker = workers[library]
                    worker.ask(do="prepare", task="train", name="train", **options)
                    for _ in range(2):
                        answer = worker.ask(check=False, do="go", name="train")
                    result = {"error": answer["error"]} if "error" in answer else {}
                    result |= worker.ask(do="memory")
                    result["import_mib"] = worker.hello["mib"]
                    part.keep(title, library, result)
                    print(f"{title}: {library}: {result}", flush=True)


def predict(args):
    """Rows a second of marginal mean and variance."""
    part = Part(args.results, "predict")
    libraries = [name for name in args.libraries if name != "naive"]
    for dtype in args.dtypes:
        for M in args.inducing or (1024,):
            title = f"{dtype}, {M}"
            if part.has(title, libraries):
                continue
            part.begin(title)
            with tempfile.TemporaryDirectory() as folder, Workers(args.log) as workers:
                path = random_problem(Path(folder), M, M)
                found = {}
                for library in libraries:
                    options = {"path": path, "M": M, "batch": M, "dtype": dtype}
                    worker = workers[library]
                    worker.ask(do="prepare", task="predict", name="predict", **options)
                    worker.ask(do="go", name="predict", rows=2000)
                    found[library] = []
                for _ in range(args.rounds):
                    for library in libraries:
                        time.sleep(args.pause)
                        answer = workers[library].ask(
                            do="go", name="predict", rows=args.rows
                        )
                        found[library].append(answer["rows"] / answer["seconds"])
            for library, rates in found.items():
                part.keep(title, library, {"rows_per_s": rates})
                print(f"{title}: {library}: {np.median(rates):.0f} rows/s", flush=True)


def mcmc(args):
    """Effective samples a second on the coal-mining counts."""
    part = Part(args.results, "mcmc")
    methods = ("whiten, NUTS", "hand-written, NUTS", "elliptical slices")
    for learn, bins in ((False, args.bins), (True, args.bins // 10)):
        title = f"{bins} bins, hyperparameters {'learned' if learn else 'fixed'}"
        if part.has(title, methods):
            continue
        part.begin(title)
        with Workers(args.log) as workers:
            worker, found = workers["ours"], {}
            for method in methods:
                slices = method == "elliptical slices"
                times = 10 if slices and not learn else 1
                worker.ask(
                    do="prepare",
                    task="sampling",
                    name=method,
                    method=method,
                    bins=bins,
                    learn=learn,
                    warmup=args.samples,
                    samples=args.samples * times,
                )
                found[method] = []
            for r in range(args.rounds):
                for method in methods:
                    answer = worker.ask(do="go", name=method, seed=r)
                    found[method].append(answer)
                    told = {k: v for k, v in answer.items() if k != "mean f"}
                    print(f"{title}: {method}: {told}", flush=True)
            for method, rows in found.items():
                part.keep(title, method, {"runs": rows})


def main(args):
    """What the options ask for."""
    if args.setup:
        set_up()
    if args.table:
        from tables import write

        write(args.results, args.docs)
        return
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with open(os.devnull if args.log is None else args.log, "a") as args.log:
        for name in args.parts:
            globals()[name](args)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--setup", action="store_true", help="make the environments")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[])
    parser.add_argument("--data", type=Path, help="folder with kin40k and banana")
    parser.add_argument("--sets", nargs="+", default=["kin40k", "banana"])
    parser.add_argument("--libraries", nargs="+", default=["ours", "naive", *PEERS])
    parser.add_argument(
        "--inducing", nargs="+", type=int, help="M, in place of a part's own"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--rounds", type=int, default=7, help="of measurements")
    parser.add_argument("--scale", type=float, default=1.0, help="of steps in a round")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between turns")
    parser.add_argument("--epochs", type=int, default=100, help="of the peers' training")
    parser.add_argument(
        "--our-epochs",
        nargs="+",
        type=int,
        default=[16, 30],
        help="of ours with natural gradients, for kin40k and banana",
    )
    parser.add_argument("--natural", type=float, default=0.2, help="their rate")
    parser.add_argument("--our-rate", type=float, default=0.05, help="of Adam beside them")
    parser.add_argument("--rows", type=int, default=100_000, help="of part predict")
    parser.add_argument("--bins", type=int, default=811, help="of part mcmc")
    parser.add_argument("--samples", type=int, default=1000, help="of part mcmc")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--log", type=Path, help="what the workers print goes there")
    parser.add_argument(
        "--table", action="store_true", help="write docs/records/speed.md, and end"
    )
    parser.add_argument("--docs", type=Path, default=HERE.parents[1] / "docs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
