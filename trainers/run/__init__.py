"""What is there because `Trainer` is what it is: each file answers one fact about it."""
