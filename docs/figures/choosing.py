"""The figure of docs/choosing.md: python docs/figures/choosing.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: A question, what is chosen where the answer is yes, and a remark on it.
STEPS = (
    (
        "Must intervals of hyperparameters\nand effects be right, or how they\ndepend on "
        "each other?",
        "sgp.nested(model, SVGP(M), data)",
        "one row at a time in the likelihood, 15 hyperparameters at most;\n"
        "else NUTS on sparsify(model, SVGP(M)), or on Collapsed... (Gaussian)",
    ),
    (
        "No gradient of the likelihood?",
        "SVGP(M), expectation=ScoreFunction(n)",
        "beside it: MCMC(EllipticalSlice(model)), which needs none either",
    ),
    (
        "Several functions that the data\ntie together?",
        'SVGP(M, covariance="coupled")',
        "one Gaussian over all Q functions of a site, with (Q M)² numbers;\n"
        "over several sites and effects: sgp.fit(..., joint=True)",
    ),
    (
        "Several modes of f?",
        "MixtureSVGP(M, K)",
        "K Gaussians with weights; without natural gradients",
    ),
    (
        "A few hundred rows?",
        "VGP()",
        "inducing points at all rows, so that they lose nothing",
    ),
    (
        "Do the inducing points lose too much\nat the M that you can pay for?",
        "SOLVEGP(M, M) or ODVGP(M, M2)",
        "M + M points: a step at 0.80 to 1.01 of that of SVGP(2 M)",
    ),
    (
        "Gaussian likelihood?",
        'SVGP(M, tight="diagonal")',
        "the same posterior, a higher bound, less noise learned",
    ),
)
LAST = ("SVGP(M)", "all others: any likelihood, any number of rows\n(SVGP('auto') finds M)")

INK, QUESTION, ANSWER = "#1a1a1a", "#eef2f7", "#dcefe2"
HEIGHT = 1.0  # of a step


def box(ax, x, y, width, height, text, colour, **font):
    patch = matplotlib.patches.FancyBboxPatch(
        (x, y - height / 2),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=colour,
        edgecolor="#8a94a0",
        linewidth=0.8,
    )
    ax.add_patch(patch)
    ax.text(x + width / 2, y, text, ha="center", va="center", color=INK, **font)


def arrow(ax, start, end, text, offset):
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#5b6673"})
    middle = [(a + b) / 2 + c for a, b, c in zip(start, end, offset, strict=True)]
    ax.text(*middle, text, fontsize=8, color="#5b6673", ha="center", va="center")


def main():
    number = len(STEPS) + 1
    figure, ax = plt.subplots(figsize=(7.4, 0.92 * number), layout="constrained")
    ax.set(xlim=(0.0, 10.0), ylim=(-(number - 0.4) * HEIGHT, 0.5))
    ax.axis("off")
    left, right = (0.05, 3.75), (4.65, 5.3)
    for i, (question, answer, remark) in enumerate(STEPS):
        y = -i * HEIGHT
        box(ax, left[0], y, left[1], 0.64, question, QUESTION, fontsize=8.5)
        box(ax, right[0], y + 0.07, right[1], 0.4, "", ANSWER)
        ax.text(
            right[0] + right[1] / 2,
            y + 0.07,
            answer,
            ha="center",
            va="center",
            family="monospace",
            fontsize=8.5,
            color=INK,
        )
        ax.text(
            right[0] + 0.05,
            y - 0.17,
            remark,
            va="top",
            fontsize=7.5,
            color="#3c4650",
            linespacing=1.15,
        )
        arrow(ax, (left[0] + left[1], y + 0.07), (right[0], y + 0.07), "yes", (0, 0.11))
        middle = left[0] + left[1] / 2
        arrow(ax, (middle, y - 0.32), (middle, y - HEIGHT + 0.32), "no", (0.25, 0))
    y = -len(STEPS) * HEIGHT
    box(ax, left[0], y, left[1], 0.64, LAST[0], ANSWER, family="monospace", fontsize=9)
    ax.text(right[0] + 0.05, y, LAST[1], va="center", fontsize=7.5, color="#3c4650")
    figure.savefig(Path(__file__).parent / "choosing.png", dpi=130, facecolor="white")


if __name__ == "__main__":
    main()
