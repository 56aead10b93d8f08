"""Everything a log does to the file system: the only package that opens, writes, locks and maps."""

from __future__ import annotations

from embedlog.files.files import Files
from embedlog.files.filesystem import thread_names
from embedlog.files.process_watch import ProcessWatch
from embedlog.files.wake_page import WakePage, forget_waiters
from embedlog.files.wake_thread import WakeThread

__all__ = ["Files", "ProcessWatch", "WakePage", "WakeThread", "forget_waiters", "thread_names"]
