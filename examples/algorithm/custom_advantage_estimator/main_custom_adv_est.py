"""The custom advantage estimator example, under the module name that some of SkyRL's recipes use."""

from __future__ import annotations

from examples.algorithms.custom_advantage_estimator.main_custom_adv_est import main

if __name__ == "__main__":
    main()
