"""Trainers that give sequences an initial state; imported as hf_recurrent_lengthgen.trainers."""
