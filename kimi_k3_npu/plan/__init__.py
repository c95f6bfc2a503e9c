"""What a launch will do, before it is made: pure functions of the model, the layout and the device."""
