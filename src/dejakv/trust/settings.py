"""Settings of the error bound."""

from dataclasses import dataclass, field
from typing import Annotated

from dejakv.errors import ConfigError
from dejakv.identity import digest_of
from dejakv.settings import AnyPath, NumberRange, check_fields, shown

ErrorBound = Annotated[float, NumberRange(0, 1, above=True, below=True)]
Confidence = Annotated[float, NumberRange(0, 1, above=True, below=True)]
DrawnShare = Annotated[float, NumberRange(0, 1, above=True)]
"""A share of hits that are drawn. None at all would teach nothing."""


@dataclass(frozen=True)
class BoundSettings:
    """Bound on wrong approximate answers. Also keys of vLLM's connector.

    error_bound  largest share of wrong answers among the served approximate ones; None: there is no gate
    certificate  file of `dejakv certify`: approximate plans outside of its rules are computed in full, and nothing is labelled online;
                 None: there is none
    """

    error_bound: ErrorBound | None = None
    certificate: AnyPath | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class TrustSettings(BoundSettings):
    """Evidence for the bound.

    confidence     probability that the bound holds
    explore_share  share of would-be hits to compute both ways while no rule covers them
    audit_share    share of served hits to compute in full as well, to notice a change of traffic
    differs        definition of a wrong answer: `first` (another first token), `answer`, `kl:NUMBER` or `package.module:function`
    trust_groups   `NAME=PARTITION,PARTITION`: partitions that share evidence; every other partition has its own
    """

    confidence: Confidence = 0.95
    explore_share: DrawnShare = 1.0
    audit_share: DrawnShare = 0.02
    differs: str = "first"
    trust_groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        self.groups()

    @property
    def labels_online(self) -> bool:
        """Whether evidence for the bound is collected while requests are served."""
        return self.error_bound is not None and self.certificate is None

    def groups(self) -> dict[str, str]:
        """Group of each grouped partition. Raises: ConfigError for an unreadable group, or a partition in two."""
        group_names: dict[str, str] = {}
        for text in self.trust_groups:
            name, mark, members = text.partition("=")
            partitions = [member.strip() for member in members.split(",")]
            if not mark or not name.strip() or not all(partitions):
                raise ConfigError(f"trust_groups holds {shown(text)}, which is no group: give NAME=PARTITION,PARTITION")

            for partition in partitions:
                # In two groups its evidence would count twice.
                if group_names.setdefault(partition, name.strip()) != name.strip():
                    raise ConfigError(
                        f"trust_groups has the partition {shown(partition)} in two groups: leave it in one of them"
                    )
        return group_names

    def group_of(self, partition: str) -> str:
        """Key of a partition's evidence: a digest, so that files and logs name no tenant. No group's is a partition's.

        >>> settings = TrustSettings(trust_groups=("team=a,b",))
        >>> settings.group_of("a") == settings.group_of("b") != settings.group_of("team")
        True
        """
        group = self.groups().get(partition)
        return digest_of("trust", *(("partition", partition) if group is None else ("group", group)))[:32]
