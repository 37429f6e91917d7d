"""Findings of the laws as plain cases with derivations; each point is also held to all laws."""

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
def test_function_costs_match_their_formulas(function, pointwise):
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise(function, g.input("x", (A,))))
    assert cg.flops(g, A=7) == 7 * (pointwise + 1)  # and one exp
    testing.check(g, A=7)


def test_window_over_expanded_axis_reads_one_element():
    with cg.Graph("g") as g:
        g.output(cg.nn.pool(cg.ops.expand(g.input("x", ()), " -> a", a=A), "max", window=(2,), stride=1))
    assert cg.costs(g).filter(op="max_pool").bind(A=5).total().read == 4
    testing.check(g, A=5)


def test_expanded_table_has_one_row():
    with cg.Graph("g") as g:
        table = cg.ops.expand(g.input("row", (D,)), "d -> a d", a=A)
        g.output(cg.ops.gather(table, g.input("ids", (B,), dtype="int64")))
    assert cg.costs(g).filter(op="gather").bind(A=5, B=3, D=2).total().read == 4 * 2 + 8 * 3
    testing.check(g, A=5, B=3, D=2)


def test_axis_merged_with_domain_axis_is_read():
    with cg.Graph("g") as g:
        q, k = g.input("q", (A * D,)), g.input("k", (A, D))
        domain = cg.Domain(causal=True)
        g.output(cg.einsum(q, k, "(s d), t d -> s t", domain=domain, over=("s", "t"), d=D))
    assert cg.costs(g).bind(A=5, D=3).total().read == 4 * (5 * 3 + 5 * 3)  # every query and key row, whole
    testing.check(g, A=5, D=3)


def test_captured_initial_carry_is_read_once():
    with cg.Graph("g") as g:
        x = g.input("x", (D,))
        g.output(cg.repeat(L, lambda h: h + x, x))
    # x + x reads D elements in the first iteration, h + x reads 2*D in each other one; each writes D
    assert cg.bytes_moved(g, D=3, L=5) == 4 * (2 * 3 + 4 * 3 * 3)
    assert cg.bytes_moved(g, D=3, L=1) == 4 * 2 * 3
    testing.check(g, D=3, L=5)


def test_swapped_carries_alias_every_other_iteration():
    with cg.Graph("g") as g:
        x, y = g.input("x", (D,)), g.input("y", (D,))
        a, b = cg.repeat(L, lambda a, b: (b, cg.relu(a + y)), (y, x))
        g.output(a, b)
    testing.check(g, D=3, L=4)
    for n in range(1, 7):
        assert cg.bytes_moved(g, D=3, L=n) == cg.bytes_moved(cg.unroll(g, L=n), D=3)


def test_output_contained_in_another_is_written_once():
    with cg.Graph("g") as g:
        y = cg.relu(g.input("x", (A,)))
        g.output(y[:2], y)
    assert cg.bytes_moved(g, fused=True, A=5) == cg.bytes_moved(g, A=5) == 4 * (5 + 5)
    testing.check(g, A=5)


def test_disjoint_output_slices_are_all_written():
    with cg.Graph("g") as g:
        y = cg.relu(g.input("x", (3 * A,)))
        g.output(*cg.ops.split(y, [A, A, A])[:2])
    assert cg.bytes_moved(g, fused=True, A=5) == 4 * (3 * 5 + 2 * 5)
    testing.check(g, A=5)


def test_view_of_a_forwarded_carry_is_not_written():
    with cg.Graph("g") as g:
        x = g.input("x", (A, D))
        g.output(cg.rearrange(cg.repeat(L, lambda h: h, x), "a d -> d a"))
    assert cg.bytes_moved(g, fused=True, A=2, D=3, L=2) == 0
    testing.check(g, A=2, D=3, L=2)


def test_unroll_binds_window_inside_kernel():
    with cg.Graph("g") as g:
        q, k, v = (g.input(n, (1, 1, A, 2)) for n in "qkv")
        g.output(cg.attention(q, k, v, window=W))
    assert cg.flops(cg.unroll(g, A=5, W=2)) == cg.flops(g, A=5, W=2)
    testing.check(g, A=5, W=2)


def test_scalar_operands_keep_their_positions():
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
def test_fused_attention_matches_separate_ops(causal, window):
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


