"""The projects that have adapters: one table of versions, replaced functions and tests."""

from __future__ import annotations

from typing import NamedTuple


class Project(NamedTuple):
    """One project.

    Attributes:
        package: its name on PyPI.
        module: the package that is imported.
        version: the tested version, or commit.
        digests: `patch.digest` of each function that the adapter replaces or depends on, by "module:name".
        tests: the files of the project's tests that call these functions, in a checkout or in the package.
    """

    package: str
    module: str
    version: str
    digests: dict[str, str]
    tests: tuple[str, ...]


_DSA = "megatron.core.transformer.experimental_attention_variant.dsa_kernels"
_DEBERTA = "transformers.models.deberta_v2.modeling_deberta_v2"
_GEMMA = "transformers.models.gemma.modeling_gemma:eager_attention_forward"

PROJECTS = {
    "openfold": Project(
        "openfold3",
        "openfold3",
        "0.5.0",
        {"openfold3.core.model.primitives.attention:_attention": "a4bebb24b28c"},
        (
            "openfold3/tests/test_primitives.py",
            "openfold3/tests/test_triangular_attention.py",
            "openfold3/tests/test_msa.py",
            "openfold3/tests/test_msa_module.py",
            "openfold3/tests/test_pairformer.py",
            "openfold3/tests/test_evoformer.py",
            "openfold3/tests/test_diffusion_transformer.py",
            "openfold3/tests/test_diffusion_module.py",
            "openfold3/tests/test_sequence_local_atom_attention.py",
        ),
    ),
    "boltz": Project(
        "boltz",
        "boltz",
        "2.2.1",
        {
            "boltz.model.layers.triangular_attention.primitives:_attention": "5ff017c2fe8e",
            "boltz.model.layers.attention:AttentionPairBias.forward": "aea3b54df4e8",
            "boltz.model.layers.attentionv2:AttentionPairBias.forward": "d78391e056ba",
        },
        ("tests/model/layers/test_triangle_attention.py",),
    ),
    "protenix": Project(
        "protenix",
        "protenix",
        "2.0.0",
        {
            "protenix.model.modules.primitives:_attention": "5e4c70fe6cb8",
            "protenix.model.triangular.layers:_attention": "5ff017c2fe8e",
        },
        ("tests/test_attention_pair_bias.py", "tests/test_diffusion_transformer.py"),
    ),
    "nemo": Project(
        "nemo-toolkit",
        "nemo",
        "3.0.0",
        {
            "nemo.collections.asr.parts.submodules.multi_head_attention:RelPositionMultiHeadAttention.forward": (
                "9af89701a7b5"
            ),
        },
        (
            "tests/collections/asr/test_conformer_encoder.py",
            "tests/collections/asr/mixins/adapters/test_asr_adapter_modules.py",
        ),
    ),
    "diffusers": Project(
        "diffusers",
        "diffusers",
        "0.42.1",
        {"diffusers.models.attention_dispatch:_AttentionBackendRegistry._backends[native]": "95e749097c2b"},
        (
            "tests/models/test_attention_dispatch.py",
            "tests/models/transformers/test_models_transformer_qwenimage.py",
            "tests/models/transformers/test_models_transformer_hunyuan_1_5.py",
            "tests/models/transformers/test_models_transformer_chroma.py",
        ),
    ),
    "openpi": Project("transformers", "transformers", "5.24.0", {_GEMMA: "cb34ccea2871"}, ()),
    "deberta": Project(
        "transformers",
        "transformers",
        "5.24.0",
        {
            f"{_DEBERTA}:DisentangledSelfAttention.forward": "af3958f86121",
            f"{_DEBERTA}:DisentangledSelfAttention.disentangled_attention_bias": "f4f4b7467256",
            f"{_DEBERTA}:DebertaV2Encoder.forward": "93f649e87603",
            f"{_DEBERTA}:DebertaV2Encoder.get_attention_mask": "394ea7d8494b",
            f"{_DEBERTA}:DebertaV2Encoder.get_rel_pos": "22db3102f922",
            f"{_DEBERTA}:build_relative_position": "00558921462f",
            f"{_DEBERTA}:make_log_bucket_position": "868c484cd016",
        },
        (),
    ),
    "megatron": Project(
        "megatron-core",
        "megatron.core",
        "d98e8a64",
        {
            f"{_DSA}:run_fused_absorbed_sparse_attention": "c4cb9f050ffb",
            f"{_DSA}:_load_backend": "64faf1ef3dee",
        },
        (),
    ),
}
