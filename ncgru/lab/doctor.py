"""What this machine can run: backends and why, devices, compiler of the GPU kernels, packages, data."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import torch

from ncgru import BackendUnavailableError, _cuda, available_backends, resolve_backend
from ncgru.lab.provenance import provenance
from ncgru.lab.tasks.penn import find_penn
from ncgru.orthogonal import cuda as orthogonal_kernels
from ncgru.recurrence.dispatch import BACKENDS

PACKAGES = ("typer", "rich", "tensorboard", "matplotlib", "safetensors", "numpy", "ray")
TYPICAL_SIZE = 128


def examine() -> dict[str, Any]:
    """Everything that `ncgru doctor` shows, as JSON."""
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return {
        "machine": provenance(),
        "devices": {device: _backends(device) for device in devices},
        "available_backends": list(available_backends()),
        "gpu_kernels": _cuda.diagnose(),
        "packages": {name: _version(name) for name in PACKAGES},
        "penn_treebank": _penn(),
    }


def _backends(device: str) -> dict[str, Any]:
    """What "auto" chooses on a device, and what every backend by name says."""
    choice = resolve_backend("auto", device=device, dtype=torch.float32, hidden_size=TYPICAL_SIZE)
    by_name = {}
    for name in BACKENDS:
        try:
            by_name[name] = resolve_backend(name, device=device, dtype=torch.float32, hidden_size=TYPICAL_SIZE).reason
        except BackendUnavailableError as error:
            by_name[name] = f"no: {error}"
    update = orthogonal_kernels.why_not(torch.device(device), torch.float32)
    return {
        "auto": choice.name,
        "reason": choice.reason,
        "by_name": by_name,
        "orthogonal_update": "by kernels" if update is None else f"by torch operations: {update}",
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _penn() -> dict[str, Any]:
    """Whether the Penn Treebank is where it is looked for."""
    found: dict[str, Any] = {"NCGRU_DATA": os.environ.get("NCGRU_DATA")}
    try:
        return {**found, "folder": str(find_penn()), "problem": None}
    except (OSError, ValueError) as error:
        return {**found, "folder": None, "problem": str(error)}
