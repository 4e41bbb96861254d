"""compose.yaml: valid by the Compose specification, and its very commands make a working plane.

No container engine runs on every machine. So the test plays the container network: names of
services become 127.0.0.1, wildcard binds become loopback, and each port becomes a free one; every
command runs otherwise as written, as a plain process, beside a real Redis server.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from kit import promql
from kit.plane import together
from kit.ports import free_ports
from kit.wait import until
from prometheus_client.parser import text_string_to_metric_families

from kvplane.children import Child
from kvplane.options import COMMANDS

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
IMAGE = COMPOSE["x-kvplane"]["image"]
OURS = [name for name, service in SERVICES.items() if service["image"] == IMAGE]
DEPLOY = ROOT / "deploy"
PORT = re.compile(r"(?<![\d.])(\d{4,5})(?!\d)")


def test_the_file_is_valid_by_the_compose_specification() -> None:
    spec = pytest.importorskip("compose_spec", reason="compose-spec has no wheel for this machine")
    resolved = yaml.safe_dump(COMPOSE)
    assert set(spec.PyCompose.from_yaml(resolved).service_names()) == set(SERVICES)
    with pytest.raises(ValueError, match="prots"):  # and the check can fail
        spec.PyCompose.from_yaml(resolved.replace("ports:", "prots:"))


def test_the_services_are_those_of_the_plan_and_each_has_a_health_check() -> None:
    engines = ["prefill-1", "prefill-2", "decode-1", "decode-2"]
    others = ["redis", "ingest", "index", "router", "prometheus", "grafana"]
    assert sorted(SERVICES) == sorted(engines + others)
    assert all("test" in service["healthcheck"] for service in SERVICES.values())


def test_nothing_is_published_off_loopback_and_the_image_runs_as_nobody() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.search(r"^USER 10001", dockerfile, re.M)
    for folder in ("src", "index", "bootstrap", "router", "events", "transfer", "engine"):
        assert f"COPY {folder} " in dockerfile


class Network:
    """Names, wildcards and ports of the compose file as this machine has them."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        words = [word for name in OURS for word in SERVICES[name]["command"]]
        found = {port for word in words if "redis:" not in word for port in PORT.findall(word)}
        self.ports = dict(zip(sorted(found), free_ports(len(found)), strict=True))

    def local(self, word: str) -> str:
        if word.startswith("redis://redis:"):
            return self._redis_url
        if word in SERVICES and word not in COMMANDS:
            return "127.0.0.1"
        for name in SERVICES:
            word = re.sub(rf"//{name}(?=:)", "//127.0.0.1", word)
        word = re.sub(r"^0\.0\.0\.0$", "127.0.0.1", word)
        return PORT.sub(lambda found: str(self.ports.get(found[1], found[1])), word)

    def child(self, name: str) -> Child:
        service = SERVICES[name]
        *_, url = service["healthcheck"]["test"]
        command = [self.local(word) for word in service["command"]]
        return Child(name, command, self.local(url), deadline_s=60)


async def test_the_commands_of_all_services_carry_a_chat(redis_url: str) -> None:
    network = Network(redis_url)
    gateway = f"http://127.0.0.1:{network.ports['8000']}"
    index = f"http://127.0.0.1:{network.ports['8100']}"
    async with contextlib.AsyncExitStack() as stack:
        # In no order: each waits for what it needs.
        children = [network.child(name) for name in OURS]
        await stack.enter_async_context(together(children))
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def all_known() -> bool:
            states = []
            for url in (index, f"{gateway}/index"):
                async with session.get(f"{url}/workers") as answer:
                    workers = (await answer.json())["workers"]
                states += [worker["knowledge"] for worker in workers]
            return states == ["exact"] * 8

        await until(all_known, timeout_s=30, what="index and router to know four workers exactly")
        messages = [{"role": "user", "content": "tell me about the sea " * 8}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 8}
        first = await _chat(session, gateway, body)
        assert first["headers"]["x-kvplane-knowledge"] == "exact"

        async def hit() -> bool:
            again = await _chat(session, gateway, body)
            return again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

        await until(hit, timeout_s=20, what="a hit on the prefill that holds the prompt")
        found = await _scraped(session, network)
    wrong = [_missing(one, found) for query in queries() for one in promql.named(query)]
    assert not list(filter(None, wrong))


