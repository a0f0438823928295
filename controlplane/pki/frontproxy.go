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

// FrontProxyUser is the name in the certificate by which aggregated APIs know that it is this API that forwards a
// request, and believe it whom it is from.
const FrontProxyUser = "keelson-front-proxy"

// FrontProxyCA is the authority of that certificate, apart from the cluster's: who is certified by it is nobody at this
// API, and no certificate of the cluster may speak for others at an aggregated one. Every replica derives the same key
// from the secret of the cluster, so that there is no further secret to hand out and to keep.
func (t *Trust) FrontProxyCA() (*CA, error) {
	key, err := t.derivedKey("keelson front proxy CA")
	if err != nil {
		return nil, err
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "keelson-front-proxy-ca@" + t.ClusterName()},
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

// derivedKey is a P-256 key that follows from the secret of the cluster and a purpose.
func (t *Trust) derivedKey(purpose string) (*ecdsa.PrivateKey, error) {
	for i := range 128 {
		raw, err := hkdf.Key(sha256.New, t.EncryptionKey, nil, fmt.Sprintf("%s %d", purpose, i), 32)
		if err != nil {
			return nil, fmt.Errorf("pki: deriving a key: %w", err)
		}
		// Hardly ever are the bytes no number below the order of the curve.
		if key, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), raw); err == nil {
			return key, nil
		}
	}
	return nil, fmt.Errorf("pki: no key can be derived for %q", purpose)
}

// SecretID names the secret of the cluster, and tells nothing of it.
func (t *Trust) SecretID() string {
	id, err := hkdf.Key(sha256.New, t.EncryptionKey, nil, "keelson name of the secret", 8)
	if err != nil {
		panic(err) // the length is right
	}
	return hex.EncodeToString(id)
}
