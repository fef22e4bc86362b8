"""What was measured, for the terminal."""

from __future__ import annotations

from kvpolicy.config import dump
from kvpolicy.evaluate.profile import ABOUT
from kvpolicy.policy import EvictionPolicy
from kvpolicy.yamltext import yaml_text


def profile_report(policy: EvictionPolicy) -> str:
    """The policy as its file has it, without the record of how it was made."""
    return yaml_text({name: value for name, value in dump(policy).items() if name != ABOUT})
