"""Settings of the error bound."""

from dataclasses import field
from typing import Annotated

from dejakv.errors import ConfigError
from dejakv.identity import digest_of
from dejakv.settings import AnyPath, NumberRange, display, strict_dataclass

ErrorBound = Annotated[float, NumberRange(0, 1, above=True, below=True)]
Confidence = Annotated[float, NumberRange(0, 1, above=True, below=True)]
DrawnShare = Annotated[float, NumberRange(0, 1, above=True)]
"""A share of hits that are drawn. None at all would teach nothing."""


@strict_dataclass()
class BoundSettings:
    """Settings that limit the share of wrong approximate answers.

    The connector for vLLM accepts the same keys (`ConnectorSettings`).
    """

    error_bound: ErrorBound | None = None
    """largest share of wrong answers among the served approximate ones; None: there is no gate"""
    certificate: AnyPath | None = field(default=None, kw_only=True)
    """file of `dejakv certify`: approximate plans outside of its rules are computed in full, and
    nothing is labelled online; None: there is none"""


@strict_dataclass()
class TrustSettings(BoundSettings):
    """Evidence for the bound."""

    confidence: Confidence = 0.95
    """probability that the bound holds"""
    explore_share: DrawnShare = 1.0
    """share of would-be hits to compute both ways while no rule covers them"""
    audit_share: DrawnShare = 0.02
    """share of served hits to compute in full as well, to notice a change of traffic"""
    differs: str = "first"
    """definition of a wrong answer: `first` (another first token), `answer`, `kl:NUMBER` or
    `package.module:function`"""
    trust_groups: tuple[str, ...] = ()
    """`NAME=PARTITION,PARTITION`: partitions that share evidence; every other partition has its own
    """

    def __post_init__(self) -> None:
        self.groups()

    @property
    def labels_online(self) -> bool:
        """Whether evidence for the bound is collected while requests are served."""
        return self.error_bound is not None and self.certificate is None

    def groups(self) -> dict[str, str]:
        """Return the name of the group of each grouped partition.

        Raises
        ------
        ConfigError
            For a text that is no group, or a partition in two groups.
        """
        group_names: dict[str, str] = {}
        for text in self.trust_groups:
            name, mark, members = text.partition("=")
            partitions = [member.strip() for member in members.split(",")]
            if not mark or not name.strip() or not all(partitions):
                raise ConfigError(
                    f"trust_groups holds {display(text)}, which is no group: give "
                    f"NAME=PARTITION,PARTITION"
                )

            for partition in partitions:
                # In two groups its evidence would count twice.
                if group_names.setdefault(partition, name.strip()) != name.strip():
                    raise ConfigError(
                        f"trust_groups has the partition {display(partition)} in two groups: "
                        f"leave it in one of them"
                    )
        return group_names

    def group_of(self, partition: str) -> str:
        """Return the key of a partition's evidence.

        The key is a digest, so that files and logs name no tenant. Groups and partitions of the
        same name have different keys.

        >>> settings = TrustSettings(trust_groups=("team=a,b",))
        >>> settings.group_of("a") == settings.group_of("b") != settings.group_of("team")
        True
        """
        group = self.groups().get(partition)
        return digest_of(
            "trust", *(("partition", partition) if group is None else ("group", group))
        )[:32]
