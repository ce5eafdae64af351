"""Bodies of the routes of Ollama's API that tell of models."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from ragkv.api.schemas.common import DESCRIBED
from ragkv.api.schemas.openai_messages import LENIENT

LATEST = ":latest"
"""The tag that Ollama's clients give to a model without one."""


class OllamaDetails(BaseModel):
    """Details of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(BaseModel):
    """A valid value of `model`."""

    model_config = DESCRIBED

    name: str
    model: str
    modified_at: str
    """Start of the service."""
    size: int
    """0: it is not told."""
    digest: str
    """SHA-256 of the name."""
    details: OllamaDetails


class OllamaModels(BaseModel):
    """The loaded model, alone or with a method."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    """A model that is loaded."""

    expires_at: str
    """It stays loaded."""
    size_vram: int
    """0: it is not told."""
    context_length: int


class OllamaRunning(BaseModel):
    """The loaded model."""

    models: list[OllamaRunningModel]


class OllamaShow(BaseModel):
    """A request to show a model."""

    model_config = LENIENT

    model: Annotated[str, Field(max_length=512)] = ""
    """Name of the loaded model, or NAME:METHOD. The tag `latest` is left out."""
    name: Annotated[str, Field(max_length=512)] = ""
    """The same, as earlier clients call it."""
    verbose: bool | None = False

    @model_validator(mode="after")
    def _named(self) -> OllamaShow:
        if not (self.model or self.name):
            raise ValueError("model is required")
        return self

    @property
    def wanted(self) -> str:
        """The name without the tag."""
        return (self.model or self.name).removesuffix(LATEST)


class OllamaShown(BaseModel):
    """What there is to know of a model."""

    model_config = DESCRIBED

    license: str
    modelfile: str
    parameters: str
    template: str
    """Empty, like those above: the prompt is the service's own."""
    details: OllamaDetails
    model_info: dict[str, str | int]
    """The longest question in tokens stands where programs look for the length of a context."""
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    """Version of the service."""

    version: str
