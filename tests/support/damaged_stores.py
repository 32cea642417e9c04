"""Damage by chance to a copy of a golden store."""

from __future__ import annotations

import os
import random
from pathlib import Path


def damage(root: Path, chance: random.Random) -> list[str]:
    """Change some files of the log, the queues and the index in one of many ways each; returns what was done."""
    done = []
    for _ in range(chance.randrange(1, 5)):
        kind = chance.choice(["commitlog", "consumequeue", "index"])
        path = chance.choice([one for one in sorted((root / kind).rglob("*")) if one.is_file()])
        data = bytearray(path.read_bytes())
        used = max((index for index, byte in enumerate(data) if byte), default=0) + 1
        at, size = chance.randrange(used), chance.choice([20, 60, 500, 4_096])
        how = chance.choice(["flip", "flip", "zero", "noise", "copy", "cut", "take away"])
        if how == "flip":
            data[at] ^= 1 << chance.randrange(8)
        elif how == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
        elif how == "noise":
            data[at : at + size] = chance.randbytes(len(data[at : at + size]))
        elif how == "copy":
            source = chance.randrange(used)
            piece = data[source : source + min(size, len(data) - max(at, source))]
            data[at : at + len(piece)] = piece
        if how == "take away" and kind != "commitlog":
            path.unlink()
        elif how == "cut" and kind != "commitlog":
            os.truncate(path, at)
        else:
            path.write_bytes(data)
        done.append(f"{how} {path.relative_to(root)} {at}")
    if chance.random() < 0.2:
        (root / "abort").write_bytes(b"1")
        done.append("abort")
    return done
