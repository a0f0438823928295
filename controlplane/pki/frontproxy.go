package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"fmt"
)

// FrontProxyUser is the common name in the client certificate with which this API server forwards
// requests to aggregated API servers. These servers accept the user in the headers of such requests
// as authenticated.
const FrontProxyUser = "keelson-front-proxy"

// FrontProxyCA returns the CA that issues the client certificate of FrontProxyUser. This CA is
// separate from the cluster CA: its certificates do not authenticate at this API server, and
// certificates of the cluster CA cannot forward users to aggregated API servers. Every replica
// derives the same key from the cluster's secret, so no further secret is distributed.
func (t *Trust) FrontProxyCA() (*CA, error) {
	key, err := t.derivedKey("keelson front proxy CA")
	if err != nil {
		return nil, err
	}
	tmpl := &x509.Certificate{
		SerialNumber: newSerial(), Subject: pkix.Name{CommonName: "keelson-front-proxy-ca@" + t.ClusterName()},
		NotBefore: t.CA.Cert.NotBefore, NotAfter: t.CA.Cert.NotAfter,
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("pki: signing the front proxy CA's certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("pki: reading the front proxy CA's certificate: %w", err)
	}
	return &CA{Cert: cert, key: key}, nil
}

// derivedKey returns a P-256 key that is derived from the cluster's secret and from purpose.
// Another purpose results in an independent key.
func (t *Trust) derivedKey(purpose string) (*ecdsa.PrivateKey, error) {
	for i := range 128 {
		raw, err := hkdf.Key(sha256.New, t.EncryptionKey, nil, fmt.Sprintf("%s %d", purpose, i), 32)
		if err != nil {
			return nil, fmt.Errorf("pki: deriving a key: %w", err)
		}
		// Almost all values of these bytes are a valid scalar of the curve.
		if key, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), raw); err == nil {
			return key, nil
		}
	}
	return nil, fmt.Errorf("pki: no key can be derived for %q", purpose)
}

// SecretID returns an identifier of the cluster's secret, from which the secret cannot be computed.
func (t *Trust) SecretID() string {
	id, err := hkdf.Key(sha256.New, t.EncryptionKey, nil, "keelson name of the secret", 8)
	if err != nil {
		panic(err) // cannot happen: the length is valid
	}
	return hex.EncodeToString(id)
}
