"""How much memory does a step hold, and are the estimates right?"""
