"""What each kernel can do, and the kernel that `auto` takes. Torch-free, so that settings are checked without torch."""

from dataclasses import dataclass
from typing import Any

from longshard.sharding.errors import OptionError


@dataclass(frozen=True)
class Capabilities:
    """What a kernel can do. All kernels take any scale and grouped heads.

    Attributes:
        device: `cpu`, `cuda`, or None for any.
        dtypes: Names of torch dtypes.
        max_head_dim: The largest head.
        head_dim_multiple: The size of a head is a multiple of this number.
        broken_heads: Sizes of heads for which its results are wrong.
        bottom_right: CAUSAL with more keys than queries is one call.
        bands: BI_CAUSAL and INV_CAUSAL of any size are one call.
        masks: BI_CAUSAL and INV_CAUSAL are calls with a dense mask, over pieces.
        many: Many tiles are one launch.
        large: Tiles with at least this many queries and keys are a launch of their own, with lengths that recur. 0
            means that no tile is.
        deterministic: Its backward can give the same bits each time.
        softcap: It computes scores c * tanh(score / c).
        elements: The size of a call, as `call_elements` counts it, must be less than this number.
    """

    device: str | None
    dtypes: frozenset[str]
    max_head_dim: int = 1 << 30
    head_dim_multiple: int = 1
    broken_heads: range = range(0)
    bottom_right: bool = False
    bands: bool = False
    masks: bool = False
    many: bool = False
    large: int = 0
    deterministic: bool = True
    softcap: bool = False
    elements: int = 1 << 62

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
        """Return what the kernel cannot do, in words; an empty list if it can do this attention.

        Args:
            device_type: The type of the device; None if not known yet.
            dtype: The name of the torch dtype; None if not known yet.
            head_dim: Size of a head.
            bands: Whether masks have windows.
            deterministic: Whether the backward must give the same bits each time.
            softcap: Whether scores have a soft-cap.
        """
        is_lacking = {
            f"tensors on {device_type}": device_type and self.device not in (None, device_type),
            dtype: dtype and dtype not in self.dtypes,
            f"heads of size {head_dim}": head_dim > self.max_head_dim
            or head_dim % self.head_dim_multiple
            or head_dim in self.broken_heads,
            "a sliding window": bands and not (self.bands or self.masks),
            "training.deterministic": deterministic and not self.deterministic,
            "a soft-cap of scores": softcap and not self.softcap,
        }
        return [words for words in is_lacking if is_lacking[words]]


_HALVES = frozenset({"bfloat16", "float16"})
FLASH2_BROKEN = range(129, 161)
"""Head sizes whose backward writes outside of its memory in FlashAttention 2.8.3, which PyTorch has since 2.11.

See pytorch issue 173953.
"""

INDEX_LIMIT = 1 << 31
"""Kernels of GPUs address elements with 32-bit integers. A call of this size, or a row at this offset, wraps around.

Seen on an H100 with PyTorch 2.11: at 540,000 rows of 32 heads of 128, FlashAttention-2's ragged backward wrote dq into
other tensors, and cuDNN 9.19 returned a dq with a relative error of up to 7 %. Both were right at 500,000 rows. No
release is known that repairs both (flash-attention pull request 2260 for the former), so the limit always holds.
"""

LARGE_TILE = 8192
"""With at least this many queries and keys, a cuDNN plan for one shape pays. A plan took 0.12 s on an H100."""

_GPU: dict[str, Any] = {"device": "cuda", "dtypes": _HALVES, "elements": INDEX_LIMIT}
_FLASH = _GPU | {
    "max_head_dim": 256,
    "broken_heads": FLASH2_BROKEN,
    "bottom_right": True,
    "bands": True,
}
_CUDNN = _GPU | {"max_head_dim": 128, "head_dim_multiple": 8, "deterministic": False}

