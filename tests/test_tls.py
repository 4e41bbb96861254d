"""A door with a certificate: who shows one that our authority signed may write, others may read."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
import trustme
from kit.directory import rank
from prometheus_client import CollectorRegistry

from kvplane import wiring
from kvplane.bootstrap import Directory as RankDirectory
from kvplane.bootstrap import DirectorySettings, RoomTable, bootstrap_app
from kvplane.doors import Server
from kvplane.engines import tls
from kvplane.runtime import SystemClock
from kvplane.settings import read, resolve
from kvplane.tls import BadTls, Tls
from kvplane.vocabulary import Generation


@dataclass
class Site:
    """One authority, a server's files, and contexts of three clients."""

    ours: trustme.CA
    files: Tls

    def client(self, signer: trustme.CA | None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.ours.configure_trust(context)
        if signer is not None:
            signer.issue_cert("prefill-0", common_name="prefill-0").configure_cert(context)
        return context


@pytest.fixture
def site(tmp_path: Path) -> Site:
    ours, cert = trustme.CA(), None
    cert = ours.issue_cert("127.0.0.1")
    paths = [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")]
    cert.cert_chain_pems[0].write_to_path(paths[0])
    cert.private_key_pem.write_to_path(paths[1])
    ours.cert_pem.write_to_path(paths[2])
    return Site(ours, Tls(*map(str, paths)))


@pytest.fixture
async def directory(site: Site) -> AsyncIterator[str]:
    """Behind a forwarder's address nobody is on loopback; here the scope is told so."""
    app = bootstrap_app(
        RankDirectory(Generation("d")), RoomTable(), SystemClock(), DirectorySettings(),
        registry=CollectorRegistry(),
    )  # fmt: skip

    async def from_afar(scope, receive, send) -> None:
        await app(dict(scope, client=("198.51.100.7", 1)), receive, send)

    server = Server(from_afar, "127.0.0.1", 0, "bootstrap", site.files)
    await server.start()
    yield f"https://127.0.0.1:{server.port}"
    await server.stop()


async def put(url: str, context: ssl.SSLContext) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.put(f"{url}/route", json=rank(), ssl=context) as answer,
    ):
        return answer.status


async def test_a_certificate_of_our_authority_may_write_from_anywhere(
    site: Site, directory: str
) -> None:
    assert await put(directory, site.client(None)) == 403, "nothing shown"
    assert await put(directory, site.client(site.ours)) == 200
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{directory}/ranks", ssl=site.client(None)) as answer,
    ):
        assert answer.status == 200, "reads are open"
        assert (await answer.json())["registered"] == 1


async def test_a_certificate_of_somebody_else_is_no_certificate(site: Site, directory: str) -> None:
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        await put(directory, site.client(trustme.CA()))


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (
            "cert",
            r"tls_cert = '.*bad\.pem', tls_key = .*: must be a PEM certificate and its own key",
        ),
        (
            "key",
            r"tls_cert = .*, tls_key = '.*bad\.pem': must be a PEM certificate and its own key",
        ),
        ("client_ca", r"client_ca = '.*bad\.pem': must be PEM certificates of authorities"),
    ],
)
async def test_files_that_cannot_be_used_are_named_before_anything_listens(
    site: Site, tmp_path: Path, broken: str, sentence: str
) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    server = Server(None, "127.0.0.1", 0, "bootstrap", replace(site.files, **{broken: str(bad)}))
    with pytest.raises(BadTls, match=sentence):
        await server.start()


@pytest.mark.parametrize("missing", ["cert", "key", "client_ca"])
async def test_a_file_that_is_not_there_is_named_with_its_key(site: Site, missing: str) -> None:
    files = replace(site.files, **{missing: "/nowhere.pem"})
    server = Server(None, "127.0.0.1", 0, "bootstrap", files)
    key = missing if missing == "client_ca" else f"tls_{missing}"
    with pytest.raises(BadTls, match=rf"^{key} = '/nowhere.pem': must be a PEM file .*No such"):
        await server.start()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--tls-cert", "c"), "tls_key is missing: tls_cert = 'c' needs --tls-key FILE too"),
        (("--tls-key", "k"), "tls_cert is missing: tls_key = 'k' needs --tls-cert FILE too"),
        (("--client-ca", "a"), "tls_cert is missing: client_ca = 'a' needs --tls-cert FILE too"),
        ((), None),
    ],
)
def test_half_a_certificate_is_a_wrong_value(flags: tuple[str, ...], sentence: str | None) -> None:
    told = resolve(read(["bootstrap", *flags]), {}, {})
    if sentence is None:
        assert tls(told) is None
        return
    with pytest.raises(BadTls, match=sentence):
        tls(told)
    assert wiring.run(told) == 2
