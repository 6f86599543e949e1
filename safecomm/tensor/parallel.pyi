from torch.distributed.tensor.parallel import *
