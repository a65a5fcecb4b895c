"""Made-up packages named tensorrt_llm: as much of each line as configs and ranks look at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

_BASE = """
from functools import cached_property
from typing import ClassVar, Literal
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

class DecodingBaseConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
"""

CONFIGS = {
    # K under its older name, copied by the constructor: texts of 1.2 before its release
    "1.2rc": _BASE
    + """
    speculative_model_dir: str | None = None

class MTPDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "MTP"
    num_nextn_predict_layers: int = 1
    num_nextn_predict_layers_from_model_config: int = 1
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    BEGIN_THINKING_PHASE_TOKEN: int = 128798

    def __init__(self, **data):
        super().__init__(**data)
        if "num_nextn_predict_layers" in data:
            self.max_draft_len = data["num_nextn_predict_layers"]
            self.max_total_draft_tokens = self.max_draft_len

    @cached_property
    def spec_dec_mode(self):
        one = self.num_nextn_predict_layers_from_model_config == 1 and not self.use_mtp_vanilla
        return "eagle" if one else "vanilla"
""",
    # K under its older name, copied after every validation
    "1.2": _BASE
    + """
    speculative_model: str | None = Field(
        default=None, validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )

class MTPDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["MTP"] = "MTP"
    num_nextn_predict_layers: int = 1
    num_nextn_predict_layers_from_model_config: int = 1
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    begin_thinking_phase_token: int = 128798

    @model_validator(mode="after")
    def copy_k(self):
        self.max_draft_len = self.max_total_draft_tokens = self.num_nextn_predict_layers
        return self

    @cached_property
    def spec_dec_mode(self):
        one = self.num_nextn_predict_layers_from_model_config == 1 and not self.use_mtp_vanilla
        return "eagle" if one else "vanilla"
""",
    # the older name is the checkpoint's number of layers
    "1.3b": _BASE
    + """
    speculative_model: str | None = Field(
        default=None, validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )
    _use_shared_kv_cache: bool = PrivateAttr(False)

class MTPDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["MTP"] = "MTP"
    num_nextn_predict_layers: int | None = None
    use_mtp_vanilla: bool = False
    begin_thinking_phase_token: int = 128798

    @model_validator(mode="before")
    @classmethod
    def read_older_name(cls, data):
        data = dict(data)
        older = data.pop("num_nextn_predict_layers", None)
        if older is not None:
            data.setdefault("max_draft_len", older)
        return data

    @model_validator(mode="after")
    def copy_k(self):
        self.max_total_draft_tokens = self.max_draft_len
        return self

    @property
    def spec_dec_mode(self):
        one = (self.num_nextn_predict_layers or 1) == 1 and not self.use_mtp_vanilla
        return "eagle" if one else "vanilla"
""",
}
# as the newest, and the switch between one model and two
CONFIGS["1.3a"] = CONFIGS["1.3b"].replace(
    "use_mtp_vanilla: bool = False\n",
    "use_mtp_vanilla: bool = False\n    mtp_eagle_one_model: bool = True\n",
)
LINES = tuple(CONFIGS)

_REGISTRY = """
MODEL_CLASS_MAPPING = {}

def register_auto_model(name):
    def keep(model):
        MODEL_CLASS_MAPPING[name] = model
        return model
    return keep
"""

_LAZY_REGISTRY = """
from importlib import import_module

def get_registered_model_class(name):
    if name in ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"):
        import_module("tensorrt_llm._torch.models.zoo")
    return MODEL_CLASS_MAPPING.get(name)
"""

_ZOO = """
from .modeling_utils import register_auto_model

class CountedType(type):
    pass

@register_auto_model("Glm4MoeForCausalLM")
class Glm4MoeForCausalLM(metaclass=CountedType):
    def __init__(self, model_config):
        self.model_config = model_config

@register_auto_model("DeepseekV3ForCausalLM")
class DeepseekV3ForCausalLM:
    pass
"""


def write_host(folder: Path, line: str = "1.3b", *, models: bool = True) -> Path:
    """Write a package of one line under a folder, and return the folder."""
    package = folder / "tensorrt_llm"
    eager, lazy = ("from . import zoo\n", "") if line.startswith("1.2") else ("", _LAZY_REGISTRY)
    files = {
        "__init__.py": "",
        "llmapi/__init__.py": "from .llm_args import MTPDecodingConfig\n",
        "llmapi/llm_args.py": CONFIGS[line],
        "_torch/__init__.py": "",
        "_torch/models/__init__.py": eager if models else "",
        "_torch/models/modeling_utils.py": _REGISTRY + (lazy if models else ""),
        "_torch/models/zoo.py": _ZOO,
    }
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def run_python(code: str, *path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process with folders on PYTHONPATH before the project's, and variables."""
    search = os.pathsep.join(map(str, [*path, ROOT]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRTLLM")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": search, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
