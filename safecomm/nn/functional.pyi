from torch.distributed.nn.functional import *
