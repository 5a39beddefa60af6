"""Print the completion script of a shell: `covey completion bash|zsh|fish`.

The scripts are static: they hold the commands, the settings of each and their values, from the schema, and start no
Python. In bash and zsh a word may be a full name (`--grpo.beta`) or, where no full name begins so, the end of one that
is unique (`--beta`).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args, get_origin

from covey.cli import options
from covey.cli.words import split_exactly
from covey.config import recipe
from covey.config.base import Config, without_none
from covey.config.overrides import resolve
from covey.config.strict_yaml import leaves
from covey.errors import CoveyError, nearest
from covey.launch import JobOptions, LocalOptions
from covey.plan import machines
from covey.rewards import registry as rewards

FILES = "FILES"
"""Stands for the names of files and folders among values."""
PATHS = ("model.source", "model.adapter", "data.path", "data.test_path", "critic", "reward_model", "out")
"""Settings whose value is a path, or may be one."""
JUDGES = ("rewards", "evaluation.accuracy", "evaluation.partial", "evaluation.format")
"""Settings whose value is the name of a reward function."""
SHELLS = ("bash", "zsh", "fish")

Flags = Mapping[str, Sequence[str]]
"""Map from a flag to its values; none if it is a switch or if any value is possible."""


class Command(NamedTuple):
    """One command: a summary of one line, the values of its first argument, its flags, and those that are switches."""

    summary: str
    arguments: Sequence[str]
    flags: Flags
    switches: Sequence[str]


def parse(words: Sequence[str]) -> Callable[[], None]:
    """Parse `covey completion bash|zsh|fish`."""
    (shell,), _ = split_exactly(1, words, f"covey completion {'|'.join(SHELLS)}")
    if shell not in SHELLS:
        raise CoveyError(f"there is no completion for {shell!r}", want=", ".join(SHELLS), fix=nearest(shell, SHELLS))
    return partial(print_script, shell)


def print_script(shell: str) -> None:
    """Print the completion script of `shell`."""
    write: dict[str, Callable[[Mapping[str, Command]], Iterable[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    print("\n".join(write[shell](commands())))


def check_flags(name: str, words: Iterable[str]) -> None:
    """Refuse an option of another command, which `name` does not have.

    Raises:
        CoveyError: it has none; the error names the commands that do.
    """
    for flag in dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")):
        owners = [other for other, (switches, taking) in OPTIONS.items() if flag in (*switches, *taking)]
        if owners and name not in owners and not _is_setting(name, flag):
            fix = f"leave it out; it belongs to covey {' or '.join(owners)}"
            raise CoveyError(f"{flag} is no option of covey {name}", want=f"covey {name} --help", fix=fix)


def _is_setting(name: str, flag: str) -> bool:
    """Return whether a setting of the command `name` may be meant by `flag`."""
    ends = "." + flag.removeprefix("--").replace("-", "_")
    return any(f".{path}".endswith(ends) for cls in SETTINGS.get(name, ()) for path in leaves(cls))


def commands() -> dict[str, Command]:
    """Return every command by name, with what can follow it."""
    from covey.cli.help import OVERVIEW, PAGES

    summaries = dict(reversed(re.findall(r"^  covey (\w+) [^ ].*?  +(.+)$", OVERVIEW, re.M)))  # the first of each
    return {name: _command(name, summaries.get(name, "")) for name in PAGES}


def _command(name: str, summary: str) -> Command:
    """Return the command `name` with its own options and its settings."""
    switches, taking = OPTIONS.get(name, ((), {}))
    flags: dict[str, Sequence[str]] = dict.fromkeys(("--help", *switches), ())
    for cls in SETTINGS.get(name, ()):
        for flag, values in _settings(cls).items():
            flags[flag] = tuple(dict.fromkeys((*flags.get(flag, ()), *values)))
    return Command(summary, _arguments(name), flags | dict(taking), ("--help", *switches))


def _arguments(name: str) -> Sequence[str]:
    """Return the values of the first argument of a command."""
    if name in ("train", "rewards", "rollout"):
        return (*recipe.names(recipe.Recipe), FILES)
    if name == "sft":
        return (*recipe.names(recipe.SFTRecipe), FILES)
    return {
        "validate": (*recipe.names(), FILES),
        "plan": (*recipe.names(), FILES),
        "recipes": (*recipe.names(), "copy"),
        "completion": SHELLS,
        "launch": ("local", "slurm", "k8s", "tpu-vm", "skypilot"),
        "doctor": (),
    }.get(name, (FILES,))


def _settings(cls: type[Config]) -> dict[str, Sequence[str]]:
    """Return the flags of the settings of `cls` with their values."""
    return {
        "--" + path.replace("_", "-"): _values(path, kind)
        for path, kind in leaves(cls).items()
        if path not in recipe.HIDDEN
    }


def _values(path: str, kind: Any) -> Sequence[str]:
    inner = without_none(kind)[0]
    if get_origin(inner) is tuple:
        inner = get_args(inner)[0]
    if get_origin(inner) is Literal:
        return tuple(map(str, get_args(inner)))
    if inner is bool:
        return ("true", "false")
    return (FILES,) if path in PATHS else tuple(rewards.REGISTRY.names()) if path in JUDGES else ()


def _short(flags: Iterable[str]) -> dict[str, str]:
    """Return the flag that each unique end of a dotted name means."""
    paths = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    found = {}
    for end in {path.rpartition(".")[2] for path in paths if "." in path} - paths:
        try:
            found["--" + end.replace("_", "-")] = "--" + resolve("--" + end, paths).replace("_", "-")
        except CoveyError:  # several settings end so
            continue
    return dict(sorted(found.items()))


def _cases(by_key: Mapping[str, Sequence[str]], indent: str) -> list[str]:
    """Return the branches of a shell's `case` that set `values`; keys with the same values share one."""
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, values in by_key.items():
        if values:
            keys.setdefault(tuple(values), []).append(key)
    return [f"{indent}{'|'.join(names)}) values={_quote(values)} ;;" for values, names in keys.items()]


