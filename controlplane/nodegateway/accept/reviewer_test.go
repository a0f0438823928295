package accept

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"testing"
	"time"

	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
)

// The limit of concurrent reviews is per node, and ended reviews do not count.
func TestReviewsAreBoundedPerNode(t *testing.T) {
	var r operationLimiter[string]
	var leave []func()
	for range maxReviews {
		out, ok := r.startOperation("w1", maxReviews)
		if !ok {
			t.Fatal("refused too early")
		}
		leave = append(leave, out)
	}
	if _, ok := r.startOperation("w1", maxReviews); ok {
		t.Error("one too many")
	}
	other, ok := r.startOperation("w2", maxReviews)
	if !ok {
		t.Fatal("another node has to wait for it")
	}
	leave[0]()
	again, ok := r.startOperation("w1", maxReviews)
	if !ok {
		t.Fatal("the place was not given back")
	}
	for _, f := range append(leave[1:], other, again) {
		f()
	}
	if len(r.count) != 0 {
		t.Errorf("still held: %v", r.count)
	}
}

// A review rejects a revoked client certificate of another node. F51
func TestRevokedClientOfANodesServer(t *testing.T) {
	issue := func(name string, at time.Time) []byte {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
			NotBefore: at.Add(-pki.Backdate), NotAfter: at.Add(time.Hour)}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	at := time.Now()
	secrets := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	s := NewReviewer(nil, &Revocations{secrets: secrets})
	w2 := api.NodeUserPrefix + "w2"
	old, renewed := issue(w2, at.Add(-time.Hour)), issue(w2, at.Add(time.Minute))
	if s.isRevokedClient(w2, old) {
		t.Error("revoked without a record")
	}
	if err := secrets.Add(pki.Revocation{Node: "w2", At: at}.Record()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, user string
		der        []byte
		want       bool
	}{
		{"revoked", w2, old, true},
		{"issued after the revocation", w2, renewed, false},
		{"another node", api.NodeUserPrefix + "w3", issue(api.NodeUserPrefix+"w3", at.Add(-time.Hour)), false},
		{"certificate of another name", w2, issue("admin", at.Add(-time.Hour)), true},
		{"not a certificate", w2, []byte("x"), true},
		{"agent of an earlier release", w2, nil, false},
		{"no node", "admin", issue("admin", at.Add(-time.Hour)), false},
	} {
		if got := s.isRevokedClient(c.user, c.der); got != c.want {
			t.Errorf("%s: revoked %v, want %v", c.name, got, c.want)
		}
	}
}
