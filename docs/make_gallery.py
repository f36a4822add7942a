"""The thumbnails of the gallery, from the figures of the built tutorials.

    make docs && python docs/make_gallery.py

FIGURES has the figures of each tutorial, counted from 0 as they come in its page.
"""

import argparse
import re
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
SIZE = 480, 300
FIGURES = {
    "01-first-model": [0],
    "02-groups-and-effects": [0],
    "03-counts": [1, 2],
    "04-classification": [1],
    "05-likelihoods": [0, 2, 3],
    "06-black-box": [0],
    "07-several-outputs": [0],
    "08-svi-beside-nuts": [0],
    "09-hyperparameters": [0],
    "10-how-many-points": [1],
    "11-large-data": [1],
    "12-deep-and-convolutional": [0, 3],
    "13-missing-data": [1],
    "14-kernels": [0],
    "15-bayesian-optimisation": [0],
    "16-save-and-serve": [1],
    "17-from-pandas": [0],
    "18-checking-a-model": [1],
    "19-trend-and-season": [0],
    "20-uncertain-inputs": [0],
}


def figures(page):
    """Files of the figures that the code of a built page made."""
    text = page.read_text(encoding="utf-8")
    cells = re.findall(r'<img[^>]*src="([^"]*_images/[^"]+\.png)"', text)
    return [page.parent / source for source in cells]


def thumbnail(source, target):
    """The figure in the middle of a white ground of the gallery's size, in 64 colours."""
    figure = Image.open(source).convert("RGB")
    figure.thumbnail(SIZE, Image.Resampling.LANCZOS)
    ground = Image.new("RGB", SIZE, "white")
    left, top = ((a - b) // 2 for a, b in zip(SIZE, figure.size, strict=True))
    ground.paste(figure, (left, top))
    ground.quantize(64, dither=Image.Dither.NONE).save(target, optimize=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, default=HERE / "_build" / "html")
    site = parser.parse_args().site
    folder = HERE / "figures" / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    for name, indices in FIGURES.items():
        found = figures(site / "tutorials" / f"{name}.html")
        for index in indices:
            thumbnail(found[index], folder / f"{name}-{index}.png")


if __name__ == "__main__":
    main()
