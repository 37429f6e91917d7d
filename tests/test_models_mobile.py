"""ConvNeXt, Swin, MobileNet, EfficientNet and DLRM as published, and unsupported configurations."""

import pytest
from shared import load

import costgraph as cg

# "num_params" and "_ops" from the IMAGENET1K weights' meta in torchvision.models; "_ops" counts billions of
# multiply-adds for one image at the evaluation size.
TORCHVISION = {
    "mobilenet-v2": (3504872, 0.301),
    "mobilenet-v3-small": (2542856, 0.057),
    "mobilenet-v3-large": (5483032, 0.217),
    "efficientnet-b0": (5288548, 0.386),
    "efficientnet-b1": (7794184, 0.687),
    "efficientnet-b2": (9109994, 1.088),
    "efficientnet-b3": (12233232, 1.827),
    "efficientnet-b4": (19341616, 4.394),
    "efficientnet-b5": (30389784, 10.266),
    "efficientnet-b6": (43040704, 19.068),
    "efficientnet-b7": (66347960, 37.746),
    "convnext-tiny": (28589128, 4.456),
    "convnext-small": (50223688, 8.684),
    "convnext-base": (88591464, 15.355),
    "convnext-large": (197767336, 34.361),
    "swin-t": (28288354, 4.491),
    "swin-s": (49606258, 8.741),
    "swin-b": (87768224, 15.431),
}


#: test_models_zoo.py checks these models' parameters against published numbers in every run.
LARGER = ("-b2", "-b4", "-b5", "-b6", "-b7", "v3-large", "convnext-small", "convnext-large", "swin-s")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n.endswith(LARGER) else n for n in TORCHVISION]
)
def test_parameters_and_multiply_adds_match_torchvision(name):
    g = load(name)
    parameters, billions = TORCHVISION[name]
    assert cg.param_count(g) == parameters
    assert round(cg.matmul_flops(g, B=1, count="full") / 2e9, 3) == billions


def test_dlrm_parameters_match_criteo_tables():
    # Rows of the Criteo Terabyte tables with indices below 40,000,000, as listed in facebookresearch/dlrm and NVIDIA's
    # DLRM: 187,767,399 with 128 elements; MLPs 13-512-256-128 and 479-1024-1024-512-256-1
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128
    top = 479 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 256 + 256 + 256 + 1
    g = load("dlrm-mlperf")
    assert cg.param_count(g) == 187_767_399 * 128 + bottom + top
    # Criteo Kaggle: 33,762,577 rows with 16 elements, MLPs 13-512-256-64-16 and 367-512-256-1
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 64 + 64 + 64 * 16 + 16
    top = 367 * 512 + 512 + 512 * 256 + 256 + 256 + 1
    assert cg.param_count(load("dlrm-small")) == 33_762_577 * 16 + bottom + top


def test_dlrm_reads_only_looked_up_rows():
    g = load("dlrm-mlperf", dtype="fp32")
    once, again = (cg.bytes_moved(g, B=2048, N=n) for n in (1, 4))
    # a lookup reads a row of 128 fp32 numbers and an 8-byte index; there are 26 tables
    assert again - once == 3 * 26 * 2048 * (128 * 4 + 8)
    assert cg.peak_memory(g, B=1) > 4 * 187_767_399 * 128  # the whole tables are in memory


# one model per declaration, and the one that repeats every stage
OPEN = ["mobilenet-v2", "mobilenet-v3-small", "efficientnet-b1", "convnext-tiny", "swin-t", "dlrm-small"]


@pytest.mark.parametrize("name", OPEN)
def test_symbolic_leaves_all_sizes_open(name):
    g = load(name, symbolic=True)
    assert g.defaults == {}
    bound = load(name).defaults
    assert cg.param_count(g, **bound) == cg.param_count(load(name))
    assert {s.name for s in (cg.flops(g) + cg.param_count(g)).free_symbols} == {"B", *bound}


@pytest.mark.parametrize("name", OPEN)
def test_reports(name):
    g = load(name, dropout=0.1)
    assert name in str(cg.report(g, B=2))


def test_image_size_can_be_overridden():
    # a stride of 2 rounds odd sides up: 33 = 32 + 1 gives 17, 9, 5, 3 and 2
    small, large = (cg.matmul_flops(load("mobilenet-v2"), B=1, R=n) for n in (33, 64))
    assert small == cg.matmul_flops(load("mobilenet-v2"), B=1, R=34)
    assert large == cg.matmul_flops(load("mobilenet-v2"), B=1, R=63)


