package pki

import (
	"crypto/x509"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// A revocation covers certificates issued up to its second, and no certificate issued from After
// on.
func TestRevocation(t *testing.T) {
	at := t0.Add(700 * time.Millisecond)
	r, ok := ParseRevocation(Revocation{Node: "w1", At: at, UID: "u1"}.Record())
	if !ok || r.Node != "w1" || r.UID != "u1" {
		t.Fatalf("%+v %v", r, ok)
	}
	issued := func(when time.Time) *x509.Certificate {
		return &x509.Certificate{NotBefore: when.Add(-Backdate).Truncate(time.Second)} // as stored in a certificate
	}
	for _, c := range []struct {
		when time.Time
		want bool
	}{{at.Add(-time.Hour), true}, {at.Add(-time.Second), true}, {at, true}, {r.After(), false},
		{at.Add(2 * time.Second), false}} {
		if got := r.Covers(issued(c.when)); got != c.want {
			t.Errorf("issued %s after the revocation: covered %v", c.when.Sub(at), got)
		}
	}
	damaged := Revocation{Node: "w1", At: at}.Record()
	damaged.Data["not-before"] = []byte("soon")
	if r, ok := ParseRevocation(damaged); !ok || !r.Covers(issued(at.Add(time.Hour))) {
		t.Error("a record that cannot be read revokes nothing")
	}
	if _, ok := ParseRevocation(&corev1.Secret{}); ok {
		t.Error("any Secret is a revocation")
	}
}

// A revocation extends past its time, but not so far that newer certificates would not be valid
// yet. A further revocation at the same time covers certificates issued after the first one and
// keeps its fields.
func TestRevocationsFollowOneAnother(t *testing.T) {
	first := NewRevocation("w1", t0)
	first.UID, first.Named = "u1", true
	if ahead := first.After().Sub(t0); ahead <= time.Minute || ahead >= Backdate {
		t.Errorf("it reaches %v past its moment, what is signed is backdated by %v", ahead, Backdate)
	}
	issued := &x509.Certificate{NotBefore: first.After().Add(-Backdate)}
	again := NewRevocation("w1", t0).Extend(first)
	if first.Covers(issued) || !again.Covers(issued) || again.UID != "u1" || !again.Named {
		t.Errorf("after %+v comes %+v", first, again)
	}
	if later := NewRevocation("w1", t0.Add(time.Hour)); later.Extend(first).At != later.At {
		t.Errorf("an hour later: %+v", later.Extend(first))
	}
	later := NewRevocation("w1", t0.Add(time.Hour))
	for _, both := range []Revocation{first.Merge(later), later.Merge(first)} {
		if both.At != later.At || !both.Named {
			t.Errorf("what two revoke that do not know of each other: %+v", both)
		}
	}
}
