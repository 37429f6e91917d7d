"""Predictions of published measurements, each family compared with explicit arithmetic."""

import json
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import pytest
from each import each
from shared import load

import costgraph as cg
from costgraph.report.records import hold
from costgraph.report.records.families import FAMILIES
from costgraph.report.records.predictions import predict

H100 = cg.load_hardware("h100-sxm")
BANDWIDTH = float(H100.bandwidth)
LAST = Decimal("0.001")


def peak(name):
    return float(H100.rate(name))


def one_of(measured, family, **inputs):
    """Return the first record of a family with these inputs."""
    return next(r for r in measured if r.family == family and inputs.items() <= r.inputs.items())


def made(measured, family, quantity, unit, value, **inputs):
    """Return a synthetic record on an H100."""
    like = one_of(measured, family)
    return replace(like, device="h100-sxm", quantity=quantity, unit=unit, value=value, inputs={**like.inputs, **inputs})


def timed(measured, family, **inputs):
    return predict(made(measured, family, "time", "ms", Decimal("1.5"), **inputs), LAST)


# -- kernels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "element", "result"), [("fp16", 2, 2), ("fp32", 4, 4), ("fp8", 1, 2), ("int8", 1, 4)])
def test_matmul_time_by_hand(measured, name, element, result):
    m, n, k = 1009, 1013, 4093
    row = timed(measured, "deepbench-gemm", M=m, N=n, K=k, dtype=name)
    compute = 2 * m * n * k / peak({"fp8": "fp8_e4m3"}.get(name, name))  # multiply and add at each index point
    moved = element * (m * k + k * n) + result * m * n
    assert row.seconds == pytest.approx(1.5e-3)
    assert row.estimate == pytest.approx(max(compute, moved / BANDWIDTH))
    # the 50 MiB L2 keeps the working set between runs
    assert row.bound == pytest.approx(compute)


def test_matmul_rate_counts_two_flops_per_index_point(measured):
    row = predict(made(measured, "squares", "rate", "TFLOP/s", 500, M=4093, N=4099, K=4111, dtype="bf16"), Decimal(1))
    assert row.seconds == pytest.approx(2 * 4093 * 4099 * 4111 / 500e12)


def test_best_of_several_matmuls_uses_the_best_size(measured):
    record = made(measured, "squares-best", "rate", "TFLOP/s", 700, best_of=[127, 8191], dtype="fp16")
    row = predict(record, Decimal(1))
    # the small one is memory-bound, the large one compute-bound
    assert row.ratio == pytest.approx(peak("fp16") / 700e12)


@each("direction", ["forward", "backward-weights", "backward-inputs"])
@each("stride", [1, 2])
def test_convolution_and_gradient_times_by_hand(measured, direction, stride):
    n, c, k, h, w, r, s, pad = 7, 61, 127, 53, 59, 3, 5, 1
    high, wide = (h + 2 * pad - r) // stride + 1, (w + 2 * pad - s) // stride + 1
    row = timed(
        measured, "deepbench-conv", W=w, H=h, C=c, N=n, K=k, S=s, R=r, pad_w=pad, pad_h=pad, stride_w=stride,
        stride_h=stride, dtype="fp32", direction=direction, out_w=wide, out_h=high,
    )  # fmt: skip
    # each output element meets each filter tap and input channel, whichever of the three tensors is computed
    compute = 2 * n * k * high * wide * c * r * s / peak("fp32")
    assert row.reason == ""
    assert row.estimate == pytest.approx(compute)


def test_convolution_with_mismatched_output_is_not_predicted(measured):
    row = timed(measured, "deepbench-conv", out_w=3)
    assert row.reason.startswith("inputs: a result of ")


@each(
    ("op", "arrays"),
    [("init", 1), ("read", 1), ("dot", 2), ("copy", 2), ("scale", 2), ("mul", 2), ("add", 3), ("triad", 3)],
)
def test_stream_moves_its_arrays_once(measured, op, arrays):
    record = made(measured, "bandwidth", "bandwidth", "GB/s", 3000, op=op, elements=2**31 - 1, dtype="fp64")
    row = predict(record, Decimal(1))
    assert row.seconds == pytest.approx(arrays * 8 * (2**31 - 1) / 3000e9)
    assert row.ratio == pytest.approx(BANDWIDTH / 3000e9, rel=1e-6)
    assert not row.violated
    assert predict(replace(record, value=3400), Decimal(1)).violated  # the HBM of an H100 has 3,350 GB/s


