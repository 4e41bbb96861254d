"""Address: where is the Redis that a URL means?

Pure: text in, an Address out; servers.py goes there. Open it to take another form of URL.

    redis://[user:password@]host[:6379][/database]
    rediss://...                      the same over TLS
    unix:///path/of/the/socket[?db=database]
    redis+sentinel://[user:password@]host[:26379],host,.../master name[/database]
    redis+cluster://[user:password@]host[:6379],host,...            rediss+... of both over TLS
    after ?  ssl_ca_certs, ssl_ca_path, ssl_certfile, ssl_keyfile (paths), ssl_check_hostname,
             sentinel_username, sentinel_password
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

FORMS = (
    "redis://host:6379/0, rediss://… (TLS), unix:///path, redis+sentinel://host,host/master/0 "
    "or redis+cluster://host,host"
)
SCHEMES = ("unix", *(f"{s}{k}" for s in ("redis", "rediss") for k in ("", "+sentinel", "+cluster")))
PATHS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_TLS, _OF_SENTINEL = (*PATHS, "ssl_check_hostname"), ("sentinel_username", "sentinel_password")
_PORTS = {"redis": 6379, "unix": 0, "sentinel": 26379, "cluster": 6379}
_SWITCH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class Address:
    """A URL taken apart; `str` shows it without anything secret."""

    kind: str  # redis, unix, sentinel or cluster
    tls: bool
    nodes: tuple[tuple[str, int], ...]  # host, port; of sentinels or of some nodes of a cluster
    database: int = 0
    path: str = ""  # of a unix socket
    master: str = ""  # as sentinels know it
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    options: tuple[tuple[str, str | bool], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        shown = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.nodes)
        return self.path or (f"{self.master} of {shown}" if self.master else shown)


def parse(url: str) -> Address:
    """Raises ValueError that says what would be right, and never shows the URL."""
    scheme, colon, rest = url.partition("://")
    base, _, kind = scheme.partition("+")
    if not colon or scheme not in SCHEMES:
        raise ValueError(f"must be like {FORMS}")
    kind = "unix" if base == "unix" else kind or "redis"
    rest, _, query = rest.partition("?")
    options, tls = dict(parse_qsl(query, keep_blank_values=True)), base == "rediss"
    if kind == "unix":
        return _unix(rest, options)
    where, _, path = rest.partition("/")
    login, _, hosts = where.rpartition("@")
    nodes = tuple(_node(one, _PORTS[kind]) for one in hosts.split(","))
    if kind == "redis" and len(nodes) > 1:
        raise ValueError("several hosts: must be redis+cluster://… or redis+sentinel://…/master")
    master, database = _path(kind, path)
    username, password = _login(login)
    taken = _options(options, (*(_TLS if tls else ()), *(_OF_SENTINEL * (kind == "sentinel"))))
    return Address(kind, tls, nodes, database, "", master, username, password, taken)


def _unix(rest: str, options: dict[str, str]) -> Address:
    login, at, path = rest.rpartition("@")
    username, password = _login(login) if at else (None, None)
    path = unquote(path)
    if not path.startswith("/") or path == "/":
        raise ValueError("must be like unix:///path/of/the/socket")
    database = _number(options.pop("db", "0"))
    _options(options, ())
    return Address("unix", False, (), database, path, "", username, password)


def _path(kind: str, path: str) -> tuple[str, int]:
    """(name of the master, number of the database)"""
    if kind == "sentinel":
        master, _, place = path.strip("/").partition("/")
        if not master:
            raise ValueError("must name the master: redis+sentinel://host:26379,host/mymaster/0")
        return unquote(master), _number(place)
    number = _number(path.strip("/"))
    if kind == "cluster" and number:
        raise ValueError("a cluster has one database, 0: redis+cluster://host:6379,host")
    return "", number


def _node(text: str, usual: int) -> tuple[str, int]:
    literal = text.startswith("[")  # of IPv6
    host, _, port = text[1:].partition("]") if literal else text.partition(":")
    port = port.removeprefix(":") if literal else port
    right = not port or (port.isascii() and port.isdecimal() and 0 < int(port) < 65_536)
    if not host or any(c.isspace() for c in host) or not right:
        raise ValueError(f"must name a host and a port from 1 to 65535, like {FORMS}")
    return host.lower(), int(port or usual)


def _login(text: str) -> tuple[str | None, str | None]:
    username, _, password = text.partition(":")
    return unquote(username) or None, unquote(password) or None


def _number(text: str) -> int:
    if text and not (text.isascii() and text.isdecimal() and len(text) < 6):
        raise ValueError("the database after the host must be a number, like redis://host:6379/0")
    return int(text or 0)


def _options(given: dict[str, str], known: tuple[str, ...]) -> tuple[tuple[str, str | bool], ...]:
    found: list[tuple[str, str | bool]] = []
    for name, value in given.items():
        if name not in known:
            right = f"may be {', '.join(known)}" if known else "nothing may be here"
            raise ValueError(f"{name} after the ?: {right}; ssl_… is for rediss:// only")
        if name == "ssl_check_hostname" and value.lower() not in _SWITCH:
            raise ValueError("ssl_check_hostname: must be true or false")
        found.append((name, _SWITCH[value.lower()] if name == "ssl_check_hostname" else value))
    return tuple(found)
