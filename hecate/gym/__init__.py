"""A gym for memories: streams that test directly what a memory remembers, learns and tracks, with known scores to
compare with."""

from hecate.gym.contenders import Contender, Memory, contender_of
from hecate.gym.peers import contenders
from hecate.gym.run import Result, run
from hecate.gym.tasks import GymTask, Stream, tasks
from hecate.gym.training import StateTracking

__all__ = [
    "Contender", "GymTask", "Memory", "Result", "StateTracking", "Stream", "contender_of", "contenders", "run", "tasks",
]  # fmt: skip
