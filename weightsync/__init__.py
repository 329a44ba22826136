"""Weight sync: layouts as data, a plan over slices, a rendezvous in Redis and a transactional transfer."""
