"""The layer's steps: containers at the door, flat arrays inside, one file per step."""
