package datadir

import (
	"testing"
	"time"
)

// The configured heartbeat timeout reaches the store.
func TestHeartbeatReachesTheStore(t *testing.T) {
	c := Dir{Name: "cp1", Path: t.TempDir(), Advertise: "127.0.0.1", Store: StoreOptions{Heartbeat: 3 * time.Second}}
	conf, err := c.OfflineStoreConfig(Cluster{PeerPort: 6445})
	if err != nil {
		t.Fatal(err)
	}
	if conf.Timeouts.HeartbeatTimeout != 3*time.Second {
		t.Errorf("%v", conf.Timeouts.HeartbeatTimeout)
	}
}