def test_swin_image_size_that_changes_shifts_is_refused():
    g = load("swin-t")
    assert cg.matmul_flops(g, B=1, R=227) == cg.matmul_flops(g, B=1, R=224)  # remainder pixels belong to no patch
    with pytest.raises(cg.BindingError):  # 57 patches, and 8 in the last stage, which exceeds its window of 7
        cg.matmul_flops(g, B=1, R=228)
    shifted = load("swin-t", stages=("shifted",) * 4)
    assert cg.matmul_flops(shifted, B=1, R=228) > cg.matmul_flops(g, B=1, R=224)
    with pytest.raises(cg.GraphError, match="stage 2 is 'turned', expected one of shifted, shifted-odd, whole, single"):
        load("swin-t", stages=("shifted", "turned"))


def test_efficientnet_windows_must_match_stages():
    with pytest.raises(cg.GraphError, match="expected one of each per stage"):
        load("efficientnet-b0", windows=(3,))


CONVNEXT = {"architectures": ["ConvNextForImageClassification"], "id2label": {str(i): "" for i in range(1000)}}
SWIN = {**CONVNEXT, "architectures": ["SwinForImageClassification"], "model_type": "swin"}
MOBILENET = {**CONVNEXT, "architectures": ["MobileNetV2ForImageClassification"], "image_size": 224}
EFFICIENTNET = {**CONVNEXT, "architectures": ["EfficientNetForImageClassification"]}
B0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "image_size": 224}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({**CONVNEXT, "model_type": "convnext", "drop_path_rate": 0.0, "num_stages": 4}, "convnext-tiny"),
        ({**CONVNEXT, "depths": [3, 3, 27, 3], "hidden_sizes": [192, 384, 768, 1536]}, "convnext-large"),
        ({**SWIN, "path_norm": True, "num_layers": 4, "hidden_size": 768}, "swin-t"),
        ({**SWIN, "embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}, "swin-b"),
        ({**MOBILENET, "tf_padding": True, "layer_norm_eps": 0.001}, "mobilenet-v2"),
        ({**EFFICIENTNET, **B0}, "efficientnet-b0"),
        ({**EFFICIENTNET, "depthwise_padding": [18]}, "efficientnet-b7"),  # google/efficientnet-b7
    ],
)
def test_configurations_match_published_models(fields, name):
    g, same = cg.models.from_config(fields), load(name)
    assert cg.param_count(g) == cg.param_count(same)
    assert cg.matmul_flops(g, B=1) == cg.matmul_flops(same, B=1)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({**CONVNEXT, "use_grn": True}, cg.UnsupportedError, "use_grn is True, expected a known field"),
        ({**CONVNEXT, "num_stages": 3}, cg.UnsupportedError, "num_stages is 3, expected 4"),
        (
            {**CONVNEXT, "depths": [3, 3]},
            cg.FormatError,
            "hidden_sizes has 4 numbers, expected 2, the length of depths",
        ),
        ({**CONVNEXT, "image_size": [224, 192]}, cg.FormatError, r"image_size is \[224, 192\]"),
        ({**SWIN, "num_heads": [3, 6]}, cg.FormatError, "num_heads has 2 numbers, expected 4, the length of depths"),
        ({**SWIN, "image_size": 225}, cg.UnsupportedError, "image_size 225, .* expected whole patches"),
        ({**SWIN, "image_size": 192}, cg.UnsupportedError, "at least one window in the last stage"),
        ({**SWIN, "mlp_ratio": 3.99}, cg.UnsupportedError, "an integer number of hidden elements"),
        ({**SWIN, "pretrained_window_sizes": [0, 0]}, cg.UnsupportedError, "pretrained_window_sizes"),
        ({**MOBILENET, "expand_ratio": 5.5}, cg.UnsupportedError, "expand_ratio 5.5 of .* products without round"),
        ({**MOBILENET, "hidden_act": "gelu_9"}, cg.UnsupportedError, "hidden_act is 'gelu_9', expected one of"),
        ({**EFFICIENTNET, **B0, "image_size": 225}, cg.UnsupportedError, "every odd side before a stride of 2"),
        ({**EFFICIENTNET, **B0, "hidden_dim": 640}, cg.UnsupportedError, "hidden_dim is 640, expected 1280"),
        ({**EFFICIENTNET, **B0, "strides": [1, 2]}, cg.FormatError, "equally long lists"),
        ({**EFFICIENTNET, **B0, "squeeze_expansion_ratio": 0.3}, cg.UnsupportedError, "squeeze_expansion_ratio 0.3"),
    ],
)
def test_unsupported_configurations_are_refused(fields, error, text):
    with pytest.raises(error, match=text):
        cg.models.from_config(fields)
