"""The words for the progress of a worker that starts."""

from __future__ import annotations


def progress_sentence(progress: object) -> str:
    """``checking the log, 45 % of 256.0 MiB``: a worker's report about its start; "" when ``progress`` is no such
    report.
    """
    if not isinstance(progress, dict) or not isinstance(progress.get("phase"), str):
        return ""
    phase, done, total = progress["phase"], progress.get("done"), progress.get("total")
    if not isinstance(done, int) or not isinstance(total, int) or total <= 0:
        return str(phase)
    share = f"{min(done, total) * 100 // total} % of "
    if progress.get("unit") == "bytes":
        return f"{phase}, {share}{total / (1 << 20):.1f} MiB"
    return f"{phase}, {share}{total}"
