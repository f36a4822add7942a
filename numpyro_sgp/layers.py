"""Layers of deep GPs: a GP site whose values are the inputs of another one."""

from collections.abc import Callable
from operator import index
from typing import Any

import jax.numpy as jnp
import numpyro
from jax import Array
from jax.typing import ArrayLike

from numpyro_sgp._checks import numbers, shown
from numpyro_sgp.distributions import GaussianProcess
from numpyro_sgp.kernels import as_kernel, extract_patches
from numpyro_sgp.kernels.base import batch_shape_of
from numpyro_sgp.kernels.convolutional import patch_grid
from numpyro_sgp.means import identity, random_filters

__all__ = ["convolutional_layer", "layer"]


def layer(
    name: str,
    kernel: Any,
    X: ArrayLike,
    num_outputs: int | None = None,
    mean: Callable | ArrayLike | str | None = "identity",
) -> Array:
    r"""
    A layer of a deep GP: a GP site of Q functions of a table, whose values are a table of
    Q columns.

    It is no more than ::

        gp = sgp.GaussianProcess(kernel, X, sgp.means.identity)
        h = numpyro.sample(name, gp.expand([num_outputs])).T

    The bound of a model with such sites is the doubly stochastic one [1], with any
    approximation in any layer; for SOLVE-GP in every layer [2, section 4],

    .. math::

        E_q[\log p(y \mid f^L)] - \sum_l \{ \mathrm{KL}[q(u^l) \| p(u^l)]
            + \mathrm{KL}[q(v_\perp^l) \| p_\perp(v_\perp^l)] \} .

    Start inner layers with little noise: ``SVGP(100, initial_scale=1e-5)``, or SOLVEGP or
    ODVGP, which have that option too.

    :param name: of the site.
    :param kernel: of the functions; with a batch shape ``(Q,)``, one for each.
    :param X: inputs, shape ``(N, D)``: those of the data, or another layer's values.
    :param num_outputs: number Q of functions; that of the kernel's batch if None, or
        else D.
    :param mean: ``"identity"`` for a layer as wide as its input; else what
        :class:`~numpyro_sgp.GaussianProcess` takes: None for zero, constants, a callable
        such as :func:`numpyro_sgp.means.pca` makes for a narrower layer.
    :return: shape ``(N, Q)``.
    :raises ValueError: if X is not a table, the mean is to be the identity of a layer that
        is wider or narrower than X, or kernel or mean are for another number of functions.
    :raises TypeError: if the name is no str, or the kernel no kernel.

    **References:**

    1. Salimbeni, Deisenroth (2017). Doubly Stochastic Variational Inference for Deep
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/1705.08933
    2. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes. AISTATS. https://arxiv.org/abs/1910.10596

    >>> import jax, jax.numpy as jnp, numpyro, optax
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     h = sgp.layer("h", sgp.kernels.RBF(1.0, 1.0), X)
    ...     f = sgp.layer("f", sgp.kernels.RBF(1.0, 1.0), h, 1, mean=None)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f[:, 0], 0.1), obs=y)
    >>> X = jnp.linspace(0.0, 1.0, 20)[:, None]
    >>> inner = sgp.SOLVEGP(4, 4, initial_scale=1e-5)
    >>> guide = sgp.AutoSparseGP(model, {"h": inner, "f": sgp.SOLVEGP(4, 4)})
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    >>> y = 1.0 * (X[:, 0] > 0.5)
    >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
    >>> result.params["h_auto_Z"].shape
    (4, 1)
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"A layer needs the name of its site, a str, got {shown(name)}.")
    X = numbers(X, f"Inputs of layer '{name}'")
    if X.ndim != 2:
        raise ValueError(
            f"Layer '{name}' needs inputs of shape (N, D), got {X.shape}."
            + (" Use X[:, None] for one column." if X.ndim == 1 else "")
        )
    width = X.shape[1]
    kernel = _kernel(name, kernel)
    if num_outputs is None:
        num_outputs = (*batch_shape_of(kernel), width)[0]
    num_outputs = index(num_outputs)
    if isinstance(mean, str):
        if mean != "identity":
            raise ValueError(
                f"Layer '{name}': mean is 'identity', None, constants or a callable, got "
                f"{mean!r}."
            )
        if num_outputs != width:
            mend = (
                f"mean=sgp.means.pca(X, {num_outputs}), made once from all inputs"
                if num_outputs < width
                else "mean=None for zero, or sgp.means.Linear(weights) with weights of "
                f"shape ({num_outputs}, {width})"
            )
            raise ValueError(
                f"Layer '{name}' has {num_outputs} functions of {width} columns, whose "
                f"mean cannot be the identity. Give it {mend}."
            )
        mean = identity
    return _sample(name, _process(name, kernel, X, mean, num_outputs)).T


def convolutional_layer(
    name: str,
    kernel: Any,
    images: ArrayLike,
    num_channels: int,
    patch_size: int | tuple[int, int],
    stride: int = 1,
    mean: Callable | ArrayLike | str | None = "filters",
    joint_patches: bool = False,
    seed: int = 0,
) -> Array:
    r"""
    An image-valued layer of a deep convolutional GP [1, 2]: a GP site of C' functions of
    the patches of images, whose values, one for each patch, are the channels of new images.
    It is no more than a site with the patches of all images as its table of inputs, see
    :func:`~numpyro_sgp.kernels.extract_patches`; its inducing points are ordinary points of
    the size of a patch, and its rows N P, with P patches of each image. The last layer is a
    GP of :class:`~numpyro_sgp.kernels.Convolutional` kernel.

    A patch's value is drawn from its marginal, as in [2]: the posterior correlations of the
    patches of an image, which the next layer combines, are ignored, so that what is
    maximised is near a bound and not strictly one. With ``joint_patches`` they are kept,
    and it is one, at the cost of a P x P Cholesky factor for each image and channel.

    The layer holds arrays of N P M C' numbers in a training step (N the images of a
    minibatch, M the inducing points); nothing grows with the data set. ``sample_posterior``
    and ``Predictive`` draw all N P rows jointly, O((N P)^3): predict with
    ``guide.posterior(params, X, rng_key=key)`` or
    :func:`~numpyro_sgp.log_predictive_density`.

    :param name: of the site.
    :param kernel: of patches, with ``h * w * C`` columns; with a batch shape ``(C',)``,
        one for each channel.
    :param images: shape ``(N, H, W, C)``, or ``(N, H, W)`` for one channel.
    :param num_channels: number C' of channels of the new images.
    :param patch_size: height and width of a patch, or one number for both.
    :param stride: pixels from one patch to the next.
    :param mean: of patches: ``"filters"`` for :func:`numpyro_sgp.means.random_filters`,
        fixed; or what :class:`~numpyro_sgp.GaussianProcess` takes. With filters, k-means of
        the patches of the next layer starts from images that are the filters' (and with
        zero, from images of nothing).
    :param joint_patches: whether the patches of an image are drawn jointly.
    :param seed: of the filters.
    :return: shape ``(N, (H - h) / stride + 1, (W - w) / stride + 1, C')``.
    :raises ValueError: if images have another number of axes, patches and stride do not
        cover them exactly, or kernel or mean are for another number of channels.

    **References:**

    1. Blomqvist, Kaski, Heinonen (2018). Deep Convolutional Gaussian Processes.
       https://arxiv.org/abs/1810.03052
    2. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes. AISTATS. https://arxiv.org/abs/1910.10596

    >>> import jax.numpy as jnp, numpyro
    >>> import numpyro_sgp as sgp
    >>> from numpyro_sgp.likelihoods import RobustMax
    >>> def model(X, y=None):                                   # (N, 28, 28)
    ...     kernel = sgp.kernels.RBF(5.0, 5.0)
    ...     h = sgp.convolutional_layer("h", kernel, X, 10, patch_size=6, stride=2)
    ...     kernel = sgp.kernels.Convolutional(kernel, h.shape[1:], 4, stride=2)
    ...     gp = sgp.GaussianProcess(kernel, h.reshape(len(h), -1))
    ...     f = numpyro.sample("f", gp.expand([3]))
    ...     with numpyro.plate("data", len(X)):
    ...         numpyro.sample("y", RobustMax(f), obs=y)
    >>> last = sgp.SOLVEGP(20, 20, sgp.InducingPatches("kmeans"))
    >>> inner = sgp.SOLVEGP(20, 20, initial_scale=1e-5)
    >>> guide = sgp.AutoSparseGP(model, {"h": inner, "f": last})
    >>> loss = sgp.TraceGP_ELBO(sgp.MonteCarlo(1))
    """
    images = jnp.asarray(images)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4:
        raise ValueError(
            f"Layer '{name}' needs images of shape (N, H, W, C), got {images.shape}. For "
            "flat images use images.reshape(-1, H, W, C)."
        )
    kernel = _kernel(name, kernel)
    num, *rest = images.shape
    shape = tuple(rest)
    num_channels = index(num_channels)
    try:
        patches = extract_patches(images.reshape(num, -1), shape, patch_size, stride)
    except ValueError as error:
        raise ValueError(f"Layer '{name}': {error}") from None
    if isinstance(mean, str):
        if mean != "filters":
            raise ValueError(
                f"Layer '{name}': mean is 'filters', None, constants or a callable, got "
                f"{mean!r}."
            )
        h, w = patch_size if isinstance(patch_size, tuple | list) else (patch_size,) * 2
        mean = random_filters((h, w, shape[2]), num_channels, seed)
    num_patches = patches.shape[-2]
    table = patches.reshape(num * num_patches, -1)
    gp = _process(name, kernel, table, mean, num_channels)
    infer = {"joint_rows": num_patches if joint_patches else 1}
    g = _sample(name, gp, infer=infer)  # [C', N P]
    size = patch_grid(shape, patch_size, stride)
    return jnp.moveaxis(g.reshape(num_channels, num, *size), 0, -1)


def _kernel(name, kernel):
    try:
        return as_kernel(kernel)
    except TypeError as error:
        raise TypeError(f"Layer '{name}': {error}") from error


def _process(name, kernel, X, mean, num_functions):
    """The prior of a layer, checked."""
    batch = batch_shape_of(kernel)
    if num_functions < 1 or batch not in ((), (1,), (num_functions,)):
        raise ValueError(
            f"Layer '{name}' is to have {num_functions} functions, but its kernel is for "
            f"{batch or 'any number'} of them. Give hyperparameters one entry for each "
            "function, or none, and a layer at least one function."
        )
    try:
        gp = GaussianProcess(kernel, X, mean)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Layer '{name}': {error}") from error
    if gp.batch_shape not in ((), (1,), (num_functions,)):
        raise ValueError(
            f"Layer '{name}' is to have {num_functions} functions, but its mean is for a "
            f"batch of {gp.batch_shape}."
        )
    return gp.expand([num_functions])


def _sample(name, gp, **options):
    """Values at a GP site, shape ``(num_functions, N)``."""
    f = numpyro.sample(name, gp, **options)
    if f.shape != gp.shape():
        raise ValueError(
            f"Layer '{name}' is inside a plate, which makes several layers of it (values "
            f"of shape {f.shape}). Take it out: num_outputs (num_channels) is the number "
            "of functions."
        )
    return f
