package pki

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// A sealed key can only be opened with the secret of its cluster and for its purpose.
func TestSealedKey(t *testing.T) {
	one, two := newTrust(t), newTrust(t)
	sealed, err := one.Seal("a", []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := one.Unseal("a", sealed); err != nil || string(got) != "secret" {
		t.Errorf("%q, %v", got, err)
	}
	damaged := slices.Clone(sealed)
	damaged[len(damaged)-1] ^= 1
	for name, open := range map[string]func() ([]byte, error){
		"another purpose": func() ([]byte, error) { return one.Unseal("b", sealed) },
		"another cluster": func() ([]byte, error) { return two.Unseal("a", sealed) },
		"damaged":         func() ([]byte, error) { return one.Unseal("a", damaged) },
		"nothing":         func() ([]byte, error) { return one.Unseal("a", nil) },
	} {
		if got, err := open(); !errors.Is(err, ErrNotOurs) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if _, err := one.Seal("a", make([]byte, maxSealedKeyBytes+1)); err == nil {
		t.Error("a key without bound is sealed")
	}
}

// Each step of a key rotation is performed twice. After each, the trust folder is complete and in
// effect. F51
func TestExchangeOnDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	first, err := Init(dir, "test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	peers, peer, err := NewPeerKey("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	service, key, err := NewServiceKey()
	if err != nil {
		t.Fatal(err)
	}
	formerPeer := PeerID(first.CA.Cert)
	formerKey, err := keyID(&first.ServiceKey.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	twice := func(step string, do func() error, ofPeers, ofService []string) {
		t.Helper()
		for range 2 {
			if err := do(); err != nil {
				t.Fatalf("%s: %v", step, err)
			}
			now, err := Load(dir)
			if err != nil {
				t.Fatalf("%s: %v", step, err)
			}
			var ids []string
			for _, c := range now.PeerAuthorities() {
				if id := PeerID(c); !slices.Contains(ids, id) {
					ids = append(ids, id)
				}
			}
			if !slices.Equal(ids, ofPeers) {
				t.Errorf("%s: authorities %v, want %v", step, ids, ofPeers)
			}
			tokens, err := NewServiceTokens(DefaultIssuer, now.ServiceKey, now.ServiceTrusted...)
			if err != nil {
				t.Fatal(err)
			}
			signs, accepted := tokens.KeyIDs()
			want := slices.Sorted(slices.Values(ofService))
			if signs != ofService[0] || !slices.Equal(accepted, want) {
				t.Errorf("%s: signs with %s, accepts %v, want %v", step, signs, accepted, ofService)
			}
		}
	}
	both := func(a, b error) error { return errors.Join(a, b) }
	twice("believe", func() error { return both(AddTrustedPeerCA(dir, peers), AddServiceKey(dir, service)) },
		[]string{formerPeer, peer}, []string{formerKey, key})
	twice("give up", func() error { return both(RemoveTrustedPeerCA(dir, peer), RemoveServiceKey(dir, key)) },
		[]string{formerPeer}, []string{formerKey})
	twice("believe again", func() error { return both(AddTrustedPeerCA(dir, peers), AddServiceKey(dir, service)) },
		[]string{formerPeer, peer}, []string{formerKey, key})
	twice("use", func() error { return both(SetSigningPeerCA(dir, peers), SetSigningServiceKey(dir, service)) },
		[]string{peer, formerPeer}, []string{key, formerKey})
	twice("forget", func() error {
		return both(RemoveTrustedPeerCA(dir, formerPeer), RemoveServiceKey(dir, formerKey))
	},
		[]string{peer}, []string{key})
	for _, name := range []string{FilePeersTrusted, FileServiceTrusted} {
		if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", name, err)
		}
	}
}
