"""References of the convolutional networks and the diffusion U-Nets."""

import torch
from diffusers_unets import UNet
from torchvision_convnets import CFGS, VGG, AlexNet, BasicBlock, Bottleneck, DenseNet, ResNet
from zoo_reference import Reference

__all__ = ["REFERENCES"]

RESNETS = {
    "resnet18": (BasicBlock, [2, 2, 2, 2], {}),
    "resnet34": (BasicBlock, [3, 4, 6, 3], {}),
    "resnet50": (Bottleneck, [3, 4, 6, 3], {}),
    "resnet101": (Bottleneck, [3, 4, 23, 3], {}),
    "resnet152": (Bottleneck, [3, 8, 36, 3], {}),
    "resnext50-32x4d": (Bottleneck, [3, 4, 6, 3], {"groups": 32, "width_per_group": 4}),
    "resnext101-32x8d": (Bottleneck, [3, 4, 23, 3], {"groups": 32, "width_per_group": 8}),
    "resnext101-64x4d": (Bottleneck, [3, 4, 23, 3], {"groups": 64, "width_per_group": 4}),
    "wide-resnet50-2": (Bottleneck, [3, 4, 6, 3], {"width_per_group": 128}),
    "wide-resnet101-2": (Bottleneck, [3, 4, 23, 3], {"width_per_group": 128}),
}
#: Growth rate, layers per block and stem channels.
DENSENETS = {
    "densenet121": (32, (6, 12, 24, 16), 64),
    "densenet161": (48, (6, 12, 36, 24), 96),
    "densenet169": (32, (6, 12, 32, 32), 64),
    "densenet201": (32, (6, 12, 48, 32), 64),
}


def images(side, channels=3):
    return lambda: (torch.zeros(2, channels, side, side),)


def of_vision(build):
    """A module on two images of 224 x 224."""
    return lambda: Reference(build, images(224), {"B": 2})


def ddpm():
    return Reference(
        lambda: UNet(3, 3, (128, 256, 256, 256), attended=(1,)),
        lambda: (torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)),
        {"B": 2},
        {"attention": "eager"},
    )


def stable_diffusion():
    return Reference(
        lambda: UNet(4, 4, (320, 640, 1280, 1280), attended=(0, 1, 2), heads=8, context=768),
        lambda: (torch.zeros(2, 4, 64, 64), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 77, 768)),
        {"B": 2},
        {"attention": "eager"},
    )


REFERENCES = {
    "alexnet": of_vision(AlexNet),
    **{
        name + ("-bn" if norm else ""): of_vision(lambda cfg=cfg, norm=norm: VGG(cfg, norm))
        for name, cfg in CFGS.items()
        for norm in (False, True)
    },
    **{
        name: of_vision(lambda block=block, layers=layers, options=options: ResNet(block, layers, **options))
        for name, (block, layers, options) in RESNETS.items()
    },
    **{
        name: of_vision(lambda growth=growth, blocks=blocks, stem=stem: DenseNet(growth, blocks, stem))
        for name, (growth, blocks, stem) in DENSENETS.items()
    },
    "ddpm-cifar10": ddpm,
    "stable-diffusion-1.5-unet": stable_diffusion,
}
