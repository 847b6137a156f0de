"""Place: the process and device that a run trains on, alone or as one of several that share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import DataError, GateError
from ..workload import Batch

_OFFSETS = "_offsets"


@dataclass(frozen=True)
class Place:
    """Rank `rank` of `processes` that share every batch by rows, on `device` ("cpu", "cuda").

    All ranks draw the same whole batch, so nothing about the data is communicated and the hash of
    what was trained on is that of one process. Several need torch's process group.
    """

    rank: int = 0
    processes: int = 1
    device: str = "cpu"

    def check(self, processes: int, device: str) -> None:
        """Refuse, with GateError, to make a record that says it ran elsewhere than it does."""
        if (self.processes, self.device) != (processes, device):
            raise GateError(
                f"the run wants {processes} processes on {device!r}; this is one of "
                f"{self.processes} on {self.device!r}: start it by `python -m qualitygates run`"
            )

    def stream(self, name: str) -> str:
        """The name of a random stream whose numbers belong to rows, another one on each rank."""
        return name if self.rank == 0 else f"{name}.{self.rank}"

    def hardware(self) -> str:
        """What records call the device: "cpu", or the name of the GPU."""
        return "cpu" if self.device == "cpu" else torch.cuda.get_device_name()

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model to call in training: gradients are averaged over the ranks in its backward."""
        if self.processes == 1:
            return model
        return DistributedDataParallel(model, find_unused_parameters=True)

    def part(self, batch: Batch) -> Batch:
        """This rank's rows of a batch, on its device; the batch itself for one process on a CPU.

        Features are [B, ...], or jagged: `x_offsets` [B + 1] beside entries `x_*` [T, ...].
        DataError for a batch that cannot be shared in equal parts.
        """
        if self.processes > 1:
            batch = self._rows(batch)
        if self.device == "cpu":
            return batch
        return replace(
            batch,
            features=on_device(batch.features, self.device),
            labels=batch.labels.to(self.device),
            weights=batch.weights.to(self.device),
        )

    def objective(self, loss: torch.Tensor) -> torch.Tensor:
        """What to differentiate, given this rank's share of the loss of the whole batch."""
        return loss if self.processes == 1 else loss * self.processes

    def total(self, loss: torch.Tensor) -> float:
        """The loss of the whole batch from the shares of all ranks."""
        if self.processes == 1:
            return loss.item()
        whole = loss.detach().clone()
        distributed.all_reduce(whole)
        return whole.item()

    def check_same(self, digest: str, what: str) -> None:
        """Raise RuntimeError unless every rank calls with the same hex digest of `what`."""
        mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.processes)]
        distributed.all_gather(every, mine)
        if not all(bool((one == mine).all()) for one in every):
            raise RuntimeError(f"the processes of this run differ in their {what}")

    def _rows(self, batch: Batch) -> Batch:
        rows = len(batch.labels)
        if rows % self.processes:
            raise DataError(
                f"a training batch of {rows} rows cannot be shared by {self.processes} processes "
                "in equal parts"
            )
        each = rows // self.processes
        start, stop = self.rank * each, (self.rank + 1) * each
        return Batch(
            features=_rows_of(batch.features, rows, start, stop),
            labels=batch.labels[start:stop],
            weights=batch.weights[start:stop],
            ids=batch.ids[start:stop],
        )


def on_device(
    features: Mapping[str, torch.Tensor], device: str | torch.device
) -> dict[str, torch.Tensor]:
    """The features on a device."""
    return {name: feature.to(device) for name, feature in features.items()}


def _rows_of(
    features: Mapping[str, torch.Tensor], rows: int, start: int, stop: int
) -> dict[str, torch.Tensor]:
    part = {}
    jagged = [name.removesuffix(_OFFSETS) for name in features if name.endswith(_OFFSETS)]
    for name, feature in features.items():
        prefix = next((one for one in jagged if name.startswith(f"{one}_")), None)
        if prefix is None:
            if feature.ndim == 0 or len(feature) != rows:
                raise DataError(
                    f"feature {name!r} has shape {tuple(feature.shape)} in a batch of {rows} rows: "
                    "[train] processes > 1 shares features [rows, ...], and jagged ones named "
                    "x_offsets [rows + 1] with entries x_*"
                )
            part[name] = feature[start:stop]
            continue
        offsets = features[prefix + _OFFSETS]
        first, last = int(offsets[start]), int(offsets[stop])
        if name == prefix + _OFFSETS:
            part[name] = offsets[start : stop + 1] - first
        else:
            part[name] = feature[first:last]
    return part
