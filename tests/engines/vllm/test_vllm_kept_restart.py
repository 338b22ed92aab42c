"""Rows of blended prompts over a restart, and the bound on how often approximate state goes into them."""

from typing import Any

import pytest
from vllm_harness import EXTENSION, Engine, running, tokens, worker_side

from dejakv.store.base import ROWS

A = tokens(400, 401)
NEW, NEWER = tokens(70, 402), tokens(80, 403)


def blended(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    (output,) = engine.ask([prompt], wish={"mode": "blend"})
    assert output.told["method"] == "blend", output.told["reason"]
    engine.settle()
    return output.told


def rows() -> set[str]:
    return {meta.id for meta in worker_side().store.metas() if meta.kind == ROWS}


@pytest.mark.parametrize("bound", [1, 2])
def test_generations_are_bounded_and_rows_outlive_a_restart(tmp_path: Any, bound: int) -> None:
    """Text that was computed beside rows of the last generation allowed serves nobody; these rows do, after a restart too."""
    extra = {"modes": ["off", "exact", "blend"], "store_dir": str(tmp_path), "max_generation": bound}
    with running(extra=extra, worker_extension_cls=EXTENSION) as first:
        first.ask([A])
        first.settle()
        assert blended(first, A[100:140] + NEW + A[180:390])["rows_kept"]
        kept = rows()
        assert len(kept) == 1
    with running(extra=extra, worker_extension_cls=EXTENSION) as second:
        told = blended(second, NEW + NEWER + A[160:390])
        assert kept <= set(told["donors"])
        assert (told["rows_kept"] > 0) == (bound == 2), "kept rows went into it: its generation is 2"
        assert len(rows()) == len(kept) + (told["rows_kept"] > 0)
