"""Environments and transforms on tensordicts, with the names and arguments of TorchRL's; torchrl is not needed."""
