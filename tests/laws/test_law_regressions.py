"""What the laws have found, each as a plain case with its derivation; the point is held to all laws besides."""

import pytest

import costgraph as cg
from costgraph import testing
from costgraph.ops.fill import fill
from costgraph.ops.kv_cache import append
from costgraph.ops.loops import accumulate

A, B, D, L, W = cg.dims("A B D L W")


@pytest.mark.parametrize(
    ("function", "pointwise"),
    [
        ("quick_gelu", 3),  # x / (1 + exp(-1.702 * x)): product, sum, quotient
        ("elu", 4),  # x if x > 0 else a * (exp(x) - 1): comparison, selection, product, difference
    ],
)
def test_functions_cost_what_their_formulas_do(function, pointwise):
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise(function, g.input("x", (A,))))
    assert cg.flops(g, A=7) == 7 * (pointwise + 1)  # and one exp
    testing.check(g, A=7)


def test_a_window_over_an_expanded_axis_reads_one_element():
    with cg.Graph("g") as g:
        g.output(cg.nn.pool(cg.ops.expand(g.input("x", ()), " -> a", a=A), "max", window=(2,), stride=1))
    assert cg.costs(g).filter(op="max_pool").bind(A=5).total().read == 4
    testing.check(g, A=5)


def test_rows_of_an_expanded_table_are_one():
    with cg.Graph("g") as g:
        table = cg.ops.expand(g.input("row", (D,)), "d -> a d", a=A)
        g.output(cg.ops.gather(table, g.input("ids", (B,), dtype="int64")))
    assert cg.costs(g).filter(op="gather").bind(A=5, B=3, D=2).total().read == 4 * 2 + 8 * 3
    testing.check(g, A=5, B=3, D=2)


def test_an_axis_merged_with_one_of_a_domain_is_read():
    with cg.Graph("g") as g:
        q, k = g.input("q", (A * D,)), g.input("k", (A, D))
        domain = cg.Domain(causal=True)
        g.output(cg.einsum(q, k, "(s d), t d -> s t", domain=domain, over=("s", "t"), d=D))
    assert cg.costs(g).bind(A=5, D=3).total().read == 4 * (5 * 3 + 5 * 3)  # every query and every key, whole rows
    testing.check(g, A=5, D=3)


def test_what_a_loop_starts_from_is_read_once_where_the_body_reads_it_as_well():
    with cg.Graph("g") as g:
        x = g.input("x", (D,))
        g.output(cg.repeat(L, lambda h: h + x, x))
    # x + x reads D elements in the first iteration, h + x reads 2*D in each of the others; each writes D
    assert cg.bytes_moved(g, D=3, L=5) == 4 * (2 * 3 + 4 * 3 * 3)
    assert cg.bytes_moved(g, D=3, L=1) == 4 * 2 * 3
    testing.check(g, D=3, L=5)


def test_carries_that_change_places_meet_every_other_iteration():
    with cg.Graph("g") as g:
        x, y = g.input("x", (D,)), g.input("y", (D,))
        a, b = cg.repeat(L, lambda a, b: (b, cg.relu(a + y)), (y, x))
        g.output(a, b)
    testing.check(g, D=3, L=4)
    for n in range(1, 7):
        assert cg.bytes_moved(g, D=3, L=n) == cg.bytes_moved(cg.unroll(g, L=n), D=3)


def test_an_output_that_is_part_of_another_is_written_once():
    with cg.Graph("g") as g:
        y = cg.relu(g.input("x", (A,)))
        g.output(y[:2], y)
    assert cg.bytes_moved(g, fused=True, A=5) == cg.bytes_moved(g, A=5) == 4 * (5 + 5)
    testing.check(g, A=5)


def test_parts_of_one_result_that_are_apart_are_all_written():
    with cg.Graph("g") as g:
        y = cg.relu(g.input("x", (3 * A,)))
        g.output(*cg.ops.split(y, [A, A, A])[:2])
    assert cg.bytes_moved(g, fused=True, A=5) == 4 * (3 * 5 + 2 * 5)
    testing.check(g, A=5)


