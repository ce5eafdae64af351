"""Asking for a method by name, and setting its fields."""

from dataclasses import replace

import pytest
import torch

from ragkv.engine.registry import METHODS, check_method, make_method
from ragkv.errors import InputError, NotCalibrated
from ragkv.model.profile import Profile
from ragkv.model.rotary import rotate
from ragkv.recompute.cacheblend import CacheBlend
from ragkv.recompute.epic import Epic
from ragkv.recompute.samkv import SamKV
from ragkv.recompute.scout import Scout
from tests import families, hybrids, tiny

CALIBRATED = Profile(block=4, initial=1, local=2, stable_layers=(2, 3), retrieval_heads=((1, 3),))


@pytest.fixture(scope="module")
def model():
    return tiny.model(profile=CALIBRATED)


@pytest.mark.parametrize("name", METHODS)
def test_a_bare_name_takes_the_models_profile(model, name):
    method = make_method(name, model)
    assert isinstance(method, METHODS[name].kind)
    if isinstance(method, SamKV):
        assert (method.initial, method.local) == (1, 2)
    if isinstance(method, Scout):
        assert (method.heads, method.repair) == (((1, 3),), "kept")


def test_fields_of_every_sort_can_be_set(model):
    assert make_method("epic:link=7", model) == Epic(4, link=7)
    assert make_method("cacheblend:ratio=0.3,gradual=0.5/0.4,deviation=v", model) == CacheBlend(
        4, ratio=0.3, gradual=(0.5, 0.4), deviation="v"
    )
    literal = "compare=before,extremes=static,total=candidates,shared=false"
    ablation = make_method(f"samkv-fusion:middle=none,bias=false,repair=none,{literal}", model)
    assert ablation == SamKV(layers=(2, 3), middle="none", bias=False, repair="none")
    assert make_method("scout:opening=3", model).opening == 3


@pytest.mark.parametrize(
    ("field", "values", "default"),
    [
        ("compare", ("before", "after"), "after"),
        ("extremes", ("static", "dynamic"), "dynamic"),
        ("anchor", ("blocks", "tokens"), "blocks"),
        ("rounding", ("up", "nearest", "down"), "up"),
        ("total", ("candidates", "all"), "all"),
        ("theta", ("head", "token"), "head"),
    ],
)
def test_what_samkvs_paper_does_not_say_is_a_field_and_the_best_reading_its_default(model, field, values, default):
    assert getattr(make_method("samkv-fusion", model), field) == default
    assert make_method("samkv-overwrite", model).shared
    for value in values:
        assert getattr(make_method(f"samkv-fusion:{field}={value}", model), field) == value
    with pytest.raises(InputError, match=f"{field} is one of {', '.join(values)}, not 'other'"):
        make_method(f"samkv-fusion:{field}=other", model)


def test_no_request_sets_samkvs_rope(model):
    with pytest.raises(InputError, match="no field 'rotate'"):
        make_method("samkv-fusion:rotate=x", model)


def test_scouts_repair_is_the_profiles_unless_a_request_says_it():
    trained = tiny.model(profile=replace(CALIBRATED, scout_repair="none"))
    assert make_method("scout", trained).repair == "none"
    assert make_method("random", trained).repair == "none"
    assert make_method("scout:repair=kept", trained).repair == "kept"
    assert make_method("samkv-fusion", trained).repair == "rules"
    assert make_method("scout", tiny.model(profile=CALIBRATED)).repair == "kept"


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("magic", "'magic' does not exist; choose one of full, reuse"),
        ("", "'' does not exist"),
        ("full:cap=1", "full has no field .cap.; it has prefix"),
        ("epic:k=3", "no field 'k'; it has link"),
        ("epic:", None),
        ("epic:link", "link is a whole number, not ''"),
        ("epic:link=1.5", "link is a whole number, not '1.5'"),
        ("epic:link=1,link=2", "link is given twice"),
        ("epic:layers=3", "no field 'layers'"),
        ("scout:cap=much", "cap is a number, not 'much'"),
        ("scout:repair=all", "repair is one of kept, none, not 'all'"),
        ("samkv-fusion:bias=1", "bias is true or false, not '1'"),
        ("cacheblend:gradual=a/b", "gradual is a number, not 'a'"),
    ],
)
def test_a_specification_that_means_nothing_is_told(spec, told):
    if told is None:
        assert check_method(spec) == spec
        return
    with pytest.raises(InputError, match=told):
        check_method(spec)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("epic:link=-1", "link must be at least 0, not -1"),
        ("cacheblend:ratio=nan", "ratio must be between 0 and 1, not nan"),
        ("cacheblend:layer=4", "layer must be between 0 and 3, not 4"),
        ("cacheblend:layer=2,gradual=0.5/0.4", "layer must be between 0 and 1, not 2"),
        ("scout:cap=1.5", "cap must be between 0 and 1"),
        ("scout:tail=0", "tail must be at least 1"),
        ("samkv-overwrite:local=0", "local must be at least 1"),
        ("multi-infllm:local=0", "local must be at least 1"),
    ],
)
def test_a_value_out_of_range_is_told(model, spec, told):
    with pytest.raises(InputError, match=told):
        make_method(spec, model)


def test_scout_asks_the_heads_of_a_calibrated_model_and_needs_none(model):
    bare = tiny.model()
    assert make_method("scout", bare).evidence == ("meaning", "words", "links")
    assert make_method("scout", model).evidence == ("meaning", "words", "links", "attention")
    assert make_method("scout:evidence=words", model).evidence == ("words",)
    assert make_method("scout:evidence=attention/meaning", model).evidence == ("attention", "meaning")
    with pytest.raises(NotCalibrated, match="ragkv calibrate"):
        make_method("scout:evidence=meaning/attention", bare)
    with pytest.raises(InputError, match="one of meaning, words, links, attention"):
        make_method("scout:evidence=guess", bare)


@pytest.mark.parametrize("name", ["gemma3_text", "llama"])
def test_samkv_turns_vectors_of_all_layers_as_each_layer_turns_its_keys(name):
    """Gemma's layers with a window turn by another base than those without."""
    turned = families.model(name) if name != "llama" else tiny.model(profile=CALIBRATED)
    method = make_method("samkv-fusion", turned)
    shape, at = turned.shape, torch.tensor([3, 0, 40])
    x = torch.randn(shape.layers, 3, shape.kv_heads, shape.head_dim, dtype=turned.dtype)
    expected = [rotate(x[layer], turned.rotary(at, layer)) for layer in range(shape.layers)]
    assert torch.equal(method.rotate(x, at), torch.stack(expected))


@pytest.mark.parametrize("name", METHODS)
def test_states_are_composed_only_where_layers_have_some(model, name):
    with pytest.raises(InputError, match="states are composed where layers have one, and model has none"):
        make_method(f"{name}:states=composed", model)
    assert make_method(f"{name}:states=last", model) == make_method(name, model)


def test_states_are_of_the_last_chunk_unless_the_request_says_otherwise():
    hybrid = hybrids.model("lfm2")
    assert (make_method("scout", hybrid).states, make_method("reuse", hybrid).states) == ("last", "last")
    assert make_method("scout:states=composed", hybrid).states == "composed"
    with pytest.raises(InputError, match="method scout: states is one of last, composed, not 'both'"):
        check_method("scout:states=both")
