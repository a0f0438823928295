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
)

// Optional files of a trust folder: the authority of the connections between
// replicas where it is not the cluster's CA, and further ones that are believed
// while one is exchanged for another.
const (
	FilePeers        = "peers.pem"         // certificate, then key
	FilePeersTrusted = "peers-trusted.pem" // certificates
)

// peerCA is the authority that signs this replica's peer certificates.
func (t *Trust) peerCA() *CA {
	if t.PeerCA != nil {
		return t.PeerCA
	}
	return t.CA
}

// PeerAuthorities are the certificates that make a replica: first the one that
// signs, then those that are believed beside it.
func (t *Trust) PeerAuthorities() []*x509.Certificate {
	return append([]*x509.Certificate{t.peerCA().Cert}, t.PeerTrusted...)
}

// Peers is the trust between replicas as the trust folder has it. It changes
// with the folder while connections go on: new ones use what Reload found last.
// Safe for concurrent use.
type Peers struct {
	dir     string
	profile Profile
	now     func() time.Time
	current atomic.Pointer[peerTrust]
}

type peerTrust struct {
	files [2][]byte           // what it was read from
	all   []*x509.Certificate // PeerAuthorities
	cert  *Rotator
	pool  *x509.CertPool
}

// NewPeers reads the folder. profile is that of this replica's certificates.
func NewPeers(dir string, profile Profile, now func() time.Time) (*Peers, error) {
	p := &Peers{dir: dir, profile: profile, now: now}
	_, err := p.Reload()
	return p, err
}

// Reload takes over what is in the folder now. When that cannot be read, or
// nothing has changed, everything stays as it was.
func (p *Peers) Reload() (changed bool, err error) {
	var files [2][]byte
	for i, name := range []string{FilePeers, FilePeersTrusted} {
		if files[i], err = optional(filepath.Join(p.dir, name)); err != nil {
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

// Authorities are those that are believed now, the one that signs first.
func (p *Peers) Authorities() []*x509.Certificate { return p.current.Load().all }

// Certificate is the one that this replica shows the others now.
func (p *Peers) Certificate() (*tls.Certificate, error) { return p.current.Load().cert.Certificate() }

// Server is the accepting end. Only certificates of GroupReplicas by an
// authority that is believed at the time of the handshake open the store: no
// other certificate of the cluster does (ErrNotReplica).
func (p *Peers) Server() *tls.Config {
	c := &tls.Config{
		MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequireAndVerifyClientCert,
		// Each handshake is judged by itself; they are rare.
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

// Client is the calling end, which asks the same of the other one.
func (p *Peers) Client() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: PeerServerName,
		Time:       p.now,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return p.current.Load().cert.Certificate()
		},
		// RootCAs cannot change in a tls.Config that is in use: verifying is
		// ours, below, and does what the package would have done.
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

// MakePeerCA writes a new authority for connections between replicas to a file
// of its own, which must not exist.
func MakePeerCA(path, clusterName string, now time.Time) (*x509.Certificate, error) {
	ca, err := NewCA(clusterName+"-peers", now)
	if err != nil {
		return nil, err
	}
	text, err := ca.both()
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("pki: writing %s: %w", path, errors.Join(err, fs.ErrExist))
	}
	return ca.Cert, WriteFile(path, text)
}

// TrustPeerCA makes the replica of a trust folder believe in the authority of a
// file too.
func TrustPeerCA(dir, path string) (*x509.Certificate, error) {
	t, ca, err := loadBoth(dir, path)
	if err != nil {
		return nil, err
	}
	return ca.Cert, t.keepTrusted(dir, append(t.PeerTrusted, ca.Cert))
}

// UsePeerCA makes the authority of a file sign this replica's certificates. The
// one before stays believed.
func UsePeerCA(dir, path string) (*x509.Certificate, error) {
	t, ca, err := loadBoth(dir, path)
	if err != nil {
		return nil, err
	}
	text, err := ca.both()
	if err != nil {
		return nil, err
	}
	// First this: at no time is the former authority unknown.
	if err := t.keepTrusted(dir, append(t.PeerTrusted, t.peerCA().Cert)); err != nil {
		return nil, err
	}
	return ca.Cert, WriteFile(filepath.Join(dir, FilePeers), text)
}

// ForgetPeerCAs ends the belief in all authorities but the one that signs.
func ForgetPeerCAs(dir string) error {
	err := os.Remove(filepath.Join(dir, FilePeersTrusted))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return syncDir(dir)
}

func loadBoth(dir, path string) (*Trust, *CA, error) {
	t, err := Load(dir)
	if err != nil {
		return nil, nil, err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	ca, err := readBoth(text)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, ca, nil
}

// keepTrusted writes the list, each once.
func (t *Trust) keepTrusted(dir string, list []*x509.Certificate) error {
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
			return nil, fmt.Errorf("the certificate of %q is no CA", c.Subject.CommonName)
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, errors.New("no PEM block")
	}
	return out, nil
}

// both is an authority in one file: certificate, then key.
func (ca *CA) both() ([]byte, error) {
	key, err := encodeKey(ca.key)
	if err != nil {
		return nil, err
	}
	return append(ca.PEM(), key...), nil
}

func readBoth(text []byte) (*CA, error) {
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
		return nil, errors.New("the certificate is no CA")
	case !key.PublicKey.Equal(cert.PublicKey):
		return nil, errors.New("certificate and key do not belong together")
	}
	return &CA{Cert: cert, key: key}, nil
}

// optional reads a file that need not be there.
func optional(path string) ([]byte, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("pki: %w", err)
	}
	return raw, nil
}