CAPABILITIES: dict[str, Capabilities] = {
    "cpu_flash": Capabilities("cpu", _HALVES | {"float32", "float64"}, masks=True),
    "cuda_flash": Capabilities(**_FLASH),
    "efficient": Capabilities(
        "cuda", _HALVES | {"float32"}, bottom_right=True, masks=True, elements=INDEX_LIMIT
    ),
    "cudnn": Capabilities(**_CUDNN),
    "varlen": Capabilities(**_FLASH, many=True),
    "cudnn_varlen": Capabilities(**_FLASH | _CUDNN, many=True, large=LARGE_TILE),
    "math": Capabilities(
        None, _HALVES | {"float32", "float64"}, bottom_right=True, bands=True, softcap=True
    ),
}
"""All kernels by name. The class of each kernel refers to its entry."""


@dataclass(frozen=True)
class FlashPackage:
    """A package that PyTorch can use for its flash operators instead of FlashAttention-2.

    Attributes:
        name: Its name in messages.
        implementation: Its name in `torch.nn.attention.list_flash_attention_impls()`.
        module: The module that PyTorch imports.
        majors: The first numbers of the compute capabilities that it runs on.
        install: The command that installs it.
    """

    name: str
    implementation: str
    module: str
    majors: tuple[int, ...]
    install: str

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether PyTorch calls it on a GPU.

        Args:
            capability: The compute capability of the GPU.
        """
        return capability[0] in self.majors


FLASH_PACKAGES = (
    FlashPackage(
        "FlashAttention-3",
        "FA3",
        "flash_attn_interface",
        (9,),
        "pip install flash-attn-3 --index-url https://download.pytorch.org/whl/cu130",
    ),
    FlashPackage(
        "FlashAttention-4",
        "FA4",
        "flash_attn.cute.interface",
        (9, 10),
        "pip install flash-attn-4",
    ),
)
"""The first package that runs is taken.

On Hopper that is FlashAttention-3, written for it and compiled when it is installed. FlashAttention-4 compiles each
kind of call in the run, and its first versions lack windows and ragged batches in the backward on Hopper.
"""

FLASH_KERNELS = ("cuda_flash", "varlen", "cudnn_varlen")
"""The kernels that call PyTorch's flash operators."""

_AUTO = ("cpu_flash", "cuda_flash", "efficient", "math")
# If a stage has more calls, one launch saves more than the copy of its rows costs.
_MANY_CALLS = 4
_HOPPER = (9, 0)


def runs_fla(device_type: str, dtype: str, key_dim: int, *, deterministic: bool) -> bool:
    """Return whether flash-linear-attention's kernels can compute linear attention.

    Args:
        device_type: The type of the device.
        dtype: The name of the torch dtype.
        key_dim: The size of the keys.
        deterministic: Whether the results must be the same bits each time.
    """
    return device_type == "cuda" and dtype in _HALVES and key_dim <= 256 and not deterministic


def kernel_words(
    name: str, capability: tuple[int, int], package: FlashPackage | None, *, deterministic: bool
) -> str:
    """Return a kernel on a GPU in words: which package computes it, and which packages would be faster.

    Args:
        name: The name of the kernel.
        capability: The compute capability of the GPU.
        package: The package behind the flash operators; None means FlashAttention-2.
        deterministic: Whether the backward must give the same bits each time.
    """
    words = (
        f"attention's kernel is {name}, on compute capability {capability[0]}.{capability[1]}"
    )
    if name not in FLASH_KERNELS:
        return words
    flash = package.name if package else "FlashAttention-2"
    by = (
        f"cuDNN for tiles of {LARGE_TILE:,} tokens or more and {flash} for others"
        if name == "cudnn_varlen"
        else flash
    )
    words += f", computed by {by}"
    faster = [
        f"{each.name} ({each.install})" for each in FLASH_PACKAGES if each.runs_on(capability)
    ]
    if package or not faster or deterministic:
        return words
    return f"{words}; faster here would be {' or '.join(faster)}"


