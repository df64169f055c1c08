"""The same program under the name that some of SkyRL's recipes call it by."""

from __future__ import annotations

from examples.algorithms.custom_policy_loss.main_custom_policy_loss import main

if __name__ == "__main__":
    main()
