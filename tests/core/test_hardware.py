"""Names of machines: the known short ones, and whole names where nothing short is known."""

import pytest
import torch

from lowprec.hardware import NAMED, Hardware, current, named, short_name


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "geforce-rtx-3090-ti"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-generation"),
        ("Quadro RTX 6000/8000", "quadro-rtx-6000-8000"),
        ("Tesla T4", "tesla-t4"),
        ("Tesla V100-SXM2-16GB", "tesla-v100-sxm2-16gb"),
        ("AMD Instinct MI300X", "amd-instinct-mi300x"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
        ("  NVIDIA   L40S  MIG 1g.12gb ", "l40s-mig-1g.12gb"),
        ("CPU of some vendor", "cpu-of-some-vendor"),
        ("", "unknown-gpu"),
        ("NVIDIA ", "unknown-gpu"),
        ("(?)", "unknown-gpu"),
    ],
)
def test_names_of_gpus(device: str, name: str) -> None:
    assert short_name(device) == name


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        ("NVIDIA H200", (9, 0), NAMED["h200"]),
        ("NVIDIA A100-SXM4-40GB", (8, 0), NAMED["a100"]),
        ("Tesla T4", (7, 5), Hardware("tesla-t4", "cuda", (7, 5))),
        ("", (12, 0), Hardware("unknown-gpu", "cuda", (12, 0))),
    ],
)
def test_this_machine(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], expected: Hardware
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert current() == expected


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert current() is named("cpu")
    assert str(named("cpu")) == "cpu"
    assert str(named("b300")) == "b300 (sm103)"
