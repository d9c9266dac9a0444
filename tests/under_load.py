"""Run the whole suite several times while busy loops keep the processors occupied: python tests/under_load.py

Every run after the first takes the files in another random order. Arguments after the options go to pytest.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of the suite, one after the other (default: 3)")
    parser.add_argument("--loops", type=int, default=4, help="busy loops at the same time (default: 4)")
    options, arguments = parser.parse_known_args()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.loops)]
    codes = []
    try:
        for number in range(options.runs):
            order = ["--shuffle-files", str(number)] if number else []
            command = [sys.executable, "-m", "pytest", *order, *arguments]
            began = time.monotonic()
            codes.append(subprocess.run(command, cwd=Path(__file__).parent.parent, check=False).returncode)
            seconds = time.monotonic() - began
            print(f"run {number + 1} of {options.runs}: exit code {codes[-1]} after {seconds:.0f} s", flush=True)
            if any(loop.poll() is not None for loop in loops):
                print("a busy loop has ended: this was not the load that was asked for")
                codes.append(1)
    finally:
        for loop in loops:
            loop.kill()
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
