package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// Every replica shows the time of a node's last heartbeat in its conditions and in its Lease. The
// time advances although nothing is written. F115
func TestHeartbeatsAreShown(t *testing.T) {
	for i := range testenv.Lab().Config.ControlPlanes {
		cs := testenv.ClientAt(t, fmt.Sprintf("cp%d", i+1))
		heard := func() (version string, node, lease time.Time) {
			n, err := cs.CoreV1().Nodes().Get(context.Background(), "w1", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			l, err := cs.CoordinationV1().Leases(v1.NamespaceNodeLease).Get(context.Background(), "w1",
				metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range n.Status.Conditions {
				if c.Type == v1.NodeReady {
					node = c.LastHeartbeatTime.Time
				}
			}
			if l.Spec.RenewTime != nil {
				lease = l.Spec.RenewTime.Time
			}
			return l.ResourceVersion, node, lease
		}
		version, node, lease := heard()
		testenv.Eventually(t, soon, func() error {
			v, n, l := heard()
			if v != version { // something was stored, for example because a node has a new session: check again
				err := fmt.Errorf("a heartbeat was stored: revision %s, then %s", version, v)
				version, node, lease = v, n, l
				return err
			}
			if !n.After(node) || !l.After(lease) {
				return fmt.Errorf("cp%d: the node's heartbeats are %v, then %v; its Lease has %v, then %v", i+1,
					node, n, lease, l)
			}
			return nil
		})
	}
}
