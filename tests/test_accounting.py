from each import each
from sympy import Rational, limit, oo, simplify

import costgraph as cg

B, S, D, F, K, H, L, V, W, N = cg.dims("B S D F K H L V W N")
MIB = 2**20


def product(left, right, pattern, dtype="bf16"):
    with cg.Graph("g", dtype=dtype) as g:
        g.output(cg.einsum(g.input("x", left), g.param("w", right), pattern))
    return g


# -- tensors, formats, movement ------------------------------------------------------------------------------------


def test_tensor_bytes_follow_dtype_and_shape():
    with cg.Graph("g", dtype="fp32") as g:
        g.input("x", (32, 32)), g.input("y", (32, 32))
    assert cg.peak_memory(g) == 2 * 32 * 32 * 4 == 8192


@each(("dtype", "mib"), [("fp32", 2304), ("bf16", 1152), ("fp16", 1152), ("fp8_e4m3", 576)])
def test_gpt3_feed_forward_weight_size_in_mebibytes(dtype, mib):
    with cg.Graph("g", dtype=dtype) as g:
        g.param("w", (12288, 49152))
    assert cg.param_bytes(g) == mib * MIB
    assert cg.param_count(g) == 12288 * 49152


@each(
    ("dtype", "expected"),
    [
        ("mxfp8", 8 * 64 * 4096 + 8 * 64 * 128),  # one 8-bit scale per block: 4096/32 blocks in a row
        ("mxfp4", 4 * 64 * 4096 + 8 * 64 * 128),
        ("nvfp4", 4 * 64 * 4096 + 8 * 64 * 256 + 32),  # an 8-bit scale per 4096/16 blocks, one of 32
    ],
)
def test_block_formats_include_scale_bytes(dtype, expected):
    with cg.Graph("g", dtype=dtype) as g:
        g.param("w", (64, 4096))
    assert 8 * cg.param_bytes(g) == expected


def test_views_move_nothing_and_transposed_reshape_copies():
    with cg.Graph("g") as g:
        x = g.input("x", (S, D))
        for y in (x[1:], x.T, cg.ops.reshape(x, (D, S)), cg.ops.expand(x, "s d -> b s d", b=B)):
            assert y.is_view
        assert cg.bytes_moved(g) == 0
        g.output(cg.ops.reshape(x.T, (S * D,)))
    assert cg.bytes_moved(g) == 4 * S * D + 4 * S * D


def test_host_to_device_transfer_moves_each_byte_once():
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.ops.transfer(g.input("x", (B, S)), "pcie"))
    assert cg.costs(g).total().written == 2 * B * S


# -- FLOPs -----------------------------------------------------------------------------------------------------------


def test_matmul_counts_two_flops_per_index_triple():
    assert cg.flops(product((B, D), (D, K), "b d, d k -> b k")) == 2 * B * D * K


@each("function", ["add", "mul", "relu"])
def test_elementwise_counts_one_flop_per_element(function):
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        g.output(cg.relu(x) if function == "relu" else cg.ops.pointwise(function, x, x))
    assert cg.flops(g) == B * D


def transformer(kernel="flash"):
    with cg.Graph("decoder", dtype="bf16") as g:
        tokens = g.input("tokens", (B, S), dtype="int64")
        x = cg.embedding(tokens, g.param("embed", (V, D)))

        def block(x):
            h = cg.rms_norm(x, name="norm1")
            heads = [cg.linear(h, "b s d -> b h s k", h=H, k=K, name=n) for n in ("wq", "wk", "wv")]
            y = cg.attention(*heads, kernel=kernel)
            x = x + cg.linear(y, "b h s k -> b s d", d=D, name="wo")
            return x + cg.nn.gated_mlp(cg.rms_norm(x, name="norm2"), F)

        x = cg.repeat(L, block, x, name="layers")
        g.output(cg.linear(cg.rms_norm(x), "b s d -> b s v", v=V, name="head"))
    return g


def test_dense_transformer_flops_are_2nd_plus_attention():
    g = transformer()
    matrices = L * (4 * D * H * K + 3 * D * F) + D * V  # matmul weights that each token is multiplied by
    embeddings, scales = V * D, D * (2 * L + 1)
    assert (cg.param_count(g) - matrices - embeddings - scales).expand() == 0
    rest = cg.matmul_flops(g) - 2 * matrices * B * S
    assert (rest - 4 * L * B * H * K * S * (S + 1) / 2).expand() == 0  # causal pairs; scores and values
    full = cg.matmul_flops(g, "full") - 2 * matrices * B * S
    assert (full - 4 * L * B * H * K * S**2).expand() == 0  # the full square


