package session

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// The files of a node's identity in the state folder.
const (
	nodeFile = "node.pem" // key and certificate in one file, so that they are replaced together
	caFile   = "ca.crt"
)

// joinToken is keelson1.node.ID.SECRET.CAHASH: the hash pins the cluster's CA before it is known.
type joinToken struct {
	whole  string
	caHash string // SHA-256 of the CA's public key, hex
}

func parseToken(t string) (joinToken, error) {
	f := strings.Split(strings.TrimSpace(t), ".")
	if len(f) != 5 || f[0] != "keelson1" {
		return joinToken{}, errors.New("the join token is malformed: want keelson1.node.ID.SECRET.CAHASH")
	}
	if f[1] != "node" {
		return joinToken{}, fmt.Errorf("the join token is for %q, not for a node", f[1])
	}
	if b, err := hex.DecodeString(f[4]); err != nil || len(b) != sha256.Size {
		return joinToken{}, errors.New("the join token is malformed: its last field is no SHA-256")
	}
	return joinToken{strings.TrimSpace(t), strings.ToLower(f[4])}, nil
}

// identity is the node's key and certificate, renewed while in use, and whom it believes.
type identity struct {
	mu       sync.RWMutex
	cert     *tls.Certificate
	believed believed
	strange  bool // a server has shown a certificate by none that is believed

	hurry chan struct{} // buffered: the certificate is to be renewed before its time
}

var errNoIdentity = errors.New("the node has no certificate yet")

// loadIdentity reads the identity from dir; errNoIdentity when there is none. An expired one is errNoIdentity too,
// wrapped with when it expired.
func loadIdentity(dir, node string, now time.Time) (*identity, error) {
	data, err := os.ReadFile(filepath.Join(dir, nodeFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errNoIdentity
	}
	if err != nil {
		return nil, fmt.Errorf("read the node's certificate: %w", err)
	}
	ca, err := os.ReadFile(filepath.Join(dir, caFile))
	if err != nil {
		return nil, fmt.Errorf("read the cluster CA: %w", err)
	}
	id, err := newIdentity(data, ca)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	leaf := id.cert.Leaf
	if want := "system:node:" + node; leaf.Subject.CommonName != want {
		return nil, fmt.Errorf("the certificate in %s is of %s, this node is %s", dir, leaf.Subject.CommonName, want)
	}
	if now.After(leaf.NotAfter) {
		return nil, fmt.Errorf("%w: the one it has expired at %s", errNoIdentity, leaf.NotAfter.Format(time.RFC3339))
	}
	return id, nil
}

func newIdentity(keyAndCert, caPEM []byte) (*identity, error) {
	cert, err := tls.X509KeyPair(keyAndCert, keyAndCert)
	if err != nil {
		return nil, fmt.Errorf("the node's certificate: %w", err)
	}
	if cert.Leaf == nil {
		if cert.Leaf, err = x509.ParseCertificate(cert.Certificate[0]); err != nil {
			return nil, fmt.Errorf("the node's certificate: %w", err)
		}
	}
	b, err := parseBelieved(caPEM)
	if err != nil {
		return nil, err
	}
	return &identity{cert: &cert, believed: b, hurry: make(chan struct{}, 1)}, nil
}

func (id *identity) current() *tls.Certificate {
	id.mu.RLock()
	defer id.mu.RUnlock()
	return id.cert
}

// tls is the configuration of every connection to a host; it follows renewals, and whom to believe.
func (id *identity) tls(host string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: host,
		// RootCAs cannot change in a configuration that is in use: verifying is ours, below, and does what the package would
		// have done.
		InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			o := x509.VerifyOptions{Roots: id.roots(), DNSName: host, Intermediates: x509.NewCertPool(),
				KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
			for _, c := range cs.PeerCertificates[1:] {
				o.Intermediates.AddCert(c)
			}
			_, err := cs.PeerCertificates[0].Verify(o)
			var unknown x509.UnknownAuthorityError
			id.met(errors.As(err, &unknown))
			if err != nil {
				return &tls.CertificateVerificationError{UnverifiedCertificates: cs.PeerCertificates, Err: err}
			}
			return nil
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return id.current(), nil
		},
	}
}

// renewAt is two thirds into the certificate's life.
func (id *identity) renewAt() time.Time {
	leaf := id.current().Leaf
	return leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 3 * 2)
}

// replace stores a new key and certificate on disk, then uses them.
func (id *identity) replace(dir string, keyAndCert []byte) error {
	cert, err := tls.X509KeyPair(keyAndCert, keyAndCert)
	if err != nil {
		return fmt.Errorf("the renewed certificate: %w", err)
	}
	if cert.Leaf == nil {
		if cert.Leaf, err = x509.ParseCertificate(cert.Certificate[0]); err != nil {
			return fmt.Errorf("the renewed certificate: %w", err)
		}
	}
	if err := writeFile(filepath.Join(dir, nodeFile), keyAndCert); err != nil {
		return err
	}
	id.mu.Lock()
	id.cert = &cert
	id.mu.Unlock()
	return nil
}

// adopt takes another identity's certificate and whom it believes, which are on disk already.
func (id *identity) adopt(other *identity) {
	cert, b := other.current(), other.believes()
	id.mu.Lock()
	defer id.mu.Unlock()
	id.cert, id.believed, id.strange = cert, b, false
}

// signingRequest asks for a certificate. One that asks again for want of an answer asks with the same key: then it is
// known as the one that asked before.
type signingRequest struct {
	key []byte // PEM
	der []byte
}

func newRequest(node string, addresses ...net.IP) (signingRequest, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return signingRequest{}, fmt.Errorf("make the node's key: %w", err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject:     pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
		IPAddresses: addresses,
	}, key)
	if err != nil {
		return signingRequest{}, fmt.Errorf("make the node's signing request: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return signingRequest{}, fmt.Errorf("encode the node's key: %w", err)
	}
	return signingRequest{pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), csr}, nil
}

// pinned is the TLS configuration for enrolment: the server must present a chain to the CA that the token
// pins, for the host that was dialled.
func (t joinToken) pinned(host string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		// While one CA gives way to another a replica can show certificates of both: this asks for that of the token.
		ServerName: t.caHash[:32] + ".ca.keelson.internal",
		// Verification is ours, below: the CA is known by its hash only.
		InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			var ca *x509.Certificate
			between := x509.NewCertPool()
			for _, c := range cs.PeerCertificates {
				sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
				if c.IsCA && hex.EncodeToString(sum[:]) == t.caHash {
					ca = c
				} else {
					between.AddCert(c)
				}
			}
			if ca == nil {
				return errors.New("the server does not belong to the cluster of the join token: no CA in its chain has the token's hash")
			}
			roots := x509.NewCertPool()
			roots.AddCert(ca)
			_, err := cs.PeerCertificates[0].Verify(x509.VerifyOptions{
				DNSName: host, Roots: roots, Intermediates: between,
				KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
			})
			return err
		},
	}
}

// checkCA says whether the PEM holds the pinned CA.
func (t joinToken) checkCA(caPEM []byte) error {
	for rest := caPEM; ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			return errors.New("the control plane sent a CA other than the one that the join token pins")
		}
		c, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			continue
		}
		if sum := sha256.Sum256(c.RawSubjectPublicKeyInfo); hex.EncodeToString(sum[:]) == t.caHash {
			return nil
		}
	}
}
