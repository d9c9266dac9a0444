"""What holds for all tests."""

import os

# Most of the suite's time is compilation; at level 1 it takes half as long. This must be set before JAX is imported.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=1".strip()
