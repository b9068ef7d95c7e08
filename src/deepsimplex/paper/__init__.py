"""Each table and figure of the paper as a command, with its published numbers beside ours."""
