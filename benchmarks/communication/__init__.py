"""Which collectives does a step issue, how do they hide, and which way is the fastest?"""
