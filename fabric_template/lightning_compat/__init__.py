"""What Lightning's modules and callbacks expect of a Trainer."""
