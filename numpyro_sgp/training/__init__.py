"""Training: on minibatches, by L-BFGS, and by natural gradients for q(u)."""

from numpyro_sgp.training.lbfgs import fit_lbfgs
from numpyro_sgp.training.minibatches import train
from numpyro_sgp.training.natural_gradients import natural_gradients
from numpyro_sgp.training.padding import pad_rows
from numpyro_sgp.training.results import FitInterrupted, TrainResult

__all__ = [
    "FitInterrupted",
    "TrainResult",
    "fit_lbfgs",
    "natural_gradients",
    "pad_rows",
    "train",
]
