"""Published rates of Apple's chips, each with its largest GPU: what a count of bytes and products is held against."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One chip.

    Attributes:
        name: as Apple calls it.
        bandwidth: of its memory, in GB/s.
        float32: multiplications and additions of float32, in TFLOP/s. simdgroup_matrix runs on the same units.
    """

    name: str
    bandwidth: float
    float32: float


# bandwidth: Apple's figures before rounding, as Ars Technica lists them with each generation (the M1: 128 bits of
# LPDDR4X-4266). float32 of M1 and M2: github.com/philipturner/metal-benchmarks (cores x 128 x 2 x clock); of M3 and M4:
# huggingface.co/hardware. Where sources differ the higher figure is taken: a floor must not be too high.
CHIPS = (
    Chip("M1", 68.3, 2.617),
    Chip("M1 Pro", 204.8, 5.308),
    Chip("M1 Max", 409.6, 10.62),
    Chip("M1 Ultra", 819.2, 21.23),
    Chip("M2", 102.4, 3.579),
    Chip("M2 Pro", 204.8, 6.8),
    Chip("M2 Max", 409.6, 13.6),
    Chip("M2 Ultra", 819.2, 27.2),
    Chip("M3", 102.4, 4.1),
    Chip("M3 Pro", 153.6, 7.4),
    Chip("M3 Max", 409.6, 14.2),
    Chip("M3 Ultra", 819.2, 28.4),
    Chip("M4", 120.0, 4.6),
    Chip("M4 Pro", 273.0, 9.2),
    Chip("M4 Max", 546.0, 18.4),
)
