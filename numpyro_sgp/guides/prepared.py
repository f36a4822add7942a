"""What a guide knows once it has seen the data: checks, points, names, starting values."""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace

import jax
from numpyro import handlers
from numpyro.infer import autoguide, init_to_uniform

from numpyro_sgp._checks import check_model, shown
from numpyro_sgp._programs import without_leaks
from numpyro_sgp._threads import methods_alone
from numpyro_sgp.distributions.arguments import as_arrays, warn_of_rounded_arguments
from numpyro_sgp.guides.base import check_approximations
from numpyro_sgp.guides.checks import check_set_up
from numpyro_sgp.guides.identity import check_params, difference
from numpyro_sgp.guides.point_guide import by_one_program, near_means
from numpyro_sgp.guides.setup import Setup, prepare, starting_values
from numpyro_sgp.tracing.coupling import Coupling

# Autoguides whose posterior is built from the model's density, which a guide for the
# latents beside f does not have: f is integrated out of it.
_DENSITY_GUIDES = (
    autoguide.AutoLaplaceApproximation,
    autoguide.AutoDAIS,
    autoguide.AutoSemiDAIS,
    autoguide.AutoSurrogateLikelihoodDAIS,
)


def base_maker(base_guide, prefix: str, init_loc_fn=None) -> Callable:
    """
    From a model to a guide of the latents beside f.

    :param base_guide: a class of guides, or a function that is that already.
    :param init_loc_fn: where a class begins; near prior means if None.
    """
    kind = getattr(base_guide, "func", base_guide)
    base_guide = by_one_program(base_guide)
    if not isinstance(kind, type):
        return base_guide
    if init_loc_fn is None and _starts_at_draws(base_guide, kind):
        init_loc_fn = near_means
    options = {} if init_loc_fn is None else {"init_loc_fn": init_loc_fn}
    return functools.partial(base_guide, prefix=prefix, **options)


def _starts_at_draws(base_guide, kind: type) -> bool:
    """Whether NumPyro starts it in (-2, 2), however far that is from a prior."""
    own = getattr(base_guide, "keywords", {})
    option = inspect.signature(kind).parameters.get("init_loc_fn")
    return (
        "init_loc_fn" not in own
        and option is not None
        and option.default is init_to_uniform
    )


