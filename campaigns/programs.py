"""
Programs, not arrays: random NumPyro models with GP sites beside the same models written
densely by hand, without the package.

    python -m campaigns.programs                   # all blocks, an hour or so
    python -m campaigns.programs --only density    # those of one kind
    python -m campaigns.programs --show            # what was found

A program is drawn from features that go together in any way: one to three GP sites, batches
of functions by plates, events or kernels, a layer on a layer, means, sums and products of
kernels, hyperparameters that are numbers, parameters or samples in ten ways, effects, an
AR(1) component by ``scan``, likelihoods with one latent function or two, masks, scales,
factors, minibatches. Each is compared with its dense twin at values drawn from the prior.
"""

import argparse

import jax
import numpy as np

from campaigns import _judged
from campaigns._bounded import bound
from campaigns._case import Case
from campaigns._table import Found, Table

#: What is asked, options of the programs, programs of a block, and blocks.
KINDS = {
    "density": (_judged.density, {}, 50, 11),
    "bound": (bound, {"bounded": True}, 5, 44),
    "handlers": (_judged.handled, {}, 15, 6),
    "draws": (_judged.draws, {}, 15, 6),
    "transforms": (_judged.transformed, {}, 5, 12),
    "chains": (_judged.chains, {"most_sites": 2}, 4, 8),
}


def look(block, each=None):
    """Programs of a block, named ``kind, number``."""
    kind, number = block.split(", ")
    judge, options, programs, _ = KINDS[kind]
    rng = np.random.default_rng([sum(map(ord, kind)), int(number)])
    failed, cases = [], 0
    for i in range(each or programs):
        case = Case(rng, **options)
        try:
            count, told = judge(case)
        except Exception as error:  # what no program may end in
            count, told = 1, [f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"]
        cases += count
        failed += [f"{i} {case.program}: {sentence}" for sentence in told]
    # Thousands of programs are more pieces of memory than a process may map.
    jax.clear_caches()
    return Found(cases, failed, {})


def blocks(only=None):
    """Their names, those of all kinds by turns."""
    most = max(count for *_, count in KINDS.values())
    return [
        f"{kind}, {i}"
        for i in range(most)
        for kind, (*_, count) in KINDS.items()
        if i < count and only in (None, kind)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    # Programs are many and small: compilation is nearly all of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    table = Table("programs")
    if not options.show:
        table.run(blocks(options.only), look)
    for sentence in table.failed:
        print(sentence)
    programs = sum(KINDS[block.split(", ")[0]][2] for block in table.blocks)
    print(f"{programs} programs, {table.cases} comparisons, {len(table.failed)} failed")


if __name__ == "__main__":
    main()
