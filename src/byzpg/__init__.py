"""Byzantine fault-tolerant federated reinforcement learning.

`train(Config(...))` trains a federation and returns a `Run`; `load` and `resume` take the directory of a run. The
robust rules and attacks are in `byzpg.robust`, tasks in `byzpg.envs`. `trust` allows files to name modules of yours.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from byzpg._parts import trust
    from byzpg.config import Config
    from byzpg.runs import Run
    from byzpg.training import load, resume, train

__version__ = version("byzpg")
__all__ = ["Config", "Run", "__version__", "load", "resume", "train", "trust"]


def __getattr__(name: str) -> Any:
    # Imported when first used: a member of a live federation needs neither the simulator nor the trainer.
    if name == "Config":
        from byzpg.config import Config as found
    elif name == "Run":
        from byzpg.runs import Run as found
    elif name == "trust":
        from byzpg._parts import trust as found
    elif name in ("load", "resume", "train"):
        from byzpg import training

        found = getattr(training, name)
    else:
        raise AttributeError(f"module 'byzpg' has no attribute {name!r}")
    return found
