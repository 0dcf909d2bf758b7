"""A strategy under LLaMA-Factory: torchrun ... examples/llamafactory_train.py config.yaml.

It takes the place of `llamafactory-cli train config.yaml`, which has no option for callbacks.
"""

from llamafactory.train.tuner import run_exp

import thinwire as tw
from thinwire.integrations.transformers import ThinwireCallback

STRATEGY = tw.DistributedStrategy(localsgd=tw.LocalSGD(8, compression=tw.Quantized(4)))

if __name__ == "__main__":
    run_exp(callbacks=[ThinwireCallback(STRATEGY)])  # it reads the file's name from the command
