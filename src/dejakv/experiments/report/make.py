"""From folders and logs to the page: what each source is, and its section."""

from collections.abc import Sequence
from pathlib import Path

from dejakv.errors import ConfigError
from dejakv.experiments.advice import in_plain_words, settings_sheet
from dejakv.experiments.output import SAMPLES, SUMMARY, make_folder, read_object, replace_file
from dejakv.experiments.report.page import GENERATOR, Section, page, paragraph, table
from dejakv.experiments.report.run_section import run_section
from dejakv.experiments.report.sweep_section import sweep_section
from dejakv.experiments.samples_log import finished_summary
from dejakv.experiments.sweep_log import logged

ESTIMATE = "estimate.json"


def make_report(sources: Sequence[Path], output: Path) -> None:
    """Writes the page. An earlier report is replaced; any other file is not.

    Raises: ConfigError for a source that is none, and for an output that exists and is no report.
    """
    _check_output(output)
    sections = [one for source in sources for one in sections_of(source)]
    make_folder(output.parent)
    replace_file(output, page(sections[0].title if len(sections) == 1 else "DejaKV report", sections), "--output")


def _check_output(output: Path) -> None:
    """Raises: ConfigError if the file exists and no report wrote it."""
    if output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a folder: give the name of a page in it")
    try:
        begins = output.read_bytes()[:2000]
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--output {str(output)!r} cannot be used ({error.strerror}): give another name") from error
    if GENERATOR.encode() not in begins:
        raise ConfigError(f"--output {str(output)!r} exists and is no report of ours: give another name")


def sections_of(source: Path) -> list[Section]:
    """The sections of a folder, or of the log of a sweep. Raises: ConfigError."""
    if not source.exists():
        raise ConfigError(f"no file or folder {str(source)!r}: give the folder of a run, or the log of a sweep")
    estimate = source / ESTIMATE if source.is_dir() else source
    found = [_estimated(estimate)] if estimate.name == ESTIMATE and estimate.exists() else []
    if (source / SUMMARY).exists() or (source / SAMPLES).exists():
        return [run_section(source, finished_summary(source)), *found]
    if found:
        return found
    if source.is_dir():
        raise ConfigError(
            f"{str(source)!r} has nothing to report: give a folder with {SUMMARY} or {ESTIMATE}, or the log of a sweep"
        )
    return [sweep_section(source, logged(source))]


def _estimated(path: Path) -> Section:
    """Section on an estimate: the recommendation, and hits by level and threshold. Raises: ConfigError for another file."""
    found = read_object(path)
    foreign = f"{str(path)!r} was not written by this version, or is damaged"
    if not isinstance(found.get("rows"), list) or not found["rows"]:
        raise ConfigError(f"{foreign} (it has no rows): make it again")
    try:
        blocks = [paragraph(*in_plain_words(found)), table(settings_sheet(found))]
        return Section(f"Settings for {found['log']}", blocks)
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:  # a file of another shape
        raise ConfigError(f"{foreign} ({type(error).__name__}: {error}): make it again") from error
