package nodegateway_test

import (
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	gatewaysession "keelson.dev/keelson/controlplane/nodegateway/session"
)

// A node that renews its certificate while all of its connections stay is shown with the new one, and with that of its
// server. Replicas with which it has no session know the one with which it connected alone, and say so. F51
func TestRenewedCertificateIsShown(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	b.nodeIPs = []string{"127.0.0.1"}
	// Certificates begin five minutes in the past: two thirds of this life end in half a second.
	b.certLife.Store(int64(5*time.Minute/2 + 750*time.Millisecond))
	b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.awaitCondition("the new certificate is shown", func() error {
		h := b.sessionHolder("w1")
		if h == nil {
			return fmt.Errorf("w1 has no session")
		}
		all := h.fleet.NodeCertificates()["w1"]
		if len(all) != 2 || all[0].Use != gatewaysession.UseAgent || all[1].Use != gatewaysession.UseServing ||
			!all[0].Reported || !all[1].Reported {
			return fmt.Errorf("w1 has %+v", all)
		}
		if c := all[0]; time.Until(c.NotAfter) < time.Hour || time.Until(c.RenewsAt()) < time.Hour {
			return fmt.Errorf("that of the agent ends %s, is renewed %s", c.NotAfter, c.RenewsAt())
		}
		for _, r := range b.replicas {
			if other := r.fleet.NodeCertificates()["w1"]; r != h && len(other) > 0 &&
				(len(other) != 1 || other[0].Reported) {
				return fmt.Errorf("%s, which has no session with w1, reports %+v", r.name, other)
			}
		}
		return nil
	})
}
