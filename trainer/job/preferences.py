"""The task of preferences: make one of two answers to a prompt likelier. Decisions and checks before ranks start."""

from collections.abc import Mapping, Sequence

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import DecoderArgs
from trainer.job.degrees import Degrees
from trainer.job.language import Language
from trainer.job.record import RankMemory, ResolvedJob


class Preferences(Language):
    """The task of pairs of answers, as tokens; see `tasks/preferences.py`."""

    module = "trainer.tasks.preferences:PreferenceTask"
    sums_losses, validates, uses_model = False, False, True

    def check(self, config: JobConfig, model: DecoderArgs, degrees: Degrees) -> Sequence[str]:
        """Check the table [dpo] in addition to the checks of `Language`.

        Args:
            config: The configuration of the run.
            model: The arguments of the model.
            degrees: The degrees of parallelism.

        Returns:
            Notes for the log.

        Raises:
            ConfigError: The reference does not exist, a setting does not work with pairs, or as in `Language`.
        """
        dataset = "training.dataset = 'preferences'"
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
        if reference_of(config) == "adapters":
            if not config.lora.rank:
                raise ConfigError(
                    "dpo.reference = 'adapters' takes the model without its adapters, and lora.rank "
                    "= 0 has none; use 'copy', or set lora.rank"
                )
            if config.lora.whole:
                raise ConfigError(
                    f"lora.whole = {list(config.lora.whole)} trains weights of the reference itself, "
                    "which is the model without its adapters; use dpo.reference = 'copy'"
                )
        if config.checkpoint.initial_load_path is None:
            raise ConfigError(
                f"{dataset} needs the weights of a reference model, and random weights are none; name weights with "
                "checkpoint.initial_load_path, or with model.path"
            )
        return super().check(config, model, degrees)

    def memory(self, job: ResolvedJob) -> RankMemory:
        """Return the memory, in bytes, of the pipeline rank with the largest total. A copied reference doubles weights.

        Args:
            job: The resolved job.
        """
        return super().memory(job, copies=1 if reference_of(job.config) == "adapters" else 2)

    def describe(self, job: ResolvedJob) -> Mapping[str, str]:
        """Return the paragraphs of `Language`, with the loss of pairs and its reference under "loss".

        Args:
            job: The resolved job.
        """
        dpo = job.config.dpo
        paragraphs = dict(super().describe(job))
        where = {
            "adapters": "the model without its adapters",
            "copy": "a frozen copy of the first weights",
        }
        paragraphs["loss"] = (
            f"{dpo.loss} of pairs (DPO), beta {dpo.beta:g}, from {where[reference_of(job.config)]}; "
            f"{paragraphs['loss']}"
        )
        return paragraphs


def reference_of(config: JobConfig) -> str:
    """Return the reference that `dpo.reference` means: "adapters" or "copy".

    Args:
        config: The configuration of the run.
    """
    if config.dpo.reference != "auto":
        return config.dpo.reference
    return "adapters" if config.lora.rank else "copy"
