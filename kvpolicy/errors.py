"""Errors a user can act on. Each names the thing, the place and the remedy in one line."""


class KVPolicyError(ValueError):
    """Base of every error kvpolicy raises on purpose; the command line prints it as one line, exit status 2."""


class ConfigError(KVPolicyError):
    """A policy, budget or option that cannot be what the user meant."""


class BudgetError(ConfigError):
    """A budget that is impossible, or too small for what the policy has been told to protect."""


class PluginError(KVPolicyError):
    """A plugin that cannot be loaded, or that claims a name another one has."""


class UnsupportedModelError(KVPolicyError):
    """A model (or an option of it) that kvpolicy would run wrongly, and therefore refuses."""


class NotAttachedError(KVPolicyError, RuntimeError):
    """An :class:`~kvpolicy.EvictionCache` was given to a model that kvpolicy is not attached to."""


class EvaluationError(KVPolicyError):
    """A model, text or folder that a comparison cannot work with."""
