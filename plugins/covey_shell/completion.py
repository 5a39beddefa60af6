"""Print the completion script of a shell: `covey completion bash|zsh|fish`.

The scripts hold commands, settings and values, and start no Python. In bash and zsh a word may be a full name
(`--grpo.beta`) or, where no full name begins so, a unique end of a name (`--beta`).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, get_origin

from covey.cli.commands import COMMANDS, Command
from covey.cli.parse import Line
from covey.config import recipe
from covey.config.base import leaves
from covey.config.kinds import choices, without_none
from covey.config.overrides import meanings
from covey.errors import CoveyError, nearest
from covey.rewards.registry import REGISTRY

FILES = "FILES"
"""Stands for the names of files and folders among values."""
PATHS = (
    "model.source", "model.adapter", "data.path", "data.test_path", "critic", "reward_model", "out",
    "file", "logs", "workdir",
)  # fmt: skip
"""Settings of recipes and of launch that take a path."""
JUDGES = ("rewards", "evaluation.accuracy", "evaluation.partial", "evaluation.format")
"""Settings that take the name of a reward function."""
SHELLS = ("bash", "zsh", "fish")
VALUES = {"": (), "N": (), "bash|zsh|fish": SHELLS}
"""Values of placeholders in the usage of any command that stand for no files."""


def completion(line: Line) -> None:
    """Execute `covey completion bash|zsh|fish`."""
    (shell,) = line.arguments
    if shell not in SHELLS:
        raise CoveyError(f"there is no completion for {shell!r}", want=", ".join(SHELLS), fix=nearest(shell, SHELLS))
    print("\n".join(script(shell)))


def script(shell: str) -> list[str]:
    """Return the lines of the completion script of `shell`."""
    if shell == "fish":
        return [*FISH, *(text for command in COMMANDS.values() for text in _fish(command))]
    words: dict[tuple[str, ...], list[str]] = {}  # words with the same values share a branch of the shell's `case`
    for command in COMMANDS.values():
        for word, values in _values_by_word(command).items():
            words.setdefault(tuple(values), []).append(f"{command.name}:{word}")
    cases = [f"    {'|'.join(names)}) values='{' '.join(values)}' ;;" for values, names in words.items() if values]
    text = (BASH if shell == "bash" else ZSH).replace("COMMANDS", f"'{' '.join(COMMANDS)}'")
    return text.replace("CASES", "\n".join(cases)).splitlines()


def flags_of(command: Command) -> dict[str, Sequence[str]]:
    """Return the flags of the command's options and settings with their values; no values if any is possible. A command
    that begins another has the valued options of that command too.
    """
    flags: dict[str, Sequence[str]] = {"--help": ()}
    for cls in command.classes:
        for path, kind in leaves(cls).items():
            if path not in recipe.HIDDEN:
                flag = "--" + path.replace("_", "-")
                flags[flag] = tuple(dict.fromkeys((*flags.get(flag, ()), *_values(path, kind))))
    launched = [option for verb in command.prefix_of for option in COMMANDS[verb].options if option.value]
    return flags | {option.flag: values_of(option.value, command) for option in (*command.options, *launched)}


def values_of(placeholder: str, command: Command) -> Sequence[str]:
    """Return the values that may stand in the place of `placeholder` in the usage of a command."""
    if placeholder in ("NAME_OR_YAML", "[NAME]"):
        return (*command.recipes, FILES if placeholder == "NAME_OR_YAML" else "copy")
    return command.values.get(placeholder, VALUES.get(placeholder, (FILES,)))


def _values(path: str, kind: Any) -> Sequence[str]:
    inner = without_none(kind)[0]
    if get_origin(inner) is not dict and (words := choices(inner)):
        return tuple(map(str, words))
    if inner is bool:
        return ("true", "false")
    return (FILES,) if path in PATHS else tuple(REGISTRY.names()) if path in JUDGES else ()


def _values_by_word(command: Command) -> dict[str, Collection[str]]:
    """Return {word: values}: the words are the flags and their unique endings, and the kinds of words."""
    flags = flags_of(command)
    paths = {flag.removeprefix("--").replace("-", "_"): flag for flag in flags}
    ends = {path.rpartition(".")[2] for path in paths}.difference(paths)
    matches = {end: meanings(end, paths) for end in sorted(ends)}
    endings = {
        "--" + end.replace("_", "-"): flags[paths[found[0]]] for end, found in matches.items() if len(found) == 1
    }
    switches = ["--help", *(option.flag for option in command.options if not option.value)]
    arguments = values_of(command.arguments.partition(" ")[0], command)
    return {"arguments": arguments, "full": flags, "short": endings, "switches": switches, **flags, **endings}


def _fish(command: Command) -> list[str]:
    """Return the lines of a command in the script for fish."""
    seen, words = f"complete -c covey -n '__fish_seen_subcommand_from {command.name}'", _values_by_word(command)
    summary, arguments = command.summary.replace("'", ""), words["arguments"]
    lines = [f"complete -c covey -n __fish_use_subcommand -a {command.name} -d '{summary}'"]
    if arguments:
        lines.append(f"{seen}{' -F' if FILES in arguments else ''} -a '{_without_files(arguments)}'")
    for flag in words["full"]:
        kind = "" if flag in words["switches"] else " -r -F" if FILES in words[flag] else " -x"
        offered = f" -a '{_without_files(words[flag])}'" if _without_files(words[flag]) else ""
        lines.append(f"{seen} -l {flag[2:]}{kind}{offered}")
    return lines


def _without_files(values: Iterable[str]) -> str:
    return " ".join(value for value in values if value != FILES)


FISH = ("# Completion of covey for fish: covey completion fish | source", "complete -c covey -f")
BASH = r"""# Completion of covey for bash: source <(covey completion bash)
_covey_values() {
  values=
  case "$1" in
CASES
  esac
}
_covey_commands=COMMANDS

