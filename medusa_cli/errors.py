"""Every error that `medusa` raises on purpose.

Messages are one or two lines and end with what to do next. This module does not know about exit
codes: `medusa_cli.cli.boundary` maps each class to one.
"""


class MedusaError(Exception):
    """Base of all errors of this package."""


class UsageError(MedusaError):
    """A value given by the user is out of range, empty or contradictory."""


class ModelNotFoundError(MedusaError):
    """A model or its heads cannot be found, or cannot be fetched from where they live."""


class UnsupportedModelError(MedusaError):
    """The model loads, but tree attention would not be exact on it."""


class CheckpointError(MedusaError):
    """A heads file or a model directory is damaged, or does not fit its base model."""


class TreeError(MedusaError):
    """A tree file is damaged, or asks for more than the heads can draft."""


class ContextLengthError(MedusaError):
    """The prompt does not fit the model's context."""


class StorageError(MedusaError):
    """The cache folder cannot be written, or the disk is too full."""
