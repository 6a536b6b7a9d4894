"""Prompt lengths at which page, window and compressor borders fall."""

SWEEP = (
    *range(1, 10),
    *range(60, 71),
    *range(125, 132),
    *range(252, 263),
    *range(508, 517),
    1000,
)
BORDERS = (1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000)
