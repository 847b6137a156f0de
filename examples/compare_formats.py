"""What each format loses on one tensor: SQNR in dB, plain and with outlier channels."""

import torch

import lowprec

torch.manual_seed(0)
plain = torch.randn(512, 1024)
outliers = plain * torch.where(torch.arange(1024) % 100 == 0, 50.0, 1.0)


def sqnr(x: torch.Tensor, name: str) -> float:
    """Signal to quantization noise ratio of one cast, in dB."""
    error = x - lowprec.dequantize(lowprec.quantize(x, name))
    return float(10 * torch.log10(x.square().sum() / error.square().sum()))


print(f"{'format':18} {'bits':>7} {'gaussian':>9} {'outliers':>9}")
for name, fmt in lowprec.FORMATS.items():
    print(
        f"{name:18} {fmt.bits_per_value:7.3f} {sqnr(plain, name):9.2f} {sqnr(outliers, name):9.2f}"
    )
