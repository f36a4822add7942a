"""Rows that subsampled plates take."""

import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.primitives import Messenger


class WholeIfFew(Messenger):
    """
    Gives a plate that has fewer rows than its ``subsample_size`` all of them, in their
    order: NumPyro shuffles them, so that what a model of minibatches says of a few new rows
    would be of others.
    """

    def process_message(self, msg):
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            if subsample_size is not None and size < subsample_size:
                msg["args"] = (size, size)
                if msg["value"] is None:
                    numpyro.prng_key()  # as in FirstRows
                    msg["value"] = jnp.asarray(np.arange(size))


class FirstRows(Messenger):
    """
    Gives a subsampled plate its first rows, which do for starting values: outside of a
    compiled program, a draw is from an array of all of them.
    """

    def process_message(self, msg):
        if msg["type"] == "plate" and msg["value"] is None:
            size, subsample_size = msg["args"]
            if subsample_size not in (None, size):
                numpyro.prng_key()  # that of the draw, so that later ones have theirs
                number = min(size, subsample_size)
                msg["args"], msg["value"] = (size, number), jnp.asarray(np.arange(number))


class OnePlateEach(Messenger):
    """Refuses a subsampled plate that is made twice, which draws two minibatches."""

    def __enter__(self):
        self.seen = set()
        return super().__enter__()

    def process_message(self, msg):
        if msg["type"] != "plate":
            return
        name, (size, subsample_size) = msg["name"], msg["args"]
        if name in self.seen and subsample_size not in (None, size):
            raise ValueError(
                f"The model makes the subsampled plate '{name}' twice, and each draws a "
                "minibatch of its own, so that rows of X and y would not match. Make it "
                f"once and enter it as often as needed: data = numpyro.plate('{name}', "
                f"{size}, subsample_size={subsample_size}); with data as idx: ...; with "
                "data: ..."
            )
        self.seen.add(name)
