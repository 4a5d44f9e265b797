"""`python -m flashqla doctor`: what is installed, what the machine has, and which backend a call would use."""

from __future__ import annotations

import argparse

import torch

import flashqla
from flashqla import testing
from flashqla.console import environment, first_line, version_of
from flashqla.hopper.compile import NO_NVCC, describe_cache, find_nvcc

PEERS = ("fla-core", "flash-qla", "flashinfer-python")


def main(arguments: argparse.Namespace) -> int:
    """The command; prints one fact a line and returns 0."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = environment(device)
    facts |= {name: version_of(name) for name in PEERS}
    facts["gpu"] = describe_gpu(facts)
    facts["nvcc"] = describe_nvcc()
    facts["kernel cache"] = describe_cache()
    facts["backend"] = describe_backend(device)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}  {'not installed' if value is None else value}")
    return 0


def describe_gpu(facts: dict) -> str:
    """The GPU, or why torch sees none."""
    if "gpu" in facts:
        return facts["gpu"]
    if torch.version.cuda is None:
        return "none: this torch is built without CUDA"
    return f"none: torch is built for CUDA {torch.version.cuda} but finds no device"


def describe_nvcc() -> str:
    """Path and version of nvcc, or how to get one."""
    nvcc = find_nvcc()
    if nvcc is None:
        return NO_NVCC
    release = first_line("sh", "-c", f'"{nvcc}" --version | grep release')
    return f"{nvcc} ({release or 'does not run'})"


def describe_backend(device: torch.device) -> str:
    """The backend of a plain bfloat16 call with heads of 128 on this machine, and why."""
    call = testing.inputs(head_dim_k=128, head_dim_v=128, dtype=torch.bfloat16, device=device).arguments()
    supported, reasons = flashqla.is_supported(**call)
    return "hopper" if supported else f"reference ({'; '.join(reasons)})"
