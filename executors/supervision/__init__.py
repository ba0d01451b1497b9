"""What follows after a replica ended: decisions on record, and who makes and carries them out."""
