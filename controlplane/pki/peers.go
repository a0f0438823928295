package pki

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/internal/durable"
)

// Optional files in the folder of a replica's keys and CAs. They contain the CAs of the connections
// between replicas (peer CAs), if these are not signed by the cluster CA.
const (
	FilePeers        = "peers.pem"         // certificate and key of the signing peer CA
	FilePeersTrusted = "peers-trusted.pem" // certificates
)

// peerCA returns the CA that signs this replica's peer certificates.
func (t *Trust) peerCA() *CA {
	if t.PeerCA != nil {
		return t.PeerCA
	}
	return t.CA
}

// PeerAuthorities returns the certificates of the CAs that may sign replicas' peer certificates.
// The first is the certificate of the CA that signs those of this replica.
func (t *Trust) PeerAuthorities() []*x509.Certificate {
	return append([]*x509.Certificate{t.peerCA().Cert}, t.PeerTrusted...)
}

// Peers contains the peer CAs, which replicas trust in connections to each other, and this
// replica's peer certificate. It reads them from the folder of the replica's keys and CAs. Reload
// reads the folder again, even while connections are in use; new connections use the result. Peers
// is safe for concurrent use.
type Peers struct {
	dir     string
	profile Profile
	now     func() time.Time
	current atomic.Pointer[peerTrust]
}

type peerTrust struct {
	files [2][]byte           // contents of the files from which the CAs were read
	all   []*x509.Certificate // result of PeerAuthorities
	cert  *Rotator
	pool  *x509.CertPool
}

// NewPeers returns the Peers with the CAs in the folder dir. profile describes this replica's peer
// certificates.
func NewPeers(dir string, profile Profile, now func() time.Time) (*Peers, error) {
	p := &Peers{dir: dir, profile: profile, now: now}
	_, err := p.Reload()
	return p, err
}

// Reload reads the peer CAs of the folder again and reports whether they have changed. If they
// cannot be read, the previous CAs stay in use.
func (p *Peers) Reload() (changed bool, err error) {
	var files [2][]byte
	for i, name := range []string{FilePeers, FilePeersTrusted} {
		if files[i], err = readOptional(filepath.Join(p.dir, name)); err != nil {
			return false, err
		}
	}
	was := p.current.Load()
	if was != nil && bytes.Equal(was.files[0], files[0]) && bytes.Equal(was.files[1], files[1]) {
		return false, nil
	}
	t, err := Load(p.dir)
	if err != nil {
		return false, err
	}
	pool := x509.NewCertPool()
	all := t.PeerAuthorities()
	for _, c := range all {
		pool.AddCert(c)
	}
	p.current.Store(&peerTrust{files: files, all: all, cert: t.peerCA().Rotator(p.profile, p.now), pool: pool})
	return true, nil
}

// Authorities returns the certificates of the trusted peer CAs. The first is the certificate of the
// CA that signs this replica's certificates.
func (p *Peers) Authorities() []*x509.Certificate { return p.current.Load().all }

// Certificate returns this replica's current peer certificate.
func (p *Peers) Certificate() (*tls.Certificate, error) { return p.current.Load().cert.Certificate() }

// Server returns the TLS server configuration for connections between replicas. It accepts only
// client certificates with the organization GroupReplicas that are signed by a peer CA. The peer CA
// must be trusted at the time of the handshake. All other certificates of the cluster fail with
// ErrNotReplica.
func (p *Peers) Server() *tls.Config {
	c := &tls.Config{
		MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequireAndVerifyClientCert,
		// Sessions are not resumed: each handshake verifies the certificate, and handshakes are
		// rare.
		SessionTicketsDisabled: true,
	}
	c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now := p.current.Load()
		own := PeerTLS(now.pool, now.cert, p.now)
		own.SessionTicketsDisabled = true
		return own, nil
	}
	return c
}

// Client returns the TLS client configuration for connections between replicas. The server's
// certificate must fulfill the same conditions that Server requires of client certificates.
func (p *Peers) Client() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: PeerServerName,
		Time:       p.now,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return p.current.Load().cert.Certificate()
		},
		// RootCAs cannot change in a tls.Config that is in use. VerifyConnection therefore performs
		// the verification of crypto/tls itself.
		InsecureSkipVerify: true, //nolint:gosec // see above
		VerifyConnection: func(cs tls.ConnectionState) error {
			if len(cs.PeerCertificates) == 0 {
				return fmt.Errorf("%w: there is none", ErrNotReplica)
			}
			o := x509.VerifyOptions{
				Roots: p.current.Load().pool, CurrentTime: p.now(), DNSName: PeerServerName,
				KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, Intermediates: x509.NewCertPool(),
			}
			for _, c := range cs.PeerCertificates[1:] {
				o.Intermediates.AddCert(c)
			}
			if _, err := cs.PeerCertificates[0].Verify(o); err != nil {
				return fmt.Errorf("%w: %w", ErrNotReplica, err)
			}
			_, err := PeerName(cs)
			return err
		},
	}
}

