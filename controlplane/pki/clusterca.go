package pki

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Files of a trust folder that are there while the cluster's CA is exchanged.
const (
	FileCATrusted = "ca-trusted.pem" // certificates that are believed beside that of ca.crt
	FileCAFormer  = "ca-former.pem"  // certificate and key of the former CA, which signs for the API alone
	// FileCANext is the CA, certificate and key in one file, while ca.crt and ca.key are written one after the other.
	FileCANext = "ca-next.pem"
)

// ClusterCA is the cluster's CA as the trust folder has it, and those that are believed beside it. It changes with the
// folder while connections go on. Safe for concurrent use.
type ClusterCA struct {
	dir string
	now func() time.Time

	mu      sync.Mutex
	current *clusterTrust // guarded by mu; replaced, never changed
	changed chan struct{} // guarded by mu; closed and replaced with current
	since   int64         // guarded by mu
}

// clusterTrust is what is believed at a time.
type clusterTrust struct {
	signs, serves *CA
	all           []*x509.Certificate // the one that serves first
	pool          *x509.CertPool
	pem           []byte
	since         int64
}

// NewClusterCA reads the folder.
func NewClusterCA(dir string, now func() time.Time) (*ClusterCA, error) {
	c := &ClusterCA{dir: dir, now: now, changed: make(chan struct{})}
	return c, c.Reload(0)
}

// Reload takes over what is in the folder now. since orders what was believed at different times, by the same count on all
// replicas: it never goes back. When the folder cannot be read everything stays as it was.
func (c *ClusterCA) Reload(since int64) error {
	t, err := Load(c.dir)
	if err != nil {
		return err
	}
	next := &clusterTrust{signs: t.CA, serves: t.CA}
	if t.CAFormer != nil {
		next.serves = t.CAFormer
	}
	next.pool = x509.NewCertPool()
	for _, cert := range append([]*x509.Certificate{next.serves.Cert, t.CA.Cert}, t.CATrusted...) {
		if !slices.ContainsFunc(next.all, cert.Equal) {
			next.all = append(next.all, cert)
			next.pool.AddCert(cert)
		}
	}
	next.pem = encodeCerts(next.all)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.since = max(c.since, since)
	next.since = c.since
	was := c.current
	if was != nil && was.since == next.since && bytes.Equal(was.pem, next.pem) && was.signs.Cert.Equal(next.signs.Cert) &&
		was.serves.Cert.Equal(next.serves.Cert) {
		return nil
	}
	if was != nil && was.pool.Equal(next.pool) {
		next.pool = was.pool // so that connections are not judged anew
	}
	c.current = next
	close(c.changed)
	c.changed = make(chan struct{})
	return nil
}

func (c *ClusterCA) trust() *clusterTrust {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current
}

// Changed is closed when what is believed, or who signs, is other than at the time of the call.
func (c *ClusterCA) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// Signs is the CA that signs now.
func (c *ClusterCA) Signs() *CA { return c.trust().signs }

// Serves is the CA whose certificate the API shows: the former one until everybody has heard of the next.
func (c *ClusterCA) Serves() *CA { return c.trust().serves }

// Believed are the certificates of all that are believed, each once; that of Serves is the first.
func (c *ClusterCA) Believed() []*x509.Certificate { return c.trust().all }

// Pool has what Believed has. It is another one only when that has changed.
func (c *ClusterCA) Pool() *x509.CertPool { return c.trust().pool }

// PEM is what clients trust: Believed as text.
func (c *ClusterCA) PEM() []byte { return c.trust().pem }

// Told is what nodes are told: what to believe, the id of the CA that signs, and what orders it in time.
func (c *ClusterCA) Told() (pem []byte, signs string, since int64) {
	t := c.trust()
	return t.pem, CAID(t.signs.Cert), t.since
}

// Former are the ids of the authorities that are believed and neither sign nor will.
func (c *ClusterCA) Former(next string) (ids []string) {
	t := c.trust()
	for _, cert := range t.all {
		if id := CAID(cert); id != CAID(t.signs.Cert) && id != next {
			ids = append(ids, id)
		}
	}
	return ids
}

