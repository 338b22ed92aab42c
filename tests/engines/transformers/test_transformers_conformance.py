"""The transformers engine passes the suite that outsiders' engines are held to."""

from dejakv.engines.base import Engine
from dejakv.engines.transformers import TransformersEngine
from dejakv.testing.engines import EngineTests


class TestText(EngineTests):
    def make(self) -> Engine:
        return TransformersEngine.from_pretrained("docs-lm", dtype="fp32")


class TestImageText(EngineTests):
    """A model that takes pictures answers prompts without them as any other does."""

    def make(self) -> Engine:
        return TransformersEngine.from_pretrained("shapes-vlm", dtype="fp32")