def test_a_view_of_what_a_loop_hands_on_is_not_written():
    with cg.Graph("g") as g:
        x = g.input("x", (A, D))
        g.output(cg.rearrange(cg.repeat(L, lambda h: h, x), "a d -> d a"))
    assert cg.bytes_moved(g, fused=True, A=2, D=3, L=2) == 0
    testing.check(g, A=2, D=3, L=2)


def test_a_window_inside_a_kernel_is_bound_when_a_loop_is_unrolled():
    with cg.Graph("g") as g:
        q, k, v = (g.input(n, (1, 1, A, 2)) for n in "qkv")
        g.output(cg.attention(q, k, v, window=W))
    assert cg.flops(cg.unroll(g, A=5, W=2)) == cg.flops(g, A=5, W=2)
    testing.check(g, A=5, W=2)


def test_numbers_among_operands_are_kept_with_their_places():
    with cg.Graph("g") as g:
        g.output(1 - g.input("x", (2,)), cg.ops.pointwise("maximum", g.input("y", (2,)), float("-inf")))
    one, other = testing.run(g, {"x": [3.0, 5.0], "y": [7.0, -1.0]}).outputs
    assert one.tolist() == [-2.0, -4.0]
    assert other.tolist() == [7.0, -1.0]
    testing.check(g)


@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (True, None), (False, None), (True, 2), (False, W),
        *(pytest.param(*c, marks=pytest.mark.long) for c in [(False, 2), (True, W)]),
    ],
)  # fmt: skip
def test_attention_in_one_kernel_computes_what_separate_ops_do(causal, window):
    outputs = []
    for kernel in ("flash", "eager"):
        with cg.Graph("g") as g:
            q = g.input("q", (1, 2, 3, 2))
            k, v = (g.input(n, (1, 1, 3 if window else 5, 2)) for n in "kv")
            g.output(cg.attention(q, k, v, causal, window, kernel))
        dims = {"W": 2} if window is W else {}
        outputs.append(testing.run(g, **dims).outputs[0])
        testing.check(g, **dims)
    assert abs(outputs[0] - outputs[1]).max() < 1e-12


def test_a_loop_over_a_restricted_tensor_is_refused():
    with cg.Graph("g") as g:
        s = cg.einsum(g.input("q", (A, D)), g.input("k", (A, D)), "s d, t d -> s t",
                      domain=cg.Domain(causal=True), over=("s", "t"))  # fmt: skip
        with pytest.raises(cg.ShapeError, match="is restricted to a domain, expected an unrestricted tensor"):
            cg.repeat(2, lambda x: cg.relu(x), s)
        with pytest.raises(cg.ShapeError, match="is restricted to a domain, expected an unrestricted tensor"):
            cg.scan(A, lambda c, x: (c, x), g.input("c", (D,)), s)


@pytest.mark.parametrize(
    ("index", "read"),
    [
        ("h-5", 0),  # position -5 alone
        ("h*2+r*3-3", 1),  # positions -3 and 0
        ("h+r-3", 0),  # positions -3 and -2
    ],
)
def test_stated_outputs_in_the_padding_read_nothing_there(index, read):
    with cg.Graph("g") as g:
        x, w = g.input("x", (5,)), g.input("w", (2,))
        g.output(cg.einsum(x, w, f"{index}, r -> h" if "r" in index else f"{index}, d -> h d", h=1))
    assert cg.costs(g).total().read == 4 * (read + 2)
    testing.check(g)


