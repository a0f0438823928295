package session

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/internal/virtual"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// authority is a CA that signs certificates of nodes.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{t: t, key: key}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true,
		BasicConstraintsValid: true,
		NotBefore:             time.Now().Add(-time.Hour), NotAfter: time.Now().Add(87600 * time.Hour),
		KeyUsage: x509.KeyUsageCertSign}
	a.cert = a.signCertificate(c, c, key)
	return a
}

func (a *authority) signCertificate(c, by *x509.Certificate, key *ecdsa.PrivateKey) *x509.Certificate {
	a.t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, c, by, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return out
}

func (a *authority) caPEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// nodePEM returns key and certificate of node w1, valid from now on for life.
func (a *authority) nodePEM(life time.Duration) []byte {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	leaf := a.signCertificate(&x509.Certificate{SerialNumber: big.NewInt(2),
		Subject:   pkix.Name{CommonName: "system:node:w1", Organization: []string{"system:nodes"}},
		NotBefore: time.Now(), NotAfter: time.Now().Add(life),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, a.cert, key)
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	return append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Raw}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})...)
}

// newIdentifiedSession returns a session whose node has a certificate issued by the authority.
func newIdentifiedSession(t *testing.T, by *authority, life time.Duration) *Session {
	t.Helper()
	s := New(Config{NodeName: "w1", StateDir: t.TempDir(), RunDir: t.TempDir(), Facts: &v1.Node{},
		Log: slog.New(slog.DiscardHandler)})
	both := by.nodePEM(life)
	if err := os.WriteFile(filepath.Join(s.cfg.StateDir, nodeFile), both, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.cfg.StateDir, caFile), by.caPEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.creds.id, err = loadIdentity(s.cfg.StateDir, "w1", time.Now()); err != nil {
		t.Fatal(err)
	}
	close(s.creds.identified)
	return s
}

// A certificate is renewed when two thirds of its lifetime have passed, and not earlier. After a
// failure the renewal is retried, and the next renewal is on time. When another CA becomes the
// signer, the certificate is renewed at once. F51
func TestCertificatesRenewAtTwoThirds(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		old, next := newAuthority(t, "old"), newAuthority(t, "next")
		const life = 90 * time.Hour
		s := newIdentifiedSession(t, old, life)
		ctx, cancel := context.WithCancel(t.Context())
		began, by := time.Now(), old
		var at []time.Duration
		ended := make(chan error, 1)
		go func() {
			ended <- s.creds.runRenewals(ctx, s.creds.id, time.Now, func(_ context.Context, id *identity) error {
				at = append(at, time.Since(began))
				if len(at) == 1 {
					return errors.New("no replica answers")
				}
				began = time.Now()
				return id.replaceCertificate(s.cfg.StateDir, by.nodePEM(life))
			})
		}()
		time.Sleep(130 * time.Hour)
		virtual.Wait()
		if len(at) != 3 || at[0] < 60*time.Hour || at[0] > 63*time.Hour || at[1] > at[0]+10*time.Second ||
			at[2] < 60*time.Hour || at[2] > 63*time.Hour {
			t.Errorf("renewed %v after each certificate was made", at)
		}
		by, at, began = next, nil, time.Now()
		trust := &fleetv1.Trust{CaPem: append(old.caPEM(), next.caPEM()...), Signs: authorityID(next.cert),
			SinceUnixMilli: 7}
		if err := s.creds.applyTrust(trust); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		if len(at) != 2 || at[0] > maxRenewalJitter || at[1] > 5*time.Second ||
			!slices.Equal(s.creds.authoritiesReport().Shows, []string{authorityID(next.cert)}) {
			t.Errorf("renewed %v after another authority signs; %v, want %s", at, s.creds.authoritiesReport(),
				authorityID(next.cert))
		}
		cancel()
		<-ended
	})
}

// A machine boots with its clock years behind, and the clock is corrected later. Both certificates
// are then renewed within an hour when they are due. F51
func TestCertificatesRenewAfterTheClockIsSet(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		const life, behind = 365 * 24 * time.Hour, 3 * 365 * 24 * time.Hour
		s := newIdentifiedSession(t, newAuthority(t, "ca"), life)
		time.Sleep(300 * 24 * time.Hour) // since the certificate was issued
		var wrong atomic.Int64
		wrong.Store(int64(-behind))
		now := func() time.Time { return time.Now().Add(time.Duration(wrong.Load())).Round(0) }
		ctx, cancel := context.WithCancel(t.Context())
		renewed, signed := 0, 0
		ended := make(chan error, 2)
		go func() {
			ended <- s.creds.runRenewals(ctx, s.creds.id, now, func(context.Context, *identity) error {
				renewed++
				return nil
			})
		}()
		go func() {
			ended <- s.creds.runServingCertificate(ctx, now, func(context.Context) (time.Time, error) {
				signed++
				return now().Add(behind + 65*24*time.Hour), nil
			})
		}()
		time.Sleep(time.Minute)
		virtual.Wait()
		if renewed != 0 || signed != 1 {
			t.Errorf("before the clock is set: renewed %d times, signed %d times; want 0 and 1", renewed, signed)
		}
		wrong.Store(0)
		time.Sleep(clockCheckInterval)
		virtual.Wait()
		if renewed == 0 || signed < 2 {
			t.Errorf("an hour after the clock was set: renewed %d times, signed %d times; want one more of each",
				renewed, signed)
		}
		cancel()
		<-ended
		<-ended
	})
}

