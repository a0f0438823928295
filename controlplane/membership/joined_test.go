package membership

import (
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// A replica that joins as a standby writes the standby mark. If the join is interrupted and
// repeated as a voter, the mark is deleted. F53
func TestJoinedAsStandby(t *testing.T) {
	trust, err := pki.NewTrust("prod", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := trust.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	response := &fleetv1.EnrollReplicaResponse{Files: map[string][]byte{trustBundleName: bundle},
		ClusterConfigJson: `{"name":"prod"}`,
		Replicas:          []*fleetv1.Replica{{Name: "cp1", ApiAddress: "192.0.2.11:6443"}}}
	c := datadir.Dir{Path: t.TempDir()}
	for _, standby := range []bool{true, false} {
		if err := saveEnrollment(c, standby, response); err != nil {
			t.Fatal(err)
		}
		if isStandby, err := c.JoinedAsStandby(); err != nil || isStandby != standby {
			t.Errorf("joined with --standby=%v, the standby mark exists: %v, error %v", standby, isStandby, err)
		}
	}
}