def test_stated_outputs_that_reach_beyond_a_bound_axis_are_refused(tmp_path):
    with cg.Graph("g") as g:
        x, w = g.input("x", (A,)), g.input("w", (3,))
        g.output(cg.einsum(x, w, "h*2, d -> h d", h=B))
    assert cg.flops(g, A=7, B=4) == 4 * 3  # positions 0, 2, 4, 6
    with pytest.raises(cg.BindingError, match="remaining length after 'einsum' has size A - 2\\*B \\+ 1 = -2"):
        cg.flops(g, A=5, B=4)
    testing.check(g, A=7, B=3)


def test_a_stack_that_nobody_reads_dies_with_its_last_slice():
    with cg.Graph("g") as g:
        x, y = g.input("x", (D,)), g.input("y", (D,))
        out, _ = cg.scan(L, lambda c, _: (cg.relu(c), cg.gelu(y)), x)
        g.output(out)
    for n in (1, 2, 3, 5):
        assert cg.peak_memory(g, D=3, L=n) == cg.peak_memory(cg.unroll(g, L=n), D=3)
    testing.check(g, D=3, L=2)


def test_stated_bytes_of_a_tensor_with_shared_scales_are_those_stated():
    with cg.Graph("g") as g:
        x = cg.reduce(g.input("x", (A, A + 1), dtype="mxfp8"), "a b -> b", "sum")
        g.output(cg.opaque("stated", [x], (A,), flops=0, reads=8 * A))
    assert cg.costs(g).filter(op="stated").bind(A=5).total().read == 8 * 5
    testing.check(g, A=5)


def test_what_an_inner_loop_makes_is_copied_into_the_stack_of_the_outer_one():
    with cg.Graph("g") as g:
        x, y = g.input("x", (D,)), g.input("y", (D,))
        out, ys = cg.scan(L, lambda c, _: (cg.relu(c), cg.repeat(2, cg.gelu, y)), x)
        g.output(out, ys)
    for n in (1, 2, 5):
        assert cg.peak_memory(g, D=3, L=n) == cg.peak_memory(cg.unroll(g, L=n), D=3)
    testing.check(g, D=3, L=2)


def test_a_mask_may_be_written_in_place():
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise("causal_mask", cg.relu(g.input("x", (A, A))), inplace=True))
    assert cg.peak_memory(g, A=5) == 4 * (25 + 25)  # the input and one storage
    testing.check(g, A=5)


def test_sizes_that_are_assumed_equal_have_one_layout():
    with cg.Graph("g") as g:
        g.assume("D == A*B")
        x = cg.rearrange(g.input("x", (A, D / A)), "a b -> b a")
        y = x + g.input("y", (B, A))
        z = cg.ops.reshape(cg.rearrange(y, "b a -> a b"), (D,))
        g.output(z)
    assert z.is_view  # the sum keeps the order of the axes of x
    assert cg.bytes_moved(g, A=2, B=3) == 4 * 3 * 6
    testing.check(g, A=2, B=3, D=6)


def test_products_of_several_tensors_are_elementwise_work():
    with cg.Graph("g") as g:
        g.output(cg.einsum(g.input("x", (2, 1)), g.input("y", (A,)), g.input("z", ()), "a b, c, -> a b c"))
    assert cg.matmul_flops(g) == 0
    assert cg.flops(g, A=5) == 2 * 5 + 2  # x*z first, then times y: cheaper than 3*A from A = 3 on
    testing.check(g, A=5)


def test_numbers_count_as_operands_do():
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise("fma", 2.0, 0.5, g.input("x", (A,))))
    assert cg.flops(g, A=7) == 2 * 7  # a product and a sum an element, whatever stands in memory
    testing.check(g, A=7)


def test_the_first_operand_orders_the_axes_as_in_torch():
    with cg.Graph("g") as g:
        x = cg.rearrange(g.input("x", (A, B, D)), "a b d -> d b a")
        y = cg.softmax(x, 0)
        g.output(y, x - g.input("y", (B, A)))
    assert g.outputs[1].strides == x.strides
    testing.check(g, A=2, B=3, D=5)


