"""Where a new run may take its weights from, and whether they fit its model. Torch-free."""

from dataclasses import fields, replace
from pathlib import Path

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig, LoRA
from trainer.families.args import ModelArgs
from trainer.families.registry import hf_config, is_folder
from trainer.hugging_face.config_json import CONFIG_FILE, read_config
from trainer.hugging_face.files import read_folder
from trainer.stores.folder import check_same_model, read_state, step_to_load
from trainer.stores.remote import named_step, saved_step
from trainer.stores.store import STATE_FILE

_KEY = "checkpoint.initial_load_path"


def hf_folder(config: JobConfig) -> Path | None:
    """Return the Hugging Face folder of which a run has its weights or sizes, and so its tokenizer; None: no such."""
    named = [config.checkpoint.initial_load_path, config.model.flavor if is_folder(config.model.flavor) else None]
    return next((Path(path) for path in named if path and (Path(path) / CONFIG_FILE).is_file()), None)


def check_initial_weights(config: JobConfig, model: ModelArgs) -> None:
    """Check that the weights in `checkpoint.initial_load_path` are there and of this model.

    Raises:
        ConfigError: they are damaged, of another model, or neither a Hugging Face folder nor a checkpoint.
        MissingFile: nothing is there.
    """
    given = config.checkpoint.initial_load_path
    if given is None:
        return
    if config.checkpoint.enable and step_to_load(config) is not None and not config.lora.rank:
        return  # a run with checkpoints resumes from them; those of adapters hold nothing else
    path, step = Path(given), saved_step(_KEY, given)
    if step is None and not path.is_dir():
        raise MissingFile(
            f"{_KEY} = {given!r} is no folder here, and no checkpoint in a store; name a folder with weights (for a "
            "finished run, in its config.toml)"
        )
    if not config.checkpoint.initial_load_model_only:
        _check_branch(config, given, step)
    if step is not None:
        state = read_state(named_step(_KEY, given)[0], step)
        if state.model.get("lora.rank"):
            raise ConfigError(
                f"{_KEY} = {given!r} holds adapters only; merge them into a Hugging Face folder with lct convert "
                "to-hf, and name that"
            )
        check_same_model(state, replace(config, lora=LoRA()), model, given, remedy="take that model", dtype=False)
    elif (path / CONFIG_FILE).is_file():
        _check_hf(config, model, path)
        read_folder(path)  # all files are there, and whole
    else:
        raise ConfigError(
            f"{_KEY} = {given!r} holds neither a {CONFIG_FILE} of a Hugging Face model nor a {STATE_FILE} of a "
            "checkpoint; name a Hugging Face folder on this machine, or a folder step-N of a run's checkpoints"
        )


def _check_branch(config: JobConfig, given: str, step: int | None) -> None:
    """Check that a run can continue another one: from a folder step-N, without adapters."""
    key = "checkpoint.initial_load_model_only = false"
    if step is None:
        raise ConfigError(
            f"{key} continues another run, and {_KEY} = {given!r} holds weights alone; name a "
            "folder step-N of a run's checkpoints, or leave the key out"
        )
    if config.lora.rank:
        raise ConfigError(
            f"{key} has no optimizer for the adapters of lora.rank = {config.lora.rank}, which are new; leave it out"
        )


def _check_hf(config: JobConfig, model: ModelArgs, path: Path) -> None:
    """Check that the model is that of `config.json`, but for what table [model] changes."""
    family = hf_config(config.model.name)
    family.check_start(model)
    args = family.read(read_config(path))
    theirs = args.configured(config.model, vocab_size=args.vocab_size, max_seq_len=model.max_seq_len)
    balance = {"router_aux_loss_coef"}  # of training, not of the weights
    different = [
        f"{field.name} = {getattr(model, field.name)} (there {getattr(theirs, field.name)})"
        for field in fields(model)
        if field.name not in balance and getattr(model, field.name) != getattr(theirs, field.name)
    ]
    if different:
        name = "the folder" if is_folder(config.model.flavor) else f"model.flavor = {config.model.flavor!r}"
        raise ConfigError(
            f"{name} is not the model in {_KEY} = {str(path)!r}: {', '.join(different)}; set "
            f"model.flavor to a folder that holds its {CONFIG_FILE}, such as {str(path.absolute())!r}"
        )
