"""How approximations are written, and how they show themselves."""

import numpy as np

import numpyro_sgp as sgp


def test_an_approximation_shows_what_is_not_the_default():
    assert repr(sgp.SVGP(20)) == "SVGP(num_inducing=20)"
    assert repr(sgp.SOLVEGP(20, (5, 6), whiten=False)) == (
        "SOLVEGP(num_inducing=20, num_orthogonal=(5, 6,), whiten=False)"
    )
    O = (np.zeros((10, 1)), np.zeros((5, 1)))
    shown = repr(sgp.SOLVEGP(inducing=np.zeros((3, 1)), orthogonal=O))
    assert "inducing=<array of shape (3, 1)>" in shown
    assert "orthogonal=(<array of shape (10, 1)>, <array of shape (5, 1)>,)" in shown
    assert "tight='scalar'" in repr(sgp.SVGP(3, tight="scalar"))


def test_inducing_points_of_an_initialiser_go_with_given_orthogonal_ones():
    X = np.linspace(0.0, 1.0, 20)[:, None]
    start = sgp.initial_inducing(X, 4, num_orthogonal=(3,))
    option = sgp.SOLVEGP(inducing=start, orthogonal=np.full((2, 1), 0.5))
    assert option.num_points == 6
