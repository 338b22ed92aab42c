"""Modules that moved are found under their former paths for one release."""

from importlib import import_module

import pytest

FORMER = {
    "dejakv.blend.token_store": ("dejakv.prototypes.token_store", "LRUCacheStore"),
    "dejakv.decide.levels.fusion": ("dejakv.prototypes.fusion", "FusionCache"),
    "dejakv.models.lckv": ("dejakv.prototypes.lckv", "KVLayout"),
    "dejakv.sim_llm": ("dejakv.prototypes.sim_llm", "SimLLMInference"),
    "dejakv.sim_llm.inference": ("dejakv.prototypes.sim_llm.inference", "TaskAnswer"),
    "dejakv.vectors.lsh": ("dejakv.prototypes.lsh", "LSHIndex"),
}


@pytest.mark.parametrize("former", FORMER)
def test_former_module_gives_the_moved_names_with_a_warning(former: str) -> None:
    today, name = FORMER[former]
    with pytest.warns(DeprecationWarning, match=f"{former} is now {today}"):
        value = getattr(import_module(former), name)
    assert value is getattr(import_module(today), name)
    with pytest.raises(AttributeError, match=f"{former}.*no attribute 'nothing'"):
        _ = import_module(former).nothing
