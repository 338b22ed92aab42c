"""The page of model types says what the tests of the types show."""

import pytest
import transformers
from tests.engines.transformers.model_types import PAGE, read_rows
from tests.engines.transformers.test_every_model_type import IN_FULL, NOT_BUILT
from tests.tiny_models import CAUSAL


def test_the_page_has_every_type_with_what_was_shown() -> None:
    if transformers.__version__ not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("the page is of another transformers")
    rows = read_rows()
    assert set(rows) == set(CAUSAL)
    assert {exact for exact, _, _ in rows.values()} == {"", "yes", "no"}
    in_full = {kind for kinds in IN_FULL["causal"].values() for kind in kinds.split()}
    assert {kind for kind, row in rows.items() if row[0] == "no"} == in_full
    assert {kind for kind, row in rows.items() if not row[0]} == set(NOT_BUILT["causal"])
    assert all(why for exact, blend, why in rows.values() if "no" in (exact, blend))
