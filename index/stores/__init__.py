"""Stores: the indexes that survive a restart, by name.

Seam: base.py says what each must do. Add one here and tests/contracts/test_stores.py runs it.
"""
