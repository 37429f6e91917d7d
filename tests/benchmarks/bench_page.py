"""The page with sliders: its export time, and its frame times while a slider is dragged in a browser."""

from statistics import median

import pytest
from browsers import chromium, needs_chromium
from timing import once

import costgraph as cg

pytestmark = needs_chromium

#: Browser frames and the page's work in each, by the browser's clock.
WATCH = """() => {
  const own = window.requestAnimationFrame.bind(window);
  window.drawn = [];
  window.ownFrame = own;
  window.requestAnimationFrame = f => own(now => {
    const start = performance.now();
    f(now);
    window.drawn.push(performance.now() - start);
  });
}"""
DRAG = """async () => {
  const slider = document.querySelector('[aria-label="S, slider"]'), at = [];
  window.drawn.length = 0;
  for (let i = 0; i < 300; i++) {
    slider.value = 10 + 5 * Math.sin(i / 20);
    slider.dispatchEvent(new Event("input"));
    at.push(await new Promise(window.ownFrame));
  }
  return { frames: at.slice(1).map((t, i) => t - at[i]), drawn: window.drawn };
}"""
WORK = """async view => {
  const data = await unpacked(document.getElementById("data").textContent), engine = new Engine(data.tables);
  const v = data.views[view], at = data.devices.findIndex(d => d.id === "h100-sxm"), start = performance.now();
  for (let i = 1; i <= 200; i++) {
    engine.set({ ...data.sizes, S: 64 * i });
    violated(engine, v); holding(engine, v.peak); spent(engine, v, data.devices[at], at);
    least(engine, v, data.devices[at], at); timeline(engine, v.memory);
  }
  return (performance.now() - start) / 200;
}"""


def busy(inspector):
    """Return the seconds that the page's thread was busy, by category, as counted by the browser."""
    metrics = {m["name"]: m["value"] for m in inspector.send("Performance.getMetrics")["metrics"]}
    return {
        "all tasks": metrics["TaskDuration"],
        "script": metrics["ScriptDuration"],
        "layout": metrics["LayoutDuration"],
    }


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3"])
def test_frames_while_a_slider_is_dragged(benchmark, name, tmp_path):
    path = tmp_path / "page.html"
    benchmark.extra_info["seconds of the export"] = once(lambda: cg.explore(name, path))
    benchmark.extra_info["kilobytes"] = path.stat().st_size / 1e3
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.add_init_script(f"({WATCH})()")
        page.goto(path.as_uri())
        views = page.locator("#view option").all_text_contents()
        page.select_option("#view", label="train precision=bf16")
        page.wait_for_timeout(500)
        inspector = page.context.new_cdp_session(page)
        inspector.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time, unaffected by other processes
        for part in ("top", "h-time"):  # the figures and the peak's tensors; the two charts
            page.evaluate("id => (document.getElementById(id) ?? document.body).scrollIntoView()", part)
            page.wait_for_timeout(500)
            before = busy(inspector)
            frame_log = page.evaluate(DRAG)
            share = {k: 1e3 * (v - before[k]) / len(frame_log["drawn"]) for k, v in busy(inspector).items()}
            where = "pictures" if part == "h-time" else "figures"
            for what, milliseconds in share.items():
                benchmark.extra_info[f"{where}: milliseconds of {what} in a frame, of 16.7"] = milliseconds
            benchmark.extra_info[f"{where}: frames a second"] = (
                1e3 * len(frame_log["frames"]) / sum(frame_log["frames"])
            )
        benchmark.pedantic(page.evaluate, args=(DRAG,), rounds=1)
        benchmark.extra_info["milliseconds of script in a frame, median"] = median(frame_log["drawn"])
        benchmark.extra_info["milliseconds of all formulas at one state"] = page.evaluate(
            WORK, views.index("train precision=bf16")
        )
        benchmark.extra_info["major version of Chromium"] = int(browser.version.partition(".")[0])
    assert len(frame_log["drawn"]) >= len(frame_log["frames"])  # every frame is drawn for its own sizes
    assert path.stat().st_size < 1_500_000
