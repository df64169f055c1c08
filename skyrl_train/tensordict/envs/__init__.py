"""Environments and transforms on tensordicts, with the names and arguments of TorchRL's, most of them subclasses."""
