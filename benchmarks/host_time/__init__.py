"""What do a unit, the guards of lockstep and an optimizer cost the host?"""
