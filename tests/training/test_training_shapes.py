"""Training of shapes-vlm: a smoke run that resumes, and batches that mean what one question alone means."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training.shapes import LEVELS, main, parse, rate
from training.shapes_batches import IGNORE, Batch, Batches
from training.shapes_learner import Average, Heads, losses
from training.shapes_model import IMAGE_TOKENS, build_model, build_processor, export


@pytest.fixture(scope="module")
def processor() -> Any:
    return build_processor()


@pytest.fixture(scope="module")
def batch(processor: Any) -> Batch:
    return Batches(processor.tokenizer, pictures=3, questions=4).make("test", (2, 6))


def _run(out: Path, steps: int) -> None:
    options = "--size tiny --pictures 2 --questions 3 --every 3 --eval-batches 1 --minutes 10 --device cpu"
    main([*options.split(), "--steps", str(steps), "--out", str(out)])


def test_smoke_run_logs_exports_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dejakv.models import load

    _run(tmp_path, 3)
    _run(tmp_path, 6)
    assert "resumed at step 3" in capsys.readouterr().out
    _run(tmp_path, 6)  # nothing left to do: the checkpoint is written again, the curve has no new line
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    assert {"all", "held-out", "relation"} <= set(lines[-1]["accuracy"])
    model, processor = load(tmp_path / "checkpoint")
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    assert model.dtype == torch.float32
    assert processor.chat_template


def test_a_packed_question_is_answered_as_if_it_were_alone(processor: Any, batch: Batch) -> None:
    torch.manual_seed(0)
    model = build_model(processor.tokenizer, "tiny").eval()
    embedded = model.model.language_model.embed_tokens(batch.tokens)
    with torch.no_grad():
        seen = model.model.get_image_features(pixel_values=batch.pixels).pooler_output
        embedded[:, :IMAGE_TOKENS] = torch.stack(list(seen))
        packed = model.model.language_model(
            inputs_embeds=embedded, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
    for row, place in batch.answers.tolist():
        start = place
        while batch.positions[row, start] > IMAGE_TOKENS:
            start -= 1
        tokens = torch.cat([batch.tokens[row, :IMAGE_TOKENS], batch.tokens[row, start : place + 1]])[None]
        with torch.no_grad():
            alone = model(input_ids=tokens, pixel_values=batch.pixels[row : row + 1]).logits[0, -1]
            among = model.lm_head(packed[row, place])
        torch.testing.assert_close(alone, among, rtol=1e-4, atol=1e-4)


def test_batches_depend_on_their_seed_alone(processor: Any, batch: Batch) -> None:
    again = Batches(processor.tokenizer, pictures=3, questions=4).make("test", (2, 6))
    other = Batches(processor.tokenizer, pictures=3, questions=4).make("other", (2, 6))
    assert torch.equal(batch.tokens, again.tokens)
    assert torch.equal(batch.pixels, again.pixels)
    assert not torch.equal(batch.pixels, other.pixels)


def test_targets_are_the_answer_and_then_its_end(processor: Any, batch: Batch) -> None:
    assert len(batch.kinds) == len(batch.answers) == 12
    eos = processor.tokenizer.eos_token_id
    for row, place in batch.answers.tolist():
        assert batch.targets[row, place] == batch.tokens[row, place + 1]
        assert batch.targets[row, place + 1] == eos
    assert (batch.targets != IGNORE).sum() == 2 * len(batch.kinds)
    assert processor.tokenizer.unk_token_id not in batch.tokens.flatten().tolist()


def test_pixels_are_what_the_processor_makes_of_the_png(processor: Any) -> None:
    import io
    import random

    from PIL import Image

    from dejakv.datasets.shapes_render import png, render
    from dejakv.datasets.shapes_scene import make_scene

    made = Batches(processor.tokenizer, pictures=1, questions=1).make("same", (4, 4))
    rng = random.Random("same")
    scene = make_scene(rng, rng.randint(4, 4))
    given = processor.image_processor(Image.open(io.BytesIO(png(render(scene)))), return_tensors="pt").pixel_values
    torch.testing.assert_close(given, made.pixels, rtol=1e-5, atol=1e-5)


def test_losses_fall_on_one_batch(processor: Any, batch: Batch) -> None:
    torch.manual_seed(0)
    model = build_model(processor.tokenizer, "tiny")
    heads = Heads(model.config.text_config.hidden_size)
    optimizer = torch.optim.AdamW([*model.parameters(), *heads.parameters()], lr=3e-3)
    seen = []
    for _ in range(20):
        loss = losses(model, heads, batch)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        seen.append((loss.answer, loss.patches, loss.references))
    assert all(last < 0.8 * first for first, last in zip(seen[0], seen[-1], strict=True))


def test_the_average_follows_and_swaps_back(processor: Any) -> None:
    model = torch.nn.Linear(2, 2)
    average = Average(model)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    average.update(model, 100)
    assert ((average.weights["weight"] > before) & (average.weights["weight"] < model.weight)).all()
    now = model.weight.detach().clone()
    average.swap(model)
    assert not torch.equal(model.weight, now)
    average.swap(model)
    assert torch.equal(model.weight, now)


def test_exported_names_are_the_hubs(processor: Any, tmp_path: Path) -> None:
    from safetensors import safe_open

    export(tmp_path, build_model(processor.tokenizer, "tiny"), processor)
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as weights:
        names = list(weights.keys())
    assert "vision_tower.vision_model.embeddings.class_embedding" in names
    assert "multi_modal_projector.linear_1.weight" in names
    assert "language_model.model.embed_tokens.weight" in names
    assert "language_model.lm_head.weight" in names
    assert all(n.split(".")[0] in ("vision_tower", "multi_modal_projector", "language_model") for n in names)


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    assert rate(0, 0.0, 1.0) < rate(50, 0.0, 1.0) < rate(500, 0.01, 1.0)
    assert rate(10**6, 1.0, 1.0) == 0.0


def test_defaults_train_the_full_model() -> None:
    args = parse([])
    assert (args.size, args.seed) == ("full", 0)
    assert LEVELS[-1][1] == 6
