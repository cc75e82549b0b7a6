"""This machine as a cluster of one host: sizes as reported, speeds as measured in a few seconds.

On a CPU machine the CPU is the one accelerator and host memory its memory. torch is imported when it is
measured, not before. Unverified: the CUDA branch has not run on a machine with GPUs.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from dhen.values import parse
from trials.cluster.cluster import Cluster

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
DESCRIPTION = "This machine as it is detected."
COPIED_BYTES = 2**28
CPU_MATMUL, GPU_MATMUL = 1024, 8192
"""Sizes of the square products that are timed: larger on a GPU, where small ones time the launch."""
GLOO_LATENCY_S = 50e-6
"""Seconds for one step of gloo between processes of a machine: an assumption."""
NVLINK_LATENCY_S = 3.4e-6
"""Seconds for one step over NVLink by NCCL's own model, src/graph/tuning.cc, hwLat: ring, Simple protocol,
NVLink."""


def host_memory_bytes() -> int:
    """Returns the host's memory, or the container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else "max"
    return min(total, int(limit)) if limit.isdigit() else total


@cache
def this_machine() -> Cluster:
    """Measures this machine's speeds, once per process; takes a second or two on a CPU."""
    import torch

    data = _gpus() if torch.cuda.is_available() else _cpu()
    data |= {"name": "this", "hosts": 1, "host_memory_bytes": host_memory_bytes()}
    data["sources"] |= {"hosts": "the machine that asks", "host_memory_bytes": "as the system reports it"}
    return parse(Cluster, data, "this machine")


def _cpu() -> dict[str, Any]:
    import torch

    from trials.cluster.machine import matmul_peak

    peak, copied = matmul_peak(CPU_MATMUL), _copy_bytes_per_second("cpu", "cpu")
    cores, threads = os.cpu_count(), torch.get_num_threads()
    matmul = f"measured: the best of products of {CPU_MATMUL} at several moments, with {threads} threads"
    copy = f"measured: the best of a few copies of {COPIED_BYTES / 2**20:.0f} MiB"
    link = {"bandwidth": copied / 2, "latency": GLOO_LATENCY_S}
    processes = f"{copy}; an upper bound between processes, unverified"
    return {
        "description": f"{DESCRIPTION} CPU, {cores} cores: ranks share its cores, memory and peak.",
        "device": "cpu",
        "verified": True,
        "gpus_per_host": 1,
        "hbm": host_memory_bytes(),
        "memory_bandwidth": copied,
        "peak_flops": {"fp32": peak.fp32, "bf16": peak.bf16},
        "host_link_bandwidth": copied / 2,
        "nvlink": link,
        "network": link,
        "sources": {
            "gpus_per_host": "the CPU stands for one accelerator",
            "hbm": "host memory, as the system reports it",
            "memory_bandwidth": f"{copy}, reads and writes together",
            "peak_flops.fp32": matmul,
            "peak_flops.bf16": matmul,
            "host_link_bandwidth": f"{copy}, one direction",
            **{f"{name}.bandwidth": processes for name in ("nvlink", "network")},
            **{f"{name}.latency": "an assumption for gloo, unverified" for name in ("nvlink", "network")},
        },
    }


def _gpus() -> dict[str, Any]:
    import torch

    from trials.cluster.machine import matmul_peak

    properties, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    peak, copied = matmul_peak(GPU_MATMUL), _copy_bytes_per_second("cuda:0", "cuda:0")
    matmul = f"measured: the best of products of {GPU_MATMUL} at several moments"
    sources = {
        "gpus_per_host": "torch.cuda.device_count",
        "hbm": "torch.cuda.get_device_properties, total_memory",
        "memory_bandwidth": "measured: the best of a few copies, reads and writes together",
        "peak_flops.fp32": matmul,
        "peak_flops.bf16": matmul,
        "host_link_bandwidth": "measured: the best of a few copies from pinned host memory, one direction",
    }
    data = {
        "description": f"{DESCRIPTION} {count} x {properties.name}.",
        "device": "cuda",
        "gpus_per_host": count,
        "hbm": properties.total_memory,
        "memory_bandwidth": copied,
        "peak_flops": {"fp32": peak.fp32, "bf16": peak.bf16},
        "host_link_bandwidth": _copy_bytes_per_second("cpu", "cuda:0") / 2,
        "sources": sources,
    }
    if count > 1:
        bandwidth = _copy_bytes_per_second("cuda:0", "cuda:1") / 2
        data["nvlink"] = {"bandwidth": bandwidth, "latency": NVLINK_LATENCY_S}
        sources["nvlink.bandwidth"] = "measured: the best of a few copies from GPU 0 to GPU 1, one direction"
        sources["nvlink.latency"] = "NCCL, src/graph/tuning.cc, hwLat (ring, Simple, NVLink); unverified"
    torch.cuda.empty_cache()  # this process lives as long as the study, and candidates may need all of the devices
    return data


def _copy_bytes_per_second(source: str, target: str) -> float:
    """Returns bytes read plus bytes written per second, of the fastest of a few copies; pinned on the way to a
    GPU."""
    import torch

    from trials.cluster.machine import best_seconds

    pinned = source == "cpu" and target != "cpu"
    a = torch.ones(COPIED_BYTES // 4, dtype=torch.float32, device=source, pin_memory=pinned)
    b = torch.empty_like(a, device=target, pin_memory=False)
    return 2.0 * COPIED_BYTES / best_seconds(lambda: b.copy_(a), b.device)
