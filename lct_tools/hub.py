"""Downloads from the Hugging Face hub, and its errors as sentences."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.config.writable import is_of_file

FILENAME, OTHER = "original/tokenizer.model", "tokenizer.json"
# These name the tokens that begin and end a text.
SETTINGS_FILES = ("tokenizer_config.json", "generation_config.json")


def download_model(repo_id: str, folder: Path, token: str | None) -> None:
    """Download the files of a model: weights in safetensors, JSON, chat template and tokenizer.

    Args:
        repo_id: The repository, ORG/NAME.
        folder: The new folder.
        token: An access token; None for the token of `hf auth login`.

    Raises:
        ConfigError: The hub refuses access, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    with _sentences(repo_id, "copy the folder here by hand"):
        snapshot_download(
            repo_id,
            local_dir=folder,
            token=token,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"],
        )


def download_tokenizer(repo_id: str, folder: str, token: str | None) -> str:
    """Return the path of the downloaded file, `<folder>/original/tokenizer.model` or `<folder>/tokenizer.json`.

    With `tokenizer.json` it also downloads the files that name the tokens which begin and end a text.

    Args:
        repo_id: The repository on the hub.
        folder: The folder to write to.
        token: An access token; None for the token of `hf auth login`.

    Raises:
        ConfigError: The hub refuses access, lacks both files, or cannot be reached.
    """
    from huggingface_hub import errors, hf_hub_download

    def fetch(name: str) -> str | None:
        """Return the path of a file; None: the repository lacks it."""
        try:
            return hf_hub_download(
                repo_id=repo_id, filename=name, local_dir=folder, token=token
            )
        except errors.LocalEntryNotFoundError:  # no connection, and nothing cached
            raise
        except errors.EntryNotFoundError:
            return None

    otherwise = f"copy {FILENAME} here by hand, or train a tokenizer with `lct tokenizer train`"
    with _sentences(repo_id, otherwise):
        if path := fetch(FILENAME):
            return path
        if path := fetch(OTHER):
            for name in SETTINGS_FILES:
                fetch(name)
            return path
    raise ConfigError(
        f"{repo_id} has neither {FILENAME} nor {OTHER}; choose another repository, for example meta-llama/Llama-3.1-8B"
    )


@contextmanager
def _sentences(repo_id: str, otherwise: str) -> Iterator[None]:
    """Enter a context in which each error of the hub, its client or the network becomes a ConfigError.

    Errors of files, such as a full disk, pass unchanged. repo_id, otherwise: see `hub_reason`.
    """
    try:
        yield
    except Exception as error:
        # The hub's client has changed its HTTP library: errors of each are known by their module.
        library = type(error).__module__.partition(".")[0]
        if library not in ("huggingface_hub", "httpx", "httpx2", "requests") and (
            not isinstance(error, OSError) or is_of_file(error)
        ):
            raise
        raise ConfigError(hub_reason(error, repo_id, otherwise)) from None


def hub_reason(error: Exception, repo_id: str, otherwise: str) -> str:
    """Return the sentence for an error of the hub: the value, the reason, and a remedy.

    Args:
        error: The error.
        repo_id: The repository that was asked for.
        otherwise: The remedy if the hub cannot be reached, besides checking the network.
    """
    from huggingface_hub import errors as hub

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, hub.HFValidationError):
        return (
            f"{repo_id!r} is no name of a repository; it must look like meta-llama/Llama-3.1-8B"
        )
    if isinstance(error, hub.RepositoryNotFoundError):  # a GatedRepoError is one, too
        # The hub answers "not found" to strangers as well, so that one sentence has to serve both.
        state = (
            "is gated"
            if isinstance(error, hub.GatedRepoError)
            else "does not exist or is private"
        )
        return (
            f"{repo_id} {state} for this account; accept its licence at https://huggingface.co/{repo_id} and pass "
            "--token (from https://huggingface.co/settings/tokens)"
        )
    if status in (401, 403):
        return f"the hub refused access to {repo_id} (HTTP {status}); pass a valid --token with read permission"
    reason = str(error.__cause__ or error).strip().partition("\n")[0]
    return (
        f"the Hugging Face hub cannot be reached ({reason}); check the network, or {otherwise}"
    )