def test_writing_into_what_a_loop_hands_on_overwrites_what_it_started_from():
    with pytest.raises(cg.GraphError, match="reads 'relu', which 'abs' has overwritten in place"), cg.Graph("g") as g:  # noqa: PT012  # found when the graph closes
        x = cg.relu(g.input("x", (D,)))
        y = cg.repeat(L, lambda h: h, x)
        cg.ops.pointwise("abs", y, inplace=True)
        g.output(cg.gelu(x))


def test_nested_loops_of_one_count_are_short_together():
    with cg.Graph("g") as g:
        x = g.input("x", (D,))
        g.output(cg.repeat(L, lambda h: cg.repeat(L, cg.gelu, h), x))
    formula, least = cg.peak_memory(g), cg.timeline(g).holds_from["L"]
    for n in range(least, 6):
        assert testing.value(formula, {"D": 3, "L": n}) == cg.peak_memory(cg.unroll(g, L=n), D=3)
    assert cg.peak_memory(g, L=1, D=3) == 4 * (3 + 3)  # the input and one result
    assert least == 2  # from two iterations on what one makes is there beside what it read
    testing.check(g, D=3, L=1)


def test_a_view_of_what_is_stacked_stays_a_view_when_the_loop_is_unrolled():
    with cg.Graph("g") as g:
        x = g.input("x", (A, D))

        def step(c, _):
            y = cg.relu(x)
            return cg.reduce(cg.ops.reshape(y, (A * D,)), "a -> ", "sum") + c, y

        g.output(*cg.scan(L, step, g.input("c", ())))
    assert cg.bytes_moved(cg.unroll(g, L=3), A=2, D=5) == cg.bytes_moved(g, A=2, D=5, L=3)
    testing.check(g, A=2, D=5, L=3)


def test_what_is_expanded_is_written_whole_into_a_cache():
    """Of 3 rows each has one element, which is read once and written to 2 places."""
    with cg.Graph("g") as g:
        held = g.buffer("held", (3, D), role="cache")
        g.output(cg.relu(append(held, cg.ops.expand(g.input("x", (3,)), "a -> a d", d=2), 1)))
    (op,) = (op for op in g.ops if op.name == "append")
    row = cg.costs(g).filter(op="append").bind(D=5).total()
    assert (row.read, row.written) == (4 * 3, 4 * 3 * 2)
    assert op.kind.reads(op)[1] == 3
    testing.check(g, D=5)


def test_a_stack_in_another_shape_is_that_of_its_iterations():
    with cg.Graph("g") as g:
        x = g.input("x", (A, D))
        _, ys = cg.scan(L, lambda c, _: (c + 1, cg.relu(x + c)), g.input("c", ()))
        g.output(cg.relu(cg.ops.reshape(ys, (L * A * D,))))
    testing.check(g, A=2, D=5, L=3)
    testing.check(cg.unroll(g, L=3), A=2, D=5)


def test_an_expanded_gradient_of_masked_scores_is_one_element():
    with cg.Graph("g") as g:
        q, k = g.param("q", (A, 1)), g.param("k", (D, 1))
        scores = cg.einsum(q, k, "s d, t d -> s t", domain=cg.Domain(causal=True), over=("s", "t"))
        g.output(cg.reduce(scores, "s t -> ", "sum"))
    products = [op for op in cg.backward(g).ops if op.kind.name == "einsum" and op.phase == "backward"]
    assert len(products) == 2
    for op in products:  # the gradient of the sum is one element, whatever the mask lets through
        assert op.operands[0].touched == 1
        assert op.kind.reads(op)[0] == 1
    testing.check_training(g, A=3, D=2)


def restricted(*batch, **options):
    """Scores of an attention whose queries see the keys up to their own position."""
    graph = cg.Graph("g", **options)
    with graph as g:
        names = " ".join("b" * len(batch))
        q, k = g.input("q", (*batch, A, D)), g.input("k", (A, D))
        s = cg.einsum(q, k, f"{names} s d, t d -> {names} s t", domain=cg.Domain(causal=True), over=("s", "t"))
    return graph, s


