"""Workers: what a person wrote about an engine, as a WorkerUp.

Pure: URLs, ports and tables in, nouns or a WorkerFault out. Used by settings.py for flags and for
[[workers]] tables. Open it to accept another way of naming a worker.

    http://10.0.0.7:30000 + prefill + 8998   ->  WorkerUp(pod 10.0.0.7:30000, ...)
    http://[::1]:30000                       ->  WorkerUp(pod [::1]:30000, ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kvplane.vocabulary import Pod, Role, WorkerUp

ENGINES = ("kvplane", "sglang", "vllm")
FIELDS = frozenset(
    {
        "url", "role", "engine", "bootstrap_port", "events", "replay", "model", "block_size",
        "tokenizer", "name", "dp_size", "bootstrap_host", "topic", "event_form",
        "handoff", "draining", "api_key",
    }
)  # fmt: skip


class WorkerFault(ValueError):
    """A worker that cannot be meant; says what would be right."""


def endpoint_of(url: str) -> tuple[str, str]:
    """(canonical http URL without slash at the end, pod name host:port) of a worker's URL.

    Raises WorkerFault for another scheme, a missing host or port, or brackets that do not match.
    """
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        want = "must be like http://host:port or http://[::1]:port"
        raise WorkerFault(f"url {url!r}: {error}; {want}") from None
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        raise WorkerFault(f"url {url!r}: must be like http://host:port or http://[::1]:port")
    _name("url", host)
    if port is None or parts.path not in ("", "/") or parts.query or parts.username:
        raise WorkerFault(f"url {url!r}: must be scheme, host and port only")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port}", f"{shown}:{port}"


def declared(url: str, role: Role, bootstrap_port: str | None = None) -> WorkerUp:
    """A worker named by flags; `bootstrap_port` may be 'none' as sgl router has it."""
    clean, pod = endpoint_of(url)
    port = None
    if bootstrap_port is not None and bootstrap_port.lower() != "none":
        port = _port("bootstrap port", bootstrap_port)
    return WorkerUp(pod=Pod(pod), url=clean, role=role, bootstrap_port=port)


def worker_from_table(table: Mapping[str, Any]) -> WorkerUp:
    """One [[workers]] table of kvplane.toml; unknown members are refused by name."""
    strangers = sorted(set(table) - FIELDS)
    if strangers:
        raise WorkerFault(f"{strangers[0]!r} is no member; known: {', '.join(sorted(FIELDS))}")
    if not isinstance(table.get("url"), str):
        raise WorkerFault("url is missing: must be like http://host:port")
    clean, pod = endpoint_of(table["url"])
    dp_size = _count("dp_size", table.get("dp_size", 1))
    size = table.get("block_size")
    host, port = _bootstrap(table)
    return WorkerUp(
        pod=Pod(_name("name", _text("name", table.get("name", pod)) or pod)),
        url=clean,
        role=Role(_choice("role", table.get("role", "both"), tuple(Role))),
        engine=_choice("engine", table.get("engine", "kvplane"), ENGINES),
        model=_text("model", table.get("model", "")),
        bootstrap_host=host,
        bootstrap_port=port,
        events=_endpoints("events", table.get("events"), dp_size),
        replay=_endpoints("replay", table.get("replay"), dp_size),
        block_size=None if size is None else _count("block_size", size),
        dp_size=dp_size,
        tokenizer=_text("tokenizer", table.get("tokenizer", "")),
        topic=_text("topic", table.get("topic", "")),
        event_form=_form(table.get("event_form", "")),
        handoff=_handoff(table.get("handoff", "")),
        draining=_switch("draining", table.get("draining", False)),
        api_key=_credential("api_key", table.get("api_key", "")),
    )


def _credential(name: str, value: object) -> str:
    if not isinstance(value, str) or not all("!" <= one <= "~" for one in value):
        raise WorkerFault(f"{name}: must be printable ASCII without blanks")
    return value


def _form(value: object) -> str:
    """Another dialect of events than the engine's own, by name."""
    if not value:
        return ""
    from kvplane.events import DIALECTS  # few name it: start without

    return _choice("event_form", value, tuple(DIALECTS))


def _handoff(value: object) -> str:
    """Another way to start a transfer than the engine's own, by name."""
    if not value:
        return ""
    from kvplane.router import HANDOFFS  # few name it: start without

    ways = tuple(name for name in HANDOFFS if not name.startswith("none"))
    return _choice("handoff", value, ways)


def _bootstrap(table: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Bare host and port of the rank directory; the host may wear brackets, or bring its port.

    ::1   [::1]   prefill-0   [::1]:8998   prefill-0:8998
    """
    told = table.get("bootstrap_port")
    port = None if told is None else _port("bootstrap_port", told)
    if (value := table.get("bootstrap_host")) is None:
        return None, port
    from kvplane.bootstrap import Address, BadAddress, is_wildcard  # few name it: start without

    text = _text("bootstrap_host", value)
    try:
        host = Address.of(text, port or 1).host
    except BadAddress:  # then it brings its port
        try:
            both = Address.parse(text)
        except BadAddress as error:
            raise WorkerFault(f"bootstrap_host {text!r}: {error.why}") from None
        if port not in (None, both.port):
            raise WorkerFault(f"bootstrap_host {text!r}: bootstrap_port says {port}") from None
        host, port = both.host, both.port
    if is_wildcard(host):
        raise WorkerFault(f"bootstrap_host {text!r}: nobody can dial it; must be one address")
    return host, port


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise WorkerFault(f"{name} {value!r}: must be text")
    return value


def _name(name: str, value: str) -> str:
    """It stands in headers, logs and texts of several words; a Worker refuses blanks, too late."""
    if " " in value or not value.isprintable():
        raise WorkerFault(f"{name} {value!r}: must be printable, without blanks")
    return value


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise WorkerFault(f"{name} {value!r}: must be true or false")
    return value


def _port(name: str, value: object) -> int:
    text = str(value)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise WorkerFault(f"{name} {value!r}: must be a port, 1 to 65535")
    return int(text)


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WorkerFault(f"{name} {value!r}: must be a number of 1 or more")
    return value


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise WorkerFault(f"{name} {value!r}: must be one of {', '.join(choices)}")
    return str(value)


def endpoint(name: str, value: object) -> str:
    """A ZMQ endpoint that can be connected to; raises WorkerFault for another thing."""
    text = str(value)
    scheme, _, rest = text.partition("://")
    if scheme not in ("tcp", "ipc") or not rest:
        raise WorkerFault(f"{name} {value!r}: must be like tcp://host:5557 or ipc:///path")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not host:
            raise WorkerFault(f"{name} {value!r}: must be like tcp://host:5557")
        _port(f"{name} {value!r}: port", port)
    return text


def _endpoints(name: str, value: object, dp_size: int) -> tuple[str, ...]:
    """One endpoint per dp rank: a list as it is, or one text whose port counts up by rank."""
    if value is None:
        return ()
    if isinstance(value, list):
        if len(value) != dp_size:
            raise WorkerFault(f"{name}: must be one endpoint per dp rank ({dp_size})")
        return tuple(endpoint(name, item) for item in value)
    base = endpoint(name, value)
    if dp_size == 1:
        return (base,)
    head, _, port = base.rpartition(":")
    first = _port(f"{name} of rank {dp_size - 1}, port", port)
    _port(f"{name} of rank {dp_size - 1}, port", first + dp_size - 1)
    return tuple(f"{head}:{first + rank}" for rank in range(dp_size))
