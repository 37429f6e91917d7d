"""Parameter sweeps: every grid point equals the formula's value there, on its own axes."""

import itertools
import sys

import numpy as np
import pytest
from each import each
from lazy import lazy_import
from shared import load, training_step

import costgraph as cg
from costgraph import BindingError

xarray = lazy_import("xarray")

B, S, D, F, bandwidth, peak_bf16 = cg.dims("B S D F bandwidth peak_bf16")
DEVICES = ["a100-80-sxm", "h100-sxm", "v100-sxm2-16gb"]


def mlp(*assumed):
    with cg.Graph("mlp", dtype="bf16") as g:
        h = cg.relu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, name="up"))
        g.output(cg.linear(h, "b f -> b d", d=D, name="down"))
        g.assume(*assumed)
    return g


def test_grid_points_match_formula():
    g = mlp()
    unknown = cg.seconds(g, cg.load_hardware("h100-sxm").symbolic())
    grid = cg.sweep(
        {"peak": (cg.peak_memory(g), "B"), "width": F / 3, "time": (unknown, "s"), "flops": cg.flops(g)},
        B=[1, 64, 4096], D=512, F=[2048, 8192], device=DEVICES[:2],
    )  # fmt: skip
    assert {name: grid[name].dims for name in grid} == {
        "peak": ("B", "F"), "width": ("F",), "time": ("B", "F", "device"), "flops": ("B", "F"),
    }  # fmt: skip
    assert [grid[name].attrs.get("units") for name in grid] == ["B", None, "s", None]
    assert [grid[name].dtype.kind for name in grid] == ["i", "f", "f", "i"]
    for b, f in itertools.product([1, 64, 4096], [2048, 8192]):
        at, sizes = grid.sel(B=b, F=f), {"B": b, "D": 512, "F": f}
        assert at.peak == cg.peak_memory(g, **sizes)
        assert at.flops == cg.flops(g, **sizes)
        for device in DEVICES[:2]:
            assert float(at.time.sel(device=device)) == pytest.approx(cg.roofline(g, device, **sizes).estimate)
    assert grid.B.attrs["units"] == "1"


def test_device_functions_are_called_per_device():
    g = mlp()
    grid = cg.sweep(
        {"time": (lambda device: cg.seconds(g, device, "lower"), "s")}, device=DEVICES[:2], B=[2, 4], D=8, F=8
    )
    expected = [[cg.seconds(g, name, "lower", B=b, D=8, F=8) for name in DEVICES[:2]] for b in (2, 4)]
    np.testing.assert_allclose(grid.time, expected)


def test_fallback_rates_are_reported():
    time = cg.seconds(mlp(), cg.load_hardware("h100-sxm").symbolic())
    grid = cg.sweep({"time": time}, device=DEVICES, B=4096, D=4096, F=4096)
    assert grid.time.attrs["stand_ins"] == [
        "v100-sxm2-16gb: peak.bf16 is missing, peak.fp32 (next wider format) stands in"
    ]
    assert float(grid.time[2]) == pytest.approx(cg.roofline(mlp(), DEVICES[2], B=4096, D=4096, F=4096).estimate)


def test_hardware_rates_can_be_axes():
    grid = cg.sweep({"ridge": (peak_bf16 / bandwidth, "FLOP/B")}, bandwidth=[1, 2], peak_bf16=[600, 900])
    np.testing.assert_array_equal(grid.ridge, [[600, 900], [300, 450]])
    assert grid.bandwidth.attrs["units"] == "B/s"


def test_integers_are_exact_within_int64():
    small, large, part = B**2 + 3, B**4 + 1, B * (B + 1) / 2
    grid = cg.sweep({"small": small, "large": large, "part": part, "most": cg.Max(7, B * B)}, B=[2**20 + 1, 3])
    assert [grid[n].dtype.kind for n in ("small", "large", "part", "most")] == ["i", "f", "f", "i"]
    assert int(grid.small[0]) == (2**20 + 1) ** 2 + 3
    assert float(grid.large[0]) == pytest.approx((2**20 + 1) ** 4)
    assert cg.sweep({"one": 5, "half": 0.5}).one == 5


