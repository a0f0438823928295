package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"slices"
	"testing"
	"time"
)

// A signed certificate has the request's name, key and alternative names, and the usages of the
// signer, and nothing else. It never authenticates a replica or an administrator, and does not
// outlive the CA.
func TestSignRequest(t *testing.T) {
	now := time.Now().Truncate(time.Second).UTC()
	ca, err := NewCA("test", now)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	isCA, err := asn1.Marshal(struct{ CA bool }{true})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(orgs ...string) *x509.CertificateRequest {
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
			Subject:         pkix.Name{CommonName: "ann", Organization: orgs, Country: []string{"XX"}},
			DNSNames:        []string{"a.example"},
			ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: isCA}},
		}, key)
		if err != nil {
			t.Fatal(err)
		}
		r, err := x509.ParseCertificateRequest(der)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	sign := func(r *x509.CertificateRequest, life time.Duration) (*x509.Certificate, error) {
		pem, err := ca.SignRequest(r, x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
			life, now)
		if err != nil {
			return nil, err
		}
		return DecodeCert(pem)
	}
	c, err := sign(ask("team"), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if c.IsCA || c.KeyUsage != x509.KeyUsageDigitalSignature ||
		!slices.Equal(c.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}) ||
		!slices.Equal(c.Subject.Organization, []string{"team"}) || c.Subject.CommonName != "ann" ||
		len(c.Subject.Country) > 0 ||
		!slices.Equal(c.DNSNames, []string{"a.example"}) || !key.PublicKey.Equal(c.PublicKey) {
		t.Errorf("CA %t, usage %v %v, subject %s, names %v", c.IsCA, c.KeyUsage, c.ExtKeyUsage, c.Subject, c.DNSNames)
	}
	if _, err := c.Verify(x509.VerifyOptions{Roots: ca.Pool(), CurrentTime: now,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Error(err)
	}
	for life, want := range map[time.Duration]time.Time{
		time.Hour: now.Add(time.Hour), 24 * time.Hour: now.Add(24*time.Hour - Backdate), 2 * caLife: ca.Cert.NotAfter,
	} {
		if c, err := sign(ask(), life); err != nil || !c.NotAfter.Equal(want) || !IssuedAt(c).Equal(now) {
			t.Errorf("%v: %v, until %v, want %v; issued at %v", life, err, c.NotAfter, want, IssuedAt(c))
		}
	}
	for _, o := range []string{GroupReplicas, "system:masters"} {
		if _, err := sign(ask("team", o), time.Hour); !errors.Is(err, ErrRequest) {
			t.Errorf("organization %s: %v", o, err)
		}
	}
	now = ca.Cert.NotAfter.Add(time.Second)
	if _, err := sign(ask(), time.Hour); err == nil {
		t.Error("signed by a CA that has ended")
	}
}
