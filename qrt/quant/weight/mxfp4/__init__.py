"""4-bit floats that share a power of two by 32 (OCP microscaling), as gpt-oss is published."""
