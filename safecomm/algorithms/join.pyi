from torch.distributed.algorithms.join import *
