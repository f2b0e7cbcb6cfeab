"""What do saving and loading cost, and do all writers keep their promise?"""
