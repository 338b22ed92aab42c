"""Scenes over docs-lm that try little."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.attack.weak import TINY

from dejakv.attack.scene import Scene


@pytest.fixture
def scene(docs_engine: Any) -> Iterator[Callable[..., Scene]]:
    """Makes scenes; they are closed in the end."""
    with ExitStack() as opened:
        yield lambda **more: opened.enter_context(Scene(TINY, engine=docs_engine, **more))
