"""What a training leaves on disk is believed only as it was written: weights, and predictions of a split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dhen.errors import UserError
from trials.store.weights import load_weights, read_all, read_logits, read_optimizer_state, save_weights
from trials.training.scoring import keep_logits

MODEL = torch.nn.Linear(3, 2)
WEIGHTS = MODEL.state_dict() | {
    "optimizer.scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 4),
    "packed": torch.arange(5, dtype=torch.uint8),
    "keys": torch.tensor([2**40, 1]),
    "half": torch.ones(3, dtype=torch.bfloat16),
}
LOGITS = torch.tensor([0.5, -1.0, 2.0])


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def test_kept_files_come_back_whole(tmp_path: Path) -> None:
    save_weights(WEIGHTS, tmp_path / "weights")
    read = read_all(tmp_path / "weights")
    assert read.keys() == WEIGHTS.keys()
    assert all(torch.equal(read[name], WEIGHTS[name]) for name in WEIGHTS)
    keep_logits(tmp_path / "logits.npy")(LOGITS)
    assert np.array_equal(read_logits(tmp_path / "logits.npy"), LOGITS.numpy())
    assert np.array_equal(np.load(tmp_path / "logits.npy"), LOGITS.numpy())


@pytest.mark.parametrize(
    "read", [read_all, read_optimizer_state, lambda path: load_weights(torch.nn.Linear(3, 2), path)]
)
def test_a_flipped_bit_of_weights_is_found(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(MODEL.state_dict(), path)
    read(path)
    flip(path, -1)
    with pytest.raises(UserError, match=rf"{path} is damaged: .* Restore it from a copy, or train"):
        read(path)


@pytest.mark.parametrize("byte", [0, 30, 130, -33, -1])
def test_a_flipped_bit_of_predictions_is_found(tmp_path: Path, byte: int) -> None:
    path = tmp_path / "logits.validation.npy"
    keep_logits(path)(LOGITS)
    flip(path, byte)
    with pytest.raises(UserError, match=rf"{path}.* Restore the file from a copy, or delete it"):
        read_logits(path)
