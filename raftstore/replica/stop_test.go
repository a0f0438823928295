package replica_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"

	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// A replica that is told to stop does not wait until a peer that cannot be
// reached has been dialed in vain.
func TestStopEndsDials(t *testing.T) {
	var away atomic.Bool
	dialing, ended := make(chan struct{}, 64), make(chan error, 64)
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		dial := cfg.Dial
		cfg.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			if !away.Load() {
				return dial(ctx, address)
			}
			dialing <- struct{}{}
			<-ctx.Done()
			ended <- ctx.Err()
			return nil, ctx.Err()
		}
	})
	leader := c.Leader()
	away.Store(true)
	c.Kill(c.Followers()[0])
	<-dialing
	c.Stop(leader)
	for {
		select {
		case err := <-ended:
			if errors.Is(err, context.Canceled) {
				return
			}
		default:
			t.Fatal("every dial went on until its own deadline")
		}
	}
}
