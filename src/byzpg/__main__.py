"""python -m byzpg."""

from byzpg.cli import main

if __name__ == "__main__":
    main()
