"""Embeddings as codes: the recipe's choice, the codec, and TorchRec's all-to-all over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import lowprec
from lowprec.embeddings import BlockCodec, embedding_codecs, qcomms_config
from lowprec.errors import LowprecError, RecipeError, UnsupportedError
from lowprec.recipe import parse_recipe
from tests.core import embedding_ranks as they

needs_torchrec = pytest.mark.skipif(
    find_spec("torchrec") is None, reason="TorchRec is missing: pip install 'lowprec[recsys]'"
)
# TorchRec and FBGEMM warn about their own imports.
theirs = pytest.mark.filterwarnings("ignore")

TEXT = """
schema = 1
why = "test"
[transport]
embeddings = "mxfp8"
reduce = "bf16"
why = "half the bytes"
[[rule]]
match = "*"
kind = "linear"
fprop = "bf16"
dgrad = "bf16"
wgrad = "bf16"
why = "because"
"""


def test_a_recipe_says_what_crosses_the_network() -> None:
    recipe = parse_recipe(TEXT, name="a")
    assert (recipe.transport.embeddings, recipe.transport.reduce) == ("mxfp8", "bf16")
    assert parse_recipe(recipe.to_toml(), name="a") == recipe
    one = parse_recipe(TEXT.replace('reduce = "bf16"\n', ""), name="a")
    assert one.transport.reduce is None
    assert parse_recipe(one.to_toml(), name="a") == one


def test_the_hash_covers_transport_but_not_its_prose() -> None:
    recipe = parse_recipe(TEXT, name="a")
    table = TEXT[TEXT.index("[transport]") : TEXT.index("[[rule]]")]
    others = [
        parse_recipe(TEXT.replace(old, new), name="a")
        for old, new in (("mxfp8", "mx4"), ('reduce = "bf16"', 'reduce = "fp32"'), (table, ""))
    ]
    assert len({recipe.hash, *(one.hash for one in others)}) == 4
    assert parse_recipe(TEXT.replace("half the bytes", "."), name="a").hash == recipe.hash


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"mxfp8"', '"fp4"', r"transport: unknown embeddings 'fp4'; did you mean"),
        ('"mxfp8"', '["mxfp8"]', r"transport: embeddings must be a non-empty string"),
        ('reduce = "bf16"', 'reduce = "fp16"', r"unknown reduce 'fp16'; did you mean"),
        ("reduce =", "reduces =", r"unknown key 'reduces'; did you mean reduce"),
        ('why = "half the bytes"', "", r"transport: key 'why' is missing"),
        ('embeddings = "mxfp8"\nreduce = "bf16"', "", r"transport: decides nothing"),
        ("[transport]", "[[transport]]", r"is not a table; write it as \[transport\]"),
        ('"mxfp8"', f'"{"x" * 5000}"', r"unknown embeddings 'xxx"),
    ],
)
def test_bad_transport(old: str, new: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        parse_recipe(TEXT.replace(old, new, 1), name="a")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(("name", "bits"), [("mxfp8", 8.25), ("mxfp4", 4.25)])
def test_a_codec_sends_the_codes_of_the_cast(name: str, bits: float) -> None:
    codec = BlockCodec(name)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    x[2, 40] = torch.nan
    message = codec.encode(x.view(-1))
    assert message.dtype == torch.uint8
    assert message.nbytes == x.numel() * bits / 8 == codec.calc_quantized_size(x.numel())
    want = lowprec.dequantize(lowprec.quantize(x, name))
    assert torch.equal(codec.decode(message).view_as(x).nan_to_num(7), want.nan_to_num(7))
    assert int(want.isnan().sum()) == 32
    # What comes from several ranks lies one after the other; a part may be empty.
    assert codec.encode(x[:0]).numel() == codec.decode(message[:0]).numel() == 0
    parts = torch.cat([codec.encode(x[:1]), codec.encode(x[1:])])
    assert torch.equal(parts, message)


def test_dimensions_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    codec = BlockCodec("mxfp8")
    pooled = torch.zeros(2, 64)
    assert codec.padded_size(pooled, [64, 32], 0, codec.create_context()) == (64, 0)
    with pytest.raises(UnsupportedError, match="every embedding dimension a multiple"):
        codec.padded_size(pooled, [64, 40], 0, None)
    with pytest.raises(UnsupportedError, match="blocks of 32 values"):
        codec.encode(torch.zeros(40))
    for cast in ("mxfp8_32x32", "nvfp4", "mxfp8:sr"):
        with pytest.raises(UnsupportedError, match="no cast of 32 values"):
            BlockCodec(cast)


def test_what_cannot_work_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedding_codecs(they.recipe(None), "cpu") is None
    with pytest.raises(LowprecError, match=r"no kernels for a CPU; 'mxfp8' takes as many bytes"):
        embedding_codecs(they.recipe("fp8"), "cpu")
    for name in (None, "mxfp8"):
        with pytest.raises(RecipeError, match="no precision of TorchRec's QCommsConfig"):
            qcomms_config(they.recipe(name))
    for name in [one for one in sys.modules if one.partition(".")[0] == "torchrec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'lowprec\[recsys\]'"):
        embedding_codecs(they.recipe("mx4"), "cpu")


@theirs
@needs_torchrec
def test_the_recipe_becomes_torchrecs_own_configuration() -> None:
    from torchrec.distributed.fbgemm_qcomm_codec import CommType

    fp8 = qcomms_config(they.recipe("fp8"))
    assert fp8.forward_precision == fp8.backward_precision == CommType.FP8
    assert (fp8.fp8_quantize_dim, fp8.fp8_quantize_dim_bwd) == (128, 128)
    mx4 = qcomms_config(they.recipe("mx4"))
    assert mx4.forward_precision == mx4.backward_precision == CommType.MX4
    assert (mx4.mx4_quantize_dim, mx4.mx4_quantize_dim_bwd) == (32, 32)
    assert qcomms_config(they.recipe("bf16")).forward_precision == CommType.BF16
    gpu = embedding_codecs(they.recipe("fp8"), "cuda")
    assert gpu is not None
    fp8_bytes = gpu["POOLED_EMBEDDINGS_ALL_TO_ALL"].forward
    assert fp8_bytes.calc_quantized_size(1280, fp8_bytes.create_context()) == 1280 * 8.5 / 8
    # The reduce-scatter of row-wise sharding sums: never in codes.
    for name in ("fp8", "mx4", "mxfp8"):
        codecs = embedding_codecs(they.recipe(name), "cuda")
        assert codecs is not None
        summing = codecs["POOLED_EMBEDDINGS_REDUCE_SCATTER"]
        assert summing.forward.quantized_dtype == torch.bfloat16


def run(folder: Path, ranks: int, task: Any) -> list[dict[str, Any]]:
    mp.spawn(they.worker, (ranks, str(folder), task), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks saw, by the precision of their embeddings."""
    return run(tmp_path_factory.mktemp("embeddings"), 2, they.exchanged)


