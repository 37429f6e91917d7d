"""A training run on a mesh, with each figure against the division that defines it."""

import pytest
import sympy

import costgraph as cg

B, S, D, F, dp, tp, P, X = cg.dims("B S D F dp tp P X")
u = sympy.Symbol("u", positive=True)  # a fraction is not a size
SIZES = {"B": 6, "S": 64, "D": 96, "F": 192, "V": 101}


@pytest.fixture(scope="module")
def step():
    with cg.Graph("lm", dtype="bf16") as g:
        table = g.param("table", (cg.dims("V"), D))
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), table)
        with cg.scope("mlp"):
            h = cg.relu(cg.linear(x, "b s d -> b s f", f=F, name="up"))
            x = x + cg.linear(h, "b s f -> b s d", d=D, name="down")
        g.output(cg.einsum(x, table, "b s d, v d -> b s v"))
    return cg.training_step(g, "cross_entropy", precision="bf16", optimizer=cg.SGD())


def test_run_figures_follow_from_step_time(step):
    s = cg.parallelize(step, dp=3, tp=2)
    taken = cg.seconds(s, "h100-sxm", network="meta-24k", **SIZES)
    figures = cg.plan.run(s, "h100-sxm", 10**9, network="meta-24k", price=2.5, bubble=0.25, **SIZES)
    tokens = 6 * 64  # over all ranks: each of three has two sequences
    assert (figures.devices, figures.step_tokens) == (6, tokens)
    assert figures.seconds == pytest.approx(1.25 * taken)
    assert figures.tokens_per_second == pytest.approx(tokens / figures.seconds)
    assert figures.steps * tokens == pytest.approx(10**9)
    assert figures.days == pytest.approx(10**9 / figures.tokens_per_second / 86400)
    assert figures.device_hours == pytest.approx(6 * 24 * figures.days)
    assert figures.cost == pytest.approx(2.5 * figures.device_hours)
    assert figures.mfu == pytest.approx(cg.mfu(s, figures.seconds, "h100-sxm", **SIZES))


def test_data_parallel_ranks_keep_utilization(step):
    s = cg.parallelize(step, dp=3)
    figures = cg.plan.run(s, "h100-sxm", 1, **SIZES)
    assert figures.cost is None
    assert figures.mfu == pytest.approx(cg.mfu(step, figures.seconds, "h100-sxm", devices=3, **SIZES))
    alone = cg.plan.run(step, "h100-sxm", 1, **SIZES)
    assert (alone.devices, alone.step_tokens) == (1, 6 * 64)
    assert alone.seconds == pytest.approx(cg.seconds(step, "h100-sxm", **SIZES))


def test_open_sizes_stay_symbolic(step):
    s = cg.parallelize(step, dp=dp)
    formulas = cg.plan.run(s, "h100-sxm", X, price=P, bubble=u, **SIZES)
    numbers = cg.plan.run(cg.parallelize(step, dp=3), "h100-sxm", 10**9, price=2, bubble=0.5, **SIZES)
    for name in ("devices", "seconds", "tokens_per_second", "mfu", "steps", "days", "device_hours", "cost"):
        bound = sympy.sympify(getattr(formulas, name)).subs({dp: 3, X: 10**9, P: 2, u: sympy.Rational(1, 2)})
        assert float(bound) == pytest.approx(getattr(numbers, name), rel=1e-9), name


def test_schedule_gives_pipeline_idle_fraction(step):
    s = cg.parallelize(step, dp=3)
    alone = cg.plan.run(s, "h100-sxm", 10**9, price=2, **SIZES)
    piped = {"schedule": "interleaved", "pp": 5, "micro_batches": 35, "virtual_stages": 2}
    figures = cg.plan.run(s, "h100-sxm", 10**9, price=2, **piped, **SIZES)
    assert figures.seconds == pytest.approx(alone.seconds * (1 + 4 / (35 * 2)))
    assert (figures.devices, figures.step_tokens) == (15, 6 * 64)
    assert figures.cost == pytest.approx(5 * alone.cost * figures.seconds / alone.seconds)
    assert figures == cg.plan.run(s, "h100-sxm", 10**9, price=2, **piped, **SIZES)
    pp, m = cg.dims("pp m")
    formula = cg.plan.run(s, "h100-sxm", 10**9, schedule="zb-h1", pp=pp, micro_batches=m, **SIZES).seconds
    assert cg.evaluate(formula, pp=5, m=7) == pytest.approx(alone.seconds * (1 + 4 / (3 * 7)))
    with pytest.raises(cg.BindingError, match="micro-batches above the minimum"):
        cg.evaluate(formula, pp=7, m=5)
    for named, says in (
        ({"pp": 5}, "run: pp is 5 without a schedule; add schedule="),
        ({"schedule": "1f1b", "bubble": 0.1}, "run: bubble is 0.1 with schedule '1f1b'; expected only one of them"),
        ({"schedule": "1f1c"}, "schedule '1f1c', expected one of gpipe"),
    ):
        with pytest.raises(cg.CostGraphError, match=says):
            cg.plan.run(step, "h100-sxm", 1, **named, **SIZES)


def test_invalid_amounts_are_refused(step):
    for named, says in (
        ({"tokens": -1}, "run: tokens: -1, expected a positive number"),
        ({"tokens": 1, "price": "2 USD"}, "run: price: '2 USD', expected a positive number"),
        ({"tokens": 1, "bubble": -0.1}, "run: bubble: -0.1, expected a positive number"),
    ):
        with pytest.raises(cg.BindingError, match=says):
            cg.plan.run(step, "h100-sxm", named.pop("tokens"), **named, **SIZES)
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (7,))))
    with pytest.raises(cg.GraphError, match="run: graph 'g' has no gradients; expected a training step"):
        cg.plan.run(g, "h100-sxm", 1)