def scraped_at() -> list[str]:
    """host:port of everything that Prometheus asks."""
    told = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    listed = [one for job in told["scrape_configs"] for one in job["static_configs"]]
    return [target for one in listed for target in one["targets"]]


def queries() -> list[str]:
    """Every query of the alerts and of the Grafana dashboard."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    found = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found += [target["expr"] for target in panel.get("targets", ())]
    return found


async def _scraped(session: aiohttp.ClientSession, network: Network) -> dict[str, set[str] | None]:
    """Every series that the processes show, with its labels; None where it has no sample yet."""
    found: dict[str, set[str] | None] = {}
    for target in scraped_at():
        async with session.get(network.local(f"http://{target}/metrics")) as answer:
            assert answer.status == 200, target
            for family in text_string_to_metric_families(await answer.text()):
                endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
                for ending in endings.get(family.type, [""]):
                    found.setdefault(family.name + ending, None)
                for sample in family.samples:
                    found[sample.name] = (found.get(sample.name) or set()) | set(sample.labels)
    return found


def _missing(one: promql.Named, found: dict[str, set[str] | None]) -> str:
    """What is wrong with a series that a query names; "" where it is there."""
    if one.series == "up":
        return ""  # Prometheus makes it itself
    if one.series not in found:
        return f"{one.series} is shown by no process"
    labels = found[one.series]
    others = one.labels - (labels or one.labels) - {"instance", "job"}
    return f"{one.series} has no label {', '.join(sorted(others))}" if others else ""


def test_prometheus_asks_every_process_at_a_port_it_listens_on() -> None:
    ports: dict[str, set[str]] = {}
    for target in scraped_at():
        name, port = target.split(":")
        ports.setdefault(name, set()).add(port)
    assert set(ports) == set(OURS)
    for name, asked in ports.items():
        assert asked <= set(SERVICES[name]["command"]), name


def test_every_file_that_is_mounted_is_there_and_grafana_finds_its_dashboards() -> None:
    mounted = [volume for service in SERVICES.values() for volume in service.get("volumes", ())]
    folders = [volume.split(":") for volume in mounted if volume.startswith("./")]
    assert folders and all((ROOT / here).is_dir() for here, _, _ in folders)
    (told,) = (DEPLOY / "grafana" / "provisioning" / "dashboards").glob("*.yaml")
    (provider,) = yaml.safe_load(told.read_text())["providers"]
    assert provider["options"]["path"] in [there for _, there, _ in folders]
    (source,) = (DEPLOY / "grafana" / "provisioning" / "datasources").glob("*.yaml")
    assert "http://prometheus:9090" in source.read_text()


def test_no_panel_of_the_dashboard_lies_on_another() -> None:
    (path,) = (DEPLOY / "grafana" / "dashboards").glob("*.json")
    panels = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_leads_to_its_own_section_of_the_guide() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    named = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert len(set(named)) == len(named)
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        path, anchor = rule["annotations"]["runbook"].split("#")
        assert anchor == rule["alert"].lower()
        assert f"### {rule['alert']}\n" in (ROOT / path).read_text(), rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_the_reader_of_queries_notices_what_is_wrong() -> None:
    good = 'sum by (role) (rate(a_total{x="1"}[5m])) / max(b) > 0.1'
    assert promql.named(good) == [
        promql.Named("a_total", frozenset({"role", "x"})),
        promql.Named("b", frozenset({"role"})),
    ]
    for bad in ("sum(rate(a[5m])", "a)", "ratio(a[5m])", "a[five]", "a ! b", "sum(rate(a[5m])}"):
        with pytest.raises(ValueError):
            promql.named(bad)
    assert _missing(promql.Named("b", frozenset({"role"})), {"b": {"worker"}})
    assert _missing(promql.Named("b", frozenset()), {})
    assert not _missing(promql.Named("b", frozenset({"worker"})), {"b": {"worker"}})


async def _chat(
    session: aiohttp.ClientSession, gateway: str, body: dict[str, Any]
) -> dict[str, Any]:
    async with session.post(f"{gateway}/v1/chat/completions", json=body) as answer:
        found: dict[str, Any] = await answer.json()
        assert answer.status == 200, found
        return {**found, "headers": answer.headers}
