"""
What the workers have in common: a worker reads a request a line from standard input and
answers each with a line of JSON. It computes only between a request and its answer, so
that a driver can time several workers in turn.

A worker module defines ``Model(problem)``, with ``steps(rows)`` (one step of Adam for each
row of indices), ``predict(X)`` (mean and variance of f at a batch) and
``noise_variance()``, and calls ``serve(Model, import_s)``; ``problem`` is made by
:func:`load`.
"""

import json
import os
import resource
import sys
import time
import traceback
from types import SimpleNamespace

import numpy as np


def serve(Model, import_s, tasks=None):
    """Answers requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    tasks = {"train": train, "predict": predict, **(tasks or {})}
    running, after_import = {}, peak_mib()
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("do")
        try:
            if kind == "hello":
                answer = {"import_s": import_s, "mib": after_import}
            elif kind == "memory":
                answer = {"mib": peak_mib() - after_import}
            elif kind == "prepare":
                name, task = request.pop("name"), tasks[request.pop("task")]
                running[name] = task(Model, **request)
                answer = next(running[name])
            else:
                answer = running[request.pop("name")].send(request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def peak_mib():
    """Largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def load(path, **options):
    """Arrays of a file, in the precision asked for, and options, as one object."""
    problem = SimpleNamespace(
        likelihood="gaussian", method="SVGP", rate=0.01, noise=0.1, lengthscale=None
    )
    vars(problem).update(options)
    with np.load(path) as file:
        for name in file.files:
            setattr(problem, name, np.asarray(file[name], problem.dtype))
    M = problem.M
    problem.N, problem.D = problem.X.shape
    problem.O = problem.Z[M : 2 * M] if len(problem.Z) >= 2 * M else None
    problem.Z2, problem.Z = problem.Z[: 2 * M], problem.Z[:M]
    if problem.lengthscale is None:
        problem.lengthscale = float(problem.D) ** 0.5
    return problem


def batches(N, batch, seed):
    """Rows of each step of an epoch, shape ``(steps, batch)``."""
    order = np.random.default_rng(seed).permutation(N)
    steps = N // batch
    return order[: steps * batch].reshape(steps, batch).astype(np.int32)


def train(Model, path, steps=None, test=False, **options):
    """
    Trains, ``steps`` steps (an epoch, if None) a request, always as many.

    :param test: whether to answer with the test NLPD, which is not timed.
    """
    problem = load(path, **options)
    begin = time.perf_counter()
    model = Model(problem)
    build_s = time.perf_counter() - begin
    answer, done = {"build_s": build_s}, 0
    rows = batches(problem.N, problem.batch, 0)
    while True:
        request = yield answer
        if steps is None or done == 0:
            rows = batches(problem.N, problem.batch, request.get("seed", 0))
        block = rows if steps is None else rows[np.arange(done, done + steps) % len(rows)]
        begin = time.perf_counter()
        loss = model.steps(block)
        seconds = time.perf_counter() - begin
        done += len(block)
        answer = {"seconds": seconds, "steps": len(block), "loss": float(loss)}
        if test:
            answer["nlpd"] = nlpd(model, problem)
            answer["noise"] = float(model.noise_variance())


def predict(Model, path, size=1000, rows=100_000, **options):
    """Predicts mean and variance at ``rows`` rows, ``size`` at a time, a request."""
    problem = load(path, **options)
    model = Model(problem)
    X = np.random.default_rng(2).normal(size=(size, problem.D)).astype(problem.dtype)
    answer = {}
    while True:
        request = yield answer
        count = max(1, request.get("rows", rows) // size)
        begin = time.perf_counter()
        for _ in range(count):
            mean, variance = model.predict(X)
        seconds = time.perf_counter() - begin
        answer = {"seconds": seconds, "rows": count * size, "variance": float(variance[0])}


def nlpd(model, problem):
    """Mean negative log predictive density of the test rows."""
    X, y = problem.X_test, problem.y_test.astype(float)
    size = min(1000, len(X))
    whole = np.concatenate([X, X[: -len(X) % size]])  # all batches of one shape
    found = [model.predict(whole[i : i + size]) for i in range(0, len(whole), size)]
    mean, variance = (
        np.concatenate([np.asarray(part, float).ravel() for part in parts])[: len(X)]
        for parts in zip(*found, strict=True)
    )
    if problem.likelihood == "gaussian":
        variance = variance + float(model.noise_variance())
        terms = np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance
        return 0.5 * float(np.mean(terms))
    sign = 2.0 * y - 1.0
    return -float(np.mean(log_cdf(sign * mean / np.sqrt(1.0 + variance))))


def log_cdf(z):
    """Of the standard normal distribution."""
    from math import erfc

    return np.log(np.maximum([0.5 * erfc(-v / 2**0.5) for v in z], 1e-30))
