"""Pairs of tensors with the same values: one of a model of ours, and its counterpart in transformers. Torch-free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


def _unchanged(x: "torch.Tensor") -> "torch.Tensor":
    return x


@dataclass(frozen=True)
class HFTensor:
    """The tensor of a Hugging Face model that has the values of one of ours: its name, and the change of layout.

    Or several tensors: `stacked` has the names for each row of ours (dim 0), whose equal parts (dim 1) they are. Then
    no layout changes.
    """

    name: str = ""
    to_hf: "Callable[[torch.Tensor], torch.Tensor]" = _unchanged
    """Whole tensor -> whole tensor, also on meta."""
    from_hf: "Callable[[torch.Tensor], torch.Tensor]" = _unchanged
    moves_rows: bool = False
    """Whether both change nothing but the order of the rows (dim 0), also of a 1-D tensor, and move no row far: a rank
    then reads what is near its own rows, in place of the whole tensor."""
    keeps_rows: bool = False
    """Whether both change each row (dim 0) by itself: a rank then reads its own rows, in place of the whole tensor."""
    stacked: tuple[tuple[str, ...], ...] = ()
    first_row: int = 0
    """Of ours in the tensor there, if it has the rows of several tensors of ours, one after another."""
    all_rows: int = 0
    """Of the tensor there; 0: as many as ours."""

    @property
    def same_layout(self) -> bool:
        return self.from_hf is _unchanged

    @property
    def names(self) -> tuple[str, ...]:
        """All names there."""
        return sum(self.stacked, ()) or (self.name,)

    def tensors(self, x: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Return the tensors there, or our rows of one, by name, possibly as views. x: whole, also on meta."""
        if not self.stacked:
            return {self.name: self.to_hf(x)}
        rows = zip(self.stacked, x, strict=True)
        return {
            name: part
            for names, row in rows
            for name, part in zip(names, row.chunk(len(names)), strict=True)
        }


@dataclass(frozen=True)
class HFModel:
    """The tensors of a model that Hugging Face's has, too."""

    pairs: "Mapping[str, tuple[torch.Tensor, HFTensor]]"
    """Our name -> our tensor on meta, and its tensor there. A shared parameter comes once, by its first name. Parts of
    one tensor there come one after another."""
    second_names: Mapping[str, str]
    """Names of shared parameters there, which files need not have -> the first names."""
    unread: tuple[str, ...] = ()
    """Beginnings of the names of tensors there that the model does not have, and files may."""
    further: frozenset[str] = frozenset()
    """Our names of tensors for further tokens, which files may lack, all of them."""
    has_further: bool = False
    """Whether the model has layers for further tokens, which need not have a name there."""

    def without_further(self) -> "HFModel":
        """Return the model without its tensors for further tokens."""
        pairs = {name: pair for name, pair in self.pairs.items() if name not in self.further}
        return replace(self, pairs=pairs, further=frozenset())

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tensors there, by name, in our order."""
        return {
            there: (hf.all_rows or y.shape[0], *y.shape[1:])
            for x, hf in self.pairs.values()
            for there, y in hf.tensors(x).items()
        }


def check_shapes(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raise a ConfigError if a tensor of the model is not found, or found with another shape, or unknown."""
    for name, shape in found.items():
        if name not in wanted:
            raise ConfigError(f"{name} is no tensor of this model")
        if shape != wanted[name]:
            raise ConfigError(
                f"{name} has the shape {shape}, and this model's has {wanted[name]}"
            )
    if missing := [name for name in wanted if name not in found]:
        more = f" and {len(missing) - 1} more" * (len(missing) > 1)
        raise ConfigError(f"there is no {missing[0]}{more}, which this model has")
