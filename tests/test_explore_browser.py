"""The explorer page in a real browser: it shows the library's answers and makes no network requests.

It needs Chromium (Debian: `apt install chromium`) and `pip install "costgraph[browser]"`, which drives it.
Screenshots at three widths go to the directory in COSTGRAPH_SCREENSHOTS.
"""

import csv
import os
import random
from functools import cache
from pathlib import Path
from urllib.parse import urlencode

import pytest
from browsers import chromium, driver, needs_chromium
from shared import load, training_step

import costgraph as cg

pytestmark = [pytest.mark.long, needs_chromium]
#: Setting an address creates a new state, even for an equal address.
GO = """hash => {
  delete document.body.dataset.estimate;
  history.replaceState(null, "", hash);
  dispatchEvent(new Event("hashchange"));
}"""
#: Models from six families.
MODELS = ["llama-3-8b", "gru-ptb-small", "alexnet", "mamba-130m", "dlrm-small", "mlp"]


@cache
def graphs(name):
    """Return graphs keyed by view name."""
    whole = load(name)
    if name not in ("llama-3-8b", "mlp"):
        return {"forward": whole}
    steps = {"step": cg.training_step(whole, precision="bf16"), "sgd": cg.training_step(whole, optimizer=cg.SGD())}
    return {"forward": whole, **steps, **({"decode": cg.decode(whole)} if name == "llama-3-8b" else {})}


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


