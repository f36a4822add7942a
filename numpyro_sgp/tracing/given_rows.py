"""Data plates where a batch of rows is given from outside."""

from collections.abc import Collection

import jax.numpy as jnp
from numpyro.primitives import Messenger


class GivenRows(Messenger):
    """
    Numbers the rows of a batch that is given from outside. A plate that subsamples would
    draw them from all N, which are an array of that length where nothing is compiled.

    A plate of the batch's own length may be taken for one that subsamples: what is in it
    then counts N / B times (eq. 33 of Bonilla, Krauth and Dezfouli 2018).

    :param batch_size: rows B of the batch.
    :param num_rows: N, if it is known: plates of other sizes draw their own.
    :param whole: names of the plates that are taken so.
    """

    def __init__(self, batch_size: int, num_rows: int | None, whole: Collection[str] = ()):
        self.batch_size, self.num_rows, self.whole = batch_size, num_rows, whole
        self._taken: set[str] = set()
        super().__init__()

    def process_message(self, msg):
        """Numbers rows at plates, and scales what is in those that are taken for others."""
        B, N = self.batch_size, self.num_rows
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            if msg["name"] in self.whole and size == B < N:
                self._taken.add(msg["name"])
                msg["args"], msg["value"] = (N, B), jnp.arange(B)
            elif subsample_size == B < size == (N or size) and msg["value"] is None:
                msg["value"] = jnp.arange(B)
        elif msg["type"] == "sample":
            for frame in msg["cond_indep_stack"]:
                if frame.name in self._taken:
                    scale = 1.0 if msg["scale"] is None else msg["scale"]
                    msg["scale"] = scale * (N / B)
