"""Router: ASK where a request goes, and take it there.

Door to the package: the few names others may use. gateway.py is the life of a request; fleet,
policies, pairing, breaker and retry decide; legs and dispatch carry; evidence remembers.
"""

from .admin import admin_app
from .admin_workers import WorkerDesk, worker_id
from .api import Api
from .breaker import Breakers
from .choice import Choice, Chooser
from .credentials import Credentials
from .dashboard import dashboard_app
from .departures import Departures
from .diagnosing import diagnose
from .directories import Directories
from .discovery import DISCOVERIES, Discovery, ProbeFailed, Static, Waiting, probe
from .engine_tokens import EngineTokens
from .errors import GatewayError
from .evidence import Ledger, Meeting
from .evidence_shared import SharedEvidence
from .fleet import Fleet
from .gateway import Gateway
from .handoffs import HANDOFFS
from .legs import Legs
from .legs_errors import LegError
from .legs_settings import LegSettings
from .metrics import RecallState, RouterMetrics
from .policies import POLICIES, Candidate, Need
from .prompt_metrics import TokensState
from .prompts import Prompt, Prompts
from .request import Ask
from .self_check import SelfCheck
from .settings import (
    AdmissionSettings,
    BreakerSettings,
    FleetSettings,
    KeySettings,
    ProbeSettings,
    PromptSettings,
    RetrySettings,
    RouterSettings,
)
from .spans import NoSpans, Spans
from .target import Booking, Target

__all__ = [
    "DISCOVERIES",
    "HANDOFFS",
    "POLICIES",
    "AdmissionSettings",
    "Api",
    "Ask",
    "Booking",
    "BreakerSettings",
    "Breakers",
    "Candidate",
    "Choice",
    "Chooser",
    "Credentials",
    "Departures",
    "Directories",
    "Discovery",
    "EngineTokens",
    "Fleet",
    "FleetSettings",
    "Gateway",
    "GatewayError",
    "KeySettings",
    "Ledger",
    "LegError",
    "LegSettings",
    "Legs",
    "Meeting",
    "Need",
    "NoSpans",
    "ProbeFailed",
    "ProbeSettings",
    "Prompt",
    "PromptSettings",
    "Prompts",
    "RecallState",
    "RetrySettings",
    "RouterMetrics",
    "RouterSettings",
    "SelfCheck",
    "SharedEvidence",
    "Spans",
    "Static",
    "Target",
    "TokensState",
    "Waiting",
    "WorkerDesk",
    "admin_app",
    "dashboard_app",
    "diagnose",
    "probe",
    "worker_id",
]
