"""What a device has, holds and takes."""
