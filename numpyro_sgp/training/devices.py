"""Where the arrays of a training lie: on one device, or on those of a mesh."""

from contextlib import nullcontext

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_sgp.training.checkpoint import is_key


class Devices:
    """
    Data-parallel placement: rows split over all devices of a mesh, all else on each.

    :param mesh: None for one device, JAX's own choice.
    :raises TypeError: if it is something else.
    :raises ValueError: if it has devices of some hosts, but not of all.

    >>> devices = Devices(Mesh(jax.devices()[:1], ("data",)))
    >>> devices.hosts, devices.split(np.ones((3, 4)), 1).shape
    (1, (3, 4))
    """

    def __init__(self, mesh: Mesh | None = None):
        if not isinstance(mesh, Mesh | None):
            raise TypeError(
                "mesh must be a mesh of devices, such as "
                "jax.sharding.Mesh(jax.devices(), ('data',)), or None, got "
                f"{type(mesh).__name__}."
            )
        #: How many processes (hosts) share the training, each with rows of its own.
        self.hosts, self.mesh = 1, None
        if mesh is not None:
            # XLA, and not the types of arrays, is to carry shardings through a model.
            self.mesh = Mesh(mesh.devices, mesh.axis_names)
            self.hosts = len({device.process_index for device in mesh.devices.flat})
            if self.hosts not in (1, jax.process_count()):
                raise ValueError(
                    f"mesh has devices of {self.hosts} of {jax.process_count()} hosts. "
                    "Give it those of all, jax.sharding.Mesh(jax.devices(), ('data',)), or "
                    "of one."
                )

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes files and shows the bar."""
        return self.hosts == 1 or jax.process_index() == 0

    def set(self):
        """A context in which programs are compiled for the mesh."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def check(self, batch_size: int):
        """
        :raises ValueError: if a batch cannot be split evenly.
        """
        size = 1 if self.mesh is None else self.mesh.size
        if batch_size % size:
            near = max(size, batch_size - batch_size % size)
            raise ValueError(
                f"The {size} devices of mesh must have as many rows each, but batches have "
                f"{batch_size} rows. Use a multiple of {size}, such as {near}."
            )

    def split(self, arrays, axis: int):
        """
        Arrays on the devices, split along an axis.

        :param arrays: of the rows of this host.
        """
        if self.mesh is None:
            return jax.device_put(arrays)
        spec = PartitionSpec(*[None] * axis, self.mesh.axis_names)
        sharding = NamedSharding(self.mesh, spec)
        return jax.tree.map(
            lambda a: jax.make_array_from_process_local_data(sharding, a), arrays
        )

    def copy(self, tree):
        """Arrays, the same on each host, on each device."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, PartitionSpec())
        if self.hosts == 1:
            return jax.device_put(tree, sharding)

        def put(leaf):
            if is_key(leaf):
                data = put(jax.random.key_data(leaf))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

        return jax.tree.map(put, tree)

    def share(self, arrays: tuple) -> tuple:
        """This host's part of rows that all hosts have."""
        size = len(arrays[0]) // self.hosts
        start = size * (jax.process_index() if self.hosts > 1 else 0)
        return tuple(a[start : start + size] for a in arrays)

    def gather(self, arrays: tuple) -> tuple:
        """The rows of all hosts, on each host."""
        if self.hosts == 1:
            return arrays
        from jax.experimental import multihost_utils

        return tuple(
            np.asarray(multihost_utils.process_allgather(a, tiled=True)) for a in arrays
        )


def copied(tree):
    """A tree that a compiled program is to leave on each device of the mesh that is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, PartitionSpec())