// A pod's token is renewed at four fifths of its lifetime, and the previous one is no longer
// returned. F51
func TestTokensRenewEarly(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		s := New(Config{NodeName: "w1", StateDir: t.TempDir(), RunDir: t.TempDir(), Facts: &v1.Node{}})
		asked := 0
		answer := func() {
			for _, m := range s.tokens.unsentRequests() {
				asked++
				s.tokens.handleToken(&fleetv1.Token{Id: m.GetTokenRequest().Id, Token: string(rune('a' + asked - 1)),
					ExpiresUnix: time.Now().Add(time.Hour).Unix()})
			}
		}
		pod := &v1.Pod{}
		pod.UID = "u"
		for _, c := range []struct {
			after time.Duration
			want  string
		}{{0, "a"}, {47 * time.Minute, "a"}, {2 * time.Minute, "b"}, {47 * time.Minute, "b"}, {2 * time.Minute, "c"}} {
			time.Sleep(c.after)
			got := make(chan string, 1)
			go func() {
				text, _, err := s.Token(t.Context(), pod, "", 3600)
				if err != nil {
					text = err.Error()
				}
				got <- text
			}()
			virtual.Wait()
			answer()
			if text := <-got; text != c.want {
				t.Errorf("%s later the token is %q, want %q", c.after, text, c.want)
			}
		}
	})
}

// A message of a replica that lags behind changes nothing, nor does one without a CA. The latest
// trusted CAs survive a restart, and a file of an earlier release is read. F51
func TestBelieved(t *testing.T) {
	old, next := newAuthority(t, "old"), newAuthority(t, "next")
	s := newIdentifiedSession(t, old, time.Hour)
	both := append(old.caPEM(), next.caPEM()...)
	for _, c := range []struct {
		what string
		say  *fleetv1.Trust
		want []string
		bad  bool
	}{
		{"both", &fleetv1.Trust{CaPem: both, Signs: authorityID(old.cert), SinceUnixMilli: 20},
			[]string{authorityID(old.cert), authorityID(next.cert)}, false},
		{"a replica that is behind", &fleetv1.Trust{CaPem: old.caPEM(), Signs: authorityID(old.cert),
			SinceUnixMilli: 10}, []string{authorityID(old.cert), authorityID(next.cert)}, false},
		{"nothing", &fleetv1.Trust{SinceUnixMilli: 30}, []string{authorityID(old.cert), authorityID(next.cert)}, true},
		{"too much", &fleetv1.Trust{CaPem: slices.Repeat(both, 1000), SinceUnixMilli: 30},
			[]string{authorityID(old.cert), authorityID(next.cert)}, true},
		{"one that is no authority", &fleetv1.Trust{CaPem: old.nodePEM(time.Hour), SinceUnixMilli: 30},
			[]string{authorityID(old.cert), authorityID(next.cert)}, true},
		{"the new one alone", &fleetv1.Trust{CaPem: next.caPEM(), Signs: authorityID(next.cert), SinceUnixMilli: 30},
			[]string{authorityID(next.cert)}, false},
	} {
		if err := s.creds.applyTrust(c.say); (err != nil) != c.bad {
			t.Errorf("%s: %v", c.what, err)
		}
		again, err := loadIdentity(s.cfg.StateDir, "w1", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if got := s.creds.authoritiesReport().Believes; !slices.Equal(got, c.want) ||
			!slices.Equal(authorityIDs(again.currentCAs().certificates), c.want) {
			t.Errorf("%s: believes %v, and %v after a start; want %v", c.what, got,
				authorityIDs(again.currentCAs().certificates), c.want)
		}
		if was := s.creds.id.currentCAs().sinceUnixMilli; again.currentCAs().sinceUnixMilli != was {
			t.Errorf("%s: since %d, and %d after a start", c.what, was, again.currentCAs().sinceUnixMilli)
		}
	}
}