class Shown:
    """An open page that records its console messages."""

    def __init__(self, browser, path, **options):
        self.page, self.told, self.path = browser.new_page(**options), [], path
        self.page.on("console", lambda message: self.told.append(message.text))
        self.page.on("pageerror", lambda error: self.told.append(str(error)))
        self.page.on("request", lambda request: self.told.append(request.url))
        self.open()

    def open(self, address=""):
        """Reload the page with an address."""
        self.page.goto("about:blank")
        self.page.goto(self.path.as_uri() + address)
        self.drawn()

    def drawn(self):
        self.page.wait_for_selector("body[data-estimate]", state="attached")

    def go(self, **state):
        """Write a state into the open page's address."""
        self.page.evaluate(GO, "#" + urlencode(state))
        self.drawn()

    def number(self, key):
        """Return the digits on a card."""
        return int(self.page.inner_text(f'[data-key="{key}"] small').split()[0].replace(",", ""))

    def close(self):
        self.page.close()
        asked = {text.split("#")[0] for text in self.told} - {"about:blank"}
        assert asked == {self.path.as_uri()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    paths = {}

    def write(name):
        if name not in paths:
            path = tmp_path_factory.mktemp("pages") / f"{name}.html"
            cg.explore(name, path, views=graphs(name))
            paths[name] = path
        return paths[name]

    return write


def drawn_states(name, times):
    """Sample views, devices and sizes, including the depth."""
    draw, views = random.Random(11), graphs(name)
    choices = {"B": [1, 2, 8, 32], "L": [3, 4, 40, 127], "S": [128, 1024, 8192], "T": [128, 1024, 8192]}
    for _ in range(times):
        view = draw.choice(list(views))
        names = {s.name for s in cg.flops(load(name, symbolic=True)).free_symbols} & choices.keys()
        sizes = {n: draw.choice([56, 224] if n == "S" and name == "alexnet" else choices[n]) for n in sorted(names)}
        yield view, views[view], draw.choice(["h100-sxm", "a100-80-sxm", "mi300x"]), sizes


@pytest.mark.parametrize("name", MODELS)
def test_displayed_numbers_match_library(name, browser, written):
    shown = Shown(browser, written(name))
    for view, graph, device, sizes in drawn_states(name, 50):
        shown.go(view=view, device=device, **sizes)
        assert {n: int(shown.page.input_value(f"#size-{n}")) for n in sizes} == sizes
        assert shown.number("peak") == cg.peak_memory(graph, **sizes), (view, sizes)
        assert shown.number("flops") == cg.flops(graph, **sizes)
        assert shown.number("bytes") == cg.bytes_moved(graph, **sizes)
        assert shown.number("params") == cg.param_count(graph, **sizes)
        estimate = float(shown.page.evaluate("document.body.dataset.estimate"))
        assert estimate == pytest.approx(cg.seconds(graph, device, **sizes), rel=1e-9)
        room = cg.load_hardware(device).capacity().value
        fits = shown.page.inner_text("[data-key=fits] b") == "fits"
        assert fits == (cg.peak_memory(graph, **sizes) <= room)
    shown.close()


def test_typed_size_round_trips_through_address(browser, written):
    shown = Shown(browser, written("llama-3-8b"))
    shown.page.fill("#size-S", "4099")
    address = shown.page.evaluate("location.hash")
    assert "S=4099" in address
    peak = cg.peak_memory(load("llama-3-8b"), B=int(shown.page.input_value("#size-B")), S=4099)
    driver.expect(shown.page.locator("[data-key=peak] small")).to_have_text(f"{peak:,} B")
    shown.open(address)
    assert (shown.number("peak"), shown.page.input_value("#size-S")) == (peak, "4099")
    shown.close()


def test_keyboard_moves_slider(browser, written):
    shown = Shown(browser, written("mlp"))
    before = int(shown.page.input_value("#size-B"))
    shown.page.focus('[aria-label="B, slider"]')
    for _ in range(8):
        shown.page.keyboard.press("ArrowRight")
    assert int(shown.page.input_value("#size-B")) == pytest.approx(before * 4, rel=0.3)  # two octaves in quarters
    shown.close()


@pytest.mark.parametrize("width", [1280, 768, 375])
def test_page_has_no_horizontal_scroll(width, browser, written, tmp_path):
    shown = Shown(browser, written("llama-3-8b"), viewport={"width": width, "height": 900})
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.page.evaluate("document.querySelector('h1').getBoundingClientRect().bottom") < 900
    shown.page.wait_for_timeout(500)  # content below the fold is drawn once the page rests
    folder = Path(os.environ.get("COSTGRAPH_SCREENSHOTS", tmp_path))
    for view in graphs("llama-3-8b"):
        shown.go(view=view)
        shown.page.wait_for_timeout(500)
        shown.page.screenshot(path=folder / f"{view}-{width}.png", full_page=True)
    shown.close()


def test_page_follows_dark_color_scheme(browser, written):
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


def test_table_can_be_downloaded(browser, written):
    shown = Shown(browser, written("llama-3-8b"))
    with shown.page.expect_download() as given:
        shown.page.click("#csv")
    with open(given.value.path(), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    sizes = {n: int(shown.page.input_value(f"#size-{n}")) for n in "BS"}
    device = "h100-sxm"
    times = cg.roofline(load("llama-3-8b"), device, **sizes)
    assert [(r["op"], r["phase"]) for r in rows] == [(r.op, r.phase) for r in times.rows]
    assert sum(float(r["seconds"]) for r in rows) == pytest.approx(times.estimate, rel=1e-12)
    assert sum(float(r["FLOPs"]) for r in rows) == cg.flops(load("llama-3-8b"), **sizes)
    shown.page.close()


#: Move a slider in each of 40 frames and count the redraws.
DRAG = """async () => {
  const seen = { ops: 0, sent: 0, cards: 0 };
  const watchers = Object.keys(seen).map(id => {
    const watcher = new MutationObserver(() => { seen[id]++; });
    watcher.observe(document.getElementById(id), { subtree: true, childList: true, characterData: true });
    return watcher;
  });
  const slider = document.querySelector('[aria-label="S, slider"]');
  for (let i = 0; i < 40; i++) {
    slider.value = 4 + i / 4;
    slider.dispatchEvent(new Event("input"));
    await new Promise(requestAnimationFrame);
  }
  watchers.forEach(watcher => watcher.disconnect());
  return seen;
}"""


def test_frame_draws_visible_content_first(browser, written):
    shown = Shown(browser, written("llama-3-8b"), viewport={"width": 1280, "height": 700})
    shown.page.wait_for_timeout(500)
    seen = shown.page.evaluate(DRAG)
    assert (seen["ops"], seen["sent"]) == (0, 0)
    assert seen["cards"] >= 39  # every frame has its state
    sizes = {n: int(shown.page.input_value(f"#size-{n}")) for n in "BS"}
    longest = max(cg.roofline(load("llama-3-8b"), "h100-sxm", **sizes).rows, key=lambda r: r.seconds)
    driver.expect(shown.page.locator("#ops tbody td").first).to_have_text(longest.op)
    assert "peak memory" in shown.page.locator("#spoken").text_content()  # a screen reader announces it once
    shown.close()


def test_controls_are_labelled_and_focusable(browser, written):
    shown = Shown(browser, written("llama-3-8b"))
    nameless = """() =>
      [...document.querySelectorAll("input, select, button, section:not([hidden], [role])")].filter(e =>
      !(e.ariaLabel || e.labels?.length || e.textContent.trim() || e.getAttribute("aria-labelledby"))).length"""
    assert shown.page.evaluate(nameless) == 0
    controls = shown.page.evaluate("document.querySelectorAll('input, select, button').length")
    reached = set()
    for _ in range(controls):
        shown.page.keyboard.press("Tab")
        reached.add(shown.page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert len(reached) == controls
    shown.close()


def test_rank_view_shows_communication(browser, tmp_path):
    rank = cg.parallelize(load("llama-3-8b"), tp=cg.dims("T"))
    cg.explore(rank, tmp_path / "rank.html")
    shown = Shown(browser, tmp_path / "rank.html")
    shown.go(device="h100-sxm", B=2, S=1024, T=4)
    sent = cg.communication(rank, B=2, S=1024, T=4)
    rows = [r.split("\t")[1:4] for r in shown.page.inner_text("#sent").splitlines()[1:]]
    assert rows == [[r.collective, r.axis, r.phase] for r in sent.rows]
    assert shown.number("peak") == cg.peak_memory(rank, B=2, S=1024, T=4)
    shown.close()


def test_stage_view_shows_its_memory_and_total_time(browser, tmp_path):
    view = "train precision=bf16 accumulate=m pp=P"
    cg.explore("llama-3-8b", tmp_path / "stages.html", views=["forward", view])
    step = training_step(load("llama-3-8b"), precision="bf16", accumulate=cg.dims("m"))
    whole = cg.parallelize(step, pp=cg.dims("P"), micro_batches=cg.dims("m"))
    sizes = {"B": 2, "S": 1024, "L": 24, "P": 8, "m": 11}
    shown = Shown(browser, tmp_path / "stages.html")
    groups = shown.page.locator("#view optgroup").evaluate_all("found => found.map(g => g.label)")
    assert groups == ["passes", "a stage of a pipeline"]
    for name, stage in zip(("first", "middle", "last"), whole.stages, strict=True):
        shown.go(view=f"{view}: {name} stage", device="h100-sxm", **sizes)
        assert shown.number("peak") == cg.peak_memory(stage, **sizes)
        estimate = float(shown.page.evaluate("document.body.dataset.estimate"))
        assert estimate == pytest.approx(cg.seconds(whole, "h100-sxm", **sizes), rel=1e-9)
        share = 100 * cg.peak_memory(whole, **sizes) / cg.load_hardware("h100-sxm").capacity().value
        assert f"the largest stage {share:.1f}%" in shown.page.inner_text("[data-key=fits] small")
        assert shown.page.inner_text("#warnings") == ""
    shown.go(view=f"{view}: middle stage", **{**sizes, "P": 2})
    assert "there are P - 2 stages like this one, 1 or more" in shown.page.inner_text("#warnings")
    shown.close()
