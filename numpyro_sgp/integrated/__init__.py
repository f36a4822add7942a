"""The field and its hyperparameters: one Gaussian over GP sites and effects."""

from numpyro_sgp.integrated import files  # noqa: F401, which reads what results write
from numpyro_sgp.integrated.apart import sites_apart
from numpyro_sgp.integrated.functions import MixtureFunctions
from numpyro_sgp.integrated.joint import AutoJointGP
from numpyro_sgp.integrated.joint_fit import JointFit
from numpyro_sgp.integrated.marginals import Mixture
from numpyro_sgp.integrated.nested import nested
from numpyro_sgp.integrated.result import Nested

__all__ = [
    "AutoJointGP",
    "JointFit",
    "Mixture",
    "MixtureFunctions",
    "Nested",
    "nested",
    "sites_apart",
]
