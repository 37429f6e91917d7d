"""Draw the picture of README.md again: `python docs/pictures.py` (needs costgraph[plot], playwright and Chromium)."""

import shutil
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import costgraph as cg

STATIC = Path(__file__).resolve().parent / "_static"
COLOURS, WIDTH = 256, 900


def keep(name: str, drawn: bytes) -> None:
    """Write a small picture, in few colours."""
    picture = Image.open(BytesIO(drawn)).convert("RGB")
    picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        STATIC / f"{name}.png", optimize=True
    )


def page(model: cg.Graph) -> bytes:
    """Return the upper part of the page with sliders, as a browser shows it."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder) / "page.html"
        cg.explore(model, path)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1280, "height": 800})
        shown.goto(path.as_uri())
        shown.wait_for_function("document.body.dataset.estimate")
        return shown.screenshot()


def main() -> None:
    """Draw the page of Llama 3 8B."""
    keep("page", page(cg.models.load("llama-3-8b")))


if __name__ == "__main__":
    main()
