"""Which specification of the library is that of a device, by the name that its driver prints."""

from __future__ import annotations

__all__ = ["BUILT_IN"]

BUILT_IN = {
    "NVIDIA A10": "a10",
    "NVIDIA A30": "a30",
    "NVIDIA A100-PCIE-40GB": "a100-40-pcie",
    "NVIDIA A100-SXM4-40GB": "a100-40-sxm",
    "NVIDIA A100 80GB PCIe": "a100-80-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80-sxm",
    "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100-sxm2-16gb",
    "Tesla V100-SXM2-32GB": "v100-sxm2-32gb",
    "AMD Instinct MI210": "mi210",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI325X": "mi325x",
}
"""A device whose name says less than a data sheet needs, such as half of an MI250X, is not here."""
