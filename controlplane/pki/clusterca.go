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

// Files of a trust folder that exist only during a rotation of the cluster CA.
const (
	FileCATrusted = "ca-trusted.pem" // CA certificates trusted in addition to ca.crt
	FileCAFormer  = "ca-former.pem"  // certificate and key of the previous CA, which now signs only API server certificates
	// FileCANext contains certificate and key of the new CA while ca.crt and ca.key are replaced
	// one after the other.
	FileCANext = "ca-next.pem"
)

// ClusterCA is the current cluster CA in a trust folder, together with the other CAs that are
// trusted during a rotation. Reload updates it while connections are in use. Safe for concurrent
// use.
type ClusterCA struct {
	dir string
	now func() time.Time

	mu      sync.Mutex
	current *clusterTrust // guarded by mu; replaced, never modified
	changed chan struct{} // guarded by mu; closed and replaced with current
	since   int64         // guarded by mu
}

// clusterTrust is an immutable snapshot of the cluster's CAs.
type clusterTrust struct {
	signs, serves *CA
	all           []*x509.Certificate // all trusted CA certificates, that of serves first
	pool          *x509.CertPool
	pem           []byte
	since         int64
}

// NewClusterCA returns the ClusterCA of a trust folder.
func NewClusterCA(dir string, now func() time.Time) (*ClusterCA, error) {
	c := &ClusterCA{dir: dir, now: now, changed: make(chan struct{})}
	return c, c.Reload(0)
}

// Reload reads the trust folder again. since is the version of its contents, from a counter that is
// common to all replicas; the stored version never decreases. If the folder cannot be read, nothing
// changes.
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
		next.pool = was.pool // so that connections are not verified again
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

// Changed returns a channel that is closed when the trusted CAs or the signing CA change after the
// call.
func (c *ClusterCA) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// Signs returns the CA that signs certificates.
func (c *ClusterCA) Signs() *CA { return c.trust().signs }

// Serves returns the CA that signs the API server's certificates. During a rotation it is the
// previous CA until all clients trust the new one.
func (c *ClusterCA) Serves() *CA { return c.trust().serves }

// Believed returns the certificates of all trusted CAs, each once, that of Serves first.
func (c *ClusterCA) Believed() []*x509.Certificate { return c.trust().all }

// Pool returns the certificates of Believed as a pool. The pointer changes only when they do.
func (c *ClusterCA) Pool() *x509.CertPool { return c.trust().pool }

// PEM returns the certificates of Believed in PEM, for clients to trust.
func (c *ClusterCA) PEM() []byte { return c.trust().pem }

// Told returns the trust information for nodes: the trusted CA certificates in PEM, the ID of the
// signing CA, and the version of this information, which orders it in time.
func (c *ClusterCA) Told() (pem []byte, signs string, since int64) {
	t := c.trust()
	return t.pem, CAID(t.signs.Cert), t.since
}

// Former returns the IDs of the trusted CAs other than the signing CA and next, which is the ID of
// the CA that will sign.
func (c *ClusterCA) Former(next string) (ids []string) {
	t := c.trust()
	for _, cert := range t.all {
		if id := CAID(cert); id != CAID(t.signs.Cert) && id != next {
			ids = append(ids, id)
		}
	}
	return ids
}

// Rotator returns a Rotator for certificates of profile p, issued by the CA that Signs returns at
// the time.
func (c *ClusterCA) Rotator(p Profile) *Rotator { return c.rotator(p, c.Signs) }

// Serving returns a Rotator for certificates of profile p, issued by the CA that Serves returns at
// the time.
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

// IssuedBy reports whether ca issued a verified certificate, as opposed to another trusted CA.
func IssuedBy(leaf, ca *x509.Certificate) bool {
	if len(leaf.AuthorityKeyId) == 0 || len(ca.SubjectKeyId) == 0 {
		return leaf.CheckSignatureFrom(ca) == nil
	}
	return bytes.Equal(leaf.AuthorityKeyId, ca.SubjectKeyId)
}

// By returns the ID of the trusted CA that issued a verified certificate; "" if none did.
func (c *ClusterCA) By(leaf *x509.Certificate) string {
	for _, ca := range c.trust().all {
		if IssuedBy(leaf, ca) {
			return CAID(ca)
		}
	}
	return ""
}

