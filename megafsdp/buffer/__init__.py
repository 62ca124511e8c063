"""Flat buffers: layouts, collectives, views, uneven DTensors."""
