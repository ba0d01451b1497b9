"""Other people's trainers, each with a DiLoCo beside its optimizer: `hf` and `lightning`."""
