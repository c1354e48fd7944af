"""What an organiser does before a run begins: set it up (`tt init`), check it (`tt check`), publish it on the Hub."""