@pytest.mark.parametrize("how", ["mul", "where"])
def test_a_whole_operand_beside_scores_is_read_where_there_are_any(how):
    graph, s = restricted(B)
    with graph as g:
        m = g.input("m", (A, A), "bool" if how == "where" else "fp32")
        g.output(s * m if how == "mul" else cg.ops.pointwise("where", m, s, 0.0))
    read = cg.costs(g).filter(op=how).bind(A=3, B=2, D=5).total().read
    assert read == 4 * 2 * 6 + (1 if how == "where" else 4) * 6  # 3 * 4 / 2 pairs of each square and of the mask
    touched = 4 * (2 * 3 * 5 + 3 * 5) + (1 if how == "where" else 4) * 6 + 4 * 2 * 6
    assert cg.bytes_moved(g, fused=True, A=3, B=2, D=5) == touched
    testing.check(g, A=3, B=2, D=5)


def test_scores_that_are_put_side_by_side_stay_scores():
    graph, s = restricted(B)
    with graph as g:
        both = cg.ops.concat([s, -s], 0)
        g.output(both)
        with pytest.raises(cg.ShapeError, match="is restricted to a domain, expected its axes 1 and 2 unchanged"):
            cg.ops.concat([s, -s], 1)
        with pytest.raises(cg.ShapeError, match="are restricted to different domains, expected the same"):
            cg.ops.concat([s, g.input("x", (B, A, A))], 0)
    assert both.domain == s.domain
    row = cg.costs(g).filter(op="concat").bind(A=3, B=2, D=5).total()
    assert (row.read, row.written) == (4 * 2 * 12, 4 * 24)
    testing.check(g, A=3, B=2, D=5)


@pytest.mark.parametrize(
    "call",
    [
        lambda g, s: cg.ops.top_k(s, 2),
        lambda g, s: cg.ops.gather(s, g.input("ids", (2,), "int64")),
        lambda g, s: cg.ops.scatter(s, g.input("ids", (2,), "int64"), g.input("x", (2, A)), inplace=False),
        lambda g, s: cg.nn.pool(s, "max", window=(2,), stride=1),
        lambda g, s: cg.ops.cache(s, "s t"),
        lambda g, s: cg.ops.collective(s, "all_reduce", 2),
    ],
)
def test_what_needs_all_elements_takes_no_scores(call):
    graph, s = restricted()
    text = r"of einsum\(A, A; fp32\), which is restricted to a domain: expected an unrestricted tensor"
    with graph as g, pytest.raises(cg.ShapeError, match=text):
        call(g, s)


def test_scores_of_two_domains_do_not_meet():
    graph, s = restricted()
    window = cg.Domain(causal=True, window=2)
    with graph as g:
        for call in (
            lambda: s + s.T,
            lambda: cg.einsum(s, s, "s t, t u -> s u"),
            lambda: cg.einsum(s, g.input("v", (A, D)), "s t, t d -> s d", domain=window, over=("s", "t")),
        ):
            with pytest.raises(cg.ShapeError, match="operands restricted to two different domains, expected one"):
                call()
        with pytest.raises(cg.ShapeError, match="expected the domain of the result"):
            cg.ops.pointwise("add", cg.relu(g.input("x", (A, A))), s, inplace=True)
        with pytest.raises(cg.ShapeError, match="leaves the body restricted to a domain, expected an unrestricted"):
            cg.scan(2, lambda c, _: (c, s * c), g.input("c", ()))


def test_axes_beside_those_of_a_domain_are_split_and_moved():
    graph, s = restricted(6)
    with graph as g:
        g.output(cg.rearrange(s, "(b c) s t -> c t b s", b=2), cg.rearrange(s, "b s t -> t b s"))
    assert [t.domain[1:] for t in g.outputs] == [(3, 1), (2, 0)]
    testing.check(g, A=3, D=2)


