"""What a sparse posterior computes, by a program each where all that it is of is known."""

import math
from functools import partial, wraps

import jax.numpy as jnp

from numpyro_sgp._programs import at_once
from numpyro_sgp.families import Factors
from numpyro_sgp.inducing.covariances import cross_covariance, inducing_covariance
from numpyro_sgp.linalg import whitened_solve

_SMALL = 2**18  # numbers of A; its kernel matrix takes some hundredths of a second


def factors_of(posterior) -> tuple:
    """Factor of K_uu, its jitter, the projection A and whitened q."""
    given = posterior.prior.kernel, posterior.prior.X, posterior.inducing, posterior.given_q
    return _factors(*given, static=(posterior.jitter,), briefly=_is_small(posterior))


@at_once
def _factors(kernel, X, inducing, q, jitter):
    # The block factorisation of Algorithm 1, lines 2-4, is that of the union.
    Kuu = inducing_covariance(kernel, inducing)
    cross = partial(cross_covariance, kernel, inducing)
    chol, jitter, projection = whitened_solve(Kuu, cross(X), jitter)
    return chol, jitter, projection, q.whitened(Factors(chol, cross, kernel))


def _is_small(posterior) -> bool:
    """Whether a program that computes A takes longer to compile than to run."""
    rows = math.prod(jnp.shape(posterior.prior.X)[:-1])
    return rows * sum(points.shape[-2] for points in posterior.inducing) < _SMALL


def in_one_program(method):
    """A method of a posterior with ``in_programs``, as one program (:class:`at_once`)."""

    @at_once
    def of(posterior, factors, arrays, *static):
        posterior._kept_factors = factors
        return method(posterior, *arrays, *static)

    @wraps(method)
    def call(self, *arrays, static=()):
        if not self.in_programs:
            return method(self, *arrays, *static)
        given = self, self._factors(), arrays
        return of(*given, static=static, briefly=_is_small(self))

    return call
