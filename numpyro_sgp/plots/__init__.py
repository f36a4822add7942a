"""
Figures by Matplotlib: of posteriors, components, inducing points, verdicts, and trainings.

Each function draws into the axes that it is given, or into new ones, and returns them;
none of them shows or saves a figure. Colours are those of the style in use (``C0``, ``C1``
and so on, with ``text.color`` for data), ArviZ's styles among them:
``az.style.use("arviz-variat")`` or ``matplotlib.style.use(...)`` before the call.
"""

from numpyro_sgp.plots.comparison import plot_comparison
from numpyro_sgp.plots.components import plot_components
from numpyro_sgp.plots.inducing import plot_inducing
from numpyro_sgp.plots.panels import plot_panels
from numpyro_sgp.plots.posterior import plot_posterior
from numpyro_sgp.plots.training import plot_training
from numpyro_sgp.plots.verdict import plot_verdict

__all__ = [
    "plot_comparison",
    "plot_components",
    "plot_inducing",
    "plot_panels",
    "plot_posterior",
    "plot_training",
    "plot_verdict",
]
