"""Objects that a recipe mentions by name: Covey's, those of installed packages, and those of the user's modules.

Covey's own stand in a table from a name to `module:attribute`; a package offers others as entry points of a group, and
a user's module needs no entry at all. Nothing is imported before its first use. `import_package` imports a package of
an extra, which `install_command` installs. This module imports only the standard library and Covey's leaves.
"""

import importlib.metadata
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from covey.display import safe_format
from covey.errors import CoveyError, RecipeError, nearest
from covey.exits import block_exit


@cache
def _read_entry_points(path: tuple[str, ...], group: str) -> EntryPoints:
    return importlib.metadata.entry_points(group=group)


def entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group. The metadata of the packages on the path are read once for each group."""
    return _read_entry_points(tuple(sys.path), group)


@dataclass(frozen=True)
class Registry:
    """The names by which a recipe may mention one kind of objects: reward functions, environments or tools.

    Attributes:
        kind: name of the kind in errors, as in "reward function".
        group: group of entry points by which installed packages offer more of them, as in `covey.rewards`.
        member: what a module of the user's has, "function" or "Class".
        where: setting that names them.
        table: Covey's own, from a name to `module:attribute`.
    """

    kind: str
    group: str
    member: str
    where: str
    table: Mapping[str, str]

    def names(self) -> list[str]:
        """Return all names without a colon: Covey's own, then those of installed packages."""
        return [n for n in dict.fromkeys([*self.table, *sorted(entry_points(group=self.group).names)]) if ":" not in n]

    def resolve(self, name: str) -> Any:
        """Return the object `name`: one of Covey, one of an installed package, or `package.module:member` of a module
        of the user's, also from the working folder.

        Raises:
            RecipeError: it does not exist, its module cannot be imported, or several packages offer it.
        """
        if name in self.table:
            return resolve_name(self.table[name])
        module, colon, attribute = name.partition(":")
        if not colon or name in entry_points(group=self.group).names:
            module, attribute = self._offered(name).value.split(":")
        described = f"{self.kind.split()[0]} {name!r}"
        return self._member(import_user_module(module, described, self._form, self.where), attribute)

    def _offered(self, name: str) -> EntryPoint:
        """Return the entry point of an installed package for `name`; no other package replaces that of a plugin."""
        offers = [point for point in entry_points(group=self.group) if point.name == name]
        offers = [offer for offer in offers if offer.dist and offer.dist.name == "covey"] or offers
        if len(offers) > 1:
            packages = " and ".join(sorted(str(offer.dist and offer.dist.name) for offer in offers))
            raise RecipeError(
                f"the packages {packages} both offer the {self.kind} {name!r}",
                fix=f"name its module: {offers[0].value}",
                where=self.where,
            )
        if not offers:
            names = self.names()
            fix = f"{nearest(name, names)}; a {self.member.lower()} of your own is named {self._form}"
            if not names:
                fix = install_command()
            elif Path(f"{name}.py").is_file():
                fix = f"{name}:{self.member.upper()}, with the name of a {self.member.lower()} in {name}.py"
            raise RecipeError(f"there is no {self.kind} {name!r}", fix=fix, where=self.where)
        return offers[0]

    @property
    def _form(self) -> str:
        return f"package.module:{self.member}"

    def _member(self, module: ModuleType, attribute: str) -> Any:
        member = getattr(module, attribute, None)
        if not callable(member):
            have = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            what = f"{module.__name__} has no {self.member.lower()} {attribute!r}"
            raise RecipeError(what, fix=nearest(attribute, have) if have else "", where=self.where)
        return member


def offered(group: str, name: str, needed_for: str = "") -> Any:
    """Return the object that an installed package offers as `name` by the group `group` of entry points.

    Args:
        needed_for: the user's word for what needs it, in the error; `name` by default.

    Raises:
        CoveyError: no package offers it, or the one that does cannot be imported.
    """
    for point in entry_points(group=group):
        if point.name == name:
            return _load(point)
    what = f"{needed_for or name} needs a package that offers {name!r} by the entry point {group}"
    raise CoveyError(what, fix=install_command())


def all_offered(group: str) -> dict[str, Callable[[], Any]]:
    """Return functions that load what installed packages offer by the group `group` of entry points, by name."""
    return {point.name: partial(_load, point) for point in sorted(entry_points(group=group))}


def _load(point: EntryPoint) -> Any:
    """Load the object of an entry point; the error names its package if that cannot be imported."""
    package = point.module.partition(".")[0]
    what = f"{point.name} belongs to the package {package}, which cannot be imported"
    import_package(point.module, CoveyError, what, where=point.group)
    return point.load()


def import_package(name: str, kind: type[CoveyError], what: str, extra: str = "", where: str = "") -> Any:
    """Import a module of a package that Covey can do without.

    Args:
        name: name of the module.
        kind: class of the error.
        what: what is wrong without it.
        extra: extra that installs the package.
        where: recipe key, or file, in the error.

    Raises:
        CoveyError: it cannot be imported; the error names the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise kind(f"{what}: {error}", fix=install_command(extra), where=where) from error


def import_user_module(module_name: str, what: str, want: str, where: str) -> ModuleType:
    """Import a module of the user's, also from the working folder.

    Args:
        module_name: dotted name of the module.
        what: what is looked for in it, at the beginning of the error.
        want: form of the name that leads to it.
        where: recipe key in the error, where no place in the module is known.

    Raises:
        RecipeError: it cannot be imported.
    """
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with block_exit():
            return importlib.import_module(module_name)
    except (KeyboardInterrupt, RecipeError):  # a module may say what it needs
        raise
    except BaseException as error:  # including scripts that exit when they are imported
        what = f"{what}: importing {module_name!r} failed: {type(error).__name__}: {safe_format(error, str)}"
        raise RecipeError(
            what, want=want, fix=_import_fix(error, module_name, here), where=_import_location(error) or where
        ) from error
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _import_fix(error: BaseException, module_name: str, here: str) -> str:
    """Return advice for an import of `module_name` that raised `error`."""
    if isinstance(error, SyntaxError):
        return f"correct line {error.lineno} of {Path(str(error.filename)).name}"
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"correct {module_name}: it raises while it is imported"
    package = error.name.partition(".")[0]
    if package == module_name.partition(".")[0]:
        return f"name a module that Python can import from {here}"
    return f"pip install {package}, or the package of another name that brings this module"


def _import_location(error: BaseException) -> str:
    """Return file and line in the user's module that failed, or "" when it was never reached."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def install_command(extra: str = "") -> str:
    """Return the command that reinstalls Covey with the packages of `extra`.

    It names the clone that Covey runs from, if it does, and the package index only if Covey came from there.
    """
    clone = Path(__file__).resolve().parents[1]
    named = f"[{extra}]" if extra else ""
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}{named}')}"
    if importlib.metadata.distribution("covey").read_text("direct_url.json") is None:
        return f"pip install {shlex.quote(f'covey{named}')}"
    return f"pip install -e '.{named}' in a clone of Covey"
