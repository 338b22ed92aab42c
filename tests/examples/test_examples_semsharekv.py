"""The example of token-level reuse runs and tells the truth."""

import importlib.util
import re
from pathlib import Path

from dejakv.models import path

SCRIPT = Path(__file__).parents[2] / "examples" / "semsharekv.py"


def load():
    spec = importlib.util.spec_from_file_location("semsharekv_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_edited_target_is_answered_as_it_is_now(capsys, tmp_path):
    page = tmp_path / "blend.html"
    load().main(["--html", str(page)])
    out = capsys.readouterr().out
    answers = re.findall(r"(blended|in full): (\d+) of (\d+) tokens computed, answer '(\w+)'", out)
    (_, few, tokens, blended), (_, all_of_them, _, full) = answers
    assert blended == full == "tokyo"
    assert int(few) < int(tokens) / 2
    assert all_of_them == tokens
    assert "tokyo" in page.read_text()


def test_the_prototypes_flag_names_a_folder(capsys):
    load().main(["--model_dir", str(path("docs-lm"))])
    assert "blended: " in capsys.readouterr().out


def test_without_a_similar_prompt_it_computes_in_full(capsys):
    load().main(["--threshold", "1.0", "--target", "<s> Nobody could say why. <q> Where does Ann live? <a>"])
    assert "computed in full" in capsys.readouterr().out
