"""What one GPU needs: adapters, quantisation, and memory planned ahead."""
