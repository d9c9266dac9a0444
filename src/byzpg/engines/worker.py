"""The program of a local worker: it trains the runs that standard input names, and answers on standard output.

Questions and answers are lines of JSON. The worker ends when its input ends, for example because the parent process has
died: after the current block of iterations and its checkpoint, and at the latest after GRACE_SECONDS.
"""

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax

from byzpg import _parts, training
from byzpg.federation.devices import keep_programs
from byzpg.runs import provenance

GRACE_SECONDS = 30.0
# Between two reports of progress.
PROGRESS_SECONDS = 0.3


def main() -> None:
    """Train until standard input ends."""
    keep_programs()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a task prints must not look like an answer
    asked: SimpleQueue[str | None] = SimpleQueue()
    over = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            asked.put(line)
        over.set()
        asked.put(None)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    def answer(**report: Any) -> None:
        answers.write(json.dumps(report) + "\n")
        answers.flush()

    threading.Thread(target=listen, daemon=True).start()
    answer(kind="ready", backend=jax.default_backend(), about=provenance())
    while (line := asked.get()) is not None:
        spoken = time.monotonic()

        def on_progress(progress: training.Progress) -> None:
            nonlocal spoken
            if over.is_set():
                raise KeyboardInterrupt
            if time.monotonic() - spoken > PROGRESS_SECONDS:
                spoken = time.monotonic()
                answer(kind="training", share=progress.done)

        try:
            question = json.loads(line)
            _parts.trust(*question["modules"])
            training.resume_all([Path(each) for each in question["directories"]], on_progress)
        except (KeyboardInterrupt, BrokenPipeError):
            break
        except Exception as error:
            traceback.print_exc()
            answer(kind="failed", reason=f"{type(error).__name__}: {error}")
        else:
            answer(kind="finished")


if __name__ == "__main__":
    main()
