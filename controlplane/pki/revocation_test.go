package pki

import (
	"crypto/x509"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// A revocation covers what was issued up to its second, and nothing that is issued from After on.
func TestRevocation(t *testing.T) {
	at := t0.Add(700 * time.Millisecond)
	r, ok := RevocationOf(Revocation{Node: "w1", At: at, UID: "u1"}.Record())
	if !ok || r.Node != "w1" || r.UID != "u1" {
		t.Fatalf("%+v %v", r, ok)
	}
	issued := func(when time.Time) *x509.Certificate {
		return &x509.Certificate{NotBefore: when.Add(-Backdate).Truncate(time.Second)} // as a certificate keeps it
	}
	for _, c := range []struct {
		when time.Time
		want bool
	}{{at.Add(-time.Hour), true}, {at.Add(-time.Second), true}, {at, true}, {r.After(), false}, {at.Add(2 * time.Second), false}} {
		if got := r.Covers(issued(c.when)); got != c.want {
			t.Errorf("issued %s after the revocation: covered %v", c.when.Sub(at), got)
		}
	}
	damaged := Revocation{Node: "w1", At: at}.Record()
	damaged.Data["not-before"] = []byte("soon")
	if r, ok := RevocationOf(damaged); !ok || !r.Covers(issued(at.Add(time.Hour))) {
		t.Error("a record that cannot be read revokes nothing")
	}
	if _, ok := RevocationOf(&corev1.Secret{}); ok {
		t.Error("any Secret is a revocation")
	}
}
