"""Language models of memories in transformers: configs, models and caches that its tools accept. Needs the extra `hf`.

    import hecate.hf
    model = AutoModelForCausalLM.from_pretrained(folder)    # one that `hecate export RUN --to hf` wrote

Importing it registers the model type `hecate` with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`. `graft` adds
memories to models of other types, `adopt` runs models whose layers are delta rules on hecate's kernels. `from_layer`
and `to_layer` convert such layers to memories and back, and `upgrade` gives a trained model a richer rule.
"""

from hecate.errors import install_line

try:
    import transformers
except ImportError:
    raise ImportError(f"hecate.hf needs transformers 5 or later: {install_line('hf')}") from None
if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"hecate.hf needs transformers 5 or later, and {transformers.__version__} is here: {install_line('hf')}"
    )

from hecate.hf.adopt import Adoption, AdoptionWarning, adopt, release
from hecate.hf.cache import StateLayer
from hecate.hf.graft import GraftConfig, graft
from hecate.hf.graft_mlp import MLPGraftConfig, graft_mlp
from hecate.hf.layers import AsLayer, AsModel, from_cache, from_layer, to_cache, to_layer
from hecate.hf.model import HecateConfig, HecateForCausalLM, HecateModel
from hecate.hf.saved import byte_tokenizer, file_tokenizer, load, load_graft, load_tokenizer, save, save_graft
from hecate.hf.upgrade import Upgrade, upgrade

__all__ = [
    "Adoption",
    "AdoptionWarning",
    "AsLayer",
    "AsModel",
    "GraftConfig",
    "HecateConfig",
    "HecateForCausalLM",
    "HecateModel",
    "MLPGraftConfig",
    "StateLayer",
    "Upgrade",
    "adopt",
    "byte_tokenizer",
    "file_tokenizer",
    "from_cache",
    "from_layer",
    "graft",
    "graft_mlp",
    "load",
    "load_graft",
    "load_tokenizer",
    "release",
    "save",
    "save_graft",
    "to_cache",
    "to_layer",
    "upgrade",
]

transformers.AutoConfig.register("hecate", HecateConfig, exist_ok=True)
transformers.AutoModel.register(HecateConfig, HecateModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(HecateConfig, HecateForCausalLM, exist_ok=True)