def able_kernels(
    name: str, device_type: str | None, dtype: str | None, head_dim: int, **needs: bool
) -> list[str]:
    """Return the names of all kernels that can compute this attention, also if `name` is one kernel.

    Args:
        name: The configured kernel, which is checked, or `auto`.
        device_type: The type of the device; None if not known yet.
        dtype: The name of the torch dtype; None if not known yet.
        head_dim: Size of a head.
        **needs: The further arguments of `Capabilities.lacks`.

    Raises:
        OptionError: The kernel is unknown, or cannot compute it; the message names kernels that can.
    """
    lacks = {
        each: c.lacks(device_type, dtype, head_dim, **needs) for each, c in CAPABILITIES.items()
    }
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
    largest: int = 0,
) -> str:
    """Return the kernel that `auto` takes among the able ones: the first of these rules that applies decides.

    1. On a GPU of Hopper or later, without FlashAttention-3 or -4, for a fixed mask of at most four tiles a stage:
       `cudnn`, the fastest there.
    2. On such a GPU, without FlashAttention-3 or -4, for a tile of `LARGE_TILE` tokens, as a long document has:
       `cudnn_varlen`, cuDNN for the large tiles.
    3. More than four tiles in a stage, as with packed documents: `varlen`, which computes them in one launch.
    4. The first of `cpu_flash`, `cuda_flash`, `efficient` and `math`.

    Args:
        able: The names of the kernels that can do this attention.
        calls: The most tiles of a stage.
        capability: The compute capability of the GPU, such as (9, 0); None for a CPU.
        fixed: Whether the mask is causal or full, with the same lengths in every step. cuDNN builds a plan for each new
            shape.
        newer_flash: Whether FlashAttention-3 or -4 computes `cuda_flash` and `varlen`.
        largest: Queries or keys, whichever are fewer, of the largest tile without a window.
    """
    many = calls > _MANY_CALLS
    has_fast_cudnn = capability is not None and capability >= _HOPPER and not newer_flash
    if has_fast_cudnn and fixed and not many and "cudnn" in able:
        return "cudnn"
    if has_fast_cudnn and largest >= LARGE_TILE and "cudnn_varlen" in able:
        return "cudnn_varlen"
    if many and "varlen" in able:
        return "varlen"
    return next(name for name in _AUTO if name in able)


def call_elements(batch: int, rows: int, calls: int, head_dim: int) -> int:
    """Return the number of elements of one head that a call of a kernel addresses, in a tensor or in its workspace.

    Args:
        batch: Number of sequences.
        rows: Queries or keys of a sequence, whichever are more.
        calls: Number of tiles that are computed together. FlashAttention's workspace has 128 more rows for each.
        head_dim: Size of a head. The workspace rounds it up to a multiple of 64.
    """
    return batch * (rows + 128 * calls) * (head_dim + -head_dim % 64)


def head_groups(
    heads: int, kv_heads: int, elements: int, limit: int
) -> list[tuple[slice, slice]]:
    """Return the query heads, and their key/value heads, of each call, so that no call has `limit` elements.

    A call has one or more key/value heads with all their query heads. If the query heads of one key/value head are too
    large together, several calls share the key/value head.

    Args:
        heads: Number of query heads.
        kv_heads: Number of key/value heads; divides `heads`.
        elements: Number of elements of one query head, see `call_elements`.
        limit: The number of elements that a call may not reach.

    Raises:
        OptionError: One head is too large.
    """
    fit = (limit - 1) // elements
    if not fit:
        raise OptionError(
            f"kernel: one head has {elements:,} elements in a call, and kernels of GPUs address fewer than {limit:,}; "
            "use a larger context_parallel_degree"
        )
    shared = heads // kv_heads
    if fit >= shared:
        step = fit // shared
        ends = [(start, min(start + step, kv_heads)) for start in range(0, kv_heads, step)]
        return [
            (slice(start * shared, stop * shared), slice(start, stop)) for start, stop in ends
        ]
    return [
        (
            slice(start, min(start + fit, first + shared)),
            slice(first // shared, first // shared + 1),
        )
        for first in range(0, heads, shared)
        for start in range(first, first + shared, fit)
    ]
