"""CenteredClip: the average of a part that a minority cannot move far, portable and compiled."""
