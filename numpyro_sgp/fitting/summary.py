"""A fit in a few lines of text."""

import math

from numpyro.infer.autoguide import AutoDelta


def summary(fitted) -> str:
    """What there is to say of a :class:`~numpyro_sgp.Fitted`."""
    rows = "rows not known" if fitted.num_rows is None else f"{fitted.num_rows} rows"
    if fitted.num_rows is not None and fitted.guide.known().subsampled:
        rows = f"minibatches that the model makes, of {rows}"
    if fitted.args is None:
        rows += ", which are not here"
    lines = [f"Fitted on {rows}"]
    lines += [f"  {name}: {a!r}" for name, a in fitted.guide.approximations.items()]
    if not math.isnan(fitted.bound):
        se = f" (standard error {fitted.bound_se:.2g})" if fitted.bound_se > 0 else ""
        of = ""
        if isinstance(fitted.guide.base_guide, AutoDelta):
            of = ", of log p(y, points): the densities of latents at points count"
        lines.append(f"  bound: {fitted.bound:.7g}{se}{of}")
    steps = counted(fitted.losses)
    steps += [f"{fitted.seconds:.1f} s"] if math.isfinite(fitted.seconds) else []
    steps += [str(fitted.stopped)] if fitted.stopped else []
    if steps:
        lines.append(f"  training: {', '.join(steps)}")
    if fitted._verdict is not None:
        lines.append(f"  verdict: {fitted._verdict}")
    return "\n".join(lines)


def counted(losses) -> list[str]:
    """How many steps there were, if there were any: of a Gaussian one solve may be all."""
    number = 0 if losses is None else len(losses)
    return [f"{number} step{'s' * (number > 1)}"] if number else []