def test_loop_over_domain_restricted_tensor_raises():
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
        ("h-5", 0),  # position -5 only
        ("h*2+r*3-3", 1),  # positions -3 and 0
        ("h+r-3", 0),  # positions -3 and -2
    ],
)
def test_outputs_in_the_padding_read_nothing(index, read):
    with cg.Graph("g") as g:
        x, w = g.input("x", (5,)), g.input("w", (2,))
        g.output(cg.einsum(x, w, f"{index}, r -> h" if "r" in index else f"{index}, d -> h d", h=1))
    assert cg.costs(g).total().read == 4 * (read + 2)
    testing.check(g)


def test_outputs_beyond_a_bound_axis_raise(tmp_path):
    with cg.Graph("g") as g:
        x, w = g.input("x", (A,)), g.input("w", (3,))
        g.output(cg.einsum(x, w, "h*2, d -> h d", h=B))
    assert cg.flops(g, A=7, B=4) == 4 * 3  # positions 0, 2, 4, 6
    with pytest.raises(cg.BindingError, match="remaining length after 'einsum' has size A - 2\\*B \\+ 1 = -2"):
        cg.flops(g, A=5, B=4)
    testing.check(g, A=7, B=3)


def test_unused_stack_dies_with_its_last_slice():
    with cg.Graph("g") as g:
        x, y = g.input("x", (D,)), g.input("y", (D,))
        out, _ = cg.scan(L, lambda c, _: (cg.relu(c), cg.gelu(y)), x)
        g.output(out)
    for n in (1, 2, 3, 5):
        assert cg.peak_memory(g, D=3, L=n) == cg.peak_memory(cg.unroll(g, L=n), D=3)
    testing.check(g, D=3, L=2)


def test_declared_bytes_of_block_format_tensor_are_kept():
    with cg.Graph("g") as g:
        x = cg.reduce(g.input("x", (A, A + 1), dtype="mxfp8"), "a b -> b", "sum")
        g.output(cg.opaque("stated", [x], (A,), flops=0, reads=8 * A))
    assert cg.costs(g).filter(op="stated").bind(A=5).total().read == 8 * 5
    testing.check(g, A=5)


def test_inner_loop_result_is_copied_into_outer_stack():
    with cg.Graph("g") as g:
        x, y = g.input("x", (D,)), g.input("y", (D,))
        out, ys = cg.scan(L, lambda c, _: (cg.relu(c), cg.repeat(2, cg.gelu, y)), x)
        g.output(out, ys)
    for n in (1, 2, 5):
        assert cg.peak_memory(g, D=3, L=n) == cg.peak_memory(cg.unroll(g, L=n), D=3)
    testing.check(g, D=3, L=2)


def test_mask_can_be_in_place():
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise("causal_mask", cg.relu(g.input("x", (A, A))), inplace=True))
    assert cg.peak_memory(g, A=5) == 4 * (25 + 25)  # the input and one storage
    testing.check(g, A=5)


def test_sizes_assumed_equal_share_a_layout():
    with cg.Graph("g") as g:
        g.assume("D == A*B")
        x = cg.rearrange(g.input("x", (A, D / A)), "a b -> b a")
        y = x + g.input("y", (B, A))
        z = cg.ops.reshape(cg.rearrange(y, "b a -> a b"), (D,))
        g.output(z)
    assert z.is_view  # the sum keeps the order of the axes of x
    assert cg.bytes_moved(g, A=2, B=3) == 4 * 3 * 6
    testing.check(g, A=2, B=3, D=6)


def test_unsummed_products_are_pointwise_flops():
    with cg.Graph("g") as g:
        g.output(cg.einsum(g.input("x", (2, 1)), g.input("y", (A,)), g.input("z", ()), "a b, c, -> a b c"))
    assert cg.matmul_flops(g) == 0
    assert cg.flops(g, A=5) == 2 * 5 + 2  # x*z first, then times y: cheaper than 3*A for A >= 3
    testing.check(g, A=5)


def test_scalar_operands_cost_flops_like_tensors():
    with cg.Graph("g") as g:
        g.output(cg.ops.pointwise("fma", 2.0, 0.5, g.input("x", (A,))))
    assert cg.flops(g, A=7) == 2 * 7  # a product and a sum per element; scalars count as operands
    testing.check(g, A=7)


def test_first_operand_determines_axis_order():
    with cg.Graph("g") as g:
        x = cg.rearrange(g.input("x", (A, B, D)), "a b d -> d b a")
        y = cg.softmax(x, 0)
        g.output(y, x - g.input("y", (B, A)))
    assert g.outputs[1].strides == x.strides
    testing.check(g, A=2, B=3, D=5)


