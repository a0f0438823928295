package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"path/filepath"

	"keelson.dev/keelson/internal/durable"
)

const (
	pemCert = "CERTIFICATE"
	pemKey  = "PRIVATE KEY"
	pemCSR  = "CERTIFICATE REQUEST"
	pemPub  = "PUBLIC KEY"
)

// EncodeCert encodes a DER certificate as PEM.
func EncodeCert(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: der})
}

// DecodeCert decodes a certificate, which must be the first PEM block in data.
func DecodeCert(data []byte) (*x509.Certificate, error) {
	der, err := firstBlock(data, pemCert)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("pki: encoding a private key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der}), nil
}

func decodeKey(data []byte) (*ecdsa.PrivateKey, error) {
	der, err := firstBlock(data, pemKey)
	if err != nil {
		return nil, err
	}
	k, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, err
	}
	key, ok := k.(*ecdsa.PrivateKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, errors.New("want an ECDSA key on P-256")
	}
	return key, nil
}

// encodePublic encodes public keys as PEM, without duplicates.
func encodePublic(keys []*ecdsa.PublicKey) (out []byte, err error) {
	seen := map[string]bool{}
	for _, k := range keys {
		der, err := x509.MarshalPKIXPublicKey(k)
		if err != nil {
			return nil, fmt.Errorf("pki: encoding a public key: %w", err)
		}
		if !seen[string(der)] {
			seen[string(der)] = true
			out = append(out, pem.EncodeToMemory(&pem.Block{Type: pemPub, Bytes: der})...)
		}
	}
	return out, nil
}

func decodePublic(text []byte) (out []*ecdsa.PublicKey, err error) {
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != pemPub {
			return nil, fmt.Errorf("PEM block is %q, want %q", block.Type, pemPub)
		}
		k, err := x509.ParsePKIXPublicKey(block.Bytes)
		if err != nil {
			return nil, err
		}
		key, ok := k.(*ecdsa.PublicKey)
		if !ok || key.Curve != elliptic.P256() {
			return nil, errors.New("want an ECDSA key on P-256")
		}
		out = append(out, key)
	}
	return out, nil
}

func firstBlock(data []byte, want string) ([]byte, error) {
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, errors.New("no PEM block")
	}
	if block.Type != want {
		return nil, fmt.Errorf("PEM block is %q, want %q", block.Type, want)
	}
	return block.Bytes, nil
}

// WriteFile writes a file with mode 0600 atomically and durably. An existing file is replaced.
func WriteFile(path string, data []byte) error {
	o := durable.Options{Level: durable.Persistent, TempPattern: "." + filepath.Base(path) + "-"}
	if err := durable.WriteWith(path, data, o); err != nil {
		return fmt.Errorf("pki: writing %s: %w", path, err)
	}
	return nil
}
