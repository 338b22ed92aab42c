"""The page of model types says what the tests of the types show."""

import pytest
import transformers
from tests.engines.transformers.model_types import PAGE, read_rows
from tests.engines.transformers.test_every_model_type import IN_FULL, NOT_BUILT, PADDED, REFUSED
from tests.tiny_models import CAUSAL, IMAGE_TEXT

pytestmark = pytest.mark.skipif(
    transformers.__version__ not in PAGE.read_text(encoding="utf-8"), reason="the page is of another transformers"
)


def test_the_page_has_every_type_with_what_was_shown() -> None:
    rows = read_rows()
    assert set(rows) == set(CAUSAL)
    assert {exact for exact, _, _ in rows.values()} == {"", "yes", "no"}
    in_full = {kind for kinds in IN_FULL["causal"].values() for kind in kinds.split()}
    assert {kind for kind, row in rows.items() if row[0] == "no"} == in_full
    assert {kind for kind, row in rows.items() if not row[0]} == set(NOT_BUILT["causal"])
    assert all(why for exact, blend, why in rows.values() if "no" in (exact, blend))


def test_the_lists_name_types_of_this_release() -> None:
    known = {"causal": set(CAUSAL), "image-text": set(IMAGE_TEXT)}
    for auto, kinds in known.items():
        listed = [*NOT_BUILT[auto], *REFUSED[auto].split(), *PADDED[auto].split()]
        listed += [kind for names in IN_FULL[auto].values() for kind in names.split()]
        assert set(listed) <= kinds
        assert len(listed) == len(set(listed))
        assert len(listed) < len(kinds) / 2, "most types are reused"