// MakePeerCA creates a CA for connections between replicas, and writes its certificate and key to
// the new file path. It returns the certificate, and an error if the file exists.
func MakePeerCA(path, clusterName string, now time.Time) (*x509.Certificate, error) {
	ca, err := NewCA(clusterName+"-peers", now)
	if err != nil {
		return nil, err
	}
	text, err := ca.encodeCertAndKey()
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("pki: writing %s: %w", path, errors.Join(err, fs.ErrExist))
	}
	return ca.Cert, WriteFile(path, text)
}

// TrustPeerCA adds the CA in the file path to the trusted peer CAs in the folder dir, and returns
// its certificate.
func TrustPeerCA(dir, path string) (*x509.Certificate, error) {
	t, ca, err := loadTrustAndFile(dir, path)
	if err != nil {
		return nil, err
	}
	return ca.Cert, t.writePeerCAs(dir, append(t.PeerTrusted, ca.Cert))
}

// UsePeerCA makes the CA in the file path the signer of this replica's peer certificates, in the
// folder dir. It returns the CA's certificate. The previous CA remains trusted.
func UsePeerCA(dir, path string) (*x509.Certificate, error) {
	t, ca, err := loadTrustAndFile(dir, path)
	if err != nil {
		return nil, err
	}
	text, err := ca.encodeCertAndKey()
	if err != nil {
		return nil, err
	}
	// This list is written first, so that the previous CA is trusted at all times.
	if err := t.writePeerCAs(dir, append(t.PeerTrusted, t.peerCA().Cert)); err != nil {
		return nil, err
	}
	return ca.Cert, WriteFile(filepath.Join(dir, FilePeers), text)
}

// RemovePreviousPeerCAs removes all trusted peer CAs except the signing CA from the folder dir.
func RemovePreviousPeerCAs(dir string) error {
	err := os.Remove(filepath.Join(dir, FilePeersTrusted))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return durable.Sync(dir)
}

func loadTrustAndFile(dir, path string) (*Trust, *CA, error) {
	t, err := Load(dir)
	if err != nil {
		return nil, nil, err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	ca, err := decodeCertAndKey(text)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, ca, nil
}

// writePeerCAs writes list to the file of trusted peer CAs in the folder dir, without duplicates.
func (t *Trust) writePeerCAs(dir string, list []*x509.Certificate) error {
	return WriteFile(filepath.Join(dir, FilePeersTrusted), encodeCerts(list))
}

func encodeCerts(list []*x509.Certificate) []byte {
	var out []byte
	seen := map[string]bool{}
	for _, c := range list {
		if !seen[string(c.Raw)] {
			seen[string(c.Raw)] = true
			out = append(out, EncodeCert(c.Raw)...)
		}
	}
	return out
}

func decodeCerts(text []byte) ([]*x509.Certificate, error) {
	var out []*x509.Certificate
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != pemCert {
			return nil, fmt.Errorf("PEM block is %q, want %q", block.Type, pemCert)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		if !c.IsCA {
			return nil, fmt.Errorf("the certificate of %q is not a CA certificate", c.Subject.CommonName)
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, errors.New("no PEM block")
	}
	return out, nil
}

// encodeCertAndKey returns the CA's certificate and private key, one after the other, in PEM.
func (ca *CA) encodeCertAndKey() ([]byte, error) {
	key, err := encodeKey(ca.key)
	if err != nil {
		return nil, err
	}
	return append(ca.PEM(), key...), nil
}

func decodeCertAndKey(text []byte) (*CA, error) {
	cert, err := DecodeCert(text)
	if err != nil {
		return nil, fmt.Errorf("the certificate of an authority: %w", err)
	}
	_, rest := pem.Decode(text)
	key, err := decodeKey(rest)
	switch {
	case err != nil:
		return nil, fmt.Errorf("the key of an authority: %w", err)
	case !cert.IsCA:
		return nil, errors.New("the certificate is not a CA certificate")
	case !key.PublicKey.Equal(cert.PublicKey):
		return nil, errors.New("the key does not match the certificate")
	}
	return &CA{Cert: cert, key: key}, nil
}

// readOptional returns the contents of a file, or nil if the file does not exist.
func readOptional(path string) ([]byte, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("pki: %w", err)
	}
	return raw, nil
}
