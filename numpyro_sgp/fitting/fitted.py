"""The result of a fit: one object that predicts, draws, scores, shows and saves itself."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult

from numpyro_sgp._checks import check_args, check_key
from numpyro_sgp._programs import split
from numpyro_sgp._threads import alone, methods_alone
from numpyro_sgp.diagnostics import to_arviz
from numpyro_sgp.diagnostics.bound import bound_of
from numpyro_sgp.distributions import FunctionSamples, SparsePosterior
from numpyro_sgp.distributions.arguments import as_arrays, with_given
from numpyro_sgp.elbo import TraceGP_ELBO
from numpyro_sgp.fitting.check import check
from numpyro_sgp.fitting.files import write
from numpyro_sgp.fitting.log_score import LogScore
from numpyro_sgp.fitting.options import with_options
from numpyro_sgp.fitting.problem import rows_of_sites
from numpyro_sgp.fitting.summary import summary
from numpyro_sgp.fitting.verdict import Verdict
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.plots.posterior import Plotted
from numpyro_sgp.predictive import (
    Predictions,
    Predictor,
    log_predictive_density,
    predict,
)
from numpyro_sgp.training.descent import Descent
from numpyro_sgp.training.padding import rows_that_count


@methods_alone
class Fitted(Plotted):
    """
    A trained sparse GP model, with all that one asks of it.

    Arguments of the methods, but for options by name, are those of the model, most often
    new inputs ``X_new``; with ``y_new`` where observations are asked for, and with the
    options that the model was trained with, if it has any. Printed, it is a summary.

    :param guide: the guide, set up.
    :param params: its parameters and those of the model.
    :param args: arguments of the model with the training data, such as ``(X, y)``; None
        if they are not at hand.
    :param kwargs: its keyword arguments.
    :param loss: what was minimised, such as :class:`~numpyro_sgp.TraceGP_ELBO`; None if
        not known.
    :param losses: loss of each step, shape ``(num_steps,)``; None if not known.
    :param bound: the bound on the log evidence (on a log joint density where latents beside
        f are at points, as under ``AutoDelta``), with all of the data.
    :param bound_se: its standard error, where it is random.
    :param seconds: how long the training took.
    :param stopped: why it ended.
    :param svi: the :class:`~numpyro.infer.SVI` that was trained, if any.
    :param descent: what trained it, for :meth:`check` to go on without compiling anew.
    :param apart: nats by which it is above where trainings from other starts ended; 0 if
        one came near or there were none.
    :raises TypeError: if ``guide`` is no :class:`~numpyro_sgp.AutoSparseGP`, or ``args``
        no tuple.
    :raises ValueError: if the guide is not set up, or ``params`` are not its.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> fitted = sgp.fit(model, sgp.SVGP(3), (X, y), progress_bar=False)
    >>> fitted.predict(X[:2])["y"].mean.shape
    (2,)
    >>> fitted.log_score(X, y)["y"].rows.shape
    (5,)
    >>> f = fitted.functions(jax.random.key(1), (4,))["f"]
    >>> f(jnp.linspace(0.0, 9.0, 7)[:, None]).shape
    (4, 7)
    """

    @alone
    def __init__(
        self,
        guide: AutoSparseGP,
        params: dict,
        args: tuple | None = None,
        kwargs: dict | None = None,
        *,
        loss: Any = None,
        losses: Any = None,
        bound: float = math.nan,
        bound_se: float = 0.0,
        seconds: float = math.nan,
        stopped: str = "",
        svi: SVI | None = None,
        descent: Descent | None = None,
        apart: float = 0.0,
    ):
        if not isinstance(guide, AutoSparseGP):
            raise TypeError(
                f"guide must be an AutoSparseGP, got {type(guide).__name__}. Results of "
                "other guides are used as NumPyro says: Predictive(model, guide=guide, "
                "params=params, ...)."
            )
        check_args(args)
        guide.check_params(params)
        if args is None and kwargs:
            args = ()
        self.guide = guide
        self.model = guide.model
        self.params = params
        self.args = None if args is None else tuple(args)
        self.kwargs: dict = dict(kwargs or {})
        self.loss = loss
        self.losses = losses
        self.bound, self.bound_se = float(bound), float(bound_se)
        self.seconds, self.stopped = float(seconds), stopped
        self.svi, self.descent, self.apart = svi, descent, apart
        #: Number of rows of the training data, if known.
        self.num_rows: int | None = None
        #: Arguments with a row or two of the data, from a file.
        self.examples: tuple | None = None
        #: With ``num_inducing="auto"``: number of inducing points, nats that they lose at
        #: least, and seconds, of each training.
        self.grown: tuple[tuple[int, float, float], ...] = ()
        #: What a file has beside the fit, by the kind of result that it is part of.
        self.more: dict = {}
        #: What is wrong with the fit, if anything, once it was looked at.
        self._verdict: str | None = None
        self._attrs: dict[str, float | str] = {}
        if self.args is not None:
            count = rows_that_count(self.args, self.kwargs)
            self.num_rows = rows_of_sites(guide, *as_arrays(self.model, *count))

    def __getstate__(self):
        """For copies and pickles: without its training, whose programs stay here."""
        return {**vars(self), "svi": None, "descent": None}

    @classmethod
    @alone
    def from_svi(cls, svi: SVI, result: Any, *args, **kwargs) -> Fitted:
        """
        Of a training by NumPyro's SVI, :func:`~numpyro_sgp.train` or
        :func:`~numpyro_sgp.fit_lbfgs`. The bound is taken with all of the data that are
        given; where it is random, it is the mean over ten keys, with its standard error.

        :param svi: the inference problem.
        :param result: what ``svi.run`` or the others returned.
        :param args: arguments of the model, with the training data.
        :param kwargs: its keyword arguments.
        :raises TypeError: if the guide of ``svi`` is no :class:`~numpyro_sgp.AutoSparseGP`,
            or ``result`` something else.
        :raises ValueError: if there are no arguments, or ``result`` is of another guide.
        """
        if not isinstance(svi, SVI) or not hasattr(result, "params"):
            raise TypeError(
                "from_svi takes an SVI and what svi.run returned, got "
                f"{type(svi).__name__} and {type(result).__name__}."
            )
        if not (args or kwargs):
            raise ValueError(
                "from_svi needs the training data for the bound: "
                "Fitted.from_svi(svi, result, X, y)."
            )
        kwargs = {**svi.static_kwargs, **kwargs}
        fitted = cls(
            svi.guide,
            result.params,
            args,
            kwargs,
            loss=svi.loss,
            losses=getattr(result, "losses", None),
            seconds=getattr(result, "seconds", math.nan),
            stopped=getattr(result, "stopped", ""),
            svi=svi,
        )
        fitted.bound, fitted.bound_se = bound_of(svi, result.params, args, kwargs)
        return fitted

    # ---- predictions --------------------------------------------------------------

    def posterior(
        self, *args, rng_key: Array | None = None, **kwargs
    ) -> dict[str, SparsePosterior]:
        """
        q(f(X)) at each GP site, in closed form, with hyperparameters (and other latents) at
        their medians; :meth:`predict` averages over them.

        :param args: arguments of the model, ``X_new`` most often.
        :param rng_key: key for one draw of the other latents in place of their medians.
        :return: a distribution for each GP site, with ``mean`` and ``variance`` of shape
            ``batch_shape + (N,)``; see :meth:`AutoSparseGP.posterior`.
        :raises ValueError: if the inputs do not fit the model.
        """
        args, kwargs = self._arguments(args, kwargs, "posterior(X)")
        return self.guide.posterior(self.params, *args, rng_key=rng_key, **kwargs)

    def predict(
        self,
        *args,
        quantiles: Sequence[float] = (0.05, 0.95),
        num_draws: int = 100,
        rng_key: Array | None = None,
        batch_size: int = 10_000,
        **kwargs,
    ) -> Predictions:
        """
        Means, standard deviations and quantiles of f, of deterministic sites and of the
        responses at new inputs, of classes the probabilities, averaged over hyperparameters
        where the base guide is a distribution of them; see :func:`~numpyro_sgp.predict`.

        Keyword arguments of the fit that are no data (flags, names, functions, numbers such
        as that of groups; no sizes of the data, and no arrays of as many rows) are here,
        and in the other methods, what they were unless they are given.

        :param args: arguments of the model, ``X_new`` most often; none: the training data.
        :param quantiles: levels between 0 and 1.
        :param num_draws: draws of other latents and of inner layers.
        :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
        :param batch_size: rows done at a time.
        :return: a :class:`~numpyro_sgp.Prediction` for each GP site, each response that
            depends on one, and each deterministic site whose rows are of one row of GP
            sites each; others are in :meth:`sample`.
        :raises ValueError: as :func:`~numpyro_sgp.predict` does, and if arguments are left
            out and the training data are not there.
        """
        args, kwargs = self._arguments(args, kwargs, "predict(X)")
        return predict(
            self.guide,
            self.params,
            *args,
            quantiles=quantiles,
            num_draws=num_draws,
            rng_key=rng_key,
            batch_size=batch_size,
            **kwargs,
        )

    def predictor(self, batch_size: int = 512) -> Predictor:
        """
        For marginal means and variances of f at many inputs, or many times; see
        :class:`~numpyro_sgp.Predictor`.

        :param batch_size: rows done at a time.
        """
        return Predictor(self.guide, self.params, batch_size)

    def log_score(
        self,
        *args,
        expectation: Any = None,
        rng_key: Array | None = None,
        num_draws: int = 100,
        **kwargs,
    ) -> dict[str, LogScore]:
        """
        Log predictive density of observations; see
        :func:`~numpyro_sgp.log_predictive_density`.

        :param args: arguments of the model with observations, such as ``X_new, y_new``;
            none: the training data.
        :param expectation: a rule for expectations over f; by the number of latent
            functions if None.
        :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
        :param num_draws: draws of other latents and of inner layers.
        :return: for each observed site the mean over the rows that no mask leaves out, and
            the density of each row, of all that it has together (several outputs, but for
            those that a mask leaves out; NaN if it leaves out all), or of each observation
            where these are of rows in another order or number (``f[index]``).
        :raises ValueError: if there are no observations, or one event of all rows.
        """
        args, kwargs = self._arguments(args, kwargs, "log_score(X, y)")
        options = {"expectation": expectation, "rng_key": rng_key, "num_draws": num_draws}
        found = log_predictive_density(self.guide, self.params, *args, **options, **kwargs)
        return {name: LogScore(float(jnp.nanmean(v)), v) for name, v in found.items()}

    # ---- draws and summaries of latents -------------------------------------------

    def sample(self, key: Array, *args, sample_shape: tuple = (), **kwargs) -> dict:
        """
        Joint draws of all latent and deterministic sites from the posterior.

        :param key: random key.
        :param args: arguments of the model, ``X_new`` most often; none: the training data.
        :param sample_shape: shape of the sample.
        :return: values by site, each of shape ``sample_shape + site shape``.
        :raises ValueError: if arguments are left out and the training data are not there.
        """
        args, kwargs = self._arguments(args, kwargs, "sample(key, X)")
        return self.guide.sample_posterior(
            key, self.params, *args, sample_shape=sample_shape, **kwargs
        )

    def functions(
        self, key: Array, shape: tuple = (), num_features: int = 1024
    ) -> dict[str, FunctionSamples]:
        """
        Draws of whole functions, which can be evaluated anywhere, with hyperparameters at
        their medians; of a deep GP those of each layer, to be put into one another.

        :param key: random key.
        :param shape: shape of the draws, or their number.
        :param num_features: random features of each draw; see
            :meth:`GPPosterior.sample_functions`.
        :return: for each GP site a function from X of shape ``(N, D)`` to values of shape
            ``shape + batch_shape + (N,)``.
        :raises ValueError: if the fit has no arguments of the model at all.
        :raises NotImplementedError: for kernels without random features.
        """
        check_key(key, "key")
        if self.args is None and self.examples is not None:
            args, kwargs = self.examples
        else:
            what = "posterior(X)['f'].sample_functions(key)"
            args, kwargs = self._arguments((), {}, what)
        posteriors = self.posterior(*args, **kwargs)
        keys = split(key, len(posteriors))
        return {
            name: q.sample_functions(k, shape, num_features)
            for k, (name, q) in zip(keys, posteriors.items(), strict=True)
        }

    def median(self, *args, **kwargs) -> dict:
        """
        Posterior medians of latent sites; that of f given those of the others.

        :param args: arguments of the model, ``X_new`` most often; none: the training data.
        :raises ValueError: if arguments are left out and the training data are not there.
        """
        args, kwargs = self._arguments(args, kwargs, "median(X)")
        return self.guide.median(self.params, *args, **kwargs)

    def quantiles(self, quantiles: Sequence[float], *args, **kwargs) -> dict:
        """
        Posterior quantiles of latent sites; those of f given medians of the others.

        :param quantiles: levels between 0 and 1, or one such number.
        :param args: arguments of the model, ``X_new`` most often; none: the training data.
        :return: for each site an array with a leading axis of the levels.
        :raises ValueError: if arguments are left out and the training data are not there.
        """
        args, kwargs = self._arguments(args, kwargs, "quantiles(levels, X)")
        return self.guide.quantiles(self.params, quantiles, *args, **kwargs)

    def to_arviz(self, *args, **kwargs) -> Any:
        """
        The fit as ArviZ data; see :func:`~numpyro_sgp.to_arviz`. After :meth:`check`, it
        has what that found too, for :func:`~numpyro_sgp.diagnostics.compare`.

        :param args: arguments of the model with all of the data; those of the training if
            left out.
        :param kwargs: options of :func:`~numpyro_sgp.to_arviz` (``num_samples``,
            ``rng_key``, ``coords``, ``dims``, ``khat`` and so on), and keyword arguments of
            the model.
        :return: a :class:`xarray.DataTree`, or an ``arviz.InferenceData`` before ArviZ 1.
        :raises ValueError: if arguments are left out and the training data are not there,
            and as :func:`~numpyro_sgp.to_arviz` does.
        """
        args, own = self._arguments(args, {}, "to_arviz(X, y)")
        args, kwargs = with_given(self.model, args, own, kwargs)
        svi = self.svi
        if svi is None:
            loss = TraceGP_ELBO() if self.loss is None else self.loss
            svi = SVI(self.model, self.guide, optax.sgd(0.0), loss)
        result = SVIRunResult(self.params, None, self.losses)
        if np.isfinite(self.seconds):
            kwargs = {"seconds": self.seconds, **kwargs}
        found = to_arviz(svi, *args, result=result, **kwargs)
        found.attrs.update(self._attrs)
        return found

    def check(self, *args, rng_key: Array | None = None, **kwargs) -> Verdict:
        """
        The nats between this fit and the truth, by cause, each with what to do about it.

        * ``q(u)``: what it has left to gain, by the KL to where a natural step leads
          (:func:`~numpyro_sgp.diagnostics.optimality.nats_left`).
        * ``other parameters``: what some more iterations of L-BFGS gain and would go on
          to gain (with other inducing points too, where that is cheap), with a standard
          error where the bound is random; where the data are many, how much the losses
          fell in the end.
        * ``inducing points``: what they lose at least, by orthogonal ones
          (:func:`~numpyro_sgp.diagnostics.sparsity.sparsity_curve`), and for Gaussian
          likelihoods a bracket of the evidence.
        * ``family``: what is between q and the posterior near it, given latents at points,
          by importance weights with their k-hat, for few rows
          (:func:`~numpyro_sgp.diagnostics.khat.weigh`); by how much they move the means
          and standard deviations of f, which a fraction of a nat can be enough for.
        * ``point estimates``: which latents are held at points.
        * ``float32``, where JAX computes in it: what the bound gains at least in float64.
        * ``quadrature``, where it is .1 nats or more: how far the bound is from that of
          many more nodes at each row, as of likelihoods narrow beside the sds of f.

        :param args: arguments of the model with all of the data; those of the training if
            left out.
        :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
        :return: the verdict, a table when it is printed; its ``summary`` is then in the
            repr of this fit.
        :raises ValueError: if arguments are left out and the training data are not there.
        """
        descent = None if args or kwargs else self.descent
        args, kwargs = self._arguments(args, kwargs, "check(X, y)", filled=True)
        loss = TraceGP_ELBO() if self.loss is None else self.loss
        svi = self.svi or SVI(self.model, self.guide, optax.sgd(0.0), loss)
        found = check(
            self.guide,
            self.params,
            args,
            kwargs,
            svi=svi,
            loss=loss,
            losses=self.losses,
            bound=self.bound,
            descent=descent,
            grown=self.grown,
            apart=self.apart,
            rng_key=jax.random.key(0) if rng_key is None else rng_key,
        )
        self._verdict, self._attrs = found.summary, found.attrs
        return found

    def _arguments(self, args, kwargs, call, filled=False) -> tuple[tuple, dict]:
        """Those given, or of the training: with rows that do not count if ``filled``."""
        if args or kwargs:
            known = self.examples if self.args is None else (self.args, self.kwargs)
            name, *_ = call.partition("(")
            methods = [getattr(self, name)] + [to_arviz] * (name == "to_arviz")
            where = self.guide, known, args, kwargs, *methods
            return args, with_options(*where, num_rows=self.num_rows)
        if self.args is None and not _takes_arguments(self.model):
            return (), {}
        if self.args is None:
            raise ValueError(
                "This fit does not have its training data (a file has none of them): pass "
                f"the model's arguments, fitted.{call}."
            )
        known = self.args, self.kwargs
        return known if filled else rows_that_count(*known)

    # ---- figures and files --------------------------------------------------------

    def save(self, path: str | os.PathLike) -> None:
        """
        Writes the fit to a file, for :func:`~numpyro_sgp.load` in another process.

        The file is an ``.npz`` archive of plain arrays, with a header in JSON and SHA-256
        checksums of both; nothing in it is ever executed. It has the parameters, the
        inducing points as they began (rows of the training inputs, but by K-means), the
        options of approximations, base guide and loss, and what :class:`Fitted` knows of
        the training.

        **It has two rows of the data**: the first two of each argument of the model that
        has as many rows as the first one, and whole all others of up to 10,000 numbers, so
        that a guide can be set up without the data. With ``VGP`` and
        ``covariance="pseudo_data"``, it has all inputs. It does not have the model, which
        is code.

        Where the model cannot be set up with two rows (latents for each row, a number of
        groups that is read off the data), a warning says that :func:`~numpyro_sgp.load`
        will need the training data. Where an approximation has a family, a relaxation or
        inducing variables of one's own, or the base guide is none of NumPyro's, ``load``
        asks for them. ``init_loc_fn`` of a base guide is not kept.

        :param path: the file; written at once or not at all, over one that is there.
        :raises ValueError: if the parameters are not the guide's or not finite.
        :raises TypeError: if they have something else than arrays in dicts, lists and
            tuples.
        """
        write(path, self)

    def __repr__(self):
        return summary(self)


def _takes_arguments(model) -> bool:
    """Whether a model has arguments that it needs; True where that is not known."""
    try:
        inspect.signature(model).bind()
    except (TypeError, ValueError):
        return True
    return False
