"""The vLLM engine passes the suite that outsiders' engines are held to."""

from dejakv.engines.base import Engine
from dejakv.engines.vllm.engine import VLLMEngine
from dejakv.testing.engines import EngineTests


class TestVLLM(EngineTests):
    def make(self) -> Engine:
        return VLLMEngine.from_pretrained("docs-lm")
