"""Which entries of a KernelConfig say what a manifest says, on names alone."""

from __future__ import annotations

import pytest

from kconvert.export.entries import Entry, ModelNames
from kconvert.export.routes import plan_routes
from kconvert.manifest import LayoutRecord, PackageRecord, PatchRecord

LAYER = {
    "": "Layer",
    "attn": "Attention",
    "attn.q_norm": "Norm",
    "attn.k_norm": "Norm",
    "mlp": "MLP",
    "norm_1": "Norm",
    "norm_2": "Norm",
}
MLPS = [("model.layers.0.mlp",), ("model.layers.1.mlp",)]
FUSED = [(f"model.layers.{number}.norm_2", f"model.layers.{number}.mlp") for number in range(2)]


def names(**kw: str) -> ModelNames:
    """A model of two layers; `kw` are more modules below `model`."""
    classes = {"": "ForCausalLM", "model": "Model", "model.layers": "ModuleList", "model.norm": "Norm"}
    for number in range(2):
        classes |= {f"model.layers.{number}.{path}".rstrip("."): name for path, name in LAYER.items()}
    classes |= {f"model.{path}": name for path, name in kw.items()}
    return ModelNames(classes, models=frozenset({"ForCausalLM", "Model"}), layers={"Norm": "RMSNorm"})


def patch(layout: str, classes: str, *claims: tuple[str, ...], package: PackageRecord | None = None) -> PatchRecord:
    words = tuple(classes.split())
    kind = "fuse" if len(words) > 1 else "replace"
    return PatchRecord(kind, words, (), claims, LayoutRecord(layout, 1, package), ("some_kernel",))


def norms(*places: str) -> PatchRecord:
    """`rms_norm` at these places of both layers, or at `model.norm`."""
    paths = [f"model.layers.{number}.{place}" for place in places if place != "model.norm" for number in range(2)]
    claims = [(path,) for path in paths] + ([("model.norm",)] if "model.norm" in places else [])
    return patch("rms_norm", "Norm", *claims)


def third_party(name: str = "Theirs", commit: str | None = None, package_id: str = "./theirs:Theirs") -> PackageRecord:
    return PackageRecord(package_id, commit, "sha256:" + "0" * 64, name)


def shape(entry: Entry) -> tuple[str, tuple[str, ...]]:
    return entry.classes[-1], entry.patterns


def reasons(*patches: PatchRecord, model: ModelNames | None = None) -> list[str]:
    return [str(refusal) for refusal in plan_routes(patches, model or names()).refusals]


def test_a_class_that_is_patched_everywhere_is_replaced_by_name() -> None:
    everywhere = ("attn.q_norm", "attn.k_norm", "norm_1", "norm_2", "model.norm")
    routes = plan_routes([*(norms(place) for place in everywhere), patch("gated_mlp", "MLP", *MLPS)], names())
    assert routes.refusals == ()
    assert [shape(entry) for entry in routes.entries] == [("Norm", ()), ("MLP", ())]
    assert routes.entries[0].patches == (0, 1, 2, 3, 4)
    assert len(routes.entries[0].claims) == 9


def test_a_fusion_gets_the_paths_as_kernel_config_wants_them() -> None:
    routes = plan_routes([patch("norm_gated_mlp", "Norm MLP", *FUSED)], names())
    assert routes.refusals == ()
    (entry,) = routes.entries
    assert entry.patterns == ("model.layers.*.norm_2", "model.layers.*.mlp")
    assert (entry.parent, entry.children, entry.patched) == ("Layer", ("norm_2", "mlp"), "Layer")


def test_the_norms_beside_a_fusion_are_replaced_and_those_in_it_may_be() -> None:
    rest = norms("attn.q_norm", "attn.k_norm", "norm_1", "model.norm")
    routes = plan_routes([patch("norm_gated_mlp", "Norm MLP", *FUSED), rest], names())
    assert routes.refusals == ()
    assert [shape(entry)[1] for entry in routes.entries] == [("model.layers.*.norm_2", "model.layers.*.mlp"), ()]


def test_one_place_of_a_class_is_a_fusion_of_one_pair() -> None:
    routes = plan_routes([norms("norm_1")], names())
    assert routes.refusals == ()
    assert shape(routes.entries[0]) == ("Norm", ("model.layers.*.norm_1",))
    assert routes.entries[0].parent == "Layer"


def test_two_fusions_under_one_parent_are_refused() -> None:
    (reason,) = reasons(norms("norm_1"), norms("norm_2"))
    assert reason.startswith("patch 0, 1 (rms_norm): two fusions under one parent class, Layer (norm_1 and norm_2)")
    (reason,) = reasons(patch("norm_gated_mlp", "Norm MLP", *FUSED), norms("norm_1"))
    assert "two fusions under one parent class, Layer (norm_2 + mlp and norm_1)" in reason


