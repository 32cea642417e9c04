"""What a node tells the kernel about its files: a journal of every call that creates, renames, deletes, cuts or syncs one,
with the content that each sync covered.

SIGKILL keeps the page cache, so what a power cut leaves cannot be seen by killing. Instead a recorder runs inside every
process of the node (through ``sitecustomize``, no compiler needed) and wraps the functions of ``os`` and ``open`` by
which Python code reaches those system calls. It believes nothing that the node says about itself.

At a sync, before it goes to the kernel, the file is compared with what was recorded last, and the pages of 4096 bytes
that changed are written down: after the call these are on the device for sure. Every few events all files are looked at
in the same way, so that it is also known what was only in the page cache then. Stores through mappings need no call to
be seen, because contents are compared, not writes counted.

All events of all processes have one order: each is made and written down under one lock. Files of a record::

    journal   one JSON object a line: n (number), t (CLOCK_MONOTONIC in ns), pid, op and what belongs to it
    pages     the pages, 4096 bytes each
    missed    calls that changed names in the store and came by another way; must stay empty (an audit hook sees them)
    shadow/   the files as recorded last

Operations: ``create path``, ``mkdir path``, ``rename path to``, ``unlink path``, ``rmdir path``, ``cut path size``,
``sync path size pages``, ``syncdir path``, ``look files`` (of all files when it is ``whole``). ``pages`` is ``[[number of
the page in its file, position in pages or -1 for zeros], …]``. The recorder must not die inside: whoever kills a process
holds the lock meanwhile
(:meth:`Recorder.alone`).
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

PAGE_BYTES = 4096
_LOOK_EVERY = 4
_LOG = "commitlog/"
_READS = 100
"""So often a segment is read again at most: appends come with pauses."""
_ZEROS = bytes(PAGE_BYTES)
_MUTATIONS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}
_CREATING = os.O_CREAT | os.O_TRUNC
_real: dict[str, Any] = {
    name: getattr(os, name)
    for name in (
        "open", "close", "fsync", "fdatasync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "ftruncate",
        "truncate",
    )
}  # fmt: skip
_real_open = io.open
_inside = threading.local()


class Recorder:
    """Records the files below ``store`` into the folder ``record``."""

    def __init__(self, store: str | os.PathLike[str], record: str | os.PathLike[str]) -> None:
        self.store = os.path.abspath(store)
        self.record = os.path.abspath(record)
        self._shadow = self.record + "/shadow"
        self._active = False

    def prepare(self) -> None:
        """Make the record's folder, with the store as it is now (if it is there) as what is durable."""
        os.makedirs(self._shadow)
        for name in ("journal", "pages", "missed", "lock"):
            with _real_open(f"{self.record}/{name}", "wb"):
                pass
        with self.alone():
            for folder, names, files in os.walk(self.store):
                for name in sorted(names):
                    if self._interesting(path := self._relative(f"{folder}/{name}") or ""):
                        self._write({"op": "mkdir", "path": path})
                for name in sorted(files):
                    if self._interesting(path := self._relative(f"{folder}/{name}") or ""):
                        self._write({"op": "create", "path": path})
                        size, pages, changed = self._changes(path)
                        self._write({"op": "sync", "path": path, "size": size, "pages": pages})
                        self._remember(path, size, changed)
                self._write({"op": "syncdir", "path": self._relative(folder) or ""})

    # ------------------------------------------------------------ installing

    def install(self) -> None:
        """Wrap the functions of this process, for good. Other recorders of it go on."""
        self._active = True
        _install_wrappers()
        _recorders.append(self)

    def uninstall(self) -> None:
        """Record no more in this process."""
        self._active = False
        _recorders.remove(self)

    # ------------------------------------------------------------ the journal

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No process makes or records an event meanwhile."""
        if getattr(_inside, "depth", 0):
            yield
            return
        # An own description each time: a forked process would share the lock of one that is kept open.
        fd = _real["open"](f"{self.record}/lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            _inside.depth = 1
            yield
        finally:
            _inside.depth = 0
            _real["close"](fd)

    def look(self) -> None:
        """Write down what has changed in any file. Only inside :meth:`alone`.

        Writers go on meanwhile, and no look may be a state that never was. A segment is read after all behind it, each until
        it reads the same twice: so the log is a beginning of what was appended. The other files are read after the log, and
        may be ahead of it, as after a power cut.
        """
        files: dict[str, Any] = {}
        contents: dict[str, dict[int, bytes]] = {}
        found = (self._relative(f"{folder}/{name}") for folder, _, names in os.walk(self.store) for name in names)
        paths = [path for path in found if path is not None and self._interesting(path)]
        of_log = sorted((path for path in paths if path.startswith(_LOG)), reverse=True)
        for path in [*of_log, *(path for path in paths if not path.startswith(_LOG))]:
            with contextlib.suppress(OSError):
                size, pages, changed = self._changes(path)
                if changed is not None:
                    files[path], contents[path] = [size, pages], changed
        if files:
            self._write({"op": "look", "files": files, "whole": True})
            for path, changed in contents.items():
                self._remember(path, files[path][0], changed)

    def _write(self, event: dict[str, Any]) -> int:
        number = os.stat(f"{self.record}/lock").st_size
        # The lock file's size counts the events: one byte each, and no other process writes it now.
        for name, data in (
            (
                "journal",
                json.dumps({"n": number, "t": time.monotonic_ns(), "pid": os.getpid(), **event}).encode() + b"\n",
            ),
            ("lock", b"."),
        ):
            fd = _real["open"](f"{self.record}/{name}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(fd, data)
            finally:
                _real["close"](fd)
        return number

    def _event(self, **event: Any) -> None:
        if self._write(event) % _LOOK_EVERY == 0:
            self.look()

    def _changes(self, path: str) -> tuple[int, list[list[int]], dict[int, bytes] | None]:
        """Size of a file, its changed pages, and their content by number; the last is None when nothing changed.

        Only what is no hole in the file or in its shadow is read: a queue's file is a few pages and megabytes of hole.
        """
        name, shadow = f"{self.store}/{path}", f"{self._shadow}/{path}"
        changed: dict[int, bytes] = {}
        with _real_open(name, "rb", buffering=0) as file, contextlib.ExitStack() as stack:
            before = None
            with contextlib.suppress(FileNotFoundError):
                before = stack.enter_context(_real_open(shadow, "rb", buffering=0))
            log = self._content(path) if path.startswith(_LOG) else None
            size = os.fstat(file.fileno()).st_size if log is None else len(log)
            extents = _extents(file.fileno()) if log is None else [(0, size)]
            for begin, end in _united([*extents, *(_extents(before.fileno()) if before else [])]):
                data = os.pread(file.fileno(), max(0, min(end, size) - begin), begin) if log is None else log[begin:end]
                old = os.pread(before.fileno(), end - begin, begin) if before else b""
                if data == old:
                    continue
                for at in range(0, len(data), PAGE_BYTES):
                    page = data[at : at + PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
                    if page != old[at : at + PAGE_BYTES].ljust(PAGE_BYTES, b"\0"):
                        changed[(begin + at) // PAGE_BYTES] = page
            if before and not changed and os.fstat(before.fileno()).st_size == size:
                return size, [], None
        fresh = bytearray()
        pages: list[list[int]] = []
        place = os.stat(f"{self.record}/pages").st_size
        for number, page in changed.items():
            pages.append([number, -1 if page == _ZEROS else place + len(fresh)])
            if page != _ZEROS:
                fresh += page
        if fresh:
            fd = _real["open"](f"{self.record}/pages", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(fd, fresh)
            finally:
                _real["close"](fd)
        return size, pages, changed

    def _content(self, path: str) -> bytes:
        with _real_open(f"{self.store}/{path}", "rb") as file:
            data = file.read()
            for _ in range(_READS if path.startswith(_LOG) else 0):
                file.seek(0)
                before, data = data, file.read()
                if data == before:
                    break
        return data

    def _remember(self, path: str, size: int, changed: dict[int, bytes] | None) -> None:
        if changed is None:
            return
        shadow = f"{self._shadow}/{path}"
        os.makedirs(os.path.dirname(shadow), exist_ok=True)
        fd = _real["open"](shadow, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            for number, page in changed.items():
                os.pwrite(fd, page, number * PAGE_BYTES)
            _real["ftruncate"](fd, size)
        finally:
            _real["close"](fd)

    def _forget(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            _real["unlink"](f"{self._shadow}/{path}")

    # ------------------------------------------------------------ which files

    def path_of(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path below the store, None for anything that is not to be recorded."""
        if not self._active or isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if dir_fd is not None and not text.startswith("/"):
            text = os.readlink(f"/proc/self/fd/{dir_fd}") + "/" + text
        found = self._relative(os.path.abspath(text))
        return found if found is not None and self._interesting(found) else None

    def fd_path(self, fd: Any) -> str | None:
        """The same for a descriptor; None for a deleted file."""
        number = fd if isinstance(fd, int) else fd.fileno()
        try:
            text = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            return None
        return self.path_of(text) if text.startswith("/") and not text.endswith(" (deleted)") else None

    def _relative(self, path: str) -> str | None:
        if path == self.store:
            return ""
        return path[len(self.store) + 1 :] if path.startswith(self.store + "/") else None

    @staticmethod
    def _interesting(path: str) -> bool:
        """What is in run/ is nobody's after a crash, but for segments being made there; the text log is no data."""
        if path.startswith("run/"):
            return path.startswith("run/segment")
        return path not in ("commitmq/node.log", "lock")

    # ------------------------------------------------------------ events

    def created(self, path: str, existed: bool) -> None:
        if not existed:
            self._forget(path)
            self._event(op="create", path=path)

    def cut(self, path: str, size: int) -> None:
        shadow = f"{self._shadow}/{path}"
        if os.path.exists(shadow):
            _real["truncate"](shadow, min(size, os.path.getsize(shadow)))
        self._event(op="cut", path=path, size=size)

    def named(self, op: str, path: str) -> None:
        if op == "unlink":
            self._forget(path)
        self._event(op=op, path=path)

    def renamed(self, path: str | None, to: str | None) -> None:
        if path is None and to is not None:
            self.created(to, False)
        elif path is not None and to is not None:
            with contextlib.suppress(FileNotFoundError):
                os.makedirs(os.path.dirname(f"{self._shadow}/{to}"), exist_ok=True)
                _real["replace"](f"{self._shadow}/{path}", f"{self._shadow}/{to}")
            self._event(op="rename", path=path, to=to)
        elif path is not None:
            self.named("unlink", path)

    def sync(self, path: str, call: Callable[[], None]) -> None:
        """Write down what the file has, sync it, write down that this was done."""
        full = f"{self.store}/{path}"
        if os.path.isdir(full):
            call()
            self._event(op="syncdir", path=path)
            return
        size, pages, changed = self._changes(path)
        if changed is not None:
            self._write({"op": "look", "files": {path: [size, pages]}})
            self._remember(path, size, changed)
        call()
        # The content of the look before is what counts: what came during the call may or may not be covered.
        self._event(op="sync", path=path, size=size, pages=[])

    def about_to_go(self, path: str) -> None:
        """Write down the content of a file that is to be deleted: a power cut may bring it back."""
        with contextlib.suppress(OSError):
            size, pages, changed = self._changes(path)
            if changed is not None:
                self._write({"op": "look", "files": {path: [size, pages]}})
                self._remember(path, size, changed)

    def missed(self, what: str) -> None:
        with _real_open(f"{self.record}/missed", "a") as file:
            file.write(what + "\n")