def _quote(words: Iterable[str]) -> str:
    return "'" + " ".join(words) + "'"


def _tables(known: Mapping[str, Command]) -> dict[str, list[str]]:
    """Return the tables of the scripts for bash and zsh, as branches of `case`."""
    every: dict[str, Sequence[str]] = {}
    arguments, full, short, switches = dict(every), dict(every), dict(every), dict(every)
    for name, command in known.items():
        ends = _short(command.flags)
        meant = {**{flag: flag for flag in command.flags}, **ends}
        every |= {f"{name}:{flag}": command.flags[path] for flag, path in meant.items()}
        arguments[name], full[name] = command.arguments, [*command.flags]
        short[name], switches[name] = [*ends], command.switches
    named = {"values": every, "arguments": arguments, "full": full, "short": short, "switches": switches}
    return {table: _cases(rows, "    ") for table, rows in named.items()}


def _lookup(function: str, key: str, cases: Sequence[str]) -> list[str]:
    return [f"{function}() {{", "  values=", f"  case {key} in", *cases, "  esac", "}"]


def _functions(known: Mapping[str, Command]) -> list[str]:
    tables = _tables(known)
    lines = _lookup("_covey_values", '"$1:$2"', tables["values"])
    for table in ("arguments", "full", "short", "switches"):
        lines += _lookup(f"_covey_{table}", '"$1"', tables[table])
    return lines


def _bash(known: Mapping[str, Command]) -> list[str]:
    return [
        "# Completion of covey for bash: source <(covey completion bash)",
        *_functions(known),
        f"_covey_commands={_quote(known)}",
        *BASH.splitlines(),
    ]


def _zsh(known: Mapping[str, Command]) -> list[str]:
    return [
        "#compdef covey",
        "# Completion of covey for zsh: source <(covey completion zsh), or save it as _covey in a folder of $fpath",
        *_functions(known),
        f"_covey_commands={_quote(known)}",
        *ZSH.splitlines(),
    ]


