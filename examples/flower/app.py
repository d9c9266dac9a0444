"""The parts of the app, which are byzpg's own.

Flower parses the file that the configuration names in two threads at once. Python 3.11 can fail at that ("AST
constructor recursion depth mismatch", cpython#106905), the more often the longer the file is.
"""

from byzpg.engines.flower import client_app, server_app

# Flower looks for both names in this list.
__all__ = ["client_app", "server_app"]
