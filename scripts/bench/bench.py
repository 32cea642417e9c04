"""The command: options, the order of measurements, progress, and what is written."""

from __future__ import annotations

import argparse


def main(arguments: list[str]) -> int:
    """Run the comparison; returns an exit code."""
    argparse.ArgumentParser(prog="scripts/bench/run", description=__doc__).parse_args(arguments)
    return 0
