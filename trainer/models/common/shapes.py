"""Parts of model shapes that families share. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: long wavelengths stretched by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
