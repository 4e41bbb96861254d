"""Logs: one line for each change, as text or as JSON.

Edge of the roof. __main__.py sets it up before anything else runs. Open it to change what a line of
the log holds. Imports nothing of ours, so that no command waits for it.

    text  2026-11-30 05:00:01,234 W kvplane.events gap not closed worker=p1 first=8 action=clear
    json  {"at": "2026-11-30T05:00:01.234Z", "level": "warning", "logger": "kvplane.events",
           "text": "gap not closed worker=p1 ...", "facts": {"worker": "p1", "first": "8", ...}}
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time

TEXT = "%(asctime)s %(levelname).1s %(name)s %(message)s"
FACT = re.compile(r"(?:^|\s)([a-z_]+)=('[^']*'|\"[^\"]*\"|\S+)")  # as our lines write them
MOST_FACTS = 32


class JsonLines(logging.Formatter):
    """A line of JSON for each record; a traceback is one member of it."""

    def format(self, record: logging.LogRecord) -> str:
        """Facts are those the text has as key=value."""
        text = record.getMessage()
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "at": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": text,
            "facts": {key: value.strip("'\"") for key, value in FACT.findall(text)[:MOST_FACTS]},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def begin(level: str, form: str) -> None:
    """Log to standard error from now on."""
    made = JsonLines() if form == "json" else logging.Formatter(TEXT)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(made)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # uvicorn tells its starts and stops as "uvicorn.error"; doors.py says the same with the port.
    logging.getLogger("uvicorn.error").setLevel(max(logging.root.level, logging.WARNING))
