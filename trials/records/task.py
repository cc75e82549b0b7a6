"""A task: what the processes of an attempt are told; a scoring and a measured forward pass are tasks too."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from dhen.values import Value
from trials.cluster.cluster import Cluster
from trials.records.events import RankLogs
from trials.records.job import Job
from trials.records.places import Address
from trials.records.serving_limits import ServingConfig
from trials.records.strategy import Ranks, Strategy


class Task(Value):
    """What the processes of a candidate do: train a job, score a trained one on a split, or time its model."""

    job: Job
    log_directory: str
    """Directory of the prepared log."""
    threads: int
    """Threads of each rank."""
    score_split: str | None = None
    """Split on which the weights in the trial's directory are evaluated, in place of training."""
    keep_logits: bool = False
    """Whether the logits of that split are kept in the trial's directory."""
    serving: ServingConfig | None = None
    """Request to the model whose time is measured, in place of training."""
    start_from: str | None = None
    """A weights file to start training from in place of fresh weights."""
    start_learnt: bool = False
    """Whether servers of tables start with the optimizer state that is beside these weights too, if there is
    any."""
    attempt: int = Field(default=0, ge=0)
    """Which execution of its trial this is: 0 for the first, as in names of logs and in MLflow's tags."""
    restarts: int = Field(default=0, ge=0)
    """How often this process was started anew before while the others of the attempt went on."""
    progress_seconds: float = 0.5
    """Seconds between two progress events of a training."""
    strategy: Strategy = Strategy()
    """How the model is held."""
    hosts: int = Field(default=1, gt=0)
    """Number of hosts; all ranks are on this machine, unless `address` is given."""
    gpus_per_host: int = Field(default=1, gt=0)
    """Number of ranks per host."""
    cluster: Cluster | None = None
    """What the plan is for: where tables are placed, how gradients are cut into buckets."""
    evaluation_rows: int | None = Field(default=None, gt=0)
    """Rows of a rank that go forward at once in an evaluation, by the plan; None: nothing was planned."""
    address: Address | None = None
    """`host:port` on the first host, where the ranks of several machines meet."""
    host: int = Field(default=0, ge=0)
    """Index of this machine among the hosts if `address` is given; only its ranks are started."""
    devices: tuple[str, ...] | None = None
    """Ids of the CUDA devices of this machine that the task has, one per rank here; None: all."""
    ends_at: float | None = None
    """Unix time at which a training is stopped, evaluated and with its best weights kept; None: no limit."""
    hbm: int | None = Field(default=None, gt=0)
    """Bytes that a rank may hold; beyond them it is out of memory. None: as much as there is."""
    deadline_seconds: float | None = Field(default=None, gt=0)
    """Silence of rank 0 after which the ranks are taken to hang; longer than an evaluation. None: any."""
    resume_from: str | None = None
    """A folder for checkpoints: training goes on from what is there, and keeps new ones there."""
    checkpoint_seconds: float | None = None
    """Seconds of training that may be lost; 0: a checkpoint follows each evaluation and each look at the losses.
    None: as `train` has it."""
    teacher: str | None = None
    """File of what the job's teacher predicts for the training rows; given if the job has one."""
    debug: bool = False
    """Whether ranks log details too."""

    @model_validator(mode="after")
    def _is_one_of_the_hosts(self) -> Task:
        if self.host >= self.hosts or (self.host and self.address is None):
            raise ValueError(
                f"host={self.host}: of {self.hosts} host(s) it is one of several with an address"
            )
        return self

    @property
    def ranks_here(self) -> range:
        """The ranks that are started on this machine."""
        return self.ranks_of(self.host)

    def ranks_of(self, host: int) -> range:
        """Returns the ranks that are started on one of the hosts."""
        if self.address is None:
            return range(self.hosts * self.gpus_per_host)
        return range(host * self.gpus_per_host, (host + 1) * self.gpus_per_host)

    def device(self, process: int) -> str | None:
        """Returns the id of the CUDA device that one of the processes here was given; None for a server, and if
        none were given."""
        if self.devices is None or process not in self.ranks_here:
            return None
        return self.devices[process - self.ranks_here.start]

    @property
    def processes_here(self) -> tuple[int, ...]:
        """The numbers of the processes that are started on this machine."""
        return self.processes_of(self.host)

    def processes_of(self, host: int) -> tuple[int, ...]:
        """Returns the numbers of the processes that are started on one of the hosts: of its ranks, and of the
        servers there, which are numbered on behind all ranks; they are spread over the hosts in turn."""
        first, servers = self.hosts * self.gpus_per_host, range(self.strategy.servers)
        there = [first + server for server in servers if self.address is None or server % self.hosts == host]
        return (*self.ranks_of(host), *there)

    def server(self, process: int) -> int | None:
        """Returns which server a process is; None for a rank."""
        return self.logs(Path()).server(process)

    @property
    def trains(self) -> bool:
        """Whether it is a training."""
        return self.score_split is None and self.serving is None

    @property
    def ranks_on_their_own(self) -> bool:
        """Whether ranks train without each other, against servers."""
        return self.trains and self.strategy.servers > 0 and self.job.training.tables.synchrony == "async"

    def logs(self, folder: Path) -> RankLogs:
        """The logs of ranks and servers in the trial's directory: each attempt has its own, and so has every task
        that is no training."""
        ranks = self.hosts * self.gpus_per_host if self.strategy.servers else None
        if self.serving is not None:
            return RankLogs(folder, "forward-time", ranks)
        if self.score_split is not None:
            return RankLogs(folder, f"scoring-{self.score_split}", ranks)
        return RankLogs(folder, f"attempt{self.attempt}", ranks)

    def ranks(self, rank: int) -> Ranks:
        """Returns where this rank stands among all."""
        return Ranks(rank, self.hosts, self.gpus_per_host)
