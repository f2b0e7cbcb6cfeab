"""Which optimizers train right, and what do their steps and clipping cost?"""
