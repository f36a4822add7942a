"""The figure of the README, by its own code: python docs/make_figures.py"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def main():
    readme = (HERE.parent / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, flags=re.S)[1]
    plt.rcParams |= {"figure.figsize": (6.4, 3.4), "figure.constrained_layout.use": True}
    exec(compile(code, "README.md", "exec"), {})
    plt.savefig(HERE / "figures" / "first_fit.png", dpi=110)


if __name__ == "__main__":
    main()
