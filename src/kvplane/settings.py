"""Settings: what was this process told to do?

Pure: flags over KVPLANE_* environment over kvplane.toml, in that order, checked value by value.
Above it only __main__.py, which reads argv, environment and file; below it wiring.py, which turns
the result into each package's own settings. Open it to add a flag: one Key in options.py.

    --port 9000  >  KVPLANE_PORT=9000  >  [router] port = 9000  >  port = 9000  >  the default
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvplane import __version__
from kvplane.keyring import ApiKey, KeyFault, keys_from_tables
from kvplane.options import COMMANDS, WORKER_COMMANDS, Command
from kvplane.options_kinds import Key
from kvplane.vocabulary import Role, WorkerUp
from kvplane.workers import WorkerFault, declared, endpoint, worker_from_table

WORKER_FLAGS = ("prefill", "decode", "worker_urls", "events", "replay")  # their order counts
NAME_WORKERS = "workers are named by flags, or as [[workers]] tables of kvplane.toml"
SECRET = re.compile("key|secret|password|token$")


class BadSetting(ValueError):
    """A value nobody can use. Names the key, where it came from, the value and what is right."""

    def __init__(
        self, key: str, source: str, value: object, want: str, hidden: bool = False
    ) -> None:
        shown = re.sub("://.*@", "://***@", repr(value))  # a login is nobody else's business
        if hidden or SECRET.search(key):  # nor is a key
            shown = "***"
        super().__init__(f"{key} = {shown} ({source}): {want}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything one process was told: its command, checked values by key, and its workers."""

    command: str
    values: Mapping[str, Any]
    workers: tuple[WorkerUp, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    by_flags: bool = False  # the workers; else the file names them

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


class _Worker(argparse.Action):
    """--prefill URL [BOOTSTRAP_PORT] | --decode URL | --worker-urls URL..., in order of naming."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        role = {"--prefill": Role.PREFILL, "--decode": Role.DECODE}.get(option or "", Role.BOTH)
        found = namespace.workers = list(getattr(namespace, "workers", None) or [])
        try:
            if role is Role.BOTH:
                found.extend(declared(url, role) for url in values)
            elif len(values) > (2 if role is Role.PREFILL else 1):
                parser.error(f"{option} {' '.join(values)!r}: too many words after it")
            else:
                found.append(declared(values[0], role, *values[1:]))
        except WorkerFault as error:
            parser.error(f"{option} {' '.join(values)!r}: {error}")


class _Events(argparse.Action):
    """--events ENDPOINT and --replay ENDPOINT belong to the worker named last."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        found = getattr(namespace, "workers", None)
        if not found:
            parser.error(f"{option} {values!r}: name a worker first (--prefill, --decode)")
        try:
            endpoint(str(option), values)
        except WorkerFault as error:
            parser.error(str(error))
        field = "events" if option == "--events" else "replay"
        found[-1] = replace(found[-1], **{field: (*getattr(found[-1], field), values)})


def parser() -> argparse.ArgumentParser:
    """The whole command line; every flag with its default in --help."""
    top = argparse.ArgumentParser(
        prog="kvplane",
        description="A global KV index control plane. Start with: kvplane demo",
        epilog="kvplane COMMAND --help explains every flag; KVPLANE_* and kvplane.toml work too.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"kvplane {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        usage = " ".join([f"kvplane {name} [FLAGS]", *(k.name.upper() for k in command.positional)])
        sub = commands.add_parser(
            name, help=command.help, description=command.help, usage=usage, allow_abbrev=False
        )
        sub.add_argument("--config", metavar="FILE", help="default: kvplane.toml where it exists")
        for key in command.positional:
            sub.add_argument(key.name, metavar=key.name.upper(), help=key.help)
        for key in command.keys:
            _add(sub, key)
        if name in WORKER_COMMANDS:
            _add_workers(sub)
    return top


def read(argv: Sequence[str] | None) -> dict[str, Any]:
    """What the command line says; ends the process where it cannot be understood."""
    top = parser()
    found, strangers = top.parse_known_args(argv)
    if strangers:
        own = ["--config", *(key.flag for key in COMMANDS[found.command].keys)]
        if found.command in WORKER_COMMANDS:
            own += ["--" + flag.replace("_", "-") for flag in WORKER_FLAGS]
        near = _near(strangers[0].partition("=")[0], own)
        see = f"see kvplane {found.command} --help"
        top.exit(2, f"kvplane: {strangers[0]}: no flag of kvplane {found.command}{near}; {see}\n")
    return vars(found)


def _add(sub: argparse.ArgumentParser, key: Key) -> None:
    words = f": {' | '.join(key.words)}" if key.words else ""
    text = f"{key.help}{words} (default: {key.shown()})"
    if key.is_switch:
        against = f"--no-{key.flag[2:]}"
        sub.add_argument(key.flag, dest=key.name, action="store_const", const="true", help=text)
        off = f"the opposite of {key.flag}"
        sub.add_argument(against, dest=key.name, action="store_const", const="false", help=off)
    else:
        metavar = key.name.split("_")[-1].upper()
        sub.add_argument(key.flag, dest=key.name, metavar=metavar, help=text)


def _add_workers(sub: argparse.ArgumentParser) -> None:
    one = {"action": _Worker, "nargs": "+", "dest": "workers"}
    sub.add_argument("--prefill", metavar="URL [BOOTSTRAP_PORT]", help="a prefill engine", **one)  # type: ignore[arg-type]
    sub.add_argument("--decode", metavar="URL", help="a decode engine", **one)  # type: ignore[arg-type]
    sub.add_argument("--worker-urls", metavar="URL", help="engines that do both", **one)  # type: ignore[arg-type]
    last = {"action": _Events, "dest": "workers", "metavar": "ZMQ_ENDPOINT"}
    sub.add_argument("--events", help="KV events of the last named worker", **last)  # type: ignore[arg-type]
    sub.add_argument("--replay", help="replay socket of the last named worker", **last)  # type: ignore[arg-type]


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any]
) -> Settings:
    """Checked settings of `flags["command"]`; raises BadSetting for the first wrong value."""
    name = str(flags["command"])
    command = COMMANDS[name]
    section = file.get(name.replace("-", "_"), {})
    if not isinstance(section, Mapping):
        raise BadSetting(name, "file", section, "must be a table")
    _no_strangers(command, file, section)
    values = {key.name: _value(key, flags, environ, section, file) for key in command.keys}
    for key in command.positional:
        values[key.name] = _checked(key, "argument", flags[key.name])
    by_flags = bool(flags.get("workers"))
    if name in WORKER_COMMANDS and not by_flags:
        _no_workers_in(environ)
    workers = flags["workers"] if by_flags else _from_file(file.get("workers", []))
    _no_twins(workers)
    return Settings(name, values, tuple(workers), _keys(file.get("keys", [])), by_flags)


def _no_workers_in(environ: Mapping[str, str]) -> None:
    """Whoever wrote them there means them: say so instead of going on without."""
    for flag in WORKER_FLAGS:
        if told := environ.get(f"KVPLANE_{flag.upper()}"):
            raise BadSetting(flag, f"environment KVPLANE_{flag.upper()}", told, NAME_WORKERS)


def _keys(tables: object) -> tuple[ApiKey, ...]:
    try:
        return keys_from_tables(tables)
    except KeyFault as error:
        raise BadSetting("keys", "file", "***", str(error)) from None


def _value(
    key: Key,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    section: Mapping[str, Any],
    file: Mapping[str, Any],
) -> Any:
    env = f"KVPLANE_{key.name.upper()}"
    sources = (
        (f"flag {key.flag}", flags.get(key.name)),
        (f"environment {env}", environ.get(env)),
        ("file", section.get(key.name, file.get(key.name))),
    )
    for source, found in sources:
        if found is not None:
            return _checked(key, source, found)
    return key.default


def _checked(key: Key, source: str, found: object) -> Any:
    text = str(found).lower() if isinstance(found, bool) else str(found)
    try:
        return key.parse(text)
    except ValueError as error:
        raise BadSetting(key.name, source, found, str(error)) from None


def _no_strangers(command: Command, file: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """A key nobody reads is a typing error: say so instead of going on without it."""
    known = {key.name for every in COMMANDS.values() for key in every.keys}
    tables = {name.replace("-", "_") for name in COMMANDS} | {"workers", "keys"}
    for key in file:
        if key in WORKER_FLAGS:
            raise BadSetting(key, "file", file[key], NAME_WORKERS)
        if key not in known | tables:
            near = _near(key, known | tables)
            want = f"no such key{near}; see kvplane COMMAND --help"
            raise BadSetting(key, "file", file[key], want, bool(SECRET.search(near)))
    own = {key.name for key in command.keys}
    for key in section:
        if key not in own:
            near = _near(key, own)
            want = f"no key of this command{near}; it has {', '.join(sorted(own))}"
            raise BadSetting(key, "file", section[key], want, bool(SECRET.search(near)))


def _near(word: str, known: Iterable[str]) -> str:
    """The known word that was meant, as a question; empty where none is near."""
    found = difflib.get_close_matches(word, sorted(known), n=1)
    return f", did you mean {found[0]}?" if found else ""


def _no_twins(workers: Sequence[WorkerUp]) -> None:
    """Two workers of one name or URL would overwrite each other in every table."""
    for what in ("pod", "url"):
        seen = [getattr(worker, what) for worker in workers]
        for one in seen:
            if seen.count(one) > 1:
                raise BadSetting(
                    "workers", what, str(one), "named twice; each worker needs its own"
                )


def _from_file(tables: Any) -> list[WorkerUp]:
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise BadSetting("workers", "file", tables, "must be [[workers]] tables")
    found = []
    for number, table in enumerate(tables):
        try:
            found.append(worker_from_table(table))
        except WorkerFault as error:
            shown = dict(table) | ({"api_key": "***"} if "api_key" in table else {})
            raise BadSetting(f"workers[{number}]", "file", shown, str(error)) from None
    return found
