"""Many power cuts in two processes: every 300 images a new node is recorded. Prints each failing image and how to repeat it.

    crash.py [--seeds IMAGES] [--first SEED]

The exit code is 1 when an image failed; the records of its run stay in a folder that is named then.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
IMAGES_A_RUN = 300
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"commit_log.flush_mode": "async"},
    {"commit_log.preallocate_segments": 1},
    {"commit_log.append_properties_crc": False},
    {"retention.store_bytes": 900_000, "retention.check_interval_ms": 50, "retention.delete_interval_ms": 1},
    {"commit_log.transient_store_pool": True, "commit_log.transient_store_pool_size": 3},
)


def one_run(arguments: tuple[int, int, str]) -> tuple[str, int, Any]:
    """Record the run with a seed and check its images; returns its folder, its seed and the failures."""
    from power_images import Images
    from power_load import record_run

    logging.getLogger("commitmq").setLevel(logging.CRITICAL)
    seed, count, folder = arguments
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="commitmq-power-", dir=memory if memory.is_dir() else None))
    try:
        run = record_run(Path(folder) / str(seed), seed, **MODES[seed % len(MODES)])
        return str(run.folder), seed, Images(run, scratch).run_all(range(count))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """Run them all; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/crash", description="Recover disks that a power cut may have left.")
    parser.add_argument("--seeds", type=int, default=5_000, metavar="IMAGES", help="how many images (default 5000)")
    parser.add_argument("--first", type=int, default=None, metavar="SEED", help="seed of the first run")
    options = parser.parse_args(arguments)
    sys.path[:0] = [str(PROJECT / "tests" / "support"), str(PROJECT / "tests" / "crash")]
    first = options.first if options.first is not None else random.SystemRandom().randrange(1 << 31)
    folder = tempfile.mkdtemp(prefix="commitmq-crash-")
    runs = -(-options.seeds // IMAGES_A_RUN)
    work = [
        (first + number, min(IMAGES_A_RUN, options.seeds - number * IMAGES_A_RUN), folder) for number in range(runs)
    ]
    print(f"{options.seeds} images of {runs} runs, first seed {first}", flush=True)
    images = again = acks = failures = 0
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for path, seed, found in pool.imap_unordered(one_run, work):
            images, again, acks = images + found.images, again + found.again, acks + found.acks
            failures += len(found.failures)
            for number, text in sorted(found.failures.items()):
                print(f"FAILED seed {seed} image {number}: {text}")
                print(f"  COMMITMQ_POWER_RUN={path} COMMITMQ_POWER_IMAGE={number} scripts/test --no-lint -k test_again")
            if not found.failures:
                shutil.rmtree(path)
            seconds = round(time.monotonic() - started)
            print(
                f"{images} images, {again} cut again, {acks} acks checked, {failures} failed, {seconds} s", flush=True
            )
    if not failures:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
