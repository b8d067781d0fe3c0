"""A progress bar, where rich is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(what: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Shows `what` out of `total` if `show`; yields the function that advances it."""
    if not show or importlib.util.find_spec("rich") is None:
        yield lambda count: None
        return
    from rich import progress

    columns = (*progress.Progress.get_default_columns(), progress.MofNCompleteColumn())
    with progress.Progress(*columns) as shown:
        task = shown.add_task(what, total=total)
        yield lambda count: shown.advance(task, count)