def test_attention_counts_two_matmuls_per_pair(measured):
    b, heads, s, k = 3, 13, 2039, 128
    inputs = {"B": b, "heads": heads, "S": s, "head_dim": k, "dtype": "fp16", "direction": "forward"}
    square = timed(measured, "attention", **inputs, causal=False)
    # 2*K FLOPs per pair for the scores, and as many for the values
    assert square.bound == pytest.approx(4 * b * heads * s * s * k / peak("fp16"))
    half = timed(measured, "attention", **inputs, causal=True)
    assert half.bound == pytest.approx(2 * b * heads * s * (s + 1) * k / peak("fp16"))
    backward = timed(measured, "attention", **inputs | {"direction": "backward"}, causal=False)
    # five matmuls instead of two: recomputed scores, and the gradients of q, k, v and the probabilities
    assert backward.bound == pytest.approx(2.5 * square.bound)
    # shared KV heads do not change the FLOPs, a value dimension of 67 reduces them; a throughput record counts the same
    narrow, products = inputs | {"kv_heads": 1, "value_dim": 67, "causal": False}, 2 * b * heads * s * s * (k + 67)
    assert timed(measured, "attention", **narrow).bound == pytest.approx(products / peak("fp16"))
    row = predict(made(measured, "attention", "rate", "TFLOP/s", 500, **narrow), Decimal(1))
    assert row.seconds == pytest.approx(products / 500e12)


@each(("op", "gates"), [("vanilla", 1), ("gru", 3), ("lstm", 4)])
@each("direction", ["forward", "backward-inputs", "backward-weights"])
def test_recurrent_layer_has_a_matmul_per_gate_and_step(measured, op, gates, direction):
    hidden, n, steps = 1021, 61, 13
    row = timed(
        measured, "deepbench-rnn", op=op, hidden=hidden, N=n, timesteps=steps, dtype="fp32", direction=direction
    )
    # 2 FLOPs per pair of units, sequence, gate and step; pointwise ops run on the same unit
    products = 2 * n * steps * gates * hidden**2 / peak("fp32")
    assert products <= row.bound < 1.01 * products
    assert row.estimate >= row.bound


# -- models --------------------------------------------------------------------------------------------------------


def test_printed_mfu_follows_from_the_rate(measured):
    record = one_of(measured, "foundry", model="mpt-1b")
    given = record.inputs
    # PaLM, appendix B: 6 per parameter, and 12*L*D*S for attention; the printed parameters include the position
    # embedding, which is only looked up
    n = given["params"] - given["seq"] * given["d_model"]
    per_token = 6 * n + 12 * given["n_layers"] * given["d_model"] * given["seq"]
    derived = per_token * Fraction(record.value) / Fraction(cg.load_hardware(record.device).rate("bf16").number)
    row = predict(record, Decimal(1))
    # biases and norms, a thousandth of the parameters, have no matmul FLOPs
    assert row.printed == pytest.approx(float(given["reported_mfu"]) / 100 / float(derived), rel=2e-3)
    assert row.printed == pytest.approx(1, abs=0.04)


def test_mismatched_architecture_is_not_predicted(measured):
    record = one_of(measured, "foundry", model="mpt-1b")
    row = predict(replace(record, inputs=record.inputs | {"params": 1009}), Decimal(1))
    assert row.reason.startswith("inputs: params 1,009, expected 1,")


def test_decode_step_reads_the_weights(measured):
    row = predict(one_of(measured, "decode", model="llama-3-8b", weights="fp16", new_tokens=512), LAST)
    g = load("llama-3-8b", dtype="fp16")
    weights = float(cg.param_bytes(g)) - 2 * 128256 * 4096  # one row of the embedding is read
    device = cg.load_hardware(row.record.device)
    assert row.bound == pytest.approx(weights / float(device.bandwidth), rel=0.01)


def test_mixed_quantization_decode_reads_the_file_size(measured):
    row = predict(one_of(measured, "decode", model="llama-3-8b", weights="Q4_K_M", new_tokens=512), LAST)
    # a published file with 4,920,734,272 bytes has a 4.5-bit embedding, from which one row is read
    read = 4_920_734_272 - 128256 * 4096 * 4.5 / 8
    device = cg.load_hardware(row.record.device)
    assert row.bound == pytest.approx(read / float(device.bandwidth), rel=0.01)


