"""Threads of OpenBLAS, in processes of their own."""

import os
import subprocess
import sys

import pytest

CODE = """
import os
os.sched_getaffinity = lambda pid: set(range({cores}))
from numpyro_sgp._threads import one_thread
from threadpoolctl import ThreadpoolController
print(one_thread())
import numpyro_sgp as sgp
for library in ThreadpoolController().info():
    print("scipy.libs" in library["filepath"], library["num_threads"])
"""


@pytest.mark.parametrize(
    ("cores", "chosen", "done"), [(2, None, True), (2, "2", False), (64, None, False)]
)
def test_one_thread_on_few_cores_unless_chosen(cores, chosen, done):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS", "OMP"))}
    if chosen is not None:
        env["OPENBLAS_NUM_THREADS"] = chosen
    code = CODE.format(cores=cores)
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    told, *libraries = out.stdout.splitlines()
    of_scipy = [line.split()[1] for line in libraries if line.startswith("True")]
    if not of_scipy:
        pytest.skip("SciPy has no OpenBLAS of its own here")
    assert told == str(done)
    assert (set(of_scipy) == {"1"}) == done or os.cpu_count() == 1
