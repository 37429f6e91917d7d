"""The site in a browser: the heading fits a phone's first screen, and only tables and code scroll sideways.

If `COSTGRAPH_SITE` names the folder of a built site, the tests use it; otherwise they build one.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: nothing drives a browser")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DOCS = Path(__file__).resolve().parent.parent / "docs"
BUILT = os.environ.get("COSTGRAPH_SITE")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the site needs a browser"),
    pytest.mark.skipif(
        not BUILT and any(find_spec(name) is None for name in ("sphinx", "myst_nb", "furo")),
        reason="needs costgraph[docs], or a built site in COSTGRAPH_SITE",
    ),
]
PAGES = sorted(str(p.relative_to(DOCS).with_suffix(".html")) for p in DOCS.rglob("*.md") if "_build" not in p.parts)
#: Elements that extend past the right edge of the page, except inside scrollable elements.
WIDE = """() => [...document.querySelectorAll("article *")].filter(e => {
    if (e.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let at = e.parentElement; at; at = at.parentElement)
        if (["auto", "scroll", "hidden"].includes(getComputedStyle(at).overflowX) && at !== document.body) return false;
    return true;
}).map(e => e.outerHTML.slice(0, 99))"""
#: Elements that scroll sideways.
SCROLLS = """() => [...document.querySelectorAll("article *")].filter(
    e => e.scrollWidth > e.clientWidth + 1 && ["auto", "scroll"].includes(getComputedStyle(e).overflowX)
).map(e => e.tagName + "." + e.className)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if BUILT:
        return Path(BUILT).resolve()
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", folder / "trees"]
    done = subprocess.run([*command, DOCS, folder / "html"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def phone(browser):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    yield page
    page.close()


@pytest.mark.parametrize("name", PAGES)
def test_phone_shows_heading_without_sideways_scrolling(name, site, phone):
    phone.goto((site / name).as_uri())
    heading = phone.locator("article h1").first.bounding_box()
    assert 0 <= heading["y"] < heading["y"] + heading["height"] <= 844
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    assert phone.evaluate(WIDE) == []
    allowed = ("PRE", "DIV.table-wrapper", "DIV.math", "DIV.output", "DIV.highlight", "DIV.picture")
    assert [e for e in phone.evaluate(SCROLLS) if not e.startswith(allowed)] == []


def test_first_screen_shows_command_figures_and_formula(site, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto((site / "index.html").as_uri())
    blocks = page.locator("article pre")
    wanted = (
        "costgraph report llama-3-8b",
        "peak memory          18.23 GB",
        "time, estimate       164.5 ms",
        "4*B*G*K*L*S",
    )
    for text in wanted:
        box = blocks.filter(has_text=text).first.bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= 800, text
        assert box["x"] + box["width"] <= 1280, text
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_live_page_reacts_to_input(width, site, browser):
    page = browser.new_page(viewport={"width": width, "height": 844})
    said = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((site / "howto" / "notebook.html").as_uri())
    live = page.frame_locator("article iframe")
    live.locator("body[data-estimate]").wait_for()
    card = live.locator('[data-key="peak"] small')
    before = card.inner_text()
    live.locator("#size-S").fill("4099")
    page.wait_for_function(
        "before => document.querySelector('article iframe').contentDocument"
        ".querySelector('[data-key=peak] small').textContent !== before",
        arg=before,
    )
    assert card.inner_text() != before
    assert said == []
    page.close()


def test_dark_mode_and_code_copying(site, browser):
    page = browser.new_page(color_scheme="dark")
    page.goto((site / "howto" / "new_architecture.html").as_uri())
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(int(part) for part in ground.strip("rgba()").split(",")[:3]) < 3 * 64
    assert page.locator("button.copybtn").count() > 0
    page.close()


def test_signatures_link_types_and_source(site, browser):
    page = browser.new_page()
    page.goto((site / "reference" / "generated" / "costgraph.roofline.html").as_uri())
    assert page.locator('dt.sig a[href*="_modules/costgraph"]').count() > 0
    assert page.locator('dt.sig a.reference:not([href*="_modules"])').count() > 0
    page.close()