@methods_alone
class PreparedGuide(autoguide.AutoGuide):
    """
    The guide's part that is made once, from the data that it first sees (a
    :class:`~numpyro_sgp.guides.setup.Setup`), and what is to be known of it; parameters
    as those of :class:`~numpyro_sgp.AutoSparseGP`.
    """

    def __init__(
        self,
        model,
        approximation,
        base_guide=autoguide.AutoDelta,
        *,
        prefix="auto",
        init_loc_fn=None,
    ):
        if isinstance(base_guide, autoguide.AutoGuide):
            raise TypeError(
                "base_guide must be a class or a function from a model to a guide, such "
                f"as AutoNormal, not an instance ({type(base_guide).__name__}): it is "
                "made for the part of the model that is left when GP sites are taken out."
            )
        if isinstance(base_guide, type) and issubclass(base_guide, _DENSITY_GUIDES):
            raise TypeError(
                f"{base_guide.__name__} needs the density of the latents beside f, which "
                "a sparse GP integrates out. Use AutoDelta, AutoNormal, "
                "AutoMultivariateNormal or another guide with parameters of its own."
            )
        check_model(model)
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a text, got {shown(prefix)}.")
        check_approximations(approximation)
        super().__init__(model, prefix=prefix)
        self.approximation = approximation
        #: What was given for it: a class, or a function from a model to a guide.
        self.base_guide_given = base_guide
        self._make_base = base_maker(base_guide, prefix, init_loc_fn)
        self._setup: Setup | None = None
        #: Largest step of :func:`~numpyro_sgp.natural_gradients` on dual sites, once begun.
        self.natural_rate: float | None = None

    def setup(self, *args, **kwargs):
        """
        Set the guide up: check the model, make the base guide and choose inducing points.
        The first run of the guide does this by itself; call it to do so outside of jit or
        vmap, or to use saved parameters in a new process. A guide that is set up stays as
        it is.

        :param args: arguments of the model, with the training data.
        :raises ValueError: as the class says.
        """
        if self._setup is None:
            self._keep(self._prepare_alone(args, kwargs))

    @property
    def is_set_up(self) -> bool:
        """Whether it has been set up."""
        return self._setup is not None

    def instead(self, approximation):
        """
        The same guide with another approximation, not set up.

        :param approximation: one, or a dict of them by site.
        """
        other = copy.copy(self)
        other.approximation, other._setup = approximation, None
        return other

    def starts(self, rng_key, args, kwargs) -> dict:
        """
        Starting values of the guide's parameters, constrained, by name; it is set up if it
        has not been.

        :param rng_key: key of the base guide's first run.
        :param args: tuple of the arguments of the model, with the training data.
        :param kwargs: dict of its keyword arguments.
        """
        args, kwargs = as_arrays(self.model, args, kwargs)
        if self._setup is None:
            with handlers.block():
                self._keep(self._prepare(rng_key, args, kwargs))
            return self.known().starts
        with handlers.block():
            return self.known().starts | self._starts_by(rng_key, args, kwargs)

    def _starts_by(self, rng_key, args, kwargs) -> dict:
        """Starting values that depend on the key, with the set-up as it is."""
        made_of = self.model, self._make_base, rng_key, args, kwargs
        return without_leaks(starting_values, self.known(), *made_of)

    def setup_state(self) -> dict:
        """What :meth:`setup_from` needs, arrays by name: it is not in the parameters."""
        return self.known().state

    def setup_from(self, saved: dict, description: dict, *args, **kwargs) -> None:
        """
        As :meth:`setup`, with inducing points from a guide that was set up before, so that
        the arguments need not have the training data.

        :param saved: of that guide's :meth:`setup_state`.
        :param description: of that guide (:attr:`Setup.description`).
        :param args: arguments of the model, with observations.
        :raises ValueError: if it is of another model or other options; this guide is then
            not set up.
        """
        setup = self._prepare_alone(args, kwargs, saved)
        if told := difference(description, setup.description):
            raise ValueError(
                f"It does not fit this guide: {told}. Use the model, the approximation and "
                "the base guide that were trained."
            )
        self._keep(replace(setup, arguments=None))

    def remember(self, arguments: tuple | None, coupling: tuple | None) -> None:
        """
        Takes what :meth:`setup_from` saw too little for.

        :param arguments: the model's ``(args, kwargs)`` with the training data, with which
            others are compared; None where they are not known.
        :param coupling: which rows the likelihood ties together; None as it was found.
        """
        setup = self.known()
        if arguments is not None and not setup.subsampled:
            setup = replace(setup, arguments=as_arrays(self.model, *arguments))
        if coupling is not None:
            setup = replace(setup, coupling=Coupling(*coupling))
        self._keep(setup)

    def _prepare(self, base_key, args, kwargs, saved=None) -> Setup:
        warn_of_rounded_arguments(self.model, args, kwargs)
        made_of = self.model, self.approximation, self._make_base, self.prefix
        return without_leaks(prepare, *made_of, base_key, args, kwargs, saved)

    def _prepare_alone(self, args, kwargs, saved=None) -> Setup:
        args, kwargs = as_arrays(self.model, args, kwargs)
        with handlers.block():
            return self._prepare(jax.random.key(0), args, kwargs, saved)

    def _keep(self, setup):
        self._setup, self.prototype_trace = setup, setup.trace

    def known(self) -> Setup:
        """
        What the set-up found out.

        :raises ValueError: if the guide is not set up.
        """
        return check_set_up(self._setup)

    @property
    def base_guide(self):
        """The guide for the latents beside f; None before the set-up, or without them."""
        return None if self._setup is None else self._setup.base_guide

    @property
    def couples_rows(self) -> bool:
        """Whether the likelihood ties rows of X together; known after the set-up."""
        return self._setup is not None and self._setup.coupling.couples

    @property
    def approximations(self) -> dict:
        """What is put at each GP site; known after the set-up."""
        return self.known().approximations

    def parameter_names(self) -> dict[str, dict[str, str]]:
        """
        For each GP site, the names of its parameters in ``params`` by their names in the
        approximation (``"Z"``, ``"qu_mu"`` and so on).
        """
        return {name: dict(site.names) for name, site in self.known().sites.items()}

    def roles(self) -> dict[str, str]:
        """
        What the parameters of GP sites are for, by name: ``"variational"`` or
        ``"inducing"``.
        """
        return self.known().roles

    def take_natural_gradients(self, rate: float) -> None:
        """
        Say that :func:`~numpyro_sgp.natural_gradients` will train this guide, as it does
        when it is made: families whose derivatives are natural gradients refuse them
        otherwise.

        :param rate: the largest step.
        :raises ValueError: if another one was given before.
        """
        if not any(o.family.is_natural for o in check_approximations(self.approximation)):
            return
        if self.natural_rate not in (None, rate):
            raise ValueError(
                f"This guide takes natural gradients of the rate {self.natural_rate} "
                f"already, and another optimiser has {rate}. Make a new guide for it."
            )
        self.natural_rate = rate

    def fingerprint(self) -> str:
        """
        What model and guide are made of as a short string, to be kept beside parameters
        and compared before they are used again: the sites and their distributions,
        kernels and means by their classes, approximations, and names and shapes of the
        parameters. It depends on no values, and on the number of rows only where
        parameters have that length. Known after the set-up.

        :return: 16 hexadecimal digits.
        """
        return self.known().fingerprint

    def check_params(self, params: dict) -> None:
        """
        :raises ValueError: if ``params`` are not this guide's, or not finite.
        """
        setup, fixed = self.known(), {}
        for site in setup.sites.values():
            fixed |= site.values(trained=False)
        check_params(params, setup.shapes, fixed)


def guide_in_float64(guide: PreparedGuide) -> PreparedGuide:
    """
    A guide that is set up as this one, for parameters and data of 64 bits where it has been
    set up in 32: what its posteriors are made of beside them is of 64 bits too.

    :param guide: which is left as it is.
    """
    other, setup = copy.copy(guide), guide.known()
    sites = {name: site.in_float64() for name, site in setup.sites.items()}
    other._setup = replace(setup, sites=sites)
    return other
