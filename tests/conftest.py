"""Settings for every test: float64, a compilation cache, no display, fixed examples."""

import gc
import os
import subprocess
import sys
from pathlib import Path

os.environ["MPLBACKEND"] = "Agg"  # before matplotlib is imported, here or in a child

import jax
import pytest
from hypothesis import Phase, settings

jax.config.update("jax_enable_x64", True)


def share(option, value):
    """Set an option of JAX, here and in the processes that tests start."""
    jax.config.update(option, value)
    os.environ[option.upper()] = str(value)


# Most of the suite's time is compilation, and programs seldom change between runs.
CACHE = Path(__file__).resolve().parent.parent / ".jax_cache"
share("jax_compilation_cache_dir", str(CACHE))
share("jax_persistent_cache_min_compile_time_secs", 0.0)

#: Flags with which a CPU compiles faster, where jaxlib has them: three times (0.12 has no
#: such flag), and once more by a third, as modules are not split among threads.
QUICK = (
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def pytest_configure(config):
    """
    Few optimisations for the quick tests, which changes speed and last digits only; those
    marked slow run with what XLA does by itself, so that both are tested.
    """
    if "not slow" not in config.option.markexpr:
        return
    share("jax_disable_most_optimizations", True)
    flags = os.environ.get("XLA_FLAGS", "")
    if any(flag in flags for flag in QUICK):  # of the parent, with several processes
        return
    # An unknown flag ends the process: ask a child whether it is one.
    for flag in [" ".join(QUICK), *QUICK]:
        environment = {**os.environ, "XLA_FLAGS": f"{flags} {flag}", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", "import jax; jax.devices()"]
        if subprocess.run(command, env=environment, capture_output=True).returncode == 0:
            os.environ["XLA_FLAGS"] = environment["XLA_FLAGS"]  # read at the first array
            break


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked slow
def pytest_collection_modifyitems(items):
    """Of a test marked ``quick(n)`` n cases, evenly spaced, are quick, the others slow."""
    cases = {}
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        (number,) = found[0].get_closest_marker("quick").args
        number = min(number, len(found))
        kept = {i * len(found) // number for i in range(number)}
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


# Tracing makes many small objects that live shortly, and a process of the suite holds
# millions that live long, which the collector would look through again and again.
gc.set_threshold(100_000, 20, 50)

# Few examples; `HYPOTHESIS_EXAMPLES=100 make test` has more. Those that fail are not
# shrunk: that takes minutes of compilation.
settings.register_profile(
    "numpyro_sgp",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", 6)),
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("numpyro_sgp")


@pytest.fixture
def count_compiled():
    """A function that gives the number of programs compiled since it was last called."""
    found = []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    def count():
        number = len(found)
        found.clear()
        return number

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


#: Mapped areas of memory that a process may have: Linux' default is 65,530, of which each
#: compiled program takes some, and one more ends the process.
MOST_AREAS = 40_000


@pytest.fixture(autouse=True, scope="module")
def bounded_programs():
    """Forgets compiled programs where a process has nearly as many as it may have."""
    yield
    areas = Path("/proc/self/maps")
    if areas.exists() and areas.read_bytes().count(b"\n") > MOST_AREAS:
        jax.clear_caches()
        gc.collect()
