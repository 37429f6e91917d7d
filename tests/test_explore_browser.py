"""The page with sliders in a real browser: what it shows is what the library answers, and it asks nobody.

It needs Chromium (Debian: `apt install chromium`) and `pip install playwright`, which drives it.
"""

import csv
import random
import shutil
from functools import cache
from urllib.parse import urlencode

import pytest

import costgraph as cg

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: nothing drives a browser")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the page needs a browser"),
]
#: Models of six families.
MODELS = ["llama-3-8b", "gru-ptb-small", "alexnet", "mamba-130m", "dlrm-small", "mlp"]


@cache
def graphs(name):
    """Graphs by the name of a view."""
    whole = cg.models.load(name)
    if name not in ("llama-3-8b", "mlp"):
        return {"forward": whole}
    steps = {"step": cg.training_step(whole, precision="bf16"), "sgd": cg.training_step(whole, optimizer=cg.SGD())}
    return {"forward": whole, **steps, **({"decode": cg.decode(whole)} if name == "llama-3-8b" else {})}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Shown:
    """A page, opened; what it says beside its numbers is kept."""

    def __init__(self, browser, path, **options):
        self.page, self.told, self.path = browser.new_page(**options), [], path
        self.page.on("console", lambda message: self.told.append(message.text))
        self.page.on("pageerror", lambda error: self.told.append(str(error)))
        self.page.on("request", lambda request: self.told.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.body.dataset.estimate")

    def go(self, **state):
        """Open the page anew with a state in its address."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.path.as_uri()}#{urlencode(state)}")
        self.page.wait_for_function("document.body.dataset.estimate")

    def number(self, key):
        """The digits of a card."""
        return int(self.page.inner_text(f'[data-key="{key}"] small').split()[0].replace(",", ""))

    def close(self):
        self.page.close()
        asked = {text.split("#")[0] for text in self.told} - {"about:blank"}
        assert asked == {self.path.as_uri()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    made = {}

    def write(name):
        if name not in made:
            path = tmp_path_factory.mktemp("pages") / f"{name}.html"
            cg.explore(name, path, views=graphs(name))
            made[name] = path
        return made[name]

    return write


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_the_library(name, browser, written):
    shown, draw = Shown(browser, written(name)), random.Random(11)
    seen = 0
    for view, graph in graphs(name).items():
        open_ones = {"B", "S", "T"} & {s.name for s in cg.flops(graph).free_symbols}
        for _ in range(9):
            sizes = {n: draw.choice([1, 2, 8, 32] if n == "B" else [128, 1024, 8192]) for n in sorted(open_ones)}
            device = draw.choice(["h100-sxm", "a100-80-sxm", "mi300x"])
            shown.go(view=view, device=device, **sizes)
            bound = {n: int(shown.page.input_value(f"#size-{n}")) for n in sizes}
            assert bound == sizes
            assert shown.number("peak") == cg.peak_memory(graph, **sizes)
            assert shown.number("flops") == cg.flops(graph, **sizes)
            assert shown.number("bytes") == cg.bytes_moved(graph, **sizes)
            assert shown.number("params") == cg.param_count(graph)
            estimate = float(shown.page.evaluate("document.body.dataset.estimate"))
            assert estimate == pytest.approx(cg.seconds(graph, device, **sizes), rel=1e-9)
            seen += 1
    assert seen >= 9
    shown.close()


def test_a_size_that_is_typed_is_in_the_address_and_comes_back(browser, written):
    shown = Shown(browser, written("llama-3-8b"))
    shown.page.fill("#size-S", "4099")
    shown.page.wait_for_function("location.hash.includes('S=4099')")
    address = shown.page.evaluate("location.hash")
    peak = cg.peak_memory(cg.models.load("llama-3-8b"), B=int(shown.page.input_value("#size-B")), S=4099)
    shown.page.wait_for_function(f"document.querySelector('[data-key=peak] small').textContent.includes('{peak:,}')")
    shown.page.goto("about:blank")
    shown.page.goto(shown.path.as_uri() + address)
    shown.page.wait_for_function("document.body.dataset.estimate")
    assert (shown.number("peak"), shown.page.input_value("#size-S")) == (peak, "4099")
    shown.close()


def test_keys_move_a_slider(browser, written):
    shown = Shown(browser, written("mlp"))
    before = int(shown.page.input_value("#size-B"))
    shown.page.focus('[aria-label="B, slider"]')
    for _ in range(8):
        shown.page.keyboard.press("ArrowRight")
    shown.page.wait_for_function(f"Number(document.querySelector('#size-B').value) > {before}")
    assert int(shown.page.input_value("#size-B")) == pytest.approx(before * 4, rel=0.3)  # two octaves in quarters
    shown.close()


@pytest.mark.parametrize("width", [1280, 768, 375])
def test_nothing_scrolls_sideways(width, browser, written):
    shown = Shown(browser, written("llama-3-8b"), viewport={"width": width, "height": 900})
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.page.evaluate("document.querySelector('h1').getBoundingClientRect().bottom") < 900
    shown.close()


def test_a_dark_room_has_a_dark_page(browser, written):
    grounds = []
    for scheme in ("light", "dark"):
        shown = Shown(browser, written("mlp"), color_scheme=scheme)
        colours = [shown.page.evaluate(f"getComputedStyle(document.body).{at}") for at in ("backgroundColor", "color")]
        light = [sum(int(x) for x in c.split("(")[1].rstrip(")").split(",")[:3]) for c in colours]
        grounds.append(light)
        shown.close()
    (ground, letters), (dark_ground, dark_letters) = grounds
    assert ground > letters
    assert dark_ground < dark_letters


def test_the_table_is_downloaded(browser, written):
    shown = Shown(browser, written("llama-3-8b"))
    with shown.page.expect_download() as given:
        shown.page.click("#csv")
    with open(given.value.path(), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    sizes = {n: int(shown.page.input_value(f"#size-{n}")) for n in "BS"}
    device = "h100-sxm"
    times = cg.roofline(cg.models.load("llama-3-8b"), device, **sizes)
    assert [(r["op"], r["phase"]) for r in rows] == [(r.op, r.phase) for r in times.rows]
    assert sum(float(r["seconds"]) for r in rows) == pytest.approx(times.estimate, rel=1e-12)
    assert sum(float(r["FLOPs"]) for r in rows) == cg.flops(cg.models.load("llama-3-8b"), **sizes)
    shown.page.close()