# -- generation on several devices and for several requests ------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "least", "most"),
    # bytes per weight: int8 has one and an fp32 scale per channel, int4 a half and an fp16 scale per 32 weights
    [("bf16", 2, 2), ("int8", 1, 1.002), ("int4-g32", 0.5625, 0.5626)],
)
def test_tp_rank_reads_its_weight_shard_and_waits_for_collectives(measured, weights, least, most):
    record = one_of(measured, "decode", model="llama-3-70b", tensor_parallel=8)
    row = predict(replace(record, inputs=record.inputs | {"weights": weights}), LAST)
    L, D, F, V, ranks = 80, 8192, 28672, 128256, 8
    layers = L * (2 * D * D + 2 * D * D // 8 + 3 * D * F)
    a100 = cg.load_hardware("a100-80-sxm")
    # the head stays as it is; norms, caches and activations are a few thousandths
    read = [(share * layers + 2 * D * V) / ranks / float(a100.bandwidth) for share in (least, most)]
    assert read[0] <= row.bound <= 1.01 * read[1]
    # two all-reduces per layer and one for the embedding, 16 KiB each, up and down a three-level tree
    wait = (2 * L + 1) * 2 * 3 * float(a100.tables["interconnect"]["latency"])
    assert row.estimate - row.bound == pytest.approx(wait, rel=0.15)


def test_unevenly_sharded_model_is_not_predicted(measured):
    row = predict(one_of(measured, "prefill", model="falcon-180b", tensor_parallel=8), LAST)
    assert row.reason.startswith("inputs: tensor_parallel 8: a rank has 2.4 times its part of 'falcon-180b.prefill', ")


def test_decode_without_prompt_is_the_first_step(measured):
    record = one_of(measured, "decode", model="llama-3-8b", weights="bf16", tensor_parallel=1)
    first = {key: value for key, value in record.inputs.items() if key not in ("prompt", "new_tokens")}
    rows = [predict(replace(record, inputs=given), LAST) for given in (first, first | {"prompt": 0, "new_tokens": 1})]
    assert rows[0].estimate == rows[1].estimate < predict(replace(record, inputs=first | {"prompt": 99}), LAST).estimate


def test_batched_serving_is_prefill_plus_decode_steps(measured):
    record = one_of(measured, "serving", model="llama-2-7b", B=384)
    row = predict(record, LAST)
    g = load("llama-2-7b", dtype="fp16")
    first = cg.seconds(cg.prefill(g, logits="last"), "a100-80-sxm", B=384, S=128)
    each = cg.seconds(cg.decode(g), "a100-80-sxm", B=384, S=128 + 64)
    assert row.estimate == pytest.approx(first + 128 * each)
    assert row.seconds == pytest.approx(384 * 128 / float(record.value))


def test_memory_limits_the_requests_in_flight(measured):
    record = one_of(measured, "serving-max", model="llama-3.1-8b", prompt=1000, new_tokens=1000)
    row = predict(record, LAST)
    device = cg.load_hardware(record.device)
    # fp8: one byte per layer weight, two for the head and the embedding; 8 KV heads of dimension 128
    weights = 8_030_261_248 + 2 * 128256 * 4096
    kv_cache = 2 * 32 * 8 * 128 * 1500  # half of the answer on average, and an fp16 scale per 128 elements
    requests = row.seconds * float(record.value) / 1000
    assert requests == pytest.approx((float(device.capacity().value) - weights) / (kv_cache * 130 / 128), rel=0.03)


@each("quantity", ["model size", "peak memory"])
def test_decode_memory_by_hand(measured, quantity):
    row = predict(one_of([r for r in measured if r.quantity == quantity], "decode-memory", weights="bf16"), LAST)
    assert row.peak == pytest.approx(2 * 8_030_261_248, rel=0.002 if quantity == "peak memory" else 0)
    assert row.bytes == pytest.approx(row.peak, rel=0.03)


# -- other libraries' training steps -----------------------------------------------------------------------------------


def test_fsdp_rank_holds_its_shard_of_the_states(measured):
    record = one_of([r for r in measured if "fsdp-g128-mem" in r.id], "training-memory")
    row, whole = (predict(replace(record, inputs=record.inputs | {"gpus": n}), LAST) for n in (8, 128))
    # an eighth of the fp32 master weights and both moments, and bf16 weights; the rest are activations
    assert row.peak > (12 + 2) * 8_030_261_248 / 8
    # 128 ranks have shards a sixteenth as large: gradients, master weights, moments and weights
    assert row.peak - whole.peak == pytest.approx((12 + 2 + 2) * 8_030_261_248 * (1 / 8 - 1 / 128), rel=0.15)


def test_qlora_weights_by_hand(measured):
    rows = [
        predict(one_of(measured, "training-memory", model="llama-2-13b", **more), LAST)
        for more in ({}, {"weights": "nf4"})
    ]
    narrow = 13_015_864_320 - 2 * 32000 * 5120  # the embedding and the head keep their dtype
    # half a byte per weight, and 4 bytes per 64 weights, instead of two bytes
    assert rows[0].peak - rows[1].peak == pytest.approx(narrow * (2 - 0.5 - 4 / 64), rel=0.02)


def test_offloaded_optimizer_takes_no_device_memory(measured):
    rows = [
        predict(r, LAST) for r in [r for r in measured if r.family == "stas-zero3" and r.what == "peak memory"][::-3]
    ]
    assert all(abs(row.peak / row.bytes - 1) < 0.06 for row in rows)
    # an eighth of the bf16 weights; the inputs of all 32 layers are saved
    assert rows[0].peak > 2 * 8_030_261_248 / 8 + 2 * 32 * rows[0].record.inputs["S"] * 4096


def test_peak_above_capacity_is_not_predicted(measured):
    row = predict(one_of(measured, "training-memory", method="LoRA", seq=2048), LAST)
    assert row.reason == "peak memory: 36.5 GB, more than rtx4090 has: something that saves memory is not stated"


@each(
    ("change", "reason"),
    [
        ({"packed": False}, "inputs: packed False: sequences are as long as those of a set of data, not stated"),
        (
            {"activation_checkpointing": "every 2nd layer"},
            "inputs: activation_checkpointing 'every 2nd layer', expected",
        ),
        ({"gpus": 8}, "inputs: sharding '' on 8 devices, expected FSDP"),
        ({"weights": "int3"}, "inputs: weights 'int3', expected nf4, or formats that are not narrow"),
        ({"precision": "fp1"}, "inputs: precision 'fp1', expected one of fp32, bf16"),
    ],
)
def test_underspecified_steps_are_listed(measured, change, reason):
    record = one_of(measured, "training-memory", model="llama-3.2-3b", packed=True)
    assert predict(replace(record, inputs=record.inputs | change), LAST).reason.startswith(reason)


def test_vision_model_has_the_printed_multiply_adds(measured):
    record = one_of(measured, "timm-infer", zoo="resnet18", image=224)
    row = predict(record, LAST)
    assert row.reason == ""
    assert row.subject == "vision"
    other = predict(replace(record, inputs=record.inputs | {"gmacs": 3}), LAST)
    assert other.reason == "inputs: gmacs 3, expected the 1.81 of resnet18: another model"


@pytest.mark.parametrize("device", ["rtx4090", pytest.param("rtx5090", marks=pytest.mark.long)])
def test_compiled_vision_models_do_not_beat_the_fused_estimate(measured, device):
    compiled = [r for r in measured if r.family == "timm-infer" and r.device == device and r.inputs.get("compiled")]
    rows = [predict(r, LAST) for r in compiled if r.inputs["zoo"] in ("resnet50", "vgg16-bn", "mobilenet-v2")]
    assert rows
    assert all(row.ratio > 0.9 for row in rows if row.ratio is not None)
    # eager mode moves more bytes
    eager = [predict(replace(row.record, inputs=row.record.inputs | {"compiled": False}), LAST) for row in rows]
    assert all(a.estimate < b.estimate for a, b in zip(rows, eager, strict=True) if a.ratio is not None)


# -- devices and shapes without a record -------------------------------------------------------------------------------

#: For each family: conditions on a record, and the sizes that are changed.
OTHERS = {
    "squares": ({}, {"M": 4093}), "deepbench-gemm": ({}, {"K": 4099}), "deepbench-conv": ({"stride_w": 1}, {"C": 67}),
    "deepbench-rnn": ({}, {"hidden": 1021}), "bandwidth": ({}, {}), "attention": ({"B": 2}, {"S": 4099}),
    "timm-infer": ({"zoo": "resnet50"}, {"batch": 251}), "foundry": ({"model": "mpt-1b"}, {"microbatch": 3}),
    "decode": ({"tensor_parallel": 8}, {"prompt": 11}), "prefill": ({"weights": "Q4_K_M"}, {"prompt": 509}),
    "serving": ({"model": "llama-2-7b"}, {"B": 61}), "serving-max": ({}, {"prompt": 127}),
    "training-speed": ({"sharding": "FSDP"}, {"batch": 3}),
    "fp8-gemm": ({}, {"N": 4091}),
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_another_generation_of_devices_is_predicted(measured, family):
    wanted, changed = OTHERS[family]
    like = next(r for r in measured if r.family == family and wanted.items() <= r.inputs.items()
                and predict(r, LAST).ratio is not None and r.what != "peak memory")  # fmt: skip
    before = predict(replace(like, inputs=like.inputs | changed), LAST)
    blackwell = [name for name in cg.list_hardware() if cg.load_hardware(name).arch in ("sm_100", "sm_103")]
    assert blackwell
    for device in blackwell:
        row = predict(replace(like, device=device, inputs=like.inputs | changed), LAST)
        # errors name a missing link or interconnect
        if row.reason:
            assert row.reason.startswith(f"hardware {device}: "), row.reason
            assert device not in ("b200", "gb200", "gb300")
        else:
            assert 0 <= row.bound <= row.estimate * (1 + 1e-12)
            if family != "serving-max":  # serving-max has more requests in flight
                assert row.estimate < before.estimate * 1.35, device  # some devices are slower in fp64 and fp32


# -- unpredicted records -----------------------------------------------------------------------------------------------


@each(
    ("family", "change", "reason"),
    [
        ("squares", {"device": "h1000"}, "device 'h1000' has no specification, did you mean b100 or h100-sxm"),
        ("squares", {"device": "/etc/passwd.toml"}, "device '/etc/passwd.toml' has no specification, "),
        ("squares", {"family": "square"}, "did you mean squares"),
        ("squares", {"family": "knitting"}, "expected a family that has a prediction"),
        ("squares", {"unit": "furlong"}, "unit: rate in furlong, expected one of s, ms, us, TFLOP/s, GB/s, "),
        ("squares", {"inputs": {}}, "inputs: no 'M', expected M, N, K, dtype, op"),
        ("attention", {"inputs": {"causal": None}}, "inputs: no 'B', expected B, S, heads, head_dim, causal"),
        ("decode", {"inputs": {"model": "eliza", "weights": "bf16", "B": 1, "prompt": 2}}, "model 'eliza'"),
    ],
)  # fmt: skip
def test_unknown_records_are_listed_with_the_reason(measured, family, change, reason):
    row = predict(replace(one_of(measured, family), **change), LAST)
    assert row.reason.startswith(reason)
    assert (row.seconds, row.estimate, row.bound, row.violated) == (None, None, None, False)


HOSTILE = [None, True, -1, 0, 10**400, 1.5, "", "x" * 10**4, "int4", "bool", "mxfp8", [], [0], [1, 2], {}, {"a": 1}]


@pytest.mark.parametrize(
    "family",
    [
        name
        for name, found in FAMILIES.items()
        if found.subject not in ("", "vision", "prefill", "serving", "memory of generation", "memory of training")
        and name != "simumax-gemm"  # no record exists; its facts are those of the other families
    ],
)
def test_hostile_inputs_are_listed(measured, family):
    record = next(r for r in measured if r.family == family and predict(r, LAST).reason == "")
    # steps are slow to derive: test a third of each fact's values
    every = 3 if FAMILIES[family].subject not in ("products", "streams") else 1
    for i, key in enumerate(record.inputs):
        for value in HOSTILE[i % every :: every]:
            row = predict(replace(record, inputs=record.inputs | {key: value}), LAST)
            assert row.reason or (row.estimate > 0 and row.bound >= 0), (key, value)


# -- files ---------------------------------------------------------------------------------------------------------


def test_every_record_of_a_file_is_predicted_or_listed(measured, tmp_path):
    records = [r for r in measured if r.family != "liger" and FAMILIES.get(r.family, None) is None]
    records += [r for r in measured if r.family in FAMILIES and FAMILIES[r.family].subject in ("products", "streams")][
        ::7
    ]
    path = tmp_path / "some.json"
    path.write_text(json.dumps([vars(r) for r in records], default=float))
    held = hold(path)
    assert [row.record.id for row in held.records] == [r.id for r in records]
    assert all(bool(row.reason) != (row.ratio is not None) for row in held.records)
    assert sum(g.rows for g in held.rows) == len(records)
    assert sum(held.reasons.values()) + sum(g.predicted for g in held.rows) == len(records)
    assert len(str(held).split("\n")) <= 40
    saved = tmp_path / "out.json"
    held.save(saved)
    rows = json.loads(saved.read_text())
    assert [row["id"] for row in rows["rows"]] == [r.id for r in records]
    assert all(("reason" in row) != ("estimate" in row) for row in rows["rows"])


def test_rounding_of_the_last_digit_is_no_violation(measured):
    record = made(measured, "squares", "time", "ms", Decimal("0.010"), M=1009, N=1013, K=1019, dtype="fp32")
    least = predict(record, LAST).bound * 1e3  # ms
    below = Decimal(least) * Decimal("0.99")
    assert predict(replace(record, value=below), Decimal("0.0000001")).violated
    assert not predict(replace(record, value=below), below / 10).violated
