"""The cost model of the speed stage against published break-even ratios, and its refusals."""

from pathlib import Path

import pytest

import lowprec
from qualitygates.errors import ExperimentError
from qualitygates.sensitivity.cost import CASTS, PUBLISHED, SpeedFacts, layer_seconds
from tests.core.calibrations import BF16_RATE, FP8_RATE, synthetic

# Speed of forward and backward over BF16 on an H200, block FP8, by where the casts run (the order
# of CASTS), for (rows, N, K); docs/sweeps.md names the source.
RATIOS = {
    (65536, 256, 256): (0.50, 0.66, 0.87, 1.29),
    (65536, 512, 512): (0.66, 0.83, 1.06, 1.49),
    (65536, 1024, 1024): (0.95, 1.10, 1.29, 1.56),
    (65536, 2048, 2048): (1.20, 1.31, 1.43, 1.58),
    (65536, 4096, 4096): (1.37, 1.44, 1.51, 1.59),
    (65536, 1024, 256): (0.57, 0.72, 0.81, 1.38),
    (65536, 256, 1024): (0.57, 0.72, 1.15, 1.38),
    (65536, 4096, 1024): (1.13, 1.25, 1.31, 1.58),
    (8192, 1024, 1024): (0.78, 0.97, 1.14, 1.38),
    (8192, 512, 512): (0.50, 0.69, 0.85, 1.13),
}
BLOCKS = {
    "fprop": "fp8_1x128 x fp8_128x128",
    "dgrad": "fp8_1x128 x fp8_128x128",
    "wgrad": "fp8_1x128",
}


def facts(hardware: str = "h200", **changes) -> SpeedFacts:
    given = {"rows": 65536, "casts": "dual", "width": 1.0, "calibration": None, **changes}
    return SpeedFacts.of(hardware=hardware, **given)


@pytest.mark.parametrize("shape", RATIOS)
def test_the_model_gives_the_published_ratios(shape) -> None:
    plain = dict.fromkeys(BLOCKS, "bf16")
    for casts, expected in zip(CASTS, RATIOS[shape], strict=True):
        times = [
            layer_seconds(PUBLISHED["h200"], shape, one, casts=casts) for one in (plain, BLOCKS)
        ]
        assert times[0] / times[1] == pytest.approx(expected, rel=0.012)


def test_b200_breaks_even_near_the_published_width() -> None:
    def gain(width: int) -> float:
        both = [
            facts("b200", casts="separate").seconds((width, width), policy)
            for policy in ("bf16 / bf16 / bf16", "mxfp8 / mxfp8 / mxfp8")
        ]
        return both[0] / both[1]

    assert gain(1024) < 1 < gain(1280)


def test_what_has_no_native_product_is_named() -> None:
    assert "mxfp8 has no native product on h200" in (facts().refusal("mxfp8") or "")
    assert "nvfp4" in (facts().refusal("nvfp4") or "")
    assert facts().refusal("fp8_1x128 x fp8_128x128") is None
    assert facts("b200").refusal("nvfp4") is None
    assert facts().refusal("bf16") is None


def test_a_layer_of_the_target_is_wider_than_that_of_the_proxy() -> None:
    narrow, wide = facts("b200"), facts("b200", width=16.0)
    policies = ("bf16 / bf16 / bf16", "mxfp4 / mxfp4 / mxfp4")
    ratios = [
        f.seconds((64, 64), policies[0]) / f.seconds((64, 64), policies[1]) for f in (narrow, wide)
    ]
    assert ratios[0] < 1 < ratios[1]


def test_stochastic_rounding_and_rotation_cost_casts() -> None:
    times = [
        facts("b200").seconds((1024, 1024), f"bf16 / bf16 / {wgrad}")
        for wgrad in ("nvfp4", "nvfp4 + rht16", "nvfp4:sr x nvfp4")
    ]
    assert times == sorted(times)
    assert len(set(times)) == 3


def test_without_hardware_nothing_is_predicted() -> None:
    assert facts("none").seconds((64, 64), "bf16 / bf16 / bf16") == 0
    assert "no speed stage" in facts("none").source


def test_published_rates_say_that_they_are_not_measured() -> None:
    assert "not measured" in facts("b200").source


def test_a_calibration_file_replaces_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'schema = 1\nhardware = "my gpu"\nsource = "measured on Tuesday"\nbf16_tflops = 100\n'
        "fp8_tflops = 190\ncopy_tbytes = 2.0\nlaunch_us = 5.0\n"
    )
    found = facts(calibration=path)
    assert found.hardware == "my gpu"
    assert "measured on Tuesday" in found.source
    assert found.refusal("nvfp4")
    path.write_text('schema = 1\nhardware = "my gpu"\nbf16_flops = 1\n')
    with pytest.raises(ExperimentError, match=r"mine.toml.*'bf16_flops'.*bf16_tflops"):
        facts(calibration=path)


def test_a_calibration_of_the_library_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    found = synthetic()
    path.write_text(found.to_toml())
    taken = facts(calibration=path)
    assert taken.hardware == "h200"
    assert "mine.toml: predicted from rates measured on h200" in taken.source
    assert taken.rates is not None
    assert taken.rates.bf16 == pytest.approx(1e6 * BF16_RATE, rel=1e-3)
    assert taken.rates.fp8 == pytest.approx(1e6 * FP8_RATE, rel=1e-3)
    assert (taken.rates.copy, taken.rates.launch) == (4.2e12, 2e-6)
    assert not taken.rates.mx
    assert taken.refusal("nvfp4")
    path.write_text(lowprec.load_calibration("b200").to_toml())
    taken = facts(calibration=path)
    assert taken.rates is not None
    assert (taken.rates.bf16, taken.rates.fp8, taken.rates.mx) == (1600e12, 3000e12, True)
    assert "never measured" in taken.source
    path.write_text(found.to_toml().replace("copy_tbytes = 4.2", "copy_tbytes = 5.2"))
    with pytest.raises(ExperimentError, match=r"mine.toml.*edited by hand"):
        facts(calibration=path)
    path.write_text(synthetic(gpu="a100").to_toml())
    with pytest.raises(ExperimentError, match="a100 has no native low-precision products"):
        facts(calibration=path)


def test_unknown_hardware_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"h20000.*h200.*calibration"):
        facts("h20000")
