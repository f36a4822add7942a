"""Settings for every test: float64, a compilation cache, no display, fixed examples."""

import os
from pathlib import Path

os.environ["MPLBACKEND"] = "Agg"  # before matplotlib is imported, here or in a child

import jax
import pytest
from hypothesis import Phase, settings

jax.config.update("jax_enable_x64", True)

# Most of the suite's time is compilation: programs are compiled with few optimisations,
# which change speed and last digits only, and seldom change between runs.
jax.config.update("jax_disable_most_optimizations", True)
CACHE = Path(__file__).resolve().parent.parent / ".jax_cache"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

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
