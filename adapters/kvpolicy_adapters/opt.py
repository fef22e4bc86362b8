"""OPT: learned absolute positions."""

from kvpolicy.adapter import ModelAdapter


class OPT(ModelAdapter):
    """Positions are part of the hidden state before attention, so they can only stay as they were."""

    name = "opt"
    model_types = frozenset({"opt"})
