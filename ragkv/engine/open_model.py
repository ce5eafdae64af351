"""Load the model that the settings mean, and tell the user what they must know of the choice."""

from __future__ import annotations

from ragkv.config import Settings, bundled_models
from ragkv.model.decoder import DecoderModel
from ragkv.model.model_cache import Notify
from ragkv.model.processors import set_threads
from ragkv.model.source import ModelSource, choose_source


def model_source(settings: Settings) -> ModelSource:
    """Return what the settings mean. Raises ModelNotFound, as `choose_source`."""
    return choose_source(settings.model, settings.adapter, bundled_models())


def load_model(settings: Settings, notify: Notify, source: ModelSource | None = None) -> DecoderModel:
    """Load the model, with its adapter, and set the number of its threads.

    Args:
        settings: the settings.
        notify: receives a line where the small model replaces the default, and lines about conversions.
        source: what to load, where it is known already.

    Raises:
        ModelNotFound: the model or its adapter cannot be read.
        ModelUnsupported: the model or its adapter is not supported.
        ConfigError: the model cache cannot be written, a profile is damaged, or the device has no FP8.
    """
    source = source or model_source(settings)
    if source.note:
        notify(source.note)
    set_threads(settings.threads)
    profiles, cache = settings.data / "profiles", settings.model_cache_folder
    return DecoderModel.load(source, settings.device, settings.dtype, profiles, cache, notify, settings.weights)
