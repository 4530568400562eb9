"""The packages that can compute the flash kernels in place of FlashAttention-2. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FlashPackage:
    """A package that PyTorch can put behind its flash operators, in place of FlashAttention-2.

    implementation: its name in `torch.nn.attention.list_flash_attention_impls()`; module: what PyTorch imports; majors:
    the first numbers of the compute capabilities; install: what to type.
    """

    name: str
    implementation: str
    module: str
    majors: tuple[int, ...]
    install: str

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether PyTorch calls it on a GPU of this compute capability."""
        return capability[0] in self.majors


FLASH_PACKAGES = (
    FlashPackage(
        "FlashAttention-3",
        "FA3",
        "flash_attn_interface",
        (9,),
        "build the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    FlashPackage("FlashAttention-4", "FA4", "flash_attn.cute.interface", (9, 10), "pip install flash-attn-4"),
)
"""The first that runs is taken.

On Hopper that is FlashAttention-3, written for it and compiled when it is installed. FlashAttention-4 compiles each
kind of call in the run, and its first versions lack windows and ragged batches in the backward on Hopper.
"""
