"""Steps of engines that keep token state on the device."""
