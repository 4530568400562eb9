"""What each kernel can do, and the kernel that `auto` takes. Torch-free, so that settings are checked without torch."""

from dataclasses import dataclass

from trainer.distributed.sharding.errors import OptionError


@dataclass(frozen=True)
class Capabilities:
    """What a kernel can do. All kernels take any scale and grouped heads.

    device: `cpu`, `cuda`, or None for any; dtypes: names of torch dtypes; max_head_dim, head_dim_multiple: of the size
    of a head. bottom_right: CAUSAL with more keys than queries in one call. bands: BI_CAUSAL and INV_CAUSAL in one call
    of any size; masks: both with a dense mask, over pieces. many: many tiles in one launch. deterministic: its backward
    can give the same bits each time. softcap: scores c * tanh(score / c).
    """

    device: str | None
    dtypes: frozenset[str]
    max_head_dim: int = 1 << 30
    head_dim_multiple: int = 1
    bottom_right: bool = False
    bands: bool = False
    masks: bool = False
    many: bool = False
    deterministic: bool = True
    softcap: bool = False

    def lacks(
        self,
        device_type: str | None,
        dtype: str | None,
        head_dim: int,
        *,
        bands: bool,
        deterministic: bool = False,
        softcap: bool = False,
    ) -> list[str]:
        """Return what the kernel cannot do, in words; device_type and dtype are None if not known yet."""
        lacks = []
        if device_type and self.device not in (None, device_type):
            lacks.append(f"tensors on {device_type}")
        if dtype and dtype not in self.dtypes:
            lacks.append(dtype)
        if head_dim > self.max_head_dim or head_dim % self.head_dim_multiple:
            lacks.append(f"heads of size {head_dim}")
        if bands and not (self.bands or self.masks):
            lacks.append("a sliding window")
        if deterministic and not self.deterministic:
            lacks.append("training.deterministic")
        if softcap and not self.softcap:
            lacks.append("a soft-cap of scores")
        return lacks


_HALVES = frozenset({"bfloat16", "float16"})

CAPABILITIES: dict[str, Capabilities] = {
    "cpu_flash": Capabilities("cpu", _HALVES | {"float32", "float64"}, masks=True),
    "cuda_flash": Capabilities("cuda", _HALVES, max_head_dim=256, bottom_right=True, bands=True),
    "efficient": Capabilities("cuda", _HALVES | {"float32"}, bottom_right=True, masks=True),
    "cudnn": Capabilities("cuda", _HALVES, max_head_dim=128, head_dim_multiple=8, deterministic=False),
    "varlen": Capabilities("cuda", _HALVES, max_head_dim=256, bottom_right=True, bands=True, many=True),
    "math": Capabilities(None, _HALVES | {"float32", "float64"}, bottom_right=True, bands=True, softcap=True),
}
"""All kernels by name; each kernel's class refers to its entry."""


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

FLASH_KERNELS = ("cuda_flash", "varlen")
"""The kernels that call PyTorch's flash operators."""

_AUTO = ("cpu_flash", "cuda_flash", "efficient", "math")
_MANY_CALLS = 4  # of a stage; with more calls, one launch saves more than the copy of its rows costs
_HOPPER = (9, 0)


def runs_fla(device_type: str, dtype: str, key_dim: int, *, deterministic: bool) -> bool:
    """Return whether flash-linear-attention's kernels can compute linear attention with keys of this size."""
    return device_type == "cuda" and dtype in _HALVES and key_dim <= 256 and not deterministic


def kernel_words(name: str, capability: tuple[int, int], package: FlashPackage | None, *, deterministic: bool) -> str:
    """Return a kernel on a GPU in words: what computes it, and which packages would be faster.

    package: behind the flash operators, None for FlashAttention-2.
    """
    words = f"attention's kernel is {name}, on compute capability {capability[0]}.{capability[1]}"
    if name not in FLASH_KERNELS:
        return words
    words += f", computed by {package.name if package else 'FlashAttention-2'}"
    faster = [f"{each.name} ({each.install})" for each in FLASH_PACKAGES if each.runs_on(capability)]
    if package or not faster or deterministic:
        return words
    return f"{words}; faster here would be {' or '.join(faster)}"


def able_kernels(name: str, device_type: str | None, dtype: str | None, head_dim: int, **needs: bool) -> list[str]:
    """Return the kernels that can do this. name: the configured kernel, or `auto`; needs: as of `Capabilities.lacks`.

    Raises:
        OptionError: an unknown kernel, or one that cannot do it; the message names kernels that can.
    """
    lacks = {each: c.lacks(device_type, dtype, head_dim, **needs) for each, c in CAPABILITIES.items()}
    able = [each for each in lacks if not lacks[each]]
    if name not in ("auto", *lacks):
        raise OptionError(f"kernel = {name!r} is none of 'auto', {', '.join(map(repr, lacks))}")
    if name != "auto" and lacks[name]:
        raise OptionError(
            f"kernel = {name!r} cannot do {' or '.join(lacks[name])}; kernels that can: {', '.join(map(repr, able))}"
        )
    return able


def auto_kernel(
    able: list[str],
    calls: int,
    *,
    capability: tuple[int, int] | None = None,
    fixed: bool = False,
    newer_flash: bool = False,
) -> str:
    """Return the kernel that `auto` takes among the able ones, by the first of these rules that names one.

    1. More than four tiles in a stage, as with packed documents: `varlen`, which computes them in one launch.
    2. A fixed mask, on a GPU of Hopper or later, without FlashAttention-3 or -4: `cudnn`, the fastest there.
    3. The first of `cpu_flash`, `cuda_flash`, `efficient` and `math`.

    calls: the most tiles of a stage; capability: of the GPU, such as (9, 0), None for a CPU; fixed: whether the mask is
    causal or full, with the same lengths in every step (cuDNN builds a plan for each new shape); newer_flash: whether
    FlashAttention-3 or -4 computes `cuda_flash` and `varlen`.
    """
    if "varlen" in able and calls > _MANY_CALLS:
        return "varlen"
    if "cudnn" in able and fixed and capability is not None and capability >= _HOPPER and not newer_flash:
        return "cudnn"
    return next(name for name in _AUTO if name in able)
