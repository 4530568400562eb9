"""Planted mistakes, one line each, and the quick tests that must see them: `make mutants` runs them on copies.

A mutant that survives is a law that nothing checks. A feature adds the mistakes that its tests must see.
"""

from tests.mutants import (
    attention,
    chat,
    checkpoints,
    domain,
    experts,
    families,
    hybrid,
    job,
    memory,
    models_of_others,
    optimizers,
    planner,
    quantized,
    sparse_attention,
    step,
)
from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: tuple[Mutant, ...] = (
    *step.LOSS,
    *step.GRADIENTS,
    *optimizers.MUON,
    *optimizers.FURTHER,
    *optimizers.QK_CLIP,
    *optimizers.EARLY_UPDATES,
    *attention.PLANS,
    *attention.EXECUTION,
    *attention.EMPTY_GROUPS,
    *attention.CONVOLUTIONS,
    *attention.SHOWN_PLANS,
    *models_of_others.MODELS_OF_OTHERS,
    *domain.DOMAIN,
    *experts.EXPERTS,
    *families.FAMILIES,
    *hybrid.HYBRID,
    *sparse_attention.SPARSE,
    *step.FAMILIES,
    *step.LAYOUTS,
    *job.DATA,
    *chat.CHAT,
    *checkpoints.CHECKPOINTS,
    *job.SETTINGS,
    *job.CACHES,
    *step.METRICS,
    *step.VALIDATION,
    *quantized.QUANTIZED,
    *memory.OFFLOADED_INPUTS,
    *memory.OFFLOADED_ATTENTION,
    *memory.ROTARY,
    *memory.HOST_BATCHES,
    *memory.BLOCKS,
    *memory.GROUPS,
    *memory.TILES,
    *planner.PLANNER,
    *memory.SEQUENCE_CHUNKS,
    *step.PREFERENCES,
    *step.ADAPTERS,
    *step.ROUNDING,
    *step.EVALUATION,
    *job.PROCESSES,
)
