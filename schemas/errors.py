"""Every error this project raises on purpose, in one tree.

    DriftlogError                 root; each class says whether trying again can help (`retriable`)
    |- UsageError                 exit 2: configuration or environment is wrong; also a ValueError
    |  |- ConfigError             a setting is unknown, impossible or contradicts another
    |  `- EnvironmentMissing      java, a package, a broker, a directory is missing
    |- InvalidRecord              a record of the log cannot be used; carries the reason code for the ledger
    |- StepFailed                 retriable: one training step could not be computed; its input is kept
    |- StepRefused                the maths refuses a training step: names tensor and sample; a loud stop
    |- EngineLost               exit 1: the generation engine's own processes are gone or silent
    |- RankLost                   exit 1: a process of a torchrun trainer is gone; all are started again
    |- IllegalState               the log contradicts itself: a loud stop, never a fresh start
    |  `- RangeMissing            records that were to be read are no longer in the log (retention)
    |- LogError                   the broker said no, or did not say
    |  |- LogUnavailable          retriable: time-outs, a broker that is away
    |  |- MessageTooLarge         this record can never be sent as it is
    |  |- DeliveryFailed          one record was not acknowledged
    |  |- BudgetExhausted         our own bound on bytes in flight; retriable, wait for deliveries
    |  |- TransactionFailed       the transaction did not commit, or nobody knows: re-read the committed state
    |  `- Fenced                  exit 3: a newer process owns this identity; never restart
    |- TrackerUnavailable         retriable: the experiment tracker; training never waits for it
    `- CheckpointError
       |- CheckpointInvalid       present but wrong: size, hash, name or format
       |- CheckpointMissing       not there (yet)
       |- CheckpointRefused       an address that may not be followed
       |- StoreFull              no room: needed and free bytes in the message
       `- StoreStuck             a save did not end within its limit

A message says what, where and what to do. To add a class: put it under the family whose handling it
shares, give it a docstring, keep it picklable (positional arguments only).
"""

from __future__ import annotations


class DriftlogError(Exception):
    """Root of the tree."""

    retriable = False


class UsageError(DriftlogError, ValueError):
    """What the user gave cannot work; the command line prints the message and exits 2."""


class ConfigError(UsageError):
    """A setting is unknown, impossible, or contradicts another; names the key."""


class EnvironmentMissing(UsageError):
    """Something outside the project is missing (java, a broker, a model directory)."""


class InvalidRecord(DriftlogError):
    """A record of the log cannot be used. `code` goes into the ledger as `invalid:<code>`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class StepFailed(DriftlogError):
    """One training step could not be computed, e.g. out of memory; its input is kept."""

    retriable = True


class StepRefused(DriftlogError):
    """The maths refuses a training step: a wrong shape, a number that is not finite, recomputed log-probabilities.

    Names the tensor and, where it is one trajectory's, the trajectory. Trying again with the same input cannot help.
    """


class RankLost(DriftlogError):
    """A process of a trainer under torchrun is gone or silent. Start all of them again: the run resumes."""


class EngineLost(DriftlogError):
    """The generation engine's own processes failed, are gone or silent. Start the service again: the log is whole."""


class IllegalState(DriftlogError):
    """Log and store contradict each other, or an invariant of the log is broken."""


class RangeMissing(IllegalState):
    """Records that were to be read are no longer in the log. `first`: (topic, partition) -> the first that still is."""

    def __init__(self, message: str, first: dict[tuple[str, int], int]) -> None:
        super().__init__(message, first)
        self.message = message
        self.first = first

    def __str__(self) -> str:
        return self.message


class LogError(DriftlogError):
    """Family of everything that can go wrong between us and the log."""


class LogUnavailable(LogError):
    """The broker does not answer within the stated limit."""

    retriable = True


class MessageTooLarge(LogError):
    """The record is larger than the client or the topic allows."""


class DeliveryFailed(LogError):
    """A record was handed to the client and not acknowledged."""


class BudgetExhausted(LogError):
    """The bytes in flight reached the configured bound; try again after deliveries."""

    retriable = True


class TransactionFailed(LogError):
    """The transaction did not commit, or its outcome is unknown. Re-read the committed state."""

    retriable = True


class Fenced(LogError):
    """A newer process uses this transactional id. Stop for good (exit 3)."""


class TrackerUnavailable(DriftlogError):
    """The experiment tracker is away, locked, or refuses; the backlog stays in the log."""

    retriable = True


class CheckpointError(DriftlogError):
    """Family of checkpoint store errors."""


class CheckpointInvalid(CheckpointError):
    """The files do not match the manifest, or the manifest does not match the event."""


class CheckpointMissing(CheckpointError):
    """Nothing is at that address (network file systems may show it late)."""

    retriable = True


class CheckpointRefused(CheckpointError):
    """The address leaves the allowed roots, or names something that is not a checkpoint file."""


class StoreFull(CheckpointError):
    """No room for the checkpoint."""


class StoreStuck(CheckpointError):
    """A save did not end within its limit, and nobody can end it from inside. The committed state is whole."""
