# pyright: reportMissingImports=false
"""Which versions of vLLM a feature runs with, and the check at the start."""

import logging

from dejakv.engines.vllm.upstream.uses import USES, Feature
from dejakv.errors import ConfigError

log = logging.getLogger("dejakv.vllm")


TESTED = ("0.32.0",)
"""Versions named by the package's extras, with which all of `tests/engines/vllm` ran."""
RANGE = ((0, 31), (0, 34))
"""Versions for `exact`: from the first on, below the last."""


def vllm_version() -> str:
    """Return the installed vLLM's version without its local part (`0.32.0+cpu` gives `0.32.0`)."""
    import vllm

    return vllm.__version__.split("+")[0]


def is_tested() -> bool:
    """Tell whether every use was seen to work with the installed version."""
    return vllm_version() in TESTED


def usable(feature: Feature, version: str | None = None) -> str:
    """Check the installed vLLM for a feature.

    `exact` runs with any version of `RANGE`, and the log names an untested one.

    Parameters
    ----------
    feature : Feature
        The feature that is to run.
    version : str or None
        Version to check; None for the installed one.

    Returns
    -------
    str
        Why blends are switched off, empty if they are not.

    Raises
    ------
    ConfigError
        The version is outside of `RANGE`, it is untested and the feature needs a tested one, or a
        name is missing.
    """
    version, tested = version or vllm_version(), ", ".join(TESTED)
    new, install = version not in TESTED, f"Install one of: {tested}"
    if not RANGE[0] <= tuple(map(int, version.split(".")[:2])) < RANGE[1]:
        first, last = (".".join(map(str, each)) for each in RANGE)
        raise ConfigError(
            f"vLLM {version} is not supported: `exact` runs with {first} and later, below {last}. "
            f"{install}"
        )

    if new and feature in ("pictures", "run", "tier"):
        raise ConfigError(
            f"vLLM {version} is not supported: {feature} leans on more of it than `exact` does. "
            f"{install}"
        )

    lost = [
        f"{name} ({use.breaks})"
        for use in USES
        if use.feature == "exact" or (use.feature == feature and not new)
        for name in use.missing()
    ]
    if lost:
        raise ConfigError(
            f"vLLM {version} is not supported: it has no {', '.join(lost)}. {install}"
        )

    off = (
        f"blend was not tested with vLLM {version} ({tested} was), so that requests run exactly"
        if new
        else ""
    )
    if new:
        log.warning(
            "vLLM %s was not tested (%s was): it has what exact reuse needs, so that runs",
            version,
            tested,
        )

    if feature != "blend":
        return ""
    if off:
        log.warning("%s", off)
    return off
