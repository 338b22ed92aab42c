"""Every error DejaKV raises. Each message names the cause and the remedy."""


class DejaKVError(Exception):
    """Base of all errors of this package."""


class ConfigError(DejaKVError, ValueError):
    """A setting is wrong or does not fit another one."""


class InputError(DejaKVError, ValueError):
    """A request cannot be served as it is (empty question, unreadable image, prompt over the context)."""


class ModelError(DejaKVError):
    """A model is unknown, incomplete, damaged or not supported by the method asked for."""


class ModelChangedError(DejaKVError):
    """The model is not the one that state was looked up for. Nothing was computed: look it up again and repeat the call."""


class DatasetError(DejaKVError):
    """A data set is unknown, missing files, or a record lacks a field."""


class StoreError(DejaKVError):
    """A store cannot be opened or written. Reading never raises it: unreadable data is a counted miss."""


class MissingExtraError(DejaKVError, ImportError):
    """An optional dependency is needed. The message names the extra to install."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}': pip install 'dejakv[{extra}]'")
