"""The two apps, which are part of byzpg.

This file is short for a reason: Flower parses it in two threads at once, and the longer a file is, the more often
Python 3.11 fails at that ("AST constructor recursion depth mismatch", cpython#106905).
"""

from byzpg.engines.flower import client_app, server_app

# Flower looks for both names in this list.
__all__ = ["client_app", "server_app"]
