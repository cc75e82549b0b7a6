"""What one rank has of a machine that several share: its part of the memory, and the speed of its threads.

A machine's speeds are measured with the threads that torch takes there, all cores or fewer. A rank has the speed
of its own threads, or of its share of the cores; what no rank uses is nobody's. On an accelerator trials side by
side take turns.
"""

from __future__ import annotations

from trials.cluster.cluster import Cluster, PeakFlops


def shared(machine: Cluster, owners: int, threads: int | None = None) -> Cluster:
    """Returns the cluster of one trial, where so many ranks or trials, each with so many threads, share the
    machine.

    Args:
        machine: as measured; with `gpus_per_host` ranks, who on a CPU share its speeds among themselves
            (`trials.planner.time.step_time`).
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
