"""DCN-V2 in plain PyTorch, written straightforwardly: an nn.Embedding a column, Adam, autocast, no loader."""

import copy
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.training.peers.contest import LEARNING_RATE, Contest, Result, Stopwatch


class DcnV2(nn.Module):
    """Cross layers beside an MLP, a linear head."""

    def __init__(self, tables: list[int], dim: int, crosses: int, widths: list[int], dropout: float) -> None:
        super().__init__()
        embeddings = [nn.Embedding(rows, dim) for rows in tables]
        for table in embeddings:
            nn.init.normal_(table.weight, std=0.01)
        self.tables = nn.ModuleList(embeddings)
        width = len(tables) * dim
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(crosses))
        layers: list[nn.Module] = []
        for n_in, n_out in zip([width, *widths], widths, strict=False):
            layers += [nn.Linear(n_in, n_out), nn.ReLU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*layers)
        self.head = nn.Linear(width + widths[-1], 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x0 = x = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)
        for cross in self.crosses:
            x = x0 * cross(x) + x
        logits: torch.Tensor = self.head(torch.cat([x, self.mlp(x0)], dim=1)).squeeze(1)
        return logits


def load(contest: Contest, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    data = np.load(f"{contest.folder}/{split}.npz")
    ids = np.stack([data[f"c{i}"] for i in range(len(contest.tables))], axis=1)
    return torch.from_numpy(ids), torch.from_numpy(data["label"]).float()


@torch.no_grad()
def predict(model: nn.Module, ids: torch.Tensor, contest: Contest) -> torch.Tensor:
    model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=contest.bf16):
        logits = [model(batch).float() for batch in torch.split(ids, contest.batch_size)]
    model.train()
    return torch.cat(logits).sigmoid()


def train(model: nn.Module, contest: Contest, watch: Stopwatch) -> float:
    """Returns the seconds it took."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    (ids, labels), (valid_ids, valid_labels) = load(contest, "train"), load(contest, "validation")
    best, best_weights = float("inf"), model.state_dict()
    began = time.perf_counter()
    for _ in range(contest.epochs):
        watch.begin()
        for rows in torch.split(torch.randperm(len(ids)), contest.batch_size):
            with torch.autocast("cpu", torch.bfloat16, enabled=contest.bf16):
                logits = model(ids[rows])
            loss = F.binary_cross_entropy_with_logits(logits.float(), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            watch.lap(len(rows))
        valid_loss = F.binary_cross_entropy(predict(model, valid_ids, contest), valid_labels).item()
        if valid_loss < best:
            best, best_weights = valid_loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return time.perf_counter() - began


def main() -> None:
    contest, watch = Contest.from_command_line(), Stopwatch()
    torch.set_num_threads(contest.threads)
    torch.manual_seed(contest.seed)
    shape = contest.shape
    model = DcnV2(
        contest.tables, shape["embedding_dim"], shape["cross_layers"], shape["mlp"], contest.dropout
    )
    test_ids, _ = load(contest, "test")
    with FlopCounterMode(display=False) as counter:
        model(test_ids[: contest.batch_size])
    flops = counter.get_total_flops() / min(contest.batch_size, len(test_ids))
    seconds = train(model, contest, watch)
    np.save(f"{contest.folder}/test.npy", predict(model, test_ids, contest).numpy().astype(np.float64))
    Result(passes=watch.passes, epoch_seconds=seconds / contest.epochs, flops=flops).save(contest.folder)


if __name__ == "__main__":
    main()
