"""Programs: graphs of the ATen calls that models make, and all that can be read off them without sites."""
