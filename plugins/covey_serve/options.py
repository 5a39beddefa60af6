"""Settings of `covey serve`."""

from dataclasses import field

from covey.cli.commands import ChatOptions
from covey.config.base import NonNegativeInt, PositiveFloat, PositiveInt
from covey.config.schema import RolloutConfig


class ServeOptions(ChatOptions):
    """Settings of `covey serve`."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach needs key_file."""
    port: NonNegativeInt = 8000
    """Port to listen on; 0 is any free one."""
    name: str = ""
    """Name of the model for clients; the end of its path when not set."""
    key_file: str | None = None
    """File with the key that each request must have. It is made with a new key if it is not there; others must not be
    able to read it.
    """
    state: str | None = None
    """Folder for the states that clients save, and for the journal of their requests: a server that begins with it goes
    on where the last one was. Without it both are lost at the end.
    """
    max_connections: PositiveInt = 1024
    """Largest number of connections at a time."""
    max_body_bytes: PositiveInt = 16 * 2**20
    """Largest size of a request."""
    max_seconds: PositiveFloat = 600.0
    """Longest time of an answer."""
    max_samples: PositiveInt = 1024
    """Largest number of completions of one request."""
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(slots=8, max_prompt_length=2048, max_new_tokens=512)
    )
