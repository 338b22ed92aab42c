"""`dejakv explain` of two prompts."""

from pathlib import Path

from typer.testing import CliRunner

from dejakv.cli.main import typer_app


def test_a_page_of_two_prompts(tmp_path: Path) -> None:
    runner = CliRunner()
    page, text = tmp_path / "page.html", tmp_path / "donor.txt"
    text.write_text("<s> Ann lives in Rome. <q> Where does Ann live? <a>")
    given = ["explain", "--donor", f"@{text}", "--target", "<s> Ann lives in Oslo. <q> Where does Ann live? <a>"]
    done = runner.invoke(typer_app, [*given, "--html", str(page), "--max-new-tokens", "1", "--model", "docs-lm"])
    assert done.exit_code == 0, done.output
    assert "oslo" in done.output
    assert page.read_text().startswith("<!doctype html>")
    missing = runner.invoke(typer_app, ["explain", "--donor", "@/nowhere", "--target", "x"])
    assert "cannot read" in str(missing.exception)
