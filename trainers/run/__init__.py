"""What is there because `Trainer` is what it is: each file handles one property of it."""
