r"""
Likelihoods as model code: what takes more than a line.

The usual ones are a line of NumPyro under the data plate and need nothing from here; with
``f`` the draw of a GP site, of shape ``(N,)`` or ``(C, N)``:

======================================  =============================================
regression                              ``dist.Normal(f, sigma)``
regression, heavy tails                 ``dist.StudentT(df, f, sigma)``
two classes, labels 0 and 1             ``dist.Bernoulli(logits=f)``
C classes (softmax), labels 0..C-1      ``dist.Categorical(logits=f.T)``
C classes, the largest f wins           ``RobustMax(f)``
counts, log-Gaussian Cox process        ``dist.Poisson(jnp.exp(f + offset))``
noise that depends on the input         ``dist.Normal(f[0], jnp.exp(f[1]))``
warped GP                               ``WarpedNormal(f, sigma, a, b, c)``
GP regression network                   ``dist.Normal(gprn_mean(f, P, Q), sigma)``
seismic inversion                       ``dist.Normal(seismic_travel_times(d, v), s)``
======================================  =============================================

where ``s`` has shape ``(P, 1)``, one standard deviation for each interface. The last two
take a function of ``examples/likelihoods.py``, which also has the moments of intensities.
"""

from numpyro_sgp.likelihoods.robust_max import RobustMax, robust_max_probabilities
from numpyro_sgp.likelihoods.warped import (
    TanhWarp,
    WarpedMoments,
    WarpedNormal,
    warped_moments,
)

__all__ = [
    "RobustMax",
    "TanhWarp",
    "WarpedMoments",
    "WarpedNormal",
    "robust_max_probabilities",
    "warped_moments",
]
