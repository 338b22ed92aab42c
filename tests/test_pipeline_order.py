"""Requests whose parts may stand in any order, over the whole path."""

from dataclasses import replace
from typing import Any

import pytest
from tests.documents import DOCUMENT, EXACT, OTHER, uncached

from dejakv.request import Request, Sampling

ROWS = (1e-3, 0.0, 0.0, 0.0)
PARTS = (DOCUMENT.text, OTHER.text)


def request(parts: tuple[str, ...], order: Any = "free") -> Request:
    prompt = f"Read this. {' '.join(parts)} Who is it?"
    sampling = Sampling(4)
    return Request("r", prompt, prompt, sampling=sampling, parts=parts if order == "free" else (), order=order)


def test_parts_run_in_the_order_that_is_stored(docs_engine: Any, served: Any) -> None:
    pipeline = served(replace(EXACT, costs=ROWS))
    first = pipeline.answer(request(PARTS))
    assert (first.record.order, first.record.method) == ((), "none")
    again = pipeline.answer(request(PARTS[::-1]))
    assert (again.record.order, again.record.method) == ((1, 0), "exact")
    assert again.token_ids == first.token_ids == uncached(docs_engine, request(PARTS, "given")).token_ids
    assert not again.record.approximate


@pytest.mark.parametrize(
    "change", [{"free_order": False}, {"costs": ROWS, "exact_prefix": False}, {"costs": (1e-9, 0.0, 1.0, 0.0)}]
)
def test_an_order_that_gains_nothing_is_left(served: Any, change: dict[str, Any]) -> None:
    pipeline = served(replace(EXACT, **change))
    pipeline.answer(request(PARTS))
    assert pipeline.answer(request(PARTS[::-1])).record.order == ()


def test_a_restart_finds_the_order_again(tmp_path: Any, served: Any) -> None:
    config = replace(EXACT, costs=ROWS, cache_dir=str(tmp_path / "cache"))
    one = served(config)
    one.answer(request(PARTS))
    one.cache.close()
    assert served(config).answer(request(PARTS[::-1])).record.order == (1, 0)


def test_another_partition_has_another_order(served: Any) -> None:
    pipeline = served(replace(EXACT, costs=ROWS))
    pipeline.answer(request(PARTS))
    assert pipeline.answer(replace(request(PARTS[::-1]), partition="other")).record.order == ()
