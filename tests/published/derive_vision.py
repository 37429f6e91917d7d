"""Models of torchvision, as the zoo declares them."""

from decimal import Decimal

from published_rows import ROWS, derives
from shared import load

import costgraph as cg

#: Names that the rows use for models of the zoo.
VISION = {
    "AlexNet": "alexnet", "VGG16": "vgg16", "ResNet18": "resnet18", "ResNet50": "resnet50", "ViT_B_16": "vit-b-16",
}  # fmt: skip


@derives(*(i for i in ROWS if i.startswith("tv-")))
def torchvision(row):
    g = load(VISION[row["inputs"]["model"]])
    if "params" in row["id"]:
        return cg.param_count(g)
    return Decimal(cg.matmul_flops(g, B=1, R=row["inputs"]["input"][-1])) / 2 / 10**9  # multiply-adds


@derives("pt-resnet18-layer1-conv-fwd")
def layer1(row):
    return cg.costs(load("resnet18"), B=1).filter(scope="stage1", kind="matmul").total().matmul
