"""Pairs of tensors with the same values: a tensor of our model, and its counterpart in transformers. Torch-free."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
LEFT_ASIDE = tuple(
    f"model.{part}."
    for part in ("visual", "vision_tower", "embed_vision", "audio_tower", "embed_audio")
)
"""Name prefixes of tensors that are not read of a folder whose model reads images, too."""
_TEXT, _TEXT_INSIDE = "model.", "model.language_model."
"""Name prefixes of the text model: in a folder of text alone, and in a folder that also reads images."""


def _unchanged(x: "torch.Tensor") -> "torch.Tensor":
    return x


@dataclass(frozen=True)
class HFTensor:
    """The counterpart of one of our tensors at Hugging Face: its name, and the change of layout.

    One of our tensors may also have several counterparts. Then `stacked` has their names for each of our rows (dim 0):
    they are equal parts (dim 1) of the row, and no layout changes.
    """

    name: str = ""
    to_hf: "Callable[[torch.Tensor], torch.Tensor]" = _unchanged
    """Whole tensor -> whole tensor, also on meta."""
    from_hf: "Callable[[torch.Tensor], torch.Tensor]" = _unchanged
    moves_rows: bool = False
    """Whether `to_hf` and `from_hf` change only the order of rows (dim 0), also of a 1-D tensor, and move no row far. A
    rank then reads the neighborhood of its own rows instead of the whole tensor."""
    keeps_rows: bool = False
    """Whether `to_hf` and `from_hf` change each row (dim 0) by itself. A rank then reads its own rows alone."""
    stacked: tuple[tuple[str, ...], ...] = ()
    first_row: int = 0
    """Our first row in the tensor there, if it has the rows of several of our tensors, one after another."""
    all_rows: int = 0
    """Number of rows of the tensor there; 0: our number of rows."""
    other_form: "HFTensor | None" = None
    """How other folders of the same architecture store the tensor."""

    @property
    def same_layout(self) -> bool:
        """Whether the tensor has the same rows and columns on both sides."""
        return self.from_hf is _unchanged

    @property
    def names(self) -> tuple[str, ...]:
        """All names there."""
        return sum(self.stacked, ()) or (self.name,)

    def tensors(self, x: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Return the tensors there, by name, possibly as views.

        A tensor with rows of several of our tensors has only our rows.

        Args:
            x: Our whole tensor, any shape, also on meta.
        """
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
    """The tensors of a model that have counterparts at Hugging Face."""

    pairs: "Mapping[str, tuple[torch.Tensor, HFTensor]]"
    """Our name -> our tensor on meta, and its tensor there. A shared parameter comes once, by its first name. Parts of
    one tensor there come one after another."""
    second_names: Mapping[str, str]
    """Second names of shared parameters there, which files may lack -> the first names."""
    unread: tuple[str, ...] = ()
    """Name prefixes of tensors that files may have but the model does not."""
    further: frozenset[str] = frozenset()
    """Our names of tensors for further tokens, which files may lack, all of them."""
    has_further: bool = False
    """Whether the model has layers for further tokens, which need not have a name there."""

    def in_folder(self, names: Collection[str]) -> "HFModel":
        """Return a copy with the names and forms that a folder has. Tensors that the folder lacks keep theirs.

        Args:
            names: Names of the tensors of the folder.
        """
        inside = self
        if any(name.startswith(_TEXT_INSIDE) for name in names):
            pairs = {ours: (x, _inside(hf)) for ours, (x, hf) in self.pairs.items()}
            second_names = {
                _inside_name(second): _inside_name(first)
                for second, first in self.second_names.items()
            }
            unread = (*map(_inside_name, self.unread), *LEFT_ASIDE)
            inside = replace(self, pairs=pairs, second_names=second_names, unread=unread)
        stored = {
            ours: (x, other if (other := hf.other_form) and other.name in names else hf)
            for ours, (x, hf) in inside.pairs.items()
        }
        return replace(inside, pairs=stored)

    def without_further(self) -> "HFModel":
        """Return the model without its tensors for further tokens."""
        pairs = {name: pair for name, pair in self.pairs.items() if name not in self.further}
        return replace(self, pairs=pairs, further=frozenset())

    def shapes(self) -> dict[str, Shape]:
        """Return the whole shapes of the tensors there, by name, in our order."""
        return {
            there: (hf.all_rows or y.shape[0], *y.shape[1:])
            for x, hf in self.pairs.values()
            for there, y in hf.tensors(x).items()
        }


def _inside_name(name: str) -> str:
    return f"{_TEXT_INSIDE}{name.removeprefix(_TEXT)}" if name.startswith(_TEXT) else name


def _inside(hf: HFTensor) -> HFTensor:
    """Return a tensor under the name that it has in a folder whose model reads images, too."""
    return replace(
        hf,
        name=_inside_name(hf.name),
        stacked=tuple(tuple(map(_inside_name, row)) for row in hf.stacked),
        other_form=None if hf.other_form is None else _inside(hf.other_form),
    )


def check_shapes(file_shapes: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Check that the tensors of files have the names and shapes of the tensors of the model.

    Args:
        file_shapes: Shapes of the tensors in the files.
        wanted: Shapes of the tensors of the model.

    Raises:
        ConfigError: A tensor is missing, unknown, or of another shape.
    """
    for name, shape in file_shapes.items():
        if name not in wanted:
            raise ConfigError(f"{name} is no tensor of this model")
        if shape != wanted[name]:
            raise ConfigError(
                f"{name} has the shape {shape}, and this model's has {wanted[name]}"
            )
    if missing := [name for name in wanted if name not in file_shapes]:
        others = f" and {len(missing) - 1} more" * (len(missing) > 1)
        raise ConfigError(f"there is no {missing[0]}{others}, which this model has")
