"""This machine as a cluster of one host: sizes as reported, speeds as measured in a few seconds.

On a CPU machine the CPU is the one accelerator and host memory its memory. torch is imported when it is
measured, not before. Unverified: the CUDA branch has not run on a machine with GPUs.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from dhen.errors import UserError, unknown_name
from dhen.values import load_yaml, parse
from trials.cluster.cluster import Cluster, PeakFlops

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
    """Returns the host's memory, or the container's limit if that is lower."""
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


# What one rank has of a machine that several share: its part of the memory, and the speed of its threads.
#
# A machine's speeds are measured with the threads that torch takes there, all cores or fewer. A rank has the
# speed of its own threads, or of its share of the cores; what no rank uses is nobody's. On an accelerator trials
# side by side take turns.


def shared(machine: Cluster, owners: int, threads: int | None = None) -> Cluster:
    """Returns the cluster of one trial, if so many ranks or trials, each with so many threads, share the
    machine.

    Args:
        machine: as measured; with `gpus_per_host` ranks, who on a CPU share its speeds among themselves
            (`trials.planner.step_time`).
        owners: on a CPU all ranks of all trials, on an accelerator the trials side by side.
        threads: threads of a rank; None for as many as there are for it.
    """
    share, words = 1.0 / owners, f"shared by {owners}"
    if machine.device == "cpu":
        import torch

        from trials.cluster.machine import cores

        measured = torch.get_num_threads()
        threads_per_rank = min(threads or measured, max(measured, cores()) / owners)
        share, words = (
            machine.gpus_per_host * threads_per_rank / measured,
            f"{threads_per_rank:g} of {measured} threads per rank",
        )
    sources = dict(machine.sources)
    if owners > 1:
        sources["hbm"] = f"{sources.get('hbm', 'as detected')}; shared by {owners}"
    if share != 1.0:
        speeds = [
            key for key in machine.numbers() if key.startswith("peak_flops.") or key == "memory_bandwidth"
        ]
        sources |= {key: f"{sources.get(key, 'as detected')}; {words}" for key in speeds}
    peaks = {key: share * peak for key, peak in machine.peak_flops.to_dict().items() if peak is not None}
    return machine.replace(
        hbm=machine.hbm // owners,
        memory_bandwidth=share * machine.memory_bandwidth,
        peak_flops=PeakFlops(**peaks),
        sources=sources,
    )


# Clusters by name (`trials/cluster/catalog/*.yaml`), by a YAML file's path, or this machine.

THIS = "this"
"""The name of the machine that asks."""


def catalog() -> dict[str, Cluster]:
    """Returns the named clusters, without this machine."""
    with resources.as_file(resources.files("trials.cluster") / "catalog") as folder:
        return {file.stem: _read(file) for file in sorted(Path(folder).glob("*.yaml"))}


def load_cluster(name_or_path: str) -> Cluster:
    """Returns a cluster by its name, by the path of a YAML file of your own, or `this`, which is measured
    (seconds).

    Raises:
        UserError: for an unknown name, with the names there are; for a bad value in a file, with its key and what
            would work.
    """
    if name_or_path == THIS:
        return this_machine()
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read(path)
    named = catalog()
    if name_or_path in named:
        return named[name_or_path]
    error = unknown_name("cluster", name_or_path, [*named, THIS])
    raise UserError(f"{error} Or give the path of a YAML file.")


def _read(path: Path) -> Cluster:
    """Returns the file's cluster, named after the file; a number that gives no source has the file as its
    source."""
    data: Any = load_yaml(path)
    cluster = parse(Cluster, {"name": path.stem} | data if isinstance(data, dict) else data, str(path))
    sources = dict.fromkeys(cluster.numbers(), f"your file {path.name}") | cluster.sources
    return cluster.replace(sources=sources)