@needs_torchrec
@pytest.mark.parametrize(
    ("name", "most"), [("mxfp8", 0.55), ("mx4", 0.32), ("mxfp4", 0.32), ("bf16", 1.0)]
)
def test_bytes_on_the_wire(two: list[dict[str, Any]], name: str, most: float) -> None:
    """Of all-to-alls, forward and backward, relative to 16 bits a value (TorchRec sends 32)."""
    for one in two:
        assert len(one["None"]["bytes"]) == 2
        for sent, wide in zip(one[name]["bytes"], one["None"]["bytes"], strict=True):
            assert wide == 4 * they.BATCH * they.TABLES * they.WIDTH
            assert sent / (wide / 2) <= most


@theirs
@needs_torchrec
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_ranks_receive_the_cast_of_what_one_process_pools(
    two: list[dict[str, Any]], name: str
) -> None:
    for rank, one in enumerate(two):
        pooled = they.in_order(they.bags()(they.features(rank))).detach()
        torch.testing.assert_close(one["None"]["first"], pooled)
        want = lowprec.dequantize(lowprec.quantize(one["None"]["first"], name))
        assert torch.equal(one[name]["first"], want)


@needs_torchrec
@pytest.mark.parametrize("name", ["mxfp8", "mx4", "mxfp4", "bf16"])
def test_training_follows_that_in_float32(two: list[dict[str, Any]], name: str) -> None:
    for one in two:
        got, want = one[name]["losses"], one["None"]["losses"]
        assert want[-1] < 0.95 * want[0]
        assert got == pytest.approx(want, rel=0.05)
        assert got[0] - got[-1] == pytest.approx(want[0] - want[-1], rel=0.25)
        assert got != want


@pytest.mark.slow
@needs_torchrec
def test_two_groups_hold_the_same_tables(tmp_path: Path) -> None:
    found = run(tmp_path, 4, they.two_dimensional)
    for one, other in ((0, 2), (1, 3)):
        mine, theirs = found[one]["own"], found[other]["own"]
        assert len(mine) == 2
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    for one in found:
        assert one["losses"][-1] < one["losses"][0]


@pytest.mark.slow
@needs_torchrec
def test_torchrecs_own_groups_take_the_codecs(tmp_path: Path) -> None:
    """DMPCollection with two groups of two ranks, its sync included."""
    script = Path(__file__).with_name("dmp_collection.py")
    root = script.parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-O", "-W", "ignore", str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    # Groups are ranks 0, 2 and 1, 3; replicas are 0, 1 and 2, 3.
    for one, other in ((0, 1), (2, 3)):
        mine, theirs = found[one]["own"], found[other]["own"]
        assert len(mine) == 2
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    wide = 2 * 2 * they.BATCH * they.TABLES * they.WIDTH
    for one in found:
        assert one["losses"][-1] < one["losses"][0]
        assert {sent / wide for sent in one["bytes"]} == {33 / 64}
