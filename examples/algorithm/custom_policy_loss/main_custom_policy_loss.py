"""The custom policy loss example, under the module name that some of SkyRL's recipes use."""

from __future__ import annotations

from examples.algorithms.custom_policy_loss.main_custom_policy_loss import main

if __name__ == "__main__":
    main()
