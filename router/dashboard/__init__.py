"""Dashboard: one page over fleet, ledger and diagnosis.

Door to the package: the app of /dashboard. door.py serves it, picture.py says what is seen,
weighing.py why a prompt would go where; static/ is the page itself, without a build step.
"""

from __future__ import annotations

from .door import dashboard_app

__all__ = ["dashboard_app"]
