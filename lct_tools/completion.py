"""Print a script by which a shell completes the commands, presets and options of lct.

    source <(lct completion bash)      # in ~/.bashrc; in ~/.zshrc with zsh
    lct completion fish | source       # in ~/.config/fish/config.fish

The first completion in a shell asks the program for its words, so the words are always its own.
"""

import train_configs
from trainer.commands.options import Parser

_PRESETS = f"printf '%s\\n' '{train_configs.__path__[0]}'/*.toml | sed 's|.*/||; s|[.]toml||'"
_COMMANDS = "lct --help | sed -n 's/^  \\([a-z]*\\)   .*/\\1/p'"
_OPTIONS = r"lct train --help | grep -oE -e '^  --[a-z0-9_.-]+|, --[a-z0-9_.]+$' | tr -d ' ,'"
_WORDS = f"""_lct_words() {{
    _lct_commands="$({_COMMANDS})"; _lct_presets="$({_PRESETS})"
    _lct_options="$({_OPTIONS})"
}}"""
_BASH = """
_lct() {
    local word="${COMP_WORDS[COMP_CWORD]}" words="";
    [ -n "$_lct_commands" ] || _lct_words;
    case "$COMP_CWORD ${COMP_WORDS[1]} $word" in
        "1 "*) words="$_lct_commands" ;;
        *" "*" -"*) words="$_lct_options" ;;
        "2 train "* | "2 check "* | "2 estimate "* | "3 data "*) words="$_lct_presets" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _lct lct"""
_FISH = """
complete -c lct -n __fish_use_subcommand -f -a '(__lct_commands)'

complete -c lct -n '__fish_seen_subcommand_from train check estimate data' -a '(__lct_presets)'

complete -c lct -n 'string match -q -- "-*" (commandline -ct)' -f -a '(__lct_options)'"""
SCRIPTS = {
    "bash": f"{_WORDS}{_BASH}",
    "zsh": f"autoload -Uz compinit bashcompinit; compinit -u; bashcompinit; {_WORDS}{_BASH}",
    "fish": f"""function __lct_commands; {_COMMANDS}; end
function __lct_options; {_OPTIONS}; end
function __lct_presets; {_PRESETS}; end
{_FISH}""",
}
"""Shell -> its script. zsh takes the functions of bash."""


def main(argv: list[str]) -> int:
    """Print the script of a shell.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code.
    """
    parser = Parser("completion", __doc__)
    parser.add_argument("shell", choices=SCRIPTS, help="the shell that reads the script")
    print(SCRIPTS[parser.parse_args(argv).shell])
    return 0
