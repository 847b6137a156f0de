"""Gate a transformers model: Trainer.train trains every run; the model comes from a config."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from qualitygates import Experiment, run
from qualitygates.integrations import EvaluationSet, HuggingFaceWorkload
from qualitygates.report import summary

TRAINED_ON, ROWS, WORDS, LENGTH = 4000, 10000, 32, 6
generator = torch.Generator().manual_seed(0)
text = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
odds = torch.randn(WORDS, generator=generator)[text].sum(1) / 2 - 0.5
liked = (torch.rand(ROWS, generator=generator) < odds.sigmoid()).long()


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return TRAINED_ON

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": text[row], "labels": liked[row]}


def model() -> nn.Module:
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = BertConfig(vocab_size=WORDS, num_hidden_layers=1, **sizes)
    return BertForSequenceClassification(config)


def logits(net: nn.Module, features: dict[str, torch.Tensor]) -> torch.Tensor:
    scores: torch.Tensor = net(**features).logits
    return scores[:, 1] - scores[:, 0]


def build() -> HuggingFaceWorkload:
    held_out = {"input_ids": text[TRAINED_ON:]}, liked[TRAINED_ON:].float()
    return HuggingFaceWorkload(
        name="texts",
        build=model,
        dataset=Texts(),
        arguments={"learning_rate": 5e-3},
        evaluation=EvaluationSet(*held_out, {"user": np.arange(ROWS - TRAINED_ON) % 200}),
        logits=logits,
    )


if __name__ == "__main__":
    gate = Experiment.from_toml(Path(__file__).with_name("own-loops") / "hugging_face_model.toml")
    with TemporaryDirectory() as folder:
        print(summary(run(gate, out=Path(folder), workers=1, progress=False)))
        print("acceptance written:", (Path(folder) / "acceptance.json").exists())