def test_embedding_lookups_have_no_matmul_flops():
    assert not any(r.kind == "matmul" for r in cg.costs(transformer()).filter(op="embedding"))


@each("s", [1, 2, 7, 16])
@each("w", [1, 3, 7, 50])
def test_causal_and_window_pair_counts_are_exact(s, w):
    for window, pairs in (
        (None, s * (s + 1) // 2),
        (W, min(s, w) * s - min(s, w) * (min(s, w) - 1) // 2),
    ):
        with cg.Graph("g") as g:
            q, k, v = (g.input(n, (B, H, S, K)) for n in "qkv")
            g.output(cg.attention(q, k, v, window=window))
        bound = {"B": 2, "H": 3, "K": 5, "S": s} | ({} if window is None else {"W": w})
        assert cg.matmul_flops(g, **bound) == 4 * 5 * 2 * 3 * pairs
        assert cg.matmul_flops(g, "full", **bound) == 4 * 5 * 2 * 3 * s * s


def test_convolution_flops_match_closed_form():
    with cg.Graph("g") as g:
        g.output(cg.conv(g.input("x", (B, D, S, S)), "b c h w -> b o h w", window=3, padding=1, o=F))
    assert cg.matmul_flops(g) == 2 * (B * F * S * S) * 9 * D  # padded positions count, as in torch


def test_expert_flops_count_activated_experts_only():
    experts, chosen = cg.dims("E k")
    with cg.Graph("moe") as g:
        x = g.input("x", (B, S, D))
        cg.linear(x, "b s d -> b s e", e=experts, name="router")
        # each token goes to k experts: E groups of B*S*k/E tokens
        slots = cg.ops.reshape(cg.ops.expand(x, "b s d -> b s k d", k=chosen), (experts, B * S * chosen / experts, D))
        h = cg.einsum(slots, g.param("up", (experts, D, F)), "e t d, e d f -> e t f")
        g.output(cg.einsum(h, g.param("down", (experts, F, D)), "e t f, e f d -> e t d"))
    assert cg.costs(g).filter(op="einsum").total().matmul + cg.costs(g).filter(op="einsum_1").total().matmul == (
        2 * 2 * B * S * chosen * D * F  # 2 * active parameters * tokens
    )
    assert cg.param_count(g) == 2 * experts * D * F + D * experts


# -- intensity -------------------------------------------------------------------------------------------------------


def test_bf16_relu_intensity_is_one_quarter():
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.relu(g.input("x", (N,))))
    assert cg.intensity(g) == 0.25  # one FLOP; two bytes read and two written


def test_dot_product_intensity_tends_to_one_half():
    intensity = cg.intensity(product((N,), (N,), "n, n -> "))
    assert simplify(intensity - 2 * N / (4 * N + 2)) == 0  # two vectors read, one scalar written
    assert limit(intensity, N, oo) == Rational(1, 2)


def test_matrix_vector_intensity_tends_to_one():
    intensity = cg.intensity(product((N,), (N, N), "n, n m -> m"))
    assert simplify(intensity - 2 * N**2 / (2 * N**2 + 4 * N)) == 0
    assert limit(intensity, N, oo) == 1


def test_square_matmul_intensity_is_a_third_of_its_size():
    assert cg.intensity(product((N, N), (N, N), "i k, k j -> i j")) == N / 3  # 2 n**3 / (3 * 2 n**2)
    # the ridge is 989.5e12 / 3.35e12 = 295.4: compute-bound from three times that size
    assert cg.intensity(product((N, N), (N, N), "i k, k j -> i j"), N=886) < 295.4 < 887 / 3


def test_thin_matmul_intensity_tends_to_batch_size():
    intensity = cg.intensity(product((B, D), (D, F), "b d, d f -> b f"))
    assert limit(limit(intensity, D, oo), F, oo) == B


def test_decode_is_one_matrix_vector_product_per_sequence():
    one = product((B, 1, D), (D, F), "b s d, d f -> b s f")
    many = product((B, S, D), (D, F), "b s d, d f -> b s f")
    sizes = {"B": 1, "D": 4096, "F": 11008}
    assert cg.intensity(one, **sizes) < 1
    assert cg.intensity(many, S=2048, **sizes) > 295
