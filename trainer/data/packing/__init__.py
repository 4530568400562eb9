"""Documents in sequences of one length, by concatenation, by best fit, or one a sequence. Public names."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"sequence": "IGNORE_INDEX NO_POSITION PackedSequence Sample positions_of together"}
)
