"""patch(): the same for programs that import ``torch.distributed`` themselves."""
