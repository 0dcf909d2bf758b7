"""A strategy under axolotl, as a plugin of its configuration.

Put this file where Python finds it, and into the YAML file

    plugins: [axolotl_plugin.ThinwirePlugin]

Start it by torchrun, without FSDP and DeepSpeed: torchrun ... -m axolotl.cli.train config.yaml.
"""

from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback

import thinwire as tw
from thinwire.integrations.transformers import ThinwireCallback

STRATEGY = tw.DistributedStrategy(localsgd=tw.LocalSGD(8, compression=tw.Quantized(4)))


class ThinwirePlugin(BasePlugin):
    def add_callbacks_pre_trainer(self, cfg: object, model: object) -> list[TrainerCallback]:
        return [ThinwireCallback(STRATEGY)]