_covey() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} name=${COMP_WORDS[1]} flag= values= switches
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "$_covey_commands --help --version" -- "$cur"))
    return
  fi
  if [[ $cur == = ]]; then flag=$prev cur=
  elif [[ $prev == = ]]; then flag=${COMP_WORDS[COMP_CWORD-2]}
  elif [[ $prev == --* ]]; then flag=$prev
  fi
  _covey_values "$name:switches"; switches=" $values "
  if [[ -n $flag && $switches != *" $flag "* ]]; then
    _covey_values "$name:$flag"
  elif [[ $cur == -* ]]; then
    _covey_values "$name:full"
    COMPREPLY=($(compgen -W "$values" -- "$cur"))
    if ((${#COMPREPLY[@]} == 0)); then
      _covey_values "$name:short"
      COMPREPLY=($(compgen -W "$values" -- "$cur"))
    fi
    return
  else
    _covey_values "$name:arguments"
  fi
  if [[ " $values " == *" FILES "* ]]; then
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "$cur"))
    values=${values/FILES/}
  fi
  COMPREPLY+=($(compgen -W "$values" -- "$cur"))
}
complete -F _covey covey
"""

ZSH = r"""#compdef covey
# Completion of covey for zsh: source <(covey completion zsh), or save it as _covey in a folder of $fpath
_covey_values() {
  values=
  case "$1" in
CASES
  esac
}
_covey_commands=COMMANDS

_covey() {
  local name=$words[2] flag= values= switches
  if ((CURRENT == 2)); then
    compadd -- ${=_covey_commands} --help --version
    return
  fi
  if [[ $words[CURRENT] == --*=* ]]; then
    flag=${words[CURRENT]%%=*}
    compset -P '*='
  elif [[ $words[CURRENT-1] == --* ]]; then
    flag=$words[CURRENT-1]
  fi
  _covey_values $name:switches; switches=" $values "
  if [[ -n $flag && $switches != *" $flag "* ]]; then
    _covey_values $name:$flag
  elif [[ $words[CURRENT] == -* ]]; then
    _covey_values $name:full
    compadd -- ${=values} && return
    _covey_values $name:short
    compadd -- ${=values}
    return
  else
    _covey_values $name:arguments
  fi
  [[ " $values " == *" FILES "* ]] && _files
  compadd -- ${=values/FILES/}
}
if [[ $funcstack[1] == _covey ]]; then _covey "$@"; else compdef _covey covey; fi
"""
