"""A cross-encoder as a guard: what it is asked about, what it cannot outvote, and models of several kinds."""

from pathlib import Path

import pytest

from dejakv.build import build_guards
from dejakv.config import SemanticCacheConfig
from dejakv.encoders.cross import CrossEncoder, label_of_the_same
from dejakv.errors import ModelError
from dejakv.guards.lexical import LexicalGuard
from dejakv.guards.paraphrase import ParaphraseGuard
from dejakv.guards.vetoes import entities
from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta
from dejakv.testing.levels import Case, GuardTests

MATCH = Match("d", "semantic_text", 0.9)


def verdict(guard: ParaphraseGuard, one: str, other: str) -> tuple[str, str]:
    donor = ChunkMeta("d", "default", "e", (1,), other, other)
    found = guard.judge(Request("r", one, one), donor, MATCH)
    return found.decision, found.reason


class TestParaphraseGuard(GuardTests):
    def make(self) -> ParaphraseGuard:
        return ParaphraseGuard(lambda _one, _other: 1.0, 0.5, LexicalGuard())

    def accepted(self) -> Case:
        return self.about("How is bread baked?")

    def rejected(self) -> Case:
        return self.about("How is no bread baked?")

    def about(self, text: str) -> Case:
        donor = ChunkMeta("d", "default", "e", (1,), "How do I bake bread?", "How do I bake bread?")
        return Request("r", text, text), donor, MATCH


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ("What does Ana do for a living?", "What does Olga do for a living?", "names differ (1 against 1)"),
        ("who married Ana and left Olga", "Who left Ana and married Olga?", ""),
        ("Did Ana call Olga?", "Was it Olga whom Ana rang?", "the order of 2 names"),
        ("Can I take 5 mg of it?", "May I have 50 mg of that?", "numbers"),
        ("Can I take 5 mg of it?", "May I have 5 g of that?", "units"),
        ("Is it safe to swim here?", "Is it not safe to bathe here?", "negations"),
        ("How do I turn the alarm on?", "How can somebody switch the alarm off?", "opposites"),
        ("Is there support for IPv4?", "Do you support IPv6?", "numbers"),
    ],
)
def test_no_likeness_outweighs_a_veto(one: str, other: str, why: str) -> None:
    guard = ParaphraseGuard(lambda _one, _other: 1.0, 0.5, LexicalGuard())
    for pair in ((one, other), (other, one)):
        decision, reason = verdict(guard, *pair)
        assert decision == ("reject" if why else "accept"), reason
        assert why in reason


def test_other_words_are_accepted_where_both_directions_say_so() -> None:
    asked: list[tuple[str, str]] = []

    def score(one: str, other: str) -> float:
        asked.append((one, other))
        return 0.9 if len(one) > len(other) else 0.4

    guard = ParaphraseGuard(score, 0.5, LexicalGuard())
    one, other = "What does Ana do for a living?", "What is Ana's job?"
    assert LexicalGuard().difference(one, other)
    assert verdict(guard, one, other)[0] == "reject"
    assert asked == [(one, other), (other, one)]
    assert verdict(ParaphraseGuard(score, 0.3, LexicalGuard()), one, other)[0] == "accept"
    asked.clear()
    assert verdict(guard, one, one.lower())[0] == "accept"
    assert not asked, "equal readings need no model"
    assert verdict(ParaphraseGuard(score, 0.3, None), one, "What does Olga do?")[0] == "accept", "nothing is vetoed"


def test_names_are_what_writing_shows() -> None:
    assert entities("When did Ana meet IBM's CEO at 10am? She and I left.") == {"ana", "ibm", "ceo", "10am"}
    assert entities("Paris. Which way?") == set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny cross-encoder, trained here to say whether two texts begin with the same word."""
    return trained(tmp_path_factory.mktemp("cross"))


def trained(folder: Path) -> Path:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "cats", "dogs", "sleep", "run"]
    plain = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    plain.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=16
    )
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        id2label={0: "not_duplicate", 1: "duplicate"}, label2id={"not_duplicate": 0, "duplicate": 1},
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    texts = [f"{who} {what}" for who in ("cats", "dogs") for what in ("sleep", "run")]
    pairs = [(one, other) for one in texts for other in texts]
    inputs = tokenizer([one for one, _ in pairs], [other for _, other in pairs], padding=True, return_tensors="pt")
    labels = torch.tensor([int(one.split()[0] == other.split()[0]) for one, other in pairs])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_from_a_folder_judges_paraphrases(folder: Path) -> None:
    config = SemanticCacheConfig(cross_encoder=str(folder), paraphrase_threshold=0.5, index_encoder="model")
    guard = build_guards(config, [])[-1]
    assert isinstance(guard, ParaphraseGuard)
    assert verdict(guard, "cats sleep", "cats run")[0] == "accept"
    decision, reason = verdict(guard, "cats sleep", "dogs sleep")
    assert decision == "reject"
    assert reason.startswith("a cross-encoder takes it for no paraphrase: 0.")
    assert verdict(guard, "cats sleep 2", "cats run 3") == ("reject", "numbers differ (1 against 1)")
    model = CrossEncoder(str(folder))
    assert 0 <= model.score("cats sleep " * 50, "dogs") <= 1, "what is too long is cut"


def test_models_of_other_kinds(tmp_path: Path) -> None:
    assert label_of_the_same({0: "contradiction", 1: "entailment", 2: "neutral"}, "nli") == 1
    assert label_of_the_same({0: "NOT_ENTAILMENT", 1: "ENTAILMENT"}, "nli") == 1
    assert label_of_the_same({0: "LABEL_0"}, "likeness") is None
    assert label_of_the_same({0: "LABEL_0", 1: "LABEL_1"}, "paraphrases") == 1
    assert label_of_the_same({0: "equivalent", 1: "not_equivalent"}, "mrpc") == 0
    with pytest.raises(ModelError, match="none of which says"):
        label_of_the_same({0: "sad", 1: "glad", 2: "mad"}, "feelings")
    with pytest.raises(ModelError, match=r"leave cross_encoder (.--cross-encoder.) out"):
        CrossEncoder(str(tmp_path))
