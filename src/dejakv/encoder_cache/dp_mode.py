"""Whether to run vLLM's vision encoder data-parallel: each rank encodes whole pictures instead of slices of each.

Several pictures, large ones or a deep encoder benefit; very many small ones hardly do.
"""

from dataclasses import dataclass
from typing import ClassVar

from dejakv.encoder_cache.outputs import Resolution
from dejakv.errors import InputError


@dataclass(frozen=True)
class DpModeRecommendation:
    """A recommendation and its reason. `flag` is the option for `vllm serve`, empty without a recommendation."""

    recommended: bool
    reason: str

    FLAG: ClassVar[tuple[str, str]] = ("--mm-encoder-tp-mode", "data")

    @property
    def flag(self) -> tuple[str, ...]:
        return self.FLAG if self.recommended else ()

    def __str__(self) -> str:
        return f"{' '.join(self.FLAG)}: {self.reason}" if self.recommended else f"no change: {self.reason}"


def recommend_dp_mode(
    batch_image_count: int, image_resolution: Resolution = (512, 512), encoder_depth: int = 27
) -> DpModeRecommendation:
    """The first rule that applies: many small pictures no; several pictures, large ones or a deep encoder yes.

    batch_image_count  pictures in a batch of requests
    image_resolution   (width, height) in pixels
    encoder_depth      layers of the encoder

    Raises InputError for a negative count, a resolution that is not two positive numbers, or a depth below 1.
    """
    if batch_image_count < 0 or len(image_resolution) != 2 or min(image_resolution) < 1 or encoder_depth < 1:
        raise InputError(
            f"no recommendation for {batch_image_count} images of {image_resolution} and an encoder of depth "
            f"{encoder_depth}: pass a count of 0 or more, (width, height) in pixels and the number of layers"
        )
    width, height = image_resolution
    size = f"{width}x{height}"
    if batch_image_count >= 10 and width <= 256 and height <= 256:
        return DpModeRecommendation(False, f"{batch_image_count} images of {size}: many small ones gain little")
    if batch_image_count >= 2:
        return DpModeRecommendation(True, f"{batch_image_count} images in a batch can be spread over the ranks")
    if width >= 512 and height >= 512:
        return DpModeRecommendation(True, f"images of {size} are large: slicing them costs more talk than work")
    if encoder_depth >= 45:
        return DpModeRecommendation(True, f"an encoder of {encoder_depth} layers synchronizes in each of them")
    return DpModeRecommendation(False, f"{batch_image_count} image of {size}, {encoder_depth} layers: nothing to gain")
