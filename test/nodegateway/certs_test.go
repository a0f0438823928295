package nodegateway_test

import (
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/nodegateway"
)

// A node that renews its certificate while all of its connections stay is shown with the new one, and with that of its
// server. Replicas with which it has no session know the one with which it connected alone, and say so. F51
func TestRenewedCertificateIsShown(t *testing.T) {
	b := newBed(t, "cp1", "cp2")
	b.nodeIPs = []string{"127.0.0.1"}
	// Certificates begin five minutes in the past: two thirds of this life end in half a second.
	b.certLife.Store(int64(5*time.Minute/2 + 750*time.Millisecond))
	b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.eventually("the new certificate is shown", func() error {
		h := b.holder("w1")
		if h == nil {
			return fmt.Errorf("w1 has no session")
		}
		all := h.fleet.Certificates()["w1"]
		if len(all) != 2 || all[0].Use != nodegateway.UseAgent || all[1].Use != nodegateway.UseServing || !all[0].Told || !all[1].Told {
			return fmt.Errorf("w1 has %+v", all)
		}
		if c := all[0]; time.Until(c.Expires) < time.Hour || time.Until(c.RenewsAt()) < time.Hour {
			return fmt.Errorf("that of the agent ends %s, is renewed %s", c.Expires, c.RenewsAt())
		}
		for _, r := range b.replicas {
			if other := r.fleet.Certificates()["w1"]; r != h && len(other) > 0 && (len(other) != 1 || other[0].Told) {
				return fmt.Errorf("%s, which has no session with w1, says %+v", r.name, other)
			}
		}
		return nil
	})
}