// Rotator keeps a certificate of profile p fresh that the CA signs which signs at the time.
func (c *ClusterCA) Rotator(p Profile) *Rotator { return c.rotator(p, c.Signs) }

// Serving keeps a certificate of profile p fresh that the CA signs which serves at the time.
func (c *ClusterCA) Serving(p Profile) *Rotator { return c.rotator(p, c.Serves) }

func (c *ClusterCA) rotator(p Profile, by func() *CA) *Rotator {
	r := NewRotator(func(now time.Time) (*tls.Certificate, error) {
		issued, err := by().Issue(p, now)
		if err != nil {
			return nil, err
		}
		return &issued.TLS, nil
	}, c.now)
	r.stale = func(leaf *x509.Certificate) bool { return !IssuedBy(leaf, by().Cert) }
	return r
}

// IssuedBy says whether a certificate that was verified is by this authority, and not by another that is believed.
func IssuedBy(leaf, ca *x509.Certificate) bool {
	if len(leaf.AuthorityKeyId) == 0 || len(ca.SubjectKeyId) == 0 {
		return leaf.CheckSignatureFrom(ca) == nil
	}
	return bytes.Equal(leaf.AuthorityKeyId, ca.SubjectKeyId)
}

// By is the id of the authority among those that are believed by which a verified certificate is; "" when it is by none.
func (c *ClusterCA) By(leaf *x509.Certificate) string {
	for _, ca := range c.trust().all {
		if IssuedBy(leaf, ca) {
			return CAID(ca)
		}
	}
	return ""
}

// Verifies says why a client's certificate is not good now.
func (c *ClusterCA) Verifies(leaf *x509.Certificate) error {
	_, err := leaf.Verify(x509.VerifyOptions{Roots: c.Pool(), CurrentTime: c.now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err
}

// SignAgent is that of the CA that signs.
func (c *ClusterCA) SignAgent(request []byte, node string, life time.Duration, now time.Time) ([]byte, error) {
	return c.Signs().SignAgent(request, node, life, now)
}

// SignServing is that of the CA that signs.
func (c *ClusterCA) SignServing(request []byte, node string, seen netip.Addr, life time.Duration, now time.Time) ([]byte, error) {
	return c.Signs().SignServing(request, node, seen, life, now)
}

// SignRequest is that of the CA that signs.
func (c *ClusterCA) SignRequest(r *x509.CertificateRequest, usage x509.KeyUsage, extended []x509.ExtKeyUsage, life time.Duration, now time.Time) ([]byte, error) {
	return c.Signs().SignRequest(r, usage, extended, life, now)
}

// hintDomain ends the name by which one who knows a CA by its hash asks for a certificate of that CA.
const hintDomain = ".ca.keelson.internal"

// CAHint is the server name with which a machine that knows the cluster by a join token asks for a certificate of the CA
// that the token names: while one CA gives way to another, there are tokens of both.
func CAHint(hash string) string { return hash[:min(len(hash), 32)] + hintDomain }

// Enrolment is the serving side for nodes and for those who want to join: it asks for a client's certificate and verifies
// it by what is believed at the time, and presents the CA behind its own certificate, since a machine that joins knows it
// by its hash only. Who names a CA by CAHint gets its certificate, as long as it is there to sign.
func (c *ClusterCA) Enrolment(p Profile) *tls.Config {
	signs, serves := c.Rotator(p), c.Serving(p)
	certificate := func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
		by, rotator := c.Signs(), signs
		if hash, ok := strings.CutSuffix(h.ServerName, hintDomain); ok && hash != "" {
			if former := c.Serves(); strings.HasPrefix(former.Hash(), hash) {
				by, rotator = former, serves
			}
		}
		leaf, err := rotator.Certificate()
		if err != nil {
			return nil, err
		}
		chain := *leaf
		chain.Certificate = append([][]byte{leaf.Certificate[0]}, by.Cert.Raw)
		return &chain, nil
	}
	base := &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: certificate, ClientAuth: tls.VerifyClientCertIfGiven,
		Time: c.now, NextProtos: []string{"h2"}, SessionTicketsDisabled: true} // each handshake is judged by what is believed then
	base.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now := base.Clone()
		now.GetConfigForClient, now.ClientCAs = nil, c.Pool()
		return now, nil
	}
	return base
}

