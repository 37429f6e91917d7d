import pytest
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph import BindingError, SpecError

B, D, H, S = cg.dims("B D H S")


def relu():
    with cg.Graph("relu") as g:
        g.output(cg.relu(g.input("x", (B, D))))
    return g


def test_largest_size_matches_hand_count():
    # 4-byte input and output: 8*B*D <= 80e9
    assert cg.largest(relu(), "B", memory=80e9, D=1000) == 10_000_000
    assert cg.largest(relu(), "B", memory=80e9 - 1, D=1000) == 9_999_999


def test_limit_is_usable_device_memory():
    assert cg.largest(relu(), "B", hardware="h100-sxm", D=1000) == 85_017_493_504 // 8000
    assert cg.largest(relu(), "B", hardware="b300", D=1000) == 288 * 10**9 // 8000  # not measured; vendor's 288 GB


def test_nothing_fits_returns_zero():
    assert cg.largest(relu(), "B", memory=7, D=1) == 0


@pytest.mark.parametrize("limit", [10**7, 10**8, 3 * 10**8])
def test_largest_fits_and_next_does_not(limit):
    g = load("gpt2", symbolic=True)
    sizes = {"S": 5, "D": 12, "H": 2, "F": 7, "L": 3, "V": 11, "P": 16}
    best = cg.largest(g, "B", memory=limit, **sizes)
    assert cg.peak_memory(g, B=best, **sizes) <= limit < cg.peak_memory(g, B=best + 1, **sizes)


def test_depth_can_be_searched():
    with cg.Graph("deep") as g:
        L = cg.dims("L")
        g.output(cg.repeat(L, lambda x: cg.relu(cg.linear(x, "b d -> b e", e=D)), g.input("x", (B, D))))
    # parameters 4*L*D^2, beside the input and two activations
    best = cg.largest(g, "L", memory=10**6, B=2, D=10)
    assert best == (10**6 - 4 * 3 * 2 * 10) // 400


@each(
    ("options", "text"),
    [
        ({"D": 3}, "expected exactly one limit, hardware= or memory="),
        ({"D": 3, "memory": 5, "hardware": "h100-sxm"}, "expected exactly one limit"),
        ({"memory": 100}, "still unbound: D"),
        ({"D": 3, "memory": -1}, "memory is -1, expected a positive number of bytes"),
        ({"D": 3, "memory": "8G"}, "memory is '8G', expected a positive number of bytes"),
        ({"D": 3, "memory": float("nan")}, "expected a positive number of bytes"),
        ({"D": 3, "B": 3, "memory": 5}, "'B', expected an unbound dimension"),
    ],
)
def test_unanswerable_questions_are_refused(options, text):
    with pytest.raises(BindingError) as caught:
        cg.largest(relu(), "B", **options)
    assert text in str(caught.value)


def test_unknown_names_are_refused():
    with pytest.raises(BindingError, match="'Q', expected an unbound dimension among B, D"):
        cg.largest(relu(), "Q", memory=5)
    with pytest.raises(SpecError, match="h100"):
        cg.largest(relu(), "B", hardware="h1000", D=3)


def test_dimension_without_memory_cost_is_refused():
    with cg.Graph("free") as g:
        g.output(cg.repeat(S, cg.relu, g.input("x", (B,))))
    with pytest.raises(BindingError, match="every S fits"):
        cg.largest(g, "S", memory=10**6, B=2)


def test_overflowing_time_is_refused():
    A, B = cg.dims("A B")
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (A, B))))
    with pytest.raises(cg.BindingError, match=r"a number beyond 1\.8e308: expected smaller sizes"):
        cg.roofline(g, "h100-sxm", A=10**300, B=10**300)


def gpt(**options):
    return training_step(load("gpt2"), precision="bf16", **options)


TINY = {"D": 12, "H": 3, "F": 11, "L": 3, "V": 13, "P": 17, "S": 7, "B": 2}


@pytest.mark.parametrize("symbol", ["B", "L", "F", "V"])
@pytest.mark.parametrize("options", [{}, {"checkpoint": cg.every_block()}], ids=["kept", "again"])
def test_largest_training_step_fits_and_next_does_not(symbol, options):
    step, limit = gpt(**options), 3 * 10**6
    sizes = {k: v for k, v in TINY.items() if k != symbol}
    best = cg.largest(step, symbol, memory=limit, **sizes)
    assert best > TINY[symbol]
    fits, more = (cg.peak_memory(step, **sizes, **{symbol: best + i}) for i in (0, 1))
    assert fits <= limit < more


def test_largest_training_batch_on_device():
    step = gpt(checkpoint=cg.every_block())
    best = cg.largest(step, "B", hardware="h100-sxm", S=1024)
    assert cg.peak_memory(step, B=best, S=1024) <= 85_017_493_504 < cg.peak_memory(step, B=best + 1, S=1024)
    assert best > cg.largest(gpt(), "B", hardware="h100-sxm", S=1024)


def test_largest_width_is_multiple_of_heads():
    step = gpt()
    sizes = {k: v for k, v in TINY.items() if k != "D"}
    best = cg.largest(step, "D", memory=10**7, multiple_of=3, **sizes)
    assert best % 3 == 0
    assert cg.peak_memory(step, D=best, **sizes) <= 10**7 < cg.peak_memory(step, D=best + 3, **sizes)
    with pytest.raises(BindingError, match="largest: multiple_of=0: expected a positive integer"):
        cg.largest(step, "D", memory=10**7, multiple_of=0, **sizes)


def test_largest_size_respects_assumptions():
    B, S = cg.dims("B S")
    with cg.Graph("g") as g:
        g.assume("S >= 5", "S <= 100", "B > S")
        g.output(cg.relu(g.input("x", (B, S))))
    # 8 bytes per element: the fp32 input and result
    assert cg.largest(g, "S", memory=8 * 200 * 50, B=200) == 50
    assert cg.largest(g, "S", memory=1e12, B=200) == 100
    assert cg.largest(g, "S", memory=8 * 200 * 5 - 1, B=200) == 0
    assert cg.largest(g, "B", memory=8 * 7 * 11, S=7) == 11
    assert cg.largest(g, "B", memory=8 * 7 * 7, S=7) == 0
    with pytest.raises(cg.BindingError, match="S"):
        cg.largest(g, "B", memory=1e9, S=-7)
    with pytest.raises(cg.BindingError, match="against the assumption 'S <= 100'"):
        cg.largest(g, "B", memory=1e9, S=101)
