"""Which trainings a fit is made of: of an approximation, a guide, or a fit before."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numpyro_sgp.elbo import TraceGP_ELBO
from numpyro_sgp.fitting.arguments import JOINT_GUIDES, guide_of
from numpyro_sgp.fitting.fitted import Fitted
from numpyro_sgp.fitting.gaussian_first import train_from_gaussian
from numpyro_sgp.fitting.grow import grow, most_points, with_points
from numpyro_sgp.fitting.other_data import check_joint_data, guide_for
from numpyro_sgp.fitting.progress import Limits
from numpyro_sgp.fitting.training import Training
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.base import check_approximations


@dataclass(frozen=True, eq=False)
class Routes:
    """
    From what :func:`~numpyro_sgp.fit` is given to the trainings that it takes.

    :param train: how guides are trained.
    :param model: the model.
    :param base_guide: of latents beside GP sites.
    :param joint: whether there is one Gaussian over all GP sites and effects.
    """

    train: Training
    model: Callable
    base_guide: Callable
    joint: bool

    def fit(self, given, keeps_loss: bool) -> Any:
        """
        The fit.

        :param given: an approximation, a guide or a fit.
        :param keeps_loss: whether a fit's own bound is the one that is asked for.
        """
        how, guide = self.train, guide_of(given)
        if isinstance(guide, tuple(JOINT_GUIDES)):
            check_joint_data(guide, how.args, how.kwargs)
            return how(guide, before=None if given is guide else given)
        if isinstance(given, Fitted):
            return self._on(given, keeps_loss)
        if isinstance(given, AutoSparseGP):
            return self._of_guide(given)
        limits = how.limits
        return self._of_option(given, limits) if self.joint else self._of_new(given, limits)

    def _on(self, fitted: Fitted, keeps_loss: bool) -> Any:
        """From where a fit ended; its own programs serve where they have the bound."""
        own, guide, how = getattr(fitted.svi, "loss", None), fitted.guide, self.train
        static = getattr(fitted.svi, "static_kwargs", {})
        how = replace(how, kwargs={**static, **how.kwargs})
        if other := guide_for(guide, how.args, how.kwargs):
            return how(other, fitted.params)
        if isinstance(own, TraceGP_ELBO) and keeps_loss:
            return how(guide, before=fitted)
        return how(guide, fitted.params)

    def _of_guide(self, guide: AutoSparseGP) -> Any:
        how = self.train
        guide = guide_for(guide, how.args, how.kwargs) or guide

        def of_gaussian(option, limits):
            rest = guide.instead, how, limits
            found = train_from_gaussian(option, of_gaussian, *rest)
            return found or how(guide.instead(option), limits=limits)

        given = None if guide.is_set_up else guide.approximation
        found = train_from_gaussian(given, of_gaussian, lambda _: guide, how, how.limits)
        return found or how(guide)

    def _of_new(self, approximation, limits: Limits) -> Any:
        """By way of a Gaussian where natural gradients train that alone."""
        rest = self._of_new, self._make, self.train, limits
        found = train_from_gaussian(approximation, *rest)
        return found or self._of_option(approximation, limits)

    def _of_option(self, approximation, limits: Limits) -> Any:
        """At once; with more and more inducing points if their number is "auto"."""
        how = self.train
        if not any(option.is_auto for option in check_approximations(approximation)):
            return how(self._make(approximation), limits=limits)
        first = self._make(with_points(approximation, 1))
        first.setup(*how.args, **how.kwargs)
        allowed = most_points(approximation, first)

        def begin(number, start, limits):
            guide = self._make(with_points(approximation, number, allowed))
            return how(guide, start, limits=limits)

        def go_on(fitted, limits):
            return how(fitted.guide, before=fitted, descent=fitted.descent, limits=limits)

        given = how.args, how.kwargs, limits, how.progress_bar
        return grow(begin, go_on, max(allowed.values()), *given)

    def _make(self, approximation) -> Any:
        kind = JOINT_GUIDES[0] if self.joint else AutoSparseGP
        return kind(self.model, approximation, self.base_guide)
