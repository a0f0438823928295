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

	"keelson.dev/keelson/internal/wakeup"
)

// Names of the files of the node's identity, in the state folder.
const (
	nodeFile = "node.pem" // key and certificate in one file, so that both are replaced atomically
	caFile   = "ca.crt"
)

// joinToken is a parsed join token of the form keelson1.node.ID.SECRET.CAHASH. The hash pins the
// cluster CA, because the joining node does not have the CA certificate yet.
type joinToken struct {
	text   string
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
		return joinToken{}, errors.New("the join token is malformed: its last field is not a SHA-256 hash")
	}
	return joinToken{strings.TrimSpace(t), strings.ToLower(f[4])}, nil
}

// identity is the node's key, its certificate, and the CAs that it trusts. It is safe for
// concurrent use, and may change while connections use it.
type identity struct {
	mu              sync.RWMutex
	cert            *tls.Certificate
	trusted         trustedCAs
	serverUntrusted bool // the latest server showed a certificate of an unknown CA

	renewNow wakeup.Signal // a value requests a renewal before renewalTime
}

var errNoIdentity = errors.New("the node has no valid certificate")

// loadIdentity reads the node's identity from the folder dir. It returns errNoIdentity if the
// folder has no certificate. It returns an error that wraps errNoIdentity if the certificate has
// expired at the time now.
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
		return nil, fmt.Errorf("the certificate in %s belongs to %s, but this node is %s", dir,
			leaf.Subject.CommonName, want)
	}
	if now.After(leaf.NotAfter) {
		return nil, fmt.Errorf("%w: its certificate expired at %s", errNoIdentity, leaf.NotAfter.Format(time.RFC3339))
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
	b, err := parseTrustedCAs(caPEM)
	if err != nil {
		return nil, err
	}
	return &identity{cert: &cert, trusted: b, renewNow: wakeup.New()}, nil
}

func (id *identity) currentCertificate() *tls.Certificate {
	id.mu.RLock()
	defer id.mu.RUnlock()
	return id.cert
}

// tlsConfig returns the TLS configuration of a client that connects to host. It uses the
// certificate and the trusted CAs that id has at the time of each handshake.
func (id *identity) tlsConfig(host string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: host,
		// VerifyConnection verifies the server with the current CAs instead: RootCAs of a
		// configuration in use cannot change.
		InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			o := x509.VerifyOptions{Roots: id.rootPool(), DNSName: host, Intermediates: x509.NewCertPool(),
				KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
			for _, c := range cs.PeerCertificates[1:] {
				o.Intermediates.AddCert(c)
			}
			_, err := cs.PeerCertificates[0].Verify(o)
			var unknown x509.UnknownAuthorityError
			id.setServerUntrusted(errors.As(err, &unknown))
			if err != nil {
				return &tls.CertificateVerificationError{UnverifiedCertificates: cs.PeerCertificates, Err: err}
			}
			return nil
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return id.currentCertificate(), nil
		},
	}
}

// renewalTime returns the time at which the node's certificate is renewed: after two thirds of its
// lifetime.
func (id *identity) renewalTime() time.Time {
	leaf := id.currentCertificate().Leaf
	return leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 3 * 2)
}

// replaceCertificate stores a new key and certificate (PEM) in nodeFile in the folder dir, and then
// uses them.
func (id *identity) replaceCertificate(dir string, keyAndCert []byte) error {
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

// adoptIdentity replaces the certificate and the trusted CAs of id with those of other. The caller
// must have stored other on disk.
func (id *identity) adoptIdentity(other *identity) {
	cert, b := other.currentCertificate(), other.currentCAs()
	id.mu.Lock()
	defer id.mu.Unlock()
	id.cert, id.trusted, id.serverUntrusted = cert, b, false
}

// signingRequest is a certificate signing request and its private key. A retry after a lost
// response uses the same key, so that the replica recognizes the request.
type signingRequest struct {
	key []byte // PEM
	der []byte
}

func newSigningRequest(node string, addresses ...net.IP) (signingRequest, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return signingRequest{}, fmt.Errorf("create the node's key: %w", err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject:     pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
		IPAddresses: addresses,
	}, key)
	if err != nil {
		return signingRequest{}, fmt.Errorf("create the node's signing request: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return signingRequest{}, fmt.Errorf("encode the node's key: %w", err)
	}
	return signingRequest{pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), csr}, nil
}

// pinnedTLSConfig returns the TLS configuration of a client that enrolls. The server must present a
// certificate for host, with a chain to the CA that the token pins.
func (t joinToken) pinnedTLSConfig(host string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		// During a rotation of the CA, a replica has one certificate per CA. This name makes it
		// present the certificate of the pinned CA.
		ServerName: t.caHash[:32] + ".ca.keelson.internal",
		// VerifyConnection verifies the chain instead: the node knows only the hash of the CA, not
		// its certificate.
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
				return errors.New("the server does not belong to the cluster of the join token: no CA in its chain " +
					"has the token's hash")
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

// checkCA returns an error if the PEM text caPEM does not contain the CA that the token pins.
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