// Server is the serving side of the API, which verifies certificates of clients itself.
func (c *ClusterCA) Server(cert *Rotator) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: cert.GetCertificate, ClientAuth: tls.RequestClientCert, Time: c.now}
}

// CAID names a CA as 'kctl cluster certs' does.
func CAID(c *x509.Certificate) string { return SPKIHash(c)[:16] }

// NewClusterKey makes a CA of the cluster: certificate, then key. Its subject differs from that of every other one, since
// there are clients that tell authorities apart by that alone.
func NewClusterKey(clusterName string, now time.Time) (text []byte, id string, err error) {
	ca, err := newCA(pkix.Name{CommonName: caNamePrefix + clusterName, SerialNumber: now.UTC().Format("20060102-150405")}, clusterName, now)
	if err != nil {
		return nil, "", err
	}
	text, err = ca.both()
	return text, CAID(ca.Cert), err
}

// BelieveCA makes the replica of a trust folder believe a further CA of the cluster.
func BelieveCA(dir string, text []byte) error {
	t, ca, err := loadWith(dir, text)
	if err != nil {
		return err
	}
	// The connections between replicas have an authority of their own from here on: it is exchanged by itself.
	if t.PeerCA == nil {
		own, err := t.CA.both()
		if err != nil {
			return err
		}
		if err := WriteFile(filepath.Join(dir, FilePeers), own); err != nil {
			return err
		}
	}
	if t.CA.Cert.Equal(ca.Cert) || slices.ContainsFunc(t.CATrusted, ca.Cert.Equal) {
		return nil
	}
	return t.keepClusterTrusted(dir, append(t.CATrusted, ca.Cert))
}

// SignCA makes a CA sign what this replica signs. The one before stays believed, and signs for the API alone until ServeCA.
func SignCA(dir string, text []byte) error {
	t, ca, err := loadWith(dir, text)
	if err != nil {
		return err
	}
	if !t.CA.Cert.Equal(ca.Cert) {
		if err := BelieveCA(dir, text); err != nil {
			return err
		}
		former, err := t.CA.both()
		if err != nil {
			return err
		}
		// First these: at no time is the former CA unknown.
		if err := t.keepClusterTrusted(dir, append(t.CATrusted, t.CA.Cert, ca.Cert)); err != nil {
			return err
		}
		if err := WriteFile(filepath.Join(dir, FileCAFormer), former); err != nil {
			return err
		}
		if err := WriteFile(filepath.Join(dir, FileCANext), text); err != nil {
			return err
		}
	}
	return finishCA(dir, ca)
}

// finishCA writes the files in which the CA lies for good.
func finishCA(dir string, ca *CA) error {
	key, err := encodeKey(ca.key)
	if err != nil {
		return err
	}
	if err := WriteFile(filepath.Join(dir, FileCACert), ca.PEM()); err != nil {
		return err
	}
	if err := WriteFile(filepath.Join(dir, FileCAKey), key); err != nil {
		return err
	}
	return writeOrRemove(filepath.Join(dir, FileCANext), nil)
}

// ServeCA has the CA that signs sign for the API, too: the key of the former one goes.
func ServeCA(dir string) error { return writeOrRemove(filepath.Join(dir, FileCAFormer), nil) }

// DropCA ends the belief in one CA, unless it is the one that signs.
func DropCA(dir, id string) error {
	t, err := Load(dir)
	if err != nil {
		return err
	}
	if CAID(t.CA.Cert) == id {
		return fmt.Errorf("pki: CA %s signs: it cannot be given up", id)
	}
	if t.CAFormer != nil && CAID(t.CAFormer.Cert) == id {
		if err := ServeCA(dir); err != nil {
			return err
		}
	}
	left := slices.DeleteFunc(slices.Clone(t.CATrusted), func(c *x509.Certificate) bool { return CAID(c) == id || c.Equal(t.CA.Cert) })
	if len(left) == len(t.CATrusted) {
		return nil
	}
	return writeOrRemove(filepath.Join(dir, FileCATrusted), encodeCerts(left))
}

func (t *Trust) keepClusterTrusted(dir string, list []*x509.Certificate) error {
	return WriteFile(filepath.Join(dir, FileCATrusted), encodeCerts(list))
}