def test_dask_chunks_are_lazy():
    pytest.importorskip("dask")
    time = cg.seconds(mlp(), cg.load_hardware("h100-sxm").symbolic())
    asked = {"peak": (cg.peak_memory(mlp()), "B"), "time": (time, "s")}
    axes = {"B": np.arange(1, 1001), "F": [64, 128], "D": 96, "device": DEVICES[:2]}
    now, later = cg.sweep(asked, **axes), cg.sweep(asked, chunks={"B": 250}, **axes)
    assert later.peak.chunks == ((250,) * 4, (2,))
    assert later.peak.dtype == now.peak.dtype
    xarray.testing.assert_identical(later.compute(), now)
    assert cg.sweep(asked, chunks=100, **axes).peak.chunks == ((100,) * 10, (2,))


@each(
    ("formulas", "axes", "text"),
    [
        ({"a": B * S}, {"B": [1]}, "sweep: 'a' has no sizes for S"),
        ({"a": B}, {"B": [1], "S": [1]}, "sweep: 'S' is in none of the formulas"),
        ({"a": B}, {"B": [1], "device": DEVICES}, "sweep: 'device' is in none of the formulas"),
        ({"a": B}, {"B": [[1, 2]]}, "sweep: B has 2 axes, expected a list of sizes, or one"),
        ({"a": B}, {"B": [0]}, "B: array of int64"),
        ({"a": B}, {"B": 1.5}, "B: array of float64"),
        ({"B": B}, {"B": [1]}, "sweep: 'B' is both a formula and an axis"),
        ({"a": lambda device: B}, {"B": [1]}, "sweep: 'a' is a function of a device, expected device="),
        (
            {"a": bandwidth},
            {"device": ["h100-sxm", "h100-sxm"]},
            r"sweep: devices \['h100-sxm', 'h100-sxm'\] contain duplicates; expected each",
        ),
        ({"a": cg.flops(mlp("B <= 4"))}, {"B": [2, 8], "D": 2, "F": 2}, "against the assumption 'B <= 4'"),
    ],
)
def test_invalid_grids_are_refused(formulas, axes, text):
    with pytest.raises(BindingError, match=text):
        cg.sweep(formulas, **axes)


def test_invalid_sweep_arguments_are_refused(monkeypatch):
    with pytest.raises(cg.SpecError, match="hardware 'h1' is unknown"):
        cg.sweep({"a": bandwidth}, device=["h1"])
    with pytest.raises(cg.ShapeError):
        cg.sweep({"a": "B"}, B=[1])
    with pytest.raises(cg.GraphError, match="sweep: formulas is 5, expected a mapping"):
        cg.sweep(5)
    for name, chunks in (("dask", 3), ("xarray", None)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(
            cg.UnsupportedError, match=rf"{name} is missing, expected it from: pip install costgraph\[sweep\]"
        ):
            cg.sweep({"a": B}, B=[1], chunks=chunks)


def test_compiled_formulas_accept_labelled_arrays():
    sizes = {n: xarray.DataArray([1, 2, 3], dims=[n], coords={n: [1, 2, 3]}) for n in "BS"}
    found = cg.compile(B + 10 * S)(**sizes)
    assert found.dims == ("B", "S")
    np.testing.assert_array_equal(found, [[11, 21, 31], [12, 22, 32], [13, 23, 33]])
    assert found.sel(B=2, S=3) == 32


def plan(layers, checkpoint):
    """Build a new graph per candidate, and derive the fit again."""
    policy = cg.every_block() if checkpoint else None
    step = training_step(load("mlp"), checkpoint=policy)
    return layers, checkpoint, cg.peak_memory(step, L=layers)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_sweep_over_new_graphs_with_two_workers():
    distributed = pytest.importorskip("distributed")
    candidates = list(itertools.product([3, 5], [False, True]))
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        found = client.gather(client.map(plan, *zip(*candidates, strict=True)))
        swept = cg.sweep({"peak": found[0][2]}, B=range(1, 9), chunks={"B": 4}).compute()
    assert [(layers, again) for layers, again, _ in found] == candidates
    for layers, again, peak in found:  # formulas survived a pickle round trip
        assert peak == plan(layers, again)[2]
    assert [int(p) for p in swept.peak] == [cg.evaluate(found[0][2], B=b) for b in range(1, 9)]
