"""Settings and limits of the server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from ipaddress import ip_address

from mtp_plugin.errors import ConfigError, format_value
from mtp_plugin.hosts.embedded.metrics import PREFIX


@dataclass(frozen=True)
class ServerSettings:
    """Where the server listens, what it serves, and its limits.

    Raises:
        ConfigError: the address is empty; a number of seconds is negative or not finite.
    """

    model_name: str = "model"
    """The name that requests give and responses have."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    """Required as ``Authorization: Bearer KEY`` by everything except ``/health``."""
    chat_template: str | None = field(default=None, repr=False)
    """A Jinja template for conversations; None: the tokenizer's."""
    metrics_prefix: str = PREFIX
    """Prefix of Prometheus names; ``vllm:`` gives vLLM's names."""

    max_body_bytes: int = 4 * 2**20
    max_json_depth: int = 32
    max_json_containers: int = 2**16
    """Maximum number of lists and objects of a body."""
    max_json_fields: int = 2**16
    """Maximum number of fields of all objects of a body."""
    min_chunk_bytes: int = 128
    """Chunks of a chunked body have at least this size on average, after the first 4096."""
    max_prompt_chars: int = 2**20
    """Maximum number of characters (or token ids) of all prompts or messages of a body."""
    max_prompts: int = 128
    max_sequences: int = 128
    """Maximum number of sequences of a body: prompts times ``n``."""
    max_queued: int = 1024
    """Maximum number of unfinished sequences of all requests; more get HTTP 429."""
    tokenizer_seconds: float = 30.0
    """Deadline for the tokenizer and the chat template."""
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    """Deadline for a body, also of one that is refused without being read."""
    write_seconds: float = 30.0
    """A connection whose client reads nothing of a response for this time is closed."""
    idle_seconds: float = 60.0
    """Idle connections are closed after this time."""
    drain_seconds: float = 30.0
    """A shutdown waits this long for running requests, then it aborts them."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError(
                "--listen: expected an address such as 127.0.0.1, or 0.0.0.0 for all interfaces, "
                "got ''"
            )
        for each in fields(self):
            value = getattr(self, each.name)
            is_number = isinstance(value, (int, float)) and 0 <= value < math.inf
            if each.name.endswith("_seconds") and not is_number:
                raise ConfigError(
                    f"{each.name}: expected a number of seconds >= 0, got {format_value(value)}"
                )

    @property
    def max_json_elements(self) -> int:
        """Maximum number of commas and opening brackets of a body, those in strings included.

        A body has at most as many quotes around strings.
        """
        return self.max_prompt_chars + self.max_json_containers

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
