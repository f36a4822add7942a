"""Inducing points that change places with rows, one by one, where the bound rises."""

from numpyro_sgp.fitting.starts import with_other_points

_FEW = 30  # swaps in vain before there are none that help
_TIMES = 3.0  # so many of those that one which helps has taken, where some did
_HELP = 0.02  # nats that count


def swapped(descent, problem, rng, most: float) -> float:
    """
    Moves one inducing point at a time to a row that is drawn at random, where the bound,
    with q(u) at its optimum, is higher there: a local search over sets of rows. Of smooth
    functions no swap is better than points that were trained; where each point serves few
    rows it finds those that need one, at some evaluations a swap, which trainings that
    begin elsewhere do not.

    :param descent: at a place that it has evaluated; at the best one after that.
    :param rng: a NumPy generator.
    :param most: of the work of ``descent`` (:attr:`Descent.work`), where to stop.
    :return: nats that the bound has risen by.
    """
    first, made, helped, in_vain, patience = descent.loss, 0, 0, 0, _FEW
    while in_vain < patience and descent.work < most:
        before = descent.loss
        moved = with_other_points(problem, descent.free_now(), rng, share=0.0)
        if moved is None:  # inducing points that are not trained
            break
        descent.look_at(moved)
        made, in_vain = made + 1, in_vain + 1
        if before - descent.loss > _HELP:
            helped, in_vain = helped + 1, 0
            patience = max(_FEW, _TIMES * made / helped)
    return first - descent.loss
