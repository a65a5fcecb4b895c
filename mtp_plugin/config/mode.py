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

    def is_mtp_one_model(self) -> bool:
        return self.is_mtp()

    def is_mtp_vanilla(self) -> bool:
        return self is SpeculativeDecodingMode.MTP

    def is_mtp_eagle_one_model(self) -> bool:
        return self is SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

    def is_mtp_eagle(self) -> bool:
        return self.is_mtp_eagle_one_model()

    def use_one_engine(self) -> bool:
        return self.is_mtp()

    def without_logits(self) -> bool:
        return self.is_mtp()

    def has_spec_decoder(self) -> bool:
        return self.is_mtp()

    def has_spec_drafter(self) -> bool:
        return False

    def has_draft_model(self) -> bool:
        return False

    def need_load_draft_weights(self) -> bool:
        return False

    def needs_kv_cache_rewind(self) -> bool:
        return self.is_mtp()

    def needs_kv_cache_recompute(self) -> bool:
        return False

    def support_overlap_scheduler(self) -> bool:
        return True

    def support_dynamic_draft_len(self) -> bool:
        return self.is_mtp()

    def support_guided_decoder(self) -> bool:
        """False: the target's tokens are chosen in the worker, which masks by no grammar."""
        return False

    def support_capturable_guided_decoder(self) -> bool:
        """False: workers have no ``set_guided_decoder``."""
        return False
