"""Settings: flags over environment over file, and a wrong value says what would be right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvplane import transfer
from kvplane.__main__ import _settings
from kvplane.options import BACKENDS, COMMANDS
from kvplane.settings import BadSetting, Settings, parser, read, resolve
from kvplane.vocabulary import Pod, Role


def told(
    *argv: str, environ: dict[str, str] | None = None, file: dict[str, Any] | None = None
) -> Settings:
    return resolve(vars(parser().parse_args(argv)), environ or {}, file or {})


def test_a_flag_wins_over_environment_over_section_over_file_over_default() -> None:
    environ, file = {"KVPLANE_PORT": "2"}, {"port": 4, "router": {"port": 3}}
    assert told("router", "--port", "1", environ=environ, file=file)["port"] == 1
    assert told("router", environ=environ, file=file)["port"] == 2
    assert told("router", file=file)["port"] == 3
    assert told("router", file={"port": 4})["port"] == 4
    assert told("router")["port"] == 8000


def test_nothing_listens_on_all_addresses_unless_it_is_told_to() -> None:
    """FR-BS-05: also the rank directory, which anybody who reaches it may read."""
    listening = [name for name, one in COMMANDS.items() if any(k.name == "host" for k in one.keys)]
    assert {"bootstrap", "engine", "router", "index"} <= set(listening)
    for command in listening:
        assert told(command)["host"] == "127.0.0.1"
    assert told("bootstrap")["open_writes"] is False


@pytest.mark.parametrize(
    ("argv", "file", "named"),
    [
        (("router", "--port", "abc"), {}, "port = 'abc' (flag --port): must be a port"),
        (("router",), {"port": 70000}, "port = 70000 (file): must be a port"),
        (("router", "--policy", "best"), {}, "policy = 'best' (flag --policy): must be one of"),
        (("engine", "--blocks", "0"), {}, "blocks = '0' (flag --blocks): must be a whole number"),
        (("ingest", "--redis", "localhost"), {}, "redis = 'localhost' (flag --redis): must be"),
        (("router",), {"prot": 1}, "prot = 1 (file): no such key"),
        (("router",), {"router": {"blocks": 1}}, "blocks = 1 (file): no key of this command"),
        (("router",), {"router": {"polcy": "x"}}, "did you mean policy?"),
        (("router",), {"prot": 1}, "did you mean port?"),
        (("router",), {"workers": [1]}, "workers = [1] (file): must be [[workers]]"),
        (("router",), {"workers": [{"url": "http://a:1", "model": 5}]}, "model 5: must be text"),
        (("router",), {"workers": [{"url": "http://a:1"}] * 2}, "'a:1' (pod): named twice"),
        (("router", "--host", ""), {}, "host = '' (flag --host): must be an address"),
        (("index", "--redis", "redis://h:xx"), {}, "a port from 1 to 65535, like redis://host:"),
        (("index", "--redis", "redis://h:1/abc"), {}, "must be a number, like redis://host:6379/0"),
        (("index", "--redis", "redis://"), {}, "must name a host and a port from 1 to 65535"),
        (("index", "--redis", "redis+sentinel://h"), {}, "redis+sentinel://host:26379,host/mymast"),
        (("index", "--redis", "redis://u:secret@h:x"), {}, "redis = 'redis://***@h:x' (flag --red"),
        (("rank", "x", "--url", "http://"), {}, "url = 'http://' (flag --url): must be like"),
        (("rank", "x", "--url", "http://h:99999"), {}, "must be like http://127.0.0.1:8000"),
        (
            ("tail", "--after", "yesterday"),
            {},
            "after = 'yesterday' (flag --after): must be the cur",
        ),
        (("tail", "--after", "1-2.3_"), {}, "after = '1-2.3_' (flag --after): must be the cursor"),
        (("rank", "a\udcff"), {}, "prompt = 'a\\udcff' (argument): must be UTF-8"),
        (("rank", "x", "--model", "\udcff"), {}, "(flag --model): must be UTF-8"),
        (("rank", "x", "--salt", "\udcff"), {}, "(flag --salt): must be UTF-8"),
        (("engine", "--model", " "), {}, "model = ' ' (flag --model): must be a name"),
        (("healthy", "nonsense"), {}, "url = 'nonsense' (argument): must be like http://"),
        (("router",), {"router": 3}, "router = 3 (file): must be a table"),
        (("router",), {"workers": {}}, "workers = {} (file): must be [[workers]]"),
        (("router",), {"workers": [{"url": "x"}]}, "workers[0]"),
        (("router",), {"workers": [{"url": "http://a:1", "rule": "x"}]}, "'rule' is no member"),
        (("router",), {"workers": [{"url": "http://a:1", "role": "x"}]}, "must be one of prefill"),
        (("router", "--request-timeout-secs", "-1"), {}, "must be seconds above 0"),
    ],
)
def test_a_wrong_value_names_key_source_value_and_what_is_right(
    argv: tuple[str, ...], file: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadSetting) as error:
        told(*argv, file=file)
    assert named in str(error.value)


@pytest.mark.parametrize("wrong", ["tcp://h", "tcp://h:70000", "tcp://:5", "h:5557", "ipc://", 5])
def test_an_endpoint_that_cannot_be_connected_to_is_refused_in_file_and_flag(
    wrong: str | int, capsys: pytest.CaptureFixture[str]
) -> None:
    for member in ("events", "replay"):
        for value in (wrong, [wrong]):
            with pytest.raises(BadSetting, match=f"{member} .*: must be"):
                told("router", file={"workers": [{"url": "http://h:1", member: value}]})
        with pytest.raises(SystemExit) as ended:
            told("router", "--decode", "http://h:1", f"--{member}", str(wrong))
        assert ended.value.code == 2
        assert f"--{member} '{wrong}'" in capsys.readouterr().err


def test_the_last_dp_rank_must_have_a_port_too() -> None:
    table = {"url": "http://h:1", "events": "tcp://h:65535", "dp_size": 2}
    with pytest.raises(BadSetting, match="events of rank 1, port 65536: must be a port"):
        told("router", file={"workers": [table]})


def test_a_flag_is_never_guessed_from_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        told("router", "--por", "5")
    assert ended.value.code == 2
    assert "--por" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("engine", "--dist-init", "h:1"), "--dist-init: no flag of kvplane engine, did you mean"),
        (
            ("all", "--prefil=http://h:1"),
            "--prefil=http://h:1: no flag of kvplane all, did you mean",
        ),
        (("bootstrap", "--role", "x"), "--role: no flag of kvplane bootstrap"),
    ],
)
def test_a_flag_that_is_not_there_is_named_with_its_command_and_where_to_look(
    argv: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(argv)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert sentence in said and f"see kvplane {argv[0]} --help" in said


def test_a_backend_known_by_name_is_left_to_the_engine_which_says_why() -> None:
    assert set(BACKENDS) == set(transfer.BACKENDS)
    assert told("engine", "--backend", "mori")["backend"] == "mori"
    with pytest.raises(BadSetting, match="must be 16"):
        told("engine", "--block-size", "32")


def test_workers_are_named_in_order_with_their_events() -> None:
    workers = told(
        "router", "--prefill", "http://10.0.0.7:30000", "8998", "--events", "tcp://10.0.0.7:5557",
        "--decode", "http://[::1]:30001/", "--prefill", "http://h:1", "none",
    ).workers  # fmt: skip
    assert [(w.pod, w.role, w.bootstrap_port, w.events) for w in workers] == [
        (Pod("10.0.0.7:30000"), Role.PREFILL, 8998, ("tcp://10.0.0.7:5557",)),
        (Pod("[::1]:30001"), Role.DECODE, None, ()),
        (Pod("h:1"), Role.PREFILL, None, ()),
    ]


def test_a_worker_of_the_file_counts_its_event_ports_up_by_dp_rank() -> None:
    table = {"url": "http://h:1", "role": "prefill", "events": "tcp://h:5557", "dp_size": 2}
    (worker,) = told("router", file={"workers": [table]}).workers
    assert worker.events == ("tcp://h:5557", "tcp://h:5558")


@pytest.mark.parametrize(
    "url",
    [
        "http://a:b:c:1", "http://[::1:30000", "ftp://h:1", "http://h:1/v1", "http://h", "",
        "http://:::8998", "http://[::1]8998", "::1:30000", "http://[localhost]:3",
    ],
)  # fmt: skip
def test_a_malformed_url_is_refused_at_the_start(url: str) -> None:
    """FR-BS-04: three colons, a missing bracket: a clear configuration error."""
    with pytest.raises(BadSetting, match="must be"):
        told("router", file={"workers": [{"url": url}]})


@pytest.mark.parametrize(
    ("host", "port", "found"),
    [
        ("::1", 8998, ("::1", 8998)),
        ("[::1]", 8998, ("::1", 8998)),
        ("[::1]:8998", None, ("::1", 8998)),
        ("prefill-0:8998", 8998, ("prefill-0", 8998)),
        ("prefill_0", None, ("prefill_0", None)),
        (None, 8998, (None, 8998)),
    ],
)
def test_a_bootstrap_host_is_kept_bare_however_it_is_written(
    host: str | None, port: int | None, found: tuple[str | None, int | None]
) -> None:
    """FR-BS-04: the stored host is the bare literal."""
    table = {"url": "http://h:1", "bootstrap_host": host, "bootstrap_port": port}
    (worker,) = told("router", file={"workers": [table]}).workers
    assert (worker.bootstrap_host, worker.bootstrap_port) == found


@pytest.mark.parametrize(
    ("host", "port"),
    [
        (":::8998", None), ("[::1", 8998), ("::1]", 8998), ("[::1]8998", None), ("a:b:c", None),
        ("", 8998), ("[::1]:70000", None), ("[::1]:8998", 9), ("0.0.0.0", 8998), ("::", 8998),
        ("[::]:8998", None), ("h\n", 8998), (5, 8998),
    ],
)  # fmt: skip
def test_a_malformed_bootstrap_host_is_refused_at_the_start(host: Any, port: int | None) -> None:
    """FR-BS-04: a clear configuration error that names the member and its value."""
    table = {"url": "http://h:1", "bootstrap_host": host, "bootstrap_port": port}
    with pytest.raises(BadSetting) as refused:
        told("router", file={"workers": [table]})
    assert f"bootstrap_host {host!r}: " in str(refused.value)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_its_flags_with_defaults(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(key.flag in shown for key in COMMANDS[command].keys)


def test_a_wrong_flag_ends_the_process_with_status_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvplane", "engine", "--role", "chief"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "role = 'chief' (flag --role): must be one of prefill, decode, both" in done.stderr


@pytest.mark.parametrize("name", ["PREFILL", "DECODE", "WORKER_URLS", "EVENTS", "REPLAY"])
def test_workers_that_the_environment_names_are_refused_instead_of_left_out(name: str) -> None:
    environ = {f"KVPLANE_{name}": "http://10.0.0.7:30000 8998"}
    with pytest.raises(BadSetting, match=f"environment KVPLANE_{name}.*workers are named by flags"):
        told("router", environ=environ)
    assert told("router", "--decode", "http://h:1", environ=environ).by_flags, "flags win"
    assert told("bootstrap", environ=environ)["port"] == 8998, "not its business"
    with pytest.raises(
        BadSetting, match=r"\(file\): workers are named by flags, or as \[\[workers"
    ):
        told("router", file={name.lower(): "http://10.0.0.7:30000"})


def test_the_environment_names_a_file_and_a_flag_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text("port = 1")
    other.write_text("port = 2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvplane.toml").write_text("port = 3")
    assert _settings(["router"])["port"] == 3
    monkeypatch.setenv("KVPLANE_CONFIG", str(one))
    assert _settings(["router"])["port"] == 1
    assert _settings(["router", "--config", str(other)])["port"] == 2
    monkeypatch.setenv("KVPLANE_CONFIG", "nowhere.toml")
    with pytest.raises(BadSetting, match=r"config = 'nowhere.toml' \(environment KVPLANE_CONFIG\)"):
        _settings(["router"])
    monkeypatch.setenv("KVPLANE_CONFIG", "")
    assert _settings(["router"])["port"] == 3, "an empty one says nothing"


# each of them: one that travels in no header, and is not shown
CREDENTIALS = [
    ("bootstrap", "write_key"),
    ("engine", "write_key"),
    ("router", "api_key"),
    ("router", "admin_key"),
    ("ingest", "api_key"),
    ("doctor", "admin_key"),
    ("doctor", "api_key"),
]


@pytest.mark.parametrize(("command", "key"), CREDENTIALS)
@pytest.mark.parametrize("wrong", ["hush\n", "hu sh", "h\u00fcsh", "hush\udcff"])
def test_a_key_that_cannot_travel_in_a_header_is_refused_and_never_shown(
    command: str, key: str, wrong: str
) -> None:
    """A secret that was written with its line's end is one."""
    with pytest.raises(BadSetting, match=rf"^{key} = \*\*\* \(environment .*printable ASCII"):
        told(command, environ={f"KVPLANE_{key.upper()}": wrong})
