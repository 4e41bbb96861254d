"""Health: does a URL answer 200? `kvplane healthy URL`, what health checks of containers run.

Door. Runs every few seconds beside every service, so it lives on the standard library alone: with
an HTTP client imported it would cost a second of CPU each time. Used by wiring.py.
"""

from __future__ import annotations

import http.client
import sys
from urllib.parse import urlsplit

TIMEOUT_S = 2.0  # below the time-out of the health checks in compose.yaml


def healthy(url: str) -> int:
    """0 if the URL answers 200 within the time-out, else 1 with the reason on standard error."""
    try:
        status = _status(url)
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        sys.stderr.write(f"kvplane: {url} is not healthy: {why}\n")
        return 1
    if status != 200:
        sys.stderr.write(f"kvplane: {url} is not healthy: it answered {status}\n")
    return 0 if status == 200 else 1


def _status(url: str) -> int:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
        return connection.getresponse().status
    finally:
        connection.close()
