"""The workloads that reuse pays for, by name, and their own options."""

from dataclasses import dataclass

from dejakv.datasets.base import Dataset

WORKLOADS = ("repo", "rag", "sessions")
OPTIONS = {"passages": "rag", "order": "rag", "window": "sessions", "compact_tools": "sessions"}
"""The data set of each option."""


@dataclass(frozen=True)
class WorkloadOptions:
    """passages, order: of `rag`; window, compact_tools: of `sessions`. None: the data set's own default. See
    `RagDataset` and `SessionsDataset`."""

    passages: int | None = None
    order: str | None = None
    window: int | None = None
    compact_tools: int | None = None


def open_workload(name: str, path: str | None, seed: int, options: WorkloadOptions) -> Dataset:
    """A workload by one of the names above.

    Raises: DatasetError if `path` cannot be read; ConfigError for a wrong option; MissingExtraError.
    """
    given = {key: value for key, value in vars(options).items() if value is not None}
    if name == "repo":
        from dejakv.datasets.repo import RepoDataset

        return RepoDataset(path, seed)
    if name == "rag":
        from dejakv.datasets.rag import RagDataset

        return RagDataset(path, seed, **{key: given[key] for key in ("passages", "order") if key in given})
    from dejakv.datasets.sessions import SessionsDataset

    return SessionsDataset(path, seed, **{key: given[key] for key in ("window", "compact_tools") if key in given})
