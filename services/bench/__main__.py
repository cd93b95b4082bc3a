"""python -m services.bench pull|relay|delta: how fast, how often and how small versions travel."""

from services.bench.cli import main

if __name__ == "__main__":
    main()
