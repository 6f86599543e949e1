from torch.distributed.checkpoint.state_dict import *
