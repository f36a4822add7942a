"""Programs that are kept with what they are of, a guide or an SVI."""

import functools
import weakref
from collections import OrderedDict

from numpyro_sgp._programs import FEW, forget, shared

#: Rows of predictions for which a program takes longer to compile than to run.
FEW_ROWS = 128
_PROGRAMS = weakref.WeakKeyDictionary()


def program(owner, fn):
    """
    ``fn(owner, *arrays, static=...)``, traced once for each shape of the arrays and each
    ``static``, whoever asks for it and how often, and :class:`shared` with other owners;
    anew for each ``state``, of the owner's model (:mod:`numpyro_sgp.tracing.state`).

    :param owner: what the program is kept with, an SVI or a guide.
    :param fn: a function at the top of a module.
    :return: a function of ``*arrays, static=...``, of ``state``, and of ``briefly`` as
        ``shared``.
    """
    programs = _PROGRAMS.setdefault(owner, {})
    if fn not in programs:
        programs[fn] = _Kept(owner, fn)
    return programs[fn]


class _Kept:
    """A :class:`shared` program for each ``static`` that a function is called with."""

    def __init__(self, owner, fn):
        self._owner = weakref.ref(owner)  # or the program would keep its own key alive
        self._fn, self._programs = fn, OrderedDict()

    def __call__(self, *arrays, static, state=None, briefly=False):
        key = static, briefly, state
        run = self._programs.pop(key, None)
        if run is None:
            run = shared(functools.partial(self._run, static), briefly)
        self._programs[key] = run  # as the one used last, also where it raises an error
        forget(self._programs, FEW)
        return run(*arrays)

    def _run(self, static, *arrays):
        return self._fn(self._owner(), *arrays, static=static)
