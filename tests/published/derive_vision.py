"""Models of torchvision."""

from decimal import Decimal

from published_rows import ROWS, derives

import costgraph as cg


def conv(x, o, window, stride=1, padding=0, *, norm=False, name):
    y = cg.conv(
        x,
        "b c h w -> b o h w",
        window=(window, window),
        stride=stride,
        padding=padding,
        bias=not norm,
        o=o,
        name=name,
    )
    if norm:  # the scale and the shift of a batch norm; its statistics are buffers
        g = x.graph
        scale, shift = (g.param(f"{name}/{part}", (o, 1, 1)) for part in ("scale", "shift"))
        y = cg.pointwise("fma", y, scale, shift)
    return y


def linear(x, o, name):
    return cg.linear(x, "b c -> b o", o=o, bias=True, name=name)


def pool(x, window, stride, padding=0):
    return cg.pool(x, "max", window=window, stride=stride, padding=padding)


def alexnet(x):
    x = pool(cg.relu(conv(x, 64, 11, 4, 2, name="c0")), 3, 2)
    x = pool(cg.relu(conv(x, 192, 5, 1, 2, name="c1")), 3, 2)
    for i, channels in enumerate((384, 256, 256)):
        x = cg.relu(conv(x, channels, 3, 1, 1, name=f"c{i + 2}"))
    x = cg.rearrange(pool(x, 3, 2), "b c h w -> b (c h w)")
    return linear(cg.relu(linear(cg.relu(linear(x, 4096, "f0")), 4096, "f1")), 1000, "f2")


def vgg16(x):
    for i, (channels, depth) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for j in range(depth):
            x = cg.relu(conv(x, channels, 3, 1, 1, name=f"c{i}_{j}"))
        x = pool(x, 2, 2)
    x = cg.rearrange(x, "b c h w -> b (c h w)")
    return linear(cg.relu(linear(cg.relu(linear(x, 4096, "f0")), 4096, "f1")), 1000, "f2")


def resnet(x, depths, bottleneck):
    x = pool(cg.relu(conv(x, 64, 7, 2, 3, norm=True, name="stem")), 3, 2, 1)
    for i, depth in enumerate(depths):
        width = 64 * 2**i
        out = width * (4 if bottleneck else 1)
        # output channels, window and which convolution has the stride
        shape = ((width, 1), (width, 3), (out, 1)) if bottleneck else ((width, 3), (out, 3))
        for j in range(depth):
            stride = 2 if i and not j else 1
            y, name = x, f"layer{i + 1}/block{j}"
            for k, (channels, window) in enumerate(shape):
                step = stride if k == len(shape) - 2 else 1
                y = conv(y, channels, window, step, window // 2, norm=True, name=f"{name}/c{k}")
                y = cg.relu(y) if k < len(shape) - 1 else y
            if x.shape != y.shape:
                x = conv(x, out, 1, stride, norm=True, name=f"{name}/down")
            x = cg.relu(x + y)
    return linear(cg.reduce(x, "b c h w -> b c", "mean"), 1000, "head")


def vit(x):
    x = conv(x, 768, 16, 16, name="patches")
    g = x.graph
    token = cg.expand(g.param("class", (1, 1, 768)), "1 s d -> b s d", b=x.shape[0])
    x = cg.concat([token, cg.rearrange(x, "b d h w -> b (h w) d")], 1)

    def block(x):
        y = cg.linear(cg.layer_norm(x, name="n0"), "b s d -> b s n h k", n=3, h=12, k=64, bias=True, name="kqv")
        q, k, v = (cg.rearrange(y[:, :, i], "b s h k -> b h s k") for i in range(3))
        y = cg.rearrange(cg.attention(q, k, v, causal=False), "b h s k -> b s (h k)")
        x = x + cg.linear(y, "b s e -> b s d", d=768, bias=True, name="proj")
        return x + cg.mlp(cg.layer_norm(x, name="n1"), 3072, bias=True)

    x = x + g.param("positions", (1, 197, 768))
    x = cg.layer_norm(cg.repeat(12, block, x, name="layers"))
    return linear(x[:, 0], 1000, "head")


VISION = {
    "AlexNet": alexnet,
    "VGG16": vgg16,
    "ResNet18": lambda x: resnet(x, (2, 2, 2, 2), bottleneck=False),
    "ResNet50": lambda x: resnet(x, (3, 4, 6, 3), bottleneck=True),
    "ViT_B_16": vit,
}


def vision(name):
    with cg.Graph(name) as g:
        g.output(VISION[name](g.input("image", (1, 3, 224, 224))))
    return g


@derives(*(i for i in ROWS if i.startswith("tv-")))
def torchvision(row):
    g = vision(row["inputs"]["model"])
    if "params" in row["id"]:
        return cg.param_count(g)
    return Decimal(cg.matmul_flops(g)) / 2 / 10**9  # multiply-adds


@derives("pt-resnet18-layer1-conv-fwd")
def layer1(row):
    return cg.costs(vision("ResNet18")).filter(scope="layer1", kind="matmul").total().matmul
