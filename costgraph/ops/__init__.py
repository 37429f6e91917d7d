"""Op kinds: records of facts, one file a family."""

from .registry import KINDS, register

__all__ = ["KINDS", "register"]