def _extents(fd: int) -> list[tuple[int, int]]:
    """What is no hole of a file: (begin, end) in bytes, whole pages, ascending."""
    found: list[tuple[int, int]] = []
    end = 0
    with contextlib.suppress(OSError):  # ENXIO: nothing but hole behind it
        while True:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            found.append((begin // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES))
    return found


def _united(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same with those that overlap made one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(extents):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


_recorders: list[Recorder] = []
_wrapped = False


def _for_path(path: Any, dir_fd: int | None = None) -> tuple[Recorder, str] | None:
    if getattr(_inside, "depth", 0):
        return None
    for recorder in _recorders:
        found = recorder.path_of(path, dir_fd)
        if found is not None:
            return recorder, found
    return None


def _opened(call: Callable[[], Any], path: Any, dir_fd: int | None, creates: bool, cuts: bool) -> Any:
    found = _for_path(path, dir_fd) if creates or cuts else None
    if found is None:
        return call()
    recorder, name = found
    full = f"{recorder.store}/{name}"
    with recorder.alone():
        existed = os.path.lexists(full)
        if existed and cuts:
            recorder.about_to_go(name)
        result = call()
        if not existed:
            recorder.created(name, False)
        elif cuts:
            recorder.cut(name, 0)
        return result


def _install_wrappers() -> None:
    global _wrapped
    if _wrapped:
        return
    _wrapped = True

    def wrapped_os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        creates, cuts = bool(flags & os.O_CREAT), bool(flags & os.O_TRUNC)
        result: int = _opened(lambda: _real["open"](path, flags, mode, dir_fd=dir_fd), path, dir_fd, creates, cuts)
        return result

    def wrapped_open(file: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        creates = any(letter in mode for letter in "wax")
        return _opened(lambda: _real_open(file, mode, *arguments, **more), file, None, creates, "w" in mode)

    def renaming(name: str) -> Callable[..., None]:
        def wrapped(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            source, target = _for_path(src, src_dir_fd), _for_path(dst, dst_dir_fd)
            found = source or target
            if found is None:
                _real[name](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                return
            recorder = found[0]
            with recorder.alone():
                for one in (source, target):
                    if one is not None:
                        recorder.about_to_go(one[1])
                _real[name](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                recorder.renamed(source and source[1], target and target[1])

        return wrapped

    def naming(name: str, op: str) -> Callable[..., None]:
        def wrapped(path: Any, *arguments: Any, dir_fd: int | None = None) -> None:
            found = _for_path(path, dir_fd)
            if found is None:
                _real[name](path, *arguments, dir_fd=dir_fd)
                return
            recorder, at = found
            with recorder.alone():
                if op == "unlink":
                    recorder.about_to_go(at)
                _real[name](path, *arguments, dir_fd=dir_fd)
                recorder.named(op, at)

        return wrapped

    def syncing(name: str) -> Callable[[Any], None]:
        def wrapped(fd: Any) -> None:
            for recorder in _recorders:
                if getattr(_inside, "depth", 0):
                    break
                if recorder.fd_path(fd) is not None:
                    with recorder.alone():
                        # Asked again: another process may have deleted or renamed the file before this one's turn.
                        path = recorder.fd_path(fd)
                        if path is None:
                            _real[name](fd)
                        else:
                            recorder.sync(path, lambda: _real[name](fd))
                    return
            _real[name](fd)

        return wrapped

    def cutting(name: str) -> Callable[[Any, int], None]:
        def wrapped(file: Any, length: int) -> None:
            for recorder in _recorders:
                if getattr(_inside, "depth", 0):
                    break

                def found(recorder: Recorder = recorder) -> str | None:
                    return recorder.fd_path(file) if isinstance(file, int) else recorder.path_of(file)

                if found() is not None:
                    with recorder.alone():
                        path = found()  # asked again, as for a sync
                        if path is None:
                            _real[name](file, length)
                        elif length < os.stat(file).st_size:
                            recorder.about_to_go(path)
                            _real[name](file, length)
                            recorder.cut(path, length)
                        else:
                            _real[name](file, length)
                    return
            _real[name](file, length)

        return wrapped

    replacements: dict[str, Any] = {
        "open": wrapped_os_open,
        "rename": renaming("rename"),
        "replace": renaming("replace"),
        "unlink": naming("unlink", "unlink"),
        "remove": naming("remove", "unlink"),
        "rmdir": naming("rmdir", "rmdir"),
        "mkdir": naming("mkdir", "mkdir"),
        "fsync": syncing("fsync"),
        "fdatasync": syncing("fdatasync"),
        "ftruncate": cutting("ftruncate"),
        "truncate": cutting("truncate"),
    }
    for name, function in replacements.items():
        setattr(os, name, function)
    # The one call that changes names and is not in ``os``. Imported here: the program under test may bring it later.
    from commitmq.files import disk

    rename_to_free = disk._rename_to_free
    _real["_rename_to_free"] = lambda src, dst, **_: rename_to_free(src, dst)
    disk._rename_to_free = renaming("_rename_to_free")
    # What the os module promises about its functions (dir_fd for shutil.rmtree) holds for the wrapped ones too.
    for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        supported |= {replacements[name] for name in replacements if _real.get(name) in supported}
    builtins.open = io.open = wrapped_open
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Whatever reaches the kernel by another way than the wrappers is noted."""
    if not _recorders or getattr(_inside, "depth", 0):  # type: ignore[arg-type]
        return
    if event == "open":
        path, mode, flags = arguments
        changes = bool(flags & _CREATING) if isinstance(flags, int) else any(letter in (mode or "") for letter in "wax")
    elif event in _MUTATIONS:
        path, changes = arguments[0], True
    else:
        return
    if not changes or not isinstance(path, str | bytes | os.PathLike):
        return
    for recorder in _recorders:
        if recorder.path_of(path) is not None:
            recorder.missed(f"{event} {arguments!r}")
