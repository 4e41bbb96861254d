"""Admin docs: /docs, the admin and query routes on one plain page.

Pure: OpenAPI in, HTML out. No script, no style and no font from elsewhere, for planes live where
there is no way out; what a person wants to try is one curl away. admin.py serves it. Open it to
change how a route is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{margin-top:2.5rem}article{border-top:1px solid #8884;padding:.6rem 0}"
    "code{font-family:ui-monospace,monospace}.m{display:inline-block;min-width:4.5rem;"
    "font-weight:600}table{border-collapse:collapse}td{padding:.1rem 1rem .1rem 0;"
    "vertical-align:top}:root{color-scheme:light dark}"
)


def docs_page(schema: Json) -> str:
    """The whole page."""
    info = schema.get("info", {})
    title = escape(str(info.get("title", "")))
    groups: dict[str, list[str]] = {}
    for path, methods in schema.get("paths", {}).items():
        for method, route in methods.items():
            tag = next(iter(route.get("tags", ())), "others")
            groups.setdefault(tag, []).append(_route(path, method, route, schema))
    shown = "".join(f"<h2>{escape(tag)}</h2>{''.join(rows)}" for tag, rows in groups.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{escape(str(info.get('description', '')))} "
        'For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{shown}</body></html>"
    )


def _route(path: str, method: str, route: Json, schema: Json) -> str:
    members = [_member(one["name"], one.get("in", ""), one) for one in route.get("parameters", ())]
    members += _body(route, schema)
    answers = ((code, one.get("description", "")) for code, one in route["responses"].items())
    return (
        f'<article><code><span class="m">{escape(method.upper())}</span>{escape(path)}</code>'
        f"<div>{escape(str(route.get('description', '')))}</div>"
        f"{_table(members)}{_table(answers)}</article>"
    )


def _body(route: Json, schema: Json) -> list[tuple[str, str]]:
    """Members of a JSON body."""
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = str(content.get("schema", {}).get("$ref", "")).rpartition("/")[2]
    model = schema.get("components", {}).get("schemas", {}).get(name, {})
    needed = model.get("required", ())
    return [
        _member(member, "body", {"schema": told, "required": member in needed})
        for member, told in model.get("properties", {}).items()
    ]


def _member(name: str, place: str, told: Json) -> tuple[str, str]:
    schema = told.get("schema", {})
    kinds = [schema, *schema.get("anyOf", ())]
    kind = " or ".join(str(one["type"]) for one in kinds if "type" in one)
    words = [place, kind, "needed" if told.get("required") else ""]
    return name, ", ".join(word for word in words if word)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    shown = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>"
        for name, text in rows
    )
    return f"<table>{shown}</table>" if shown else ""
