"""Classification sets of the SAVIGP paper, read from a folder that the user names."""

from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from numpyro_sgp.datasets._folder import (
    ClassificationSplit,
    locate,
    read_arrays,
    read_split,
    read_table,
    standardise,
)

_SPARSE_GP = "https://github.com/Karl-Krauth/Sparse-GP, experiments/data"

CANCER_COLUMNS = (
    "clump_thickness,uniformity_cell_size,uniformity_cell_shape,marginal_adhesion,"
    "single_epithelial_cell_size,bare_nuclei,bland_chromatin,normal_nucleoli,mitoses,y"
).split(",")
CANCER_TABLE = (
    "the 683 complete rows of breast_cancer_wisconsin.data "
    f"({_SPARSE_GP}/matlab_code_data) with a header, y = 1 benign and -1 malignant."
)
CANCER_SPLITS = (
    "0-based rows train_idx (5, 300) and test_idx (5, 383) of wbc.csv.gz, those of "
    f"{_SPARSE_GP}/wisconsin_cancer."
)


def breast_cancer(folder: str | Path, split: int = 0) -> ClassificationSplit:
    """
    Breast cancer Wisconsin, the original set [1]: benign or malignant from 9 scores from
    1 to 10, 683 complete rows, in the five 300/383 splits of [2].

    As in [2], inputs have mean 0 and standard deviation 1 (N - 1 in the variance) over
    the training rows. Labels are 1 for benign and 0 for malignant, the +1 and -1 of [2].

    Reads ``breast_cancer_wisconsin/wbc.csv.gz`` (columns clump_thickness, ..., mitoses, y
    with y = 1 or -1) and ``breast_cancer_wisconsin/savigp_splits.npz`` (``train_idx``,
    ``test_idx``: 0-based rows).

    >>> from numpyro_sgp.datasets import breast_cancer
    >>> breast_cancer("no_such_folder")
    Traceback (most recent call last):
    FileNotFoundError: No file breast_cancer_wisconsin/wbc.csv.gz in the folder ...

    **References:**

    1. Wolberg, W. H., Mangasarian, O. L. (1990). Multisurface method of pattern
       separation for medical diagnosis applied to breast cytology. PNAS 87, 9193-9196.
       UCI Machine Learning Repository, CC BY 4.0.
    2. Bonilla, E. V., Krauth, K., Dezfouli, A. (2019). Generic inference in latent
       Gaussian process models. Journal of Machine Learning Research 20(117), 1-63;
       splits of https://github.com/Karl-Krauth/Sparse-GP.

    :param folder: the folder that holds ``breast_cancer_wisconsin``.
    :param split: which split, 0 to 4 (the authors' 1 to 5).
    :return: a :class:`ClassificationSplit`.
    :raises FileNotFoundError: if a file is missing; says what it holds and its source.
    :raises ValueError: if there is no such split, or a column or an array is missing.
    """
    table = locate(folder, "breast_cancer_wisconsin/wbc.csv.gz", CANCER_TABLE)
    splits = locate(folder, "breast_cancer_wisconsin/savigp_splits.npz", CANCER_SPLITS)
    values = read_table(table, CANCER_COLUMNS)
    train, test = read_split(splits, split)
    X, y = values[:, :-1], (values[:, -1] > 0).astype(np.int64)
    (X_train, X_test), _, _ = standardise(X[train], X[test], ddof=1)
    return ClassificationSplit(X_train, y[train], X_test, y[test])


USPS_DIGITS = (4, 7, 9)
USPS_ARRAYS = (
    "X (2465, 256), y (2465,) in {4, 7, 9}, and 0-based rows train_idx (5, 1233) and "
    f"test_idx (5, 1232), from {_SPARSE_GP}/USPS."
)


def usps(folder: str | Path, split: int = 0) -> ClassificationSplit:
    """
    USPS digits 4, 7 and 9 [1]: 2465 images of 16 x 16 pixels, in the five 1233/1232 splits
    of [2].

    Labels 0, 1, 2 stand for the digits 4, 7, 9. Pixels come standardised one by one over
    all 2465 rows, test rows too, as in [2]; raw pixels could not be had.

    Reads ``usps479/usps479.npz`` (``X``, ``y``, ``train_idx``, ``test_idx``).

    **References:**

    1. Rasmussen, C. E., Williams, C. K. I. (2006). Gaussian Processes for Machine
       Learning. MIT Press (Section 3.7.3).
    2. Bonilla, E. V., Krauth, K., Dezfouli, A. (2019). Generic inference in latent
       Gaussian process models. Journal of Machine Learning Research 20(117), 1-63;
       splits of https://github.com/Karl-Krauth/Sparse-GP.

    :param folder: the folder that holds ``usps479``.
    :param split: which split, 0 to 4 (the authors' 1 to 5).
    :return: a :class:`ClassificationSplit`.
    :raises FileNotFoundError: if the file is missing; says what it holds and its source.
    :raises ValueError: if there is no such split, or an array is missing.
    """
    path = locate(folder, "usps479/usps479.npz", USPS_ARRAYS)
    X, y = read_arrays(path, "X", "y")
    train, test = read_split(path, split)
    X, y = X.astype(np.float64), np.searchsorted(USPS_DIGITS, y)
    return ClassificationSplit(X[train], y[train], X[test], y[test])


MNIST_ARRAYS = (
    "x_train (60000, 28, 28), y_train, x_test (10000, 28, 28), y_test as uint8, the file "
    "of Keras (https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz)."
)


def mnist(
    folder: str | Path,
    binary: bool = False,
    num_train: int | None = None,
    num_test: int | None = None,
    dtype: DTypeLike = np.float64,
) -> ClassificationSplit:
    """
    MNIST [1]: 60,000 and 10,000 images of digits, 28 x 28 pixels, flattened and divided by
    255.

    Reads ``mnist/mnist.npz`` (``x_train``, ``y_train``, ``x_test``, ``y_test``).

    **References:**

    1. LeCun, Y., Cortes, C., Burges, C. J. C. (1998). The MNIST database of handwritten
       digits. Usually given as CC BY-SA 3.0.

    :param folder: the folder that holds ``mnist``.
    :param binary: whether labels are 1 for odd and 0 for even digits, the MNIST-B of
        SAVIGP, and not the digits.
    :param num_train: how many training rows, the first ones; all of them by default.
    :param num_test: how many test rows, likewise.
    :param dtype: of the pixels. All rows take 0.44 GB in float64, half in float32.
    :return: a :class:`ClassificationSplit` with ``D = 784``.
    :raises FileNotFoundError: if the file is missing; says what it holds and its source.
    :raises ValueError: if an array is missing, or has fewer rows than asked for.
    """
    path = locate(folder, "mnist/mnist.npz", MNIST_ARRAYS)
    arrays = read_arrays(path, "x_train", "y_train", "x_test", "y_test")
    parts = []
    given = {"num_train": num_train, "num_test": num_test}
    for (name, num), images, labels in zip(
        given.items(), arrays[::2], arrays[1::2], strict=True
    ):
        num = len(images) if num is None else num
        if not 1 <= num <= len(images):
            raise ValueError(f"{name} must be 1 to {len(images)}, got {num}.")
        pixels = images[:num].reshape(num, -1).astype(dtype)
        pixels /= 255
        labels = labels[:num].astype(np.int64)
        parts += [pixels, labels % 2 if binary else labels]
    return ClassificationSplit(*parts)
