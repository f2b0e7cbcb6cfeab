"""What does it cost to read or to show full parameters?"""
