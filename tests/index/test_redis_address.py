"""Which Redis a URL means, and what is said of one that means none."""

from __future__ import annotations

import pytest

from kvplane.index import redis_address
from kvplane.index.stores.address import Address


@pytest.mark.parametrize(
    ("url", "address", "shown"),
    [
        ("redis://h", Address("redis", False, (("h", 6379),)), "h:6379"),
        ("redis://H:7/3", Address("redis", False, (("h", 7),), 3), "h:7"),
        ("redis://[fd00::1]:7/", Address("redis", False, (("fd00::1", 7),)), "[fd00::1]:7"),
        ("redis://[::1]", Address("redis", False, (("::1", 6379),)), "[::1]:6379"),
        (
            "redis://me:p%40ss%2F%3A@h:1/2",
            Address("redis", False, (("h", 1),), 2, username="me", password="p@ss/:"),
            "h:1",
        ),
        ("redis://:pw@h", Address("redis", False, (("h", 6379),), password="pw"), "h:6379"),
        (
            "rediss://h?ssl_ca_certs=/ca.pem&ssl_check_hostname=false",
            Address(
                "redis",
                True,
                (("h", 6379),),
                options=(("ssl_ca_certs", "/ca.pem"), ("ssl_check_hostname", False)),
            ),
            "h:6379",
        ),
        ("unix:///run/r.sock", Address("unix", False, (), 0, "/run/r.sock"), "/run/r.sock"),
        (
            "unix://me:pw@/run/r.sock?db=4",
            Address("unix", False, (), 4, "/run/r.sock", username="me", password="pw"),
            "/run/r.sock",
        ),
        (
            "redis+sentinel://me:pw@a,b:1,[::1]:2/mymaster/5?sentinel_password=x",
            Address(
                "sentinel",
                False,
                (("a", 26379), ("b", 1), ("::1", 2)),
                5,
                "",
                "mymaster",
                "me",
                "pw",
                (("sentinel_password", "x"),),
            ),
            "mymaster of a:26379,b:1,[::1]:2",
        ),
        (
            "rediss+cluster://a,b:7001",
            Address("cluster", True, (("a", 6379), ("b", 7001))),
            "a:6379,b:7001",
        ),
    ],
)
def test_a_url_names_servers_and_shows_no_secret(url: str, address: Address, shown: str) -> None:
    found = redis_address(url)
    assert found == address and str(found) == shown
    assert all(secret not in repr(found) for secret in ("pw", "p@ss", "sentinel_password"))


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("", "must be like redis://host:6379/0"),
        ("localhost", "must be like redis://"),
        ("http://h", "rediss://… (TLS), unix:///path, redis+sentinel://"),
        ("redis+ring://h", "redis+cluster://host,host"),
        ("redis+unix:///run/r.sock", "must be like"),
        ("unix+cluster://h", "must be like"),
        ("redis+://h", "must be like"),
        ("redis://", "must name a host and a port from 1 to 65535"),
        ("redis://:7", "must name a host"),
        ("redis://h:0", "from 1 to 65535"),
        ("redis://h:65536", "from 1 to 65535"),
        ("redis://h:7:8", "from 1 to 65535"),
        ("redis://h:\u0663", "from 1 to 65535"),
        ("redis://a b", "must name a host"),
        ("redis://h/x", "must be a number, like redis://host:6379/0"),
        ("redis://h/-1", "must be a number"),
        ("redis://a,b", "must be redis+cluster://… or redis+sentinel://…/master"),
        ("redis://h?ssl_ca_certs=/x", "ssl_… is for rediss:// only"),
        ("rediss://h?ssl_ca=/x", "may be ssl_ca_certs, ssl_ca_path"),
        ("rediss://h?ssl_check_hostname=perhaps", "must be true or false"),
        ("redis://h?sentinel_password=x", "nothing may be here"),
        ("unix://", "must be like unix:///path/of/the/socket"),
        ("unix://run/r.sock", "must be like unix:///path"),
        ("unix:///r?db=x", "must be a number"),
        ("redis+sentinel://h:26379", "must name the master"),
        ("redis+sentinel://h/m/x", "must be a number"),
        ("redis+cluster://h/1", "a cluster has one database, 0"),
        ("redis+cluster://a,,b", "must name a host"),
    ],
)
def test_a_url_that_means_none_is_told_what_would_be_right(url: str, right: str) -> None:
    with pytest.raises(ValueError, match=r"must|may|has") as caught:
        redis_address(url.replace("://", "://u:hunter2@") if "://" in url else url)
    assert right in str(caught.value), caught.value
    assert "hunter2" not in str(caught.value)
