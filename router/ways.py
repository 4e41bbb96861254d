"""Ways: what does each engine make of a chat before its template sees it?

Pure. prompts.py renders what this returns; what no table can know (a release, a flag) is found out
by self_check.py. Open it when an engine shows its template something else. Sources: SGLang's and
vLLM's own servers; ours passes a chat on as it is.

    SGLang   tools as {type, function {description, name, parameters, strict}}, none where
             tool_choice is "none", one where it names one; an answer that comes last is taken for
             a question; the template always opens the next turn; text parts are joined by a blank
    vLLM     tools as {type, function {name, description, parameters, ...}}; parts by a line break
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from .plans import Body, Plan

JOINERS = {"sglang": " "}  # between text parts of a message; all others: a line break


def joiner(engine: str) -> str:
    """What stands between the text parts of one message."""
    return JOINERS.get(engine, "\n")


def seen(engine: str, chat: Plan) -> Plan:
    """A chat as the template of this engine sees it; the same where it changes nothing."""
    way = WAYS.get(engine)
    return chat if way is None else way(chat)


def flat(engine: str, chat: Plan) -> Plan:
    """What it shows a template that refused the first: SGLang then leaves tools' wrappers away."""
    if engine != "sglang" or not chat.tools:
        return chat
    tools = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in chat.tools]
    return replace(chat, tools=tools)


def _sglang(chat: Plan) -> Plan:
    tools = [tool for tool in chat.tools or () if _chosen(tool, chat.choice)]
    return replace(
        chat,
        messages=_asking(chat.messages or []),
        tools=[_sglang_tool(tool) for tool in tools] or None,
        open_turn=True,
        extra=_sglang_extra(chat) or None,
    )


def _chosen(tool: Body, choice: Any) -> bool:
    """Is this tool shown?"""
    if choice == "none":
        return False
    named = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(named, dict):
        return True
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and function.get("name") == named.get("name")


def _asking(messages: list[Body]) -> list[Body]:
    last = messages[-1]
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        return messages
    return [*messages[:-1], {"role": "user", "content": last["content"]}]


def _sglang_extra(chat: Plan) -> Body:
    effort = (chat.more or {}).get("reasoning_effort")
    if effort is None:
        return chat.extra or {}
    off = {"thinking": False, "enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **off, **(chat.extra or {})}


def _sglang_tool(tool: Body) -> Body:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    names = ("description", "name", "parameters")
    shown = {name: function.get(name) for name in names}
    strict = function.get("strict") is True
    return {"type": tool.get("type", "function"), "function": {**shown, "strict": strict}}


def _vllm(chat: Plan) -> Plan:
    shown = {**(chat.more or {}), **(chat.extra or {})}
    tools = [_vllm_tool(tool) for tool in chat.tools or ()]
    return replace(chat, tools=tools or None, extra=shown or None)


def _vllm_tool(tool: Body) -> Body:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    return {"type": tool.get("type", "function"), "function": {**shown, **function}}


WAYS: dict[str, Callable[[Plan], Plan]] = {"sglang": _sglang, "vllm": _vllm}