def test_in_place_write_to_forwarded_carry_overwrites_initial_value():
    with pytest.raises(cg.GraphError, match="reads 'relu', which 'abs' has overwritten in place"), cg.Graph("g") as g:  # noqa: PT012  # found when the graph closes
        x = cg.relu(g.input("x", (D,)))
        y = cg.repeat(L, lambda h: h, x)
        cg.ops.pointwise("abs", y, inplace=True)
        g.output(cg.gelu(x))


def test_nested_loops_with_one_count_share_short_cases():
    with cg.Graph("g") as g:
        x = g.input("x", (D,))
        g.output(cg.repeat(L, lambda h: cg.repeat(L, cg.gelu, h), x))
    formula, least = cg.peak_memory(g), cg.timeline(g).holds_from["L"]
    for n in range(least, 6):
        assert testing.value(formula, {"D": 3, "L": n}) == cg.peak_memory(cg.unroll(g, L=n), D=3)
    assert cg.peak_memory(g, L=1, D=3) == 4 * (3 + 3)  # the input and one result
    assert least == 2  # from two iterations on, an iteration's result coexists with its input
    testing.check(g, D=3, L=1)


def test_view_of_stack_stays_view_when_unrolled():
    with cg.Graph("g") as g:
        x = g.input("x", (A, D))

        def step(c, _):
            y = cg.relu(x)
            return cg.reduce(cg.ops.reshape(y, (A * D,)), "a -> ", "sum") + c, y

        g.output(*cg.scan(L, step, g.input("c", ())))
    assert cg.bytes_moved(cg.unroll(g, L=3), A=2, D=5) == cg.bytes_moved(g, A=2, D=5, L=3)
    testing.check(g, A=2, D=5, L=3)


def test_expanded_tensor_is_written_whole_into_cache():
    """Each of the 3 rows has one stored element, which is read once and written to 2 positions."""
    with cg.Graph("g") as g:
        held = g.buffer("held", (3, D), role="cache")
        g.output(cg.relu(append(held, cg.ops.expand(g.input("x", (3,)), "a -> a d", d=2), 1)))
    (op,) = (op for op in g.ops if op.name == "append")
    row = cg.costs(g).filter(op="append").bind(D=5).total()
    assert (row.read, row.written) == (4 * 3, 4 * 3 * 2)
    assert op.kind.reads(op)[1] == 3
    testing.check(g, D=5)


def test_reshaped_stack_matches_unrolled_iterations():
    with cg.Graph("g") as g:
        x = g.input("x", (A, D))
        _, ys = cg.scan(L, lambda c, _: (c + 1, cg.relu(x + c)), g.input("c", ()))
        g.output(cg.relu(cg.ops.reshape(ys, (L * A * D,))))
    testing.check(g, A=2, D=5, L=3)
    testing.check(cg.unroll(g, L=3), A=2, D=5)


def test_expanded_gradient_of_masked_scores_reads_one_element():
    with cg.Graph("g") as g:
        q, k = g.param("q", (A, 1)), g.param("k", (D, 1))
        scores = cg.einsum(q, k, "s d, t d -> s t", domain=cg.Domain(causal=True), over=("s", "t"))
        g.output(cg.reduce(scores, "s t -> ", "sum"))
    products = [op for op in cg.backward(g).ops if op.kind.name == "einsum" and op.phase == "backward"]
    assert len(products) == 2
    for op in products:  # the sum's gradient is one element, whatever the mask selects
        assert op.operands[0].touched == 1
        assert op.kind.reads(op)[0] == 1
    testing.check_training(g, A=3, D=2)


def restricted(*batch, **options):
    """Attention scores whose queries see the keys up to their own position."""
    graph = cg.Graph("g", **options)
    with graph as g:
        names = " ".join("b" * len(batch))
        q, k = g.input("q", (*batch, A, D)), g.input("k", (A, D))
        s = cg.einsum(q, k, f"{names} s d, t d -> {names} s t", domain=cg.Domain(causal=True), over=("s", "t"))
    return graph, s


