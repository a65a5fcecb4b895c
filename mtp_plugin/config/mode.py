"""Which drafter runs, with the methods that TensorRT-LLM's executor calls."""

from __future__ import annotations

from enum import IntEnum

from mtp_plugin.errors import ConfigError, format_value


class SpeculativeDecodingMode(IntEnum):
    """Which drafter runs; has the methods of TensorRT-LLM's enum of this name."""

    NONE = 0
    MTP = 1
    """Vanilla: one MTP layer per depth."""
    MTP_EAGLE_ONE_MODEL = 2
    """Eagle: the first MTP layer reused for every depth, inside the target's forward."""

    @classmethod
    def from_string(cls, name: str | None) -> SpeculativeDecodingMode:
        """The member with this name in any case; ``None`` is `NONE`."""
        if name is None:
            return cls.NONE
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        allowed = ", ".join(member.name for member in cls)
        raise ConfigError(
            f"speculative decoding mode: expected one of {allowed}, got {format_value(name)}"
        )

    def is_none(self) -> bool:
        return self is SpeculativeDecodingMode.NONE

    def is_mtp(self) -> bool:
        return not self.is_none()

    def is_mtp_vanilla(self) -> bool:
        return self is SpeculativeDecodingMode.MTP

    def is_mtp_eagle_one_model(self) -> bool:
        return self is SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

    is_mtp_one_model = is_mtp
    is_mtp_eagle = is_mtp_eagle_one_model
    use_one_engine = is_mtp
    without_logits = is_mtp
    has_spec_decoder = is_mtp
    needs_kv_cache_rewind = is_mtp
    support_dynamic_draft_len = is_mtp

    def support_overlap_scheduler(self) -> bool:
        return True

    def has_spec_drafter(self) -> bool:
        return False

    has_draft_model = has_spec_drafter
    need_load_draft_weights = has_spec_drafter
    needs_kv_cache_recompute = has_spec_drafter

    def support_guided_decoder(self) -> bool:
        """False: the target's tokens are chosen in the worker, which masks by no grammar."""
        return False

    def support_capturable_guided_decoder(self) -> bool:
        """False: workers have no ``set_guided_decoder``."""
        return False
