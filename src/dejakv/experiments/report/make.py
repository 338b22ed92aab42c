"""From folders and logs to the page: what each source is, its section, and the files that are written."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.errors import ConfigError
from dejakv.experiments.output import SAMPLES, SUMMARY, make_folder, read_object, refuse_existing, replace_file
from dejakv.experiments.report.estimate_section import estimate_section
from dejakv.experiments.report.page import GENERATOR, Section, page
from dejakv.experiments.report.run_section import run_section
from dejakv.experiments.report.sweep_section import sweep_section
from dejakv.experiments.samples_log import finished_summary
from dejakv.experiments.sweep_log import logged

Files = Mapping[str, tuple[str, Callable[[Path, Any, str], Section]]]
"""Files that are a section of their own, by name: a key that each must have, and the function that makes the section."""

FILES: Files = {"estimate.json": ("rows", estimate_section)}


def make_report(sources: Sequence[Path], output: Path, svg: Path | None = None, files: Files = FILES) -> list[Path]:
    """Writes the page, and with `svg` each chart as a file into that folder. Returns what was written.

    An earlier report is replaced; any other file is not.

    Raises: ConfigError for a source that is none, and for an output that exists and is no report.
    """
    check_output(output)
    sections = [
        section for number, source in enumerate(sources) for section in sections_of(source, f"s{number}", files)
    ]
    title = sections[0].title if len(sections) == 1 else "DejaKV report"
    make_folder(output.parent)
    written = [output]
    if svg is not None:
        folder = make_folder(svg, "--svg")
        charts = [chart for section in sections for chart in section.charts]
        for chart in charts:
            refuse_existing(folder / f"{chart.name}.svg", "--svg")
        for chart in charts:
            replace_file(folder / f"{chart.name}.svg", chart.alone, "--svg")
            written.append(folder / f"{chart.name}.svg")
    replace_file(output, page(title, sections), "--output")
    return written


def check_output(output: Path) -> None:
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


def sections_of(source: Path, prefix: str, files: Files = FILES) -> list[Section]:
    """The sections of a folder, or of the log of a sweep. Raises: ConfigError."""
    if source.is_dir():
        found = [
            _made(source / name, key, make, f"{prefix}-{name.split('.')[0]}")
            for name, (key, make) in files.items()
            if (source / name).exists()
        ]
        if not found or (source / SUMMARY).exists() or (source / SAMPLES).exists():
            found.insert(0, run_section(source, _summary(source, files), f"{prefix}-run"))
        return found
    if not source.exists():
        raise ConfigError(f"no file or folder {str(source)!r}: give the folder of a run, or the log of a sweep")
    if source.name in files:
        key, make = files[source.name]
        return [_made(source, key, make, f"{prefix}-{source.stem}")]
    return [sweep_section(source, logged(source), f"{prefix}-sweep")]


def _summary(source: Path, files: Files) -> dict[str, Any]:
    if not (source / SUMMARY).exists() and not (source / SAMPLES).exists():
        known = ", ".join((SUMMARY, *files))
        raise ConfigError(
            f"{str(source)!r} has nothing to report: give a folder with one of {known}, or the log of a sweep"
        )
    return finished_summary(source)


def _made(path: Path, key: str, make: Callable[[Path, Any, str], Section], prefix: str) -> Section:
    found = read_object(path)
    foreign = f"{str(path)!r} was not written by this version, or is damaged"
    if not isinstance(found.get(key), list) or not found[key]:
        raise ConfigError(f"{foreign} (it has no {key}): make it again")
    try:
        return make(path.parent, found, prefix)
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:  # a file of another shape
        raise ConfigError(f"{foreign} ({type(error).__name__}: {error}): make it again") from error