def _fish(known: Mapping[str, Command]) -> list[str]:
    lines = ["# Completion of covey for fish: covey completion fish | source", "complete -c covey -f"]
    for name, command in known.items():
        summary = command.summary.replace("'", "")
        lines.append(f"complete -c covey -n __fish_use_subcommand -a {name} -d '{summary}'")
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        words = [word for word in command.arguments if word != FILES]
        if command.arguments:
            files = " -F" if FILES in command.arguments else ""
            lines.append(f"complete -c covey {seen}{files} -a '{' '.join(words)}'")
        for flag, values in command.flags.items():
            lines.append(f"complete -c covey {seen} -l {flag[2:]}{_fish_values(flag in command.switches, values)}")
    return lines


def _fish_values(switch: bool, values: Sequence[str]) -> str:
    if switch:
        return ""
    words = " ".join(word for word in values if word != FILES)
    return (" -r -F" if FILES in values else " -x") + (f" -a '{words}'" if words else "")


BASH = r"""
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
  _covey_switches "$name"; switches=" $values "
  if [[ -n $flag && $switches != *" $flag "* ]]; then
    _covey_values "$name" "$flag"
  elif [[ $cur == -* ]]; then
    _covey_full "$name"
    COMPREPLY=($(compgen -W "$values" -- "$cur"))
    if ((${#COMPREPLY[@]} == 0)); then
      _covey_short "$name"
      COMPREPLY=($(compgen -W "$values" -- "$cur"))
    fi
    return
  else
    _covey_arguments "$name"
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

ZSH = r"""
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
  _covey_switches $name; switches=" $values "
  if [[ -n $flag && $switches != *" $flag "* ]]; then
    _covey_values $name $flag
  elif [[ $words[CURRENT] == -* ]]; then
    _covey_full $name
    compadd -- ${=values} && return
    _covey_short $name
    compadd -- ${=values}
    return
  else
    _covey_arguments $name
  fi
  [[ " $values " == *" FILES "* ]] && _files
  compadd -- ${=values/FILES/}
}
if [[ $funcstack[1] == _covey ]]; then _covey "$@"; else compdef _covey covey; fi
"""

RL, SFT = recipe.Recipe, recipe.SFTRecipe
SETTINGS: dict[str, Sequence[type[Config]]] = {
    "train": (RL,), "rewards": (RL,), "rollout": (RL,), "sft": (SFT,),
    "validate": (RL, SFT), "plan": (RL, SFT), "eval": (RL, SFT),
    "generate": (options.GenerateOptions,), "chat": (options.ChatOptions,), "export": (options.ExportOptions,),
    "report": (options.ReportOptions,), "push": (options.PushOptions,),
}  # fmt: skip
"""Classes of the settings of each command."""
RUN: tuple[Sequence[str], Flags] = ("--dry-run", "--json"), {"--resume": (FILES,)}
LAUNCH: Flags = {
    "--" + path.replace("_", "-"): (FILES,) if path in ("file", "logs", "workdir") else ()
    for cls in (LocalOptions, JobOptions)
    for path in leaves(cls)
} | {"--out": (FILES,)}
OPTIONS: dict[str, tuple[Sequence[str], Flags]] = {
    "train": RUN,
    "sft": RUN,
    "eval": ((), {"--recipe": (*recipe.names(), FILES)}),
    "validate": (("--json", "--no-import"), {}),
    "rewards": (("--json",), {"--samples": (FILES,), "--prompts": ()}),
    "rollout": ((), {"--episodes": ()}),
    "watch": (("--once", "--json"), {}),
    "launch": (("--dry-run",), {**LAUNCH, "--recipe": (*recipe.names(), FILES)}),
    "compare": (("--json",), {}),
    "push": (("--yes", "--private", "--samples", "--no-report"), {}),
    "recipes": (("--json",), {}),
    "plan": (
        ("--json", "--here", "--quick"),
        {"--on": machines.EXAMPLES, "--prompt-tokens": (), "--completion-tokens": ()},
    ),
}
"""Options of each command that are no settings: switches, and the values of the others."""