// Verifies returns an error if a client certificate is currently not valid.
func (c *ClusterCA) Verifies(leaf *x509.Certificate) error {
	_, err := leaf.Verify(x509.VerifyOptions{Roots: c.Pool(), CurrentTime: c.now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err
}

// SignAgent calls SignAgent of the signing CA.
func (c *ClusterCA) SignAgent(request []byte, node string, life time.Duration, now time.Time) ([]byte, error) {
	return c.Signs().SignAgent(request, node, life, now)
}

// SignServing calls SignServing of the signing CA.
func (c *ClusterCA) SignServing(request []byte, node string, seen netip.Addr, life time.Duration, now time.Time) ([]byte, error) {
	return c.Signs().SignServing(request, node, seen, life, now)
}

// SignRequest calls SignRequest of the signing CA.
func (c *ClusterCA) SignRequest(r *x509.CertificateRequest, usage x509.KeyUsage, extended []x509.ExtKeyUsage, life time.Duration, now time.Time) ([]byte, error) {
	return c.Signs().SignRequest(r, usage, extended, life, now)
}

// hintDomain is the suffix of the TLS server names that CAHint returns.
const hintDomain = ".ca.keelson.internal"

// CAHint returns the TLS server name with which a joining machine requests a server certificate of
// the CA with the hash in its join token. During a CA rotation there are join tokens with both CAs.
func CAHint(hash string) string { return hash[:min(len(hash), 32)] + hintDomain }

// Enrolment returns the TLS server configuration for nodes and joining machines. Client
// certificates are requested and verified with the CAs trusted at the handshake. The server
// presents its CA too, since a joining machine has only the CA's hash. A client that names a CA by
// CAHint gets a certificate of this CA while the CA can sign.
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
		Time: c.now, NextProtos: []string{"h2"}, SessionTicketsDisabled: true} // no resumption: each handshake uses the currently trusted CAs
	base.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now := base.Clone()
		now.GetConfigForClient, now.ClientCAs = nil, c.Pool()
		return now, nil
	}
	return base
}

// Server returns the TLS server configuration of the API server, which verifies client certificates
// itself.
func (c *ClusterCA) Server(cert *Rotator) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: cert.GetCertificate, ClientAuth: tls.RequestClientCert, Time: c.now}
}

// CAID returns the ID of a CA that 'kctl cluster certs' shows.
func CAID(c *x509.Certificate) string { return SPKIHash(c)[:16] }

// NewClusterKey creates a cluster CA for a rotation and returns its certificate and key in PEM, and
// its ID. Its subject differs from that of other CAs, because some clients identify CAs by the
// subject alone.
func NewClusterKey(clusterName string, now time.Time) (text []byte, id string, err error) {
	ca, err := newCA(pkix.Name{CommonName: caNamePrefix + clusterName, SerialNumber: now.UTC().Format("20060102-150405")}, clusterName, now)
	if err != nil {
		return nil, "", err
	}
	text, err = ca.both()
	return text, CAID(ca.Cert), err
}

// BelieveCA adds a cluster CA to the trusted CAs in the trust folder dir. text contains its
// certificate and key, as returned by NewClusterKey.
func BelieveCA(dir string, text []byte) error {
	t, ca, err := loadWith(dir, text)
	if err != nil {
		return err
	}
	// From now on, connections between replicas have their own CA, which is rotated separately.
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

// SignCA makes a cluster CA the signing CA in the trust folder dir. text contains its certificate
// and key. The previous CA remains trusted, and signs API server certificates until ServeCA.
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
		// These files are written first, so that the previous CA is trusted at all times.
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

// finishCA writes the CA to its permanent files and removes FileCANext.
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

// ServeCA makes the signing CA in the trust folder dir also sign API server certificates. It
// deletes the previous CA's key.
func ServeCA(dir string) error { return writeOrRemove(filepath.Join(dir, FileCAFormer), nil) }

// DropCA removes the CA with the given ID from the trusted CAs in the trust folder dir. It is an
// error for the signing CA.
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
