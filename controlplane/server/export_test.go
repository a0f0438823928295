package server

import "context"

// CheckReadyLeader returns nil if the replica may hold the virtual IP address of the API.
func (r *Replica) CheckReadyLeader(ctx context.Context) error { return r.checkReadyLeader(ctx) }
