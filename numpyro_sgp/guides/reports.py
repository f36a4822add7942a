"""What a guide says of what it found: factors, mixtures, inducing points."""

import warnings

import jax
import numpy as np
from numpyro.util import find_stack_level, not_jax_tracer

from numpyro_sgp.guides.points import MeanKernel
from numpyro_sgp.inducing import InducingVerdict, assess_inducing
from numpyro_sgp.linalg import max_jitter

_COLLAPSED = 1e-3  # a component with all but this weight is the only one


def check_cholesky(name: str, chol: jax.Array) -> None:
    """
    :raises ValueError: if the factor of K_uu is known and not finite.
    """
    if not_jax_tracer(chol) and not np.isfinite(chol).all():
        dtype = chol.dtype
        raise ValueError(
            f"The inducing covariance K_uu of GP site '{name}' has no Cholesky factor, "
            f"even with a jitter of {max_jitter(dtype):g} times its mean diagonal "
            f"({dtype}). Look for NaN or infinite kernel hyperparameters (has training "
            "diverged?), or a kernel that is not positive definite; in float32, try "
            "numpyro.enable_x64()."
        )


def report(name: str, posterior, approximation) -> None:
    """
    Refuses a posterior that is not finite; warns of a mixture that has become a single
    component, and of what the approximation looks at.

    :param name: of the GP site.
    :param approximation: what is put there.
    """
    check_cholesky(name, posterior.chol)
    if posterior.num_components > 1 and not_jax_tracer(posterior.log_weights):
        weights = np.exp(np.asarray(posterior.log_weights))
        if np.max(weights) > 1 - _COLLAPSED:
            _warn(
                f"The mixture at GP site '{name}' has collapsed to one component (weights "
                f"{np.array2string(weights, precision=3)}): SVGP(M, covariance=...) gives "
                "the same at less cost. Where several modes are expected, start the "
                "components further apart (MixtureSVGP(..., spread=1.0)) or with another "
                "seed."
            )
    approximation.report(name, posterior)


def _warn(message):
    warnings.warn(message, stacklevel=find_stack_level())


def verdicts(found: dict, approximations: dict) -> dict[str, InducingVerdict]:
    """
    How good inducing points are, of the GP sites that have them among the inputs.

    :param found: by site the kernel, inputs X and inducing points of each set.
    :param approximations: by site.
    :raises NotImplementedError: if no site has such points.
    """
    names = [name for name, a in approximations.items() if not a.inter_domain]
    if not names:
        raise NotImplementedError(
            f"GP site '{next(iter(approximations))}': verdicts are of inducing points "
            "among the inputs, which its inducing variables are not. Compare the "
            "variances of guide.posterior(params, X) with the prior's instead."
        )
    return {name: _verdict(*found[name]) for name in names if name in found}


def _verdict(kernel, X, points):
    """Of points for each latent, the first latent's."""
    X = np.asarray(X).reshape(-1, np.shape(X)[-1])
    first, *rest = (np.asarray(p).reshape(-1, *np.shape(p)[-2:])[0] for p in points)
    return assess_inducing(MeanKernel(kernel), X, first, tuple(rest))