def test_a_loop_that_hands_on_what_stands_outside_gives_that():
    with cg.Graph("g") as g:
        x = g.input("x", (2, A))
        views = (lambda h: x[1], lambda h: cg.rearrange(h, "a -> a"), lambda h: h)
        y, z, h = (cg.repeat(L, view, x[1]) for view in views)
        g.output(cg.einsum(y, z, "a, a -> "), cg.einsum(h, x[1], "a, b -> "))
    # each of the two products reads one row of x, which it is given twice
    assert cg.costs(g).total().read == 4 * A + 4 * A
    testing.check(g, A=3, L=2)


def test_bytes_that_are_read_again_are_bound_by_those_there_are():
    with cg.Graph("g") as g:
        g.output(cg.opaque("stated", [g.input("x", (2 * A,))[:A]], (A,), flops=0, reads=32 * A))
    assert cg.bytes_moved(g) == 32 * A + 4 * A
    assert cg.bytes_moved(g, fused=True) == 4 * A + 4 * A
    testing.check(g, A=3)


def test_a_repeated_element_is_read_once_and_written_everywhere_into_a_cache():
    with cg.Graph("g") as g:
        g.output(append(cg.relu(g.input("held", (A, D))), cg.ops.expand(g.input("x", (D,)), "d -> a d", a=A), 0))
    row = cg.costs(g).filter(op="append").bind(A=3, D=2).total()
    assert (row.read, row.written) == (4 * 2, 4 * 3 * 2)
    testing.check(g, A=3, D=2)


@pytest.mark.parametrize(
    "write",
    [
        lambda held, x, ids: append(held, x, 0),
        lambda held, x, ids: cg.ops.scatter(held, ids, x, inplace=True),
        lambda held, x, ids: cg.ops.pointwise("add", held, x, inplace=True),
        lambda held, x, ids: accumulate(held, x),
    ],
)
def test_nothing_is_written_where_several_index_points_are_one_element(write):
    with cg.Graph("g") as g:
        held = cg.ops.expand(fill((D,), 1.5), "d -> a d", a=3)
        x, ids = g.input("x", (3, D)), g.input("ids", (3,), dtype="int64")
        with pytest.raises(cg.ShapeError, match=r"in place into expand.*: expected a tensor that is not expanded"):
            write(held, x, ids)  # torch: more than one element of the written-to tensor refers to a single location
        g.output(append(held + 0, x, 0))
    testing.check(g, D=5)


def test_the_largest_of_a_restricted_row_is_counted_from_where_the_row_begins():
    with cg.Graph("g") as g:
        q, k = g.input("q", (A, D)), g.input("k", (A, D))
        s = cg.einsum(q, k, "s d, t d -> s t", domain=cg.Domain(causal=True, window=1), over=("s", "t"))
        g.output(cg.reduce(s, "s t -> t", "argmax"))
    assert testing.run(g, A=5, D=3).outputs[0].tolist() == [0, 1, 2, 3, 4]  # a query sees the key of its own place
    testing.check(g, A=5, D=3)


def test_an_axis_of_one_more_than_a_size_is_longer_than_one():
    with cg.Graph("g") as g:
        x = cg.rearrange(g.input("x", (A, B, D + 1)), "a b d -> a d b")
        g.output(cg.relu(x))
    assert g.outputs[0].strides == x.strides  # 1/(D + 1) is no size: the order of the axes is kept
    testing.check(g, A=2, B=3, D=5)


def test_a_run_that_is_not_called_again_holds_nothing_that_a_loop_has_left():
    with cg.Graph("g") as g:
        x = cg.repeat(2, cg.ops.keep, g.param("x", (D,)), name="scan")
        x = cg.repeat(2, lambda h: -h, x, name="negated")
        g.output(cg.reduce(x, "d -> ", "mean"))
    testing.check_training(g, ["checkpoints_change_no_gradient_and_save_no_flops"], D=5)
