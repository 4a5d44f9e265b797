"""`python -m flashqla doctor`: what is installed, what the machine has, and which backend a call would use."""

from __future__ import annotations

import argparse
import os

import torch

import flashqla
from flashqla import backends, testing
from flashqla.console import environment, first_line, version_of
from flashqla.hopper.compile import NO_NVCC, describe_cache, find_nvcc, wrong_companion
from flashqla.validation import Call

PEERS = ("fla-core", "flash-qla", "flashinfer-python")


def main(arguments: argparse.Namespace) -> int:
    """The command; prints one fact a line and returns 0."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = environment(device)
    facts |= {name: version_of(name) for name in PEERS}
    facts["gpu"] = describe_gpu(facts)
    facts["tilelang"] = wrong_companion() or facts["tilelang"]
    facts["nvcc"] = describe_nvcc()
    facts["kernel cache"] = describe_cache()
    facts["backend"] = describe_backend(device)
    facts["backward"] = describe_backward(device, facts["backend"])
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
    found = f"none: torch is built for CUDA {torch.version.cuda} but finds no device"
    driver = first_line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        torch.cuda.init()
        why = ""
    except Exception as error:  # no GPU, none visible, or a driver too old for this torch: torch says which
        why = str(error).strip().splitlines()[0]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "; ".join(
        text
        for text in (
            found,
            why,
            driver and f"nvidia-smi sees {driver}: the driver is too old for this torch, or the GPU is hidden",
            hidden is not None and f"CUDA_VISIBLE_DEVICES is {hidden!r}",
        )
        if text
    )


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
    if supported:
        return "hopper"
    if backends.prefers_fla("chunk_gated_delta_rule", Call(**call)):
        return f"fla, the kernels of fla-core ({'; '.join(reasons)})"
    without = backends.fla_refusals(device) if device.type == "cuda" and backends.device_refusals(device) else []
    return f"reference ({'; '.join(reasons + [f'fla: {reason}' for reason in without])})"


def describe_backward(device: torch.device, backend: str) -> str:
    """Where the gradients of such a call come from."""
    if backend.startswith("fla"):
        return "fla"
    reasons = backends.backward_refusals(device)
    return f"reference ({'; '.join(reasons)})" if reasons else "hopper"
