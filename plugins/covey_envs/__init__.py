"""Environments of several turns: what one is, the built-in ones, and how they are run."""

from covey.envs.protocol import Environment, Factory, Step, independent
from covey.envs.registry import resolve
from covey.envs.runner import EnvironmentRunner
from covey.envs.schemas import json_schema

__all__ = ["Environment", "EnvironmentRunner", "Factory", "Step", "independent", "json_schema", "resolve"]
