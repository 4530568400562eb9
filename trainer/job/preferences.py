"""The task of preferences: of two answers to a prompt one is to become likelier. What it answers before ranks start."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import DecoderArgs
from trainer.job.degrees import Degrees
from trainer.job.language import Language
from trainer.job.record import RankMemory, ResolvedJob


class Preferences(Language):
    """Pairs of answers, as tokens; see `tasks/preferences.py`."""

    module = "trainer.tasks.preferences:PreferenceTask"
    sums_losses, validates, uses_model = False, False, True

    def check(self, config: JobConfig, model: DecoderArgs, degrees: Degrees) -> Sequence[str]:
        """Check the table [dpo]; ConfigError for a reference that is not there, or a feature that takes pairs apart."""
        dataset = "training.dataset = 'preferences'"
        initial = config.checkpoint.initial_load_path
        for key, wrong, remedy in (
            (
                "training.sequence_chunks",
                config.training.sequence_chunks > 1,
                "use 1, and context parallelism",
            ),
            ("training.balance = 'step'", config.training.balance == "step", "use 'off'"),
            ("mixture.names", bool(config.mixture.names), "put all pairs into one data set"),
            (
                "validation.enable",
                config.validation.enable,
                "leave it out; rewards_accuracy is in the metrics",
            ),
        ):
            if wrong:
                raise ConfigError(
                    f"{key} is not handled with {dataset}, whose loss is of whole pairs; {remedy}"
                )
        if reference_of(config) == "adapters" and not config.lora.rank:
            raise ConfigError(
                "dpo.reference = 'adapters' takes the model without its adapters, and lora.rank = 0 has none; use "
                "'copy', or set lora.rank"
            )
        if reference_of(config) == "adapters" and config.lora.whole:
            raise ConfigError(
                f"lora.whole = {list(config.lora.whole)} trains weights of the reference itself, which is the model "
                "without its adapters; use dpo.reference = 'copy'"
            )
        if initial is None:
            raise ConfigError(
                f"{dataset} trains away from a reference, which random weights are not; name its weights with "
                "checkpoint.initial_load_path, or with model.path"
            )
        return super().check(config, model, degrees)

    def memory(self, job: ResolvedJob) -> RankMemory:
        memory = super().memory(job)
        return (
            memory
            if reference_of(job.config) == "adapters"
            else replace(memory, weights=2 * memory.weights)
        )

    def describe(self, job: ResolvedJob) -> Mapping[str, str]:
        dpo = job.config.dpo
        found = super().describe(job)
        where = {
            "adapters": "the model without its adapters",
            "copy": "a frozen copy of the first weights",
        }
        reference = where[reference_of(job.config)]
        return {
            **found,
            "loss": f"{dpo.loss} of pairs (DPO), beta {dpo.beta:g}, from {reference}; {found['loss']}",
        }


def reference_of(config: JobConfig) -> str:
    """Return what `dpo.reference` means: "adapters" or "copy"."""
    if config.dpo.reference != "auto":
        return config.dpo.reference
    return "adapters" if config.lora.rank else "copy"