@pytest.mark.parametrize("how", ["mul", "where"])
def test_unrestricted_operand_is_read_inside_the_domain_only(how):
    graph, s = restricted(B)
    with graph as g:
        m = g.input("m", (A, A), "bool" if how == "where" else "fp32")
        g.output(s * m if how == "mul" else cg.ops.pointwise("where", m, s, 0.0))
    read = cg.costs(g).filter(op=how).bind(A=3, B=2, D=5).total().read
    assert read == 4 * 2 * 6 + (1 if how == "where" else 4) * 6  # 3 * 4 / 2 pairs in each square and in the mask
    touched = 4 * (2 * 3 * 5 + 3 * 5) + (1 if how == "where" else 4) * 6 + 4 * 2 * 6
    assert cg.bytes_moved(g, fused=True, A=3, B=2, D=5) == touched
    testing.check(g, A=3, B=2, D=5)


def test_concatenated_scores_keep_their_domain():
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
def test_ops_on_whole_tensors_reject_restricted_scores(call):
    graph, s = restricted()
    text = r"of einsum\(A, A; fp32\), which is restricted to a domain: expected an unrestricted tensor"
    with graph as g, pytest.raises(cg.ShapeError, match=text):
        call(g, s)


def test_mixing_two_domains_raises():
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


def test_axes_outside_the_domain_can_be_split_and_permuted():
    graph, s = restricted(6)
    with graph as g:
        g.output(cg.rearrange(s, "(b c) s t -> c t b s", b=2), cg.rearrange(s, "b s t -> t b s"))
    assert [t.domain[1:] for t in g.outputs] == [(3, 1), (2, 0)]
    testing.check(g, A=3, D=2)


def test_loop_forwarding_a_captured_tensor_aliases_it():
    with cg.Graph("g") as g:
        x = g.input("x", (2, A))
        views = (lambda h: x[1], lambda h: cg.rearrange(h, "a -> a"), lambda h: h)
        y, z, h = (cg.repeat(L, view, x[1]) for view in views)
        g.output(cg.einsum(y, z, "a, a -> "), cg.einsum(h, x[1], "a, b -> "))
    # both products read one row of x, passed twice
    assert cg.costs(g).total().read == 4 * A + 4 * A
    testing.check(g, A=3, L=2)


def test_fused_reads_are_capped_at_operand_size():
    with cg.Graph("g") as g:
        g.output(cg.opaque("stated", [g.input("x", (2 * A,))[:A]], (A,), flops=0, reads=32 * A))
    assert cg.bytes_moved(g) == 32 * A + 4 * A
    assert cg.bytes_moved(g, fused=True) == 4 * A + 4 * A
    testing.check(g, A=3)


def test_repeated_element_is_read_once_and_written_everywhere():
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
def test_writes_to_expanded_tensors_raise(write):
    with cg.Graph("g") as g:
        held = cg.ops.expand(fill((D,), 1.5), "d -> a d", a=3)
        x, ids = g.input("x", (3, D)), g.input("ids", (3,), dtype="int64")
        with pytest.raises(cg.ShapeError, match=r"in place into expand.*: expected a tensor that is not expanded"):
            write(held, x, ids)  # torch: more than one element of the written-to tensor refers to a single location
        g.output(append(held + 0, x, 0))
    testing.check(g, D=5)


def test_argmax_of_restricted_row_counts_from_its_start():
    with cg.Graph("g") as g:
        q, k = g.input("q", (A, D)), g.input("k", (A, D))
        s = cg.einsum(q, k, "s d, t d -> s t", domain=cg.Domain(causal=True, window=1), over=("s", "t"))
        g.output(cg.reduce(s, "s t -> t", "argmax"))
    assert testing.run(g, A=5, D=3).outputs[0].tolist() == [0, 1, 2, 3, 4]  # a query sees its own key
    testing.check(g, A=5, D=3)


def test_axis_of_size_plus_one_exceeds_one():
    with cg.Graph("g") as g:
        x = cg.rearrange(g.input("x", (A, B, D + 1)), "a b d -> a d b")
        g.output(cg.relu(x))
    assert g.outputs[0].strides == x.strides  # 1/(D + 1) is no size: the axis order is kept
    testing.check(g, A=2, B=3, D=5)


def test_single_run_frees_loop_state():
    with cg.Graph("g") as g:
        x = cg.repeat(2, cg.ops.keep_alive, g.param("x", (D,)), name="scan")
        x = cg.repeat(2, lambda h: -h, x, name="negated")
        g.output(cg.reduce(x, "d -> ", "mean"))
    testing.check_training(g, ["checkpoints_change_no_gradient_and_save_no_flops"], D=5)
