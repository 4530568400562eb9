"""Plans of attention: what each rank computes, sends and receives. Integers only, torch-free."""
