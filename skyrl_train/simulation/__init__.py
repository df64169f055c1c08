"""What a run would take on another cluster: its loop, queue and client, over engines and a learner that only wait."""
