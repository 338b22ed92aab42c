"""Settings of pictures: encoder outputs and fusion states."""

from dataclasses import dataclass

from dejakv.settings import Count, Folder


@dataclass(frozen=True)
class MediaSettings:
    """What is kept of pictures beside the prompts' state.

    enable_fusion_cache  keep encoder outputs by the pictures' content; None: if there is a `fusion_cache_dir` or a
                         `fusion_provider`
    fusion_provider      `package.module:factory` of a `levels.fusion.FusionProvider`, which reads the tensors of the model's own
                         fusion modules and writes them back
    fusion_cache_dir     folder of encoder outputs; None: memory
    encoder_bytes        budget of the encoder registry in bytes
    image_root           folder of pictures that samples name
    """

    enable_fusion_cache: bool | None = None
    fusion_provider: str | None = None
    fusion_cache_dir: Folder | None = None
    encoder_bytes: Count = 1024**3
    image_root: Folder | None = None

    @property
    def fusion_states_dir(self) -> str | None:
        """The folder of a provider's states, beside that of encoder outputs; None if they are not kept."""
        kept = self.fusion_cache_dir if self.fusion_provider else None
        return f"{kept.rstrip('/')}-states" if kept else None
