"""Engine: a tiny real engine on CPU, the witness that the right KV reached the right decode.

Door of the package: the names others may use. Looks at events (forms), transfer and bootstrap.

    EngineSettings -> Engine: start(), .app (ASGI), stop()
"""

from .engine import Engine
from .errors import BadSetting, EngineError, PortTaken
from .metrics import EngineMetrics
from .settings import EngineSettings

__all__ = ["BadSetting", "Engine", "EngineError", "EngineMetrics", "EngineSettings", "PortTaken"]