def test_a_fusion_in_a_class_that_is_replaced_is_refused() -> None:
    attention = patch("qkv_proj", "Attention", ("model.layers.0.attn",), ("model.layers.1.attn",))
    (reason,) = reasons(norms("attn.q_norm"), attention)
    assert reason.startswith("patch 0, 1 (qkv_proj): a fusion and a replacement of one class, Attention")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            patch("gated_mlp", "MLP", MLPS[1]),
            "only model.layers.{1}.mlp is patched, and KernelConfig patches MLP in every",
        ),
        (patch("norm_gated_mlp", "Norm MLP", FUSED[0]), "KernelConfig patches every Layer, 'model.layers.1' too"),
    ],
)
def test_a_set_of_layers_is_refused(made: PatchRecord, words: str) -> None:
    (reason,) = reasons(made)
    assert reason.startswith(f"patch 0 ({made.layout.name}): of its places only ")
    assert words in reason


def test_a_class_that_is_patched_in_some_places_is_refused() -> None:
    (reason,) = reasons(norms("model.norm"))
    mixed = "Norm is patched in some places, not at 'model.layers.0.attn.k_norm', and KernelConfig patches a class"
    assert reason == f"patch 0 (rms_norm): {mixed} everywhere"
    package = patch(
        "TheirsLayout", "Norm", ("model.layers.0.norm_1",), ("model.layers.1.norm_1",), package=third_party()
    )
    assert "Norm is patched in some places, not at 'model.layers.0.attn.k_norm'" in reasons(package)[0], (
        "a package's layout takes what the class's constructor takes, so it cannot be a fusion of one pair"
    )


def test_two_layouts_on_one_class_are_refused() -> None:
    package = patch("TheirsLayout", "MLP", MLPS[0], package=third_party())
    found = reasons(patch("gated_mlp", "MLP", MLPS[1]), package)
    assert len(found) == 2


def test_a_package_that_changes_a_class_that_is_fused_elsewhere_is_refused() -> None:
    package = patch("TheirsLayout", "Norm", *norms("norm_1").modules, package=third_party())
    found = reasons(patch("norm_gated_mlp", "Norm MLP", *FUSED), package)
    assert any(
        "Norm is replaced elsewhere by TheirsLayout, and would come into the fusion so" in line for line in found
    )


def test_a_fusion_under_two_parent_classes_is_refused() -> None:
    model = names(**{"other": "Other", "other.norm_2": "Norm", "other.mlp": "MLP"})
    claims = [*FUSED, ("model.other.norm_2", "model.other.mlp")]
    (reason,) = reasons(patch("norm_gated_mlp", "Norm MLP", *claims), model=model)
    assert "it stands under Layer and Other, which are two parent classes" in reason


def test_a_pattern_that_kernel_config_reads_more_widely_is_refused() -> None:
    """Its `*` is `\\w+`, and a name will do for a number."""
    model = names(**{"layers.extra": "Other"})
    (reason,) = reasons(patch("norm_gated_mlp", "Norm MLP", *FUSED), model=model)
    assert "reads 'model.layers.*' so that it is also 'model.layers.extra', which is no Layer" in reason


def test_a_class_name_inside_another_one() -> None:
    model = names(vision="VisionMLP", other="DecoderLayer")
    routes = plan_routes([patch("gated_mlp", "MLP", *MLPS)], model)
    assert routes.refusals == ()
    assert [entry.key for entry in routes.entries] == ["^MLP$"], "so that it is found in no other name"
    (reason,) = reasons(norms("norm_1"), model=model)
    assert "searches the name Layer in other names too, and would also patch DecoderLayer" in reason


def test_a_kernel_called_like_the_layer_name_of_another_class_is_refused() -> None:
    package = third_party("RMSNorm")
    (reason,) = reasons(patch("RMSNormLayout", "MLP", *MLPS, package=package))
    assert "Norm has the layer name RMSNorm, so KernelConfig would put the kernel in there too" in reason


def test_two_kernels_of_one_name_from_two_packages_are_refused() -> None:
    one = patch("TheirsLayout", "MLP", *MLPS, package=third_party(commit="a" * 40, package_id="a/x:Theirs"))
    attention = [("model.layers.0.attn",), ("model.layers.1.attn",)]
    two = patch("TheirsLayout", "Attention", *attention, package=third_party(commit="b" * 40, package_id="b/x:Theirs"))
    (reason,) = reasons(one, two)
    assert "another package has a kernel Theirs too, and KernelConfig goes by that name" in reason


def test_a_kernel_without_a_layout_goes_by_the_layer_name() -> None:
    everywhere = norms("attn.q_norm", "attn.k_norm", "norm_1", "norm_2", "model.norm").modules
    routes = plan_routes([patch("Theirs", "Norm", *everywhere, package=third_party())], names())
    assert routes.refusals == ()
    assert (routes.entries[0].layer, routes.entries[0].patched) == ("RMSNorm", None)
    (reason,) = reasons(patch("Theirs", "Norm", ("model.norm",), package=third_party()))
    assert "'RMSNorm' is also the layer name of 'model.layers.0.attn.k_norm'" in reason
    (reason,) = reasons(patch("Theirs", "MLP", *MLPS, package=third_party()))
    assert "MLP has no layer name" in reason


def test_a_module_that_is_another_class_here_is_refused() -> None:
    (reason,) = reasons(patch("gated_mlp", "OldMLP", *MLPS))
    assert "'model.layers.0.mlp' is MLP in this transformers, not OldMLP" in reason


def test_an_entry_that_matched_nothing_says_nothing() -> None:
    assert plan_routes([patch("gated_mlp", "MLP")], names()).entries == ()
